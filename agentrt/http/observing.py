"""The endpoints by which operators watch the node, and switch its profiles: metrics, the dashboard's figures."""

import asyncio
from typing import Final

from starlette.responses import Response

from agentrt.flow.profiles import Change
from agentrt.http import types as t
from agentrt.http.endpoint import Call, Endpoint
from agentrt.http.keys import KeyRing
from agentrt.http.live import Live
from agentrt.http.sse import Streams
from agentrt.observe.prometheus import expose
from agentrt.runtime import Runtime, RuntimeStatistics

#: How long a scrape waits for a busy control loop before it goes without what only that knows.
_ASK_S: Final = 2.0


class Observing:
    """Handlers over one runtime."""

    def __init__(self, runtime: Runtime, keys: KeyRing, streams: Streams) -> None:
        self._runtime = runtime
        self._live = Live(runtime, keys, streams)

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
            Endpoint(
                "GET",
                "/v1/live",
                "node:read",
                self.live,
                "The node once a second, as the dashboard shows it: server-sent events of kind `node`.",
                media_type="text/event-stream",
            ),
            Endpoint(
                "PUT",
                "/v1/profiles/{name}",
                "admin",
                self.apply_profile,
                "Put a profile of the file `flow.file` over the limits in force; durable when this is answered.",
                t.ProfileChange,
            ),
            Endpoint(
                "DELETE",
                "/v1/profiles/{name}",
                "admin",
                self.roll_back_profile,
                "Take a profile off again.",
                t.ProfileChange,
            ),
        ]

    async def live(self, call: Call) -> Response:
        return self._live.stream(call.owner)

    async def apply_profile(self, call: Call) -> t.ProfileChange:
        return _changed(await self._runtime.apply_profile(call.path("name"), by=_who(call), reason="over HTTP"))

    async def roll_back_profile(self, call: Call) -> t.ProfileChange:
        return _changed(await self._runtime.roll_back_profile(call.path("name"), by=_who(call), reason="over HTTP"))

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


def _who(call: Call) -> str:
    return (call.owner.label or call.owner.id)[:128]


def _changed(change: Change) -> t.ProfileChange:
    return t.ProfileChange(profile=change.profile, action=change.action, at=change.at_ns / 1e9, by=change.by)
