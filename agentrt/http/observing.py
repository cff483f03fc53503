"""The endpoints by which operators watch the node: metrics."""

import asyncio
from typing import Final

from starlette.responses import Response

from agentrt.http.endpoint import Call, Endpoint
from agentrt.observe.prometheus import expose
from agentrt.runtime import Runtime, RuntimeStatistics

#: How long a scrape waits for a busy control loop before it goes without what only that knows.
_ASK_S: Final = 2.0


class Observing:
    """Handlers over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def endpoints(self) -> list[Endpoint]:
        """The table's part about watching."""
        return [
            Endpoint(
                "GET",
                "/metrics",
                "node:read",
                self.metrics,
                "The metrics, for Prometheus. Also answered while the control loop is busy, then without those that "
                "only it knows.",
                media_type="text/plain",
            ),
        ]

    async def metrics(self, call: Call) -> Response:
        body, media_type = expose(
            self._runtime.meter.snapshot(),
            await self._statistics(),
            self._runtime.loop_watch.age_ms(),
            call.request.headers.get("accept", ""),
        )
        return Response(body, 200, None, media_type)

    async def _statistics(self) -> RuntimeStatistics | None:
        try:
            async with asyncio.timeout(_ASK_S):
                return await self._runtime.statistics()
        except TimeoutError:
            return None
