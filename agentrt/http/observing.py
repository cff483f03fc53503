"""The endpoints by which operators watch the node, and switch its profiles: metrics, the dashboard's figures."""

import asyncio
from typing import Final

from starlette.responses import Response

from agentrt.errors import ForbiddenError
from agentrt.flow.profiles import Change
from agentrt.http import types as t
from agentrt.http.endpoint import Call, Endpoint
from agentrt.http.keys import ANY_TENANT, KeyRing
from agentrt.http.live import Live, flow_for
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
                "GET",
                "/v1/budgets",
                "node:read",
                self.budgets,
                "Limits of accounts above runs, the fullest first; of one tenant's key those of that tenant.",
                t.Budgets,
            ),
            Endpoint(
                "GET",
                "/v1/breakers",
                "node:read",
                self.breakers,
                "Breakers that are not closed. Only for keys that may act for any tenant.",
                t.Breakers,
            ),
            Endpoint("GET", "/v1/profiles", "node:read", self.profiles, "Profiles and those in force.", t.Profiles),
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
            Endpoint(
                "PUT",
                "/v1/profile-schedules/{name}",
                "admin",
                self.schedule_profile,
                "Apply a profile, or take it off, by the clock. The node's own: it is no tenant's schedule.",
                t.ProfileScheduleRequest,
                t.ProfileScheduleRequest,
            ),
            Endpoint(
                "DELETE",
                "/v1/profile-schedules/{name}",
                "admin",
                self.unschedule_profile,
                "Remove such a schedule; what is in force stays.",
                status=204,
            ),
        ]

    async def live(self, call: Call) -> Response:
        return self._live.stream(call.owner)

    async def budgets(self, call: Call) -> t.Budgets:
        flow = flow_for(call.owner, await self._runtime.flow_view())
        return t.Budgets(
            budgets=[
                t.Budget(
                    scope=each.scope,
                    name=each.name,
                    tenant=each.tenant,
                    key=each.key,
                    used=each.used,
                    held=each.held,
                    limit=each.limit,
                )
                for each in flow.budgets
            ]
        )

    async def breakers(self, call: Call) -> t.Breakers:
        if not call.owner.sees(ANY_TENANT):
            raise ForbiddenError("breakers have the names of all tenants' tools; this key acts for its own tenant only")
        flow = await self._runtime.flow_view()
        return t.Breakers(
            breakers=[
                t.Breaker(scope=each.scope, name=each.name, state=each.state, until_at=each.until_ns / 1e9)
                for each in flow.breakers
            ]
        )

    async def profiles(self, call: Call) -> t.Profiles:
        flow, changes = await asyncio.gather(self._runtime.flow_view(), self._runtime.profile_changes())
        return t.Profiles(
            known=list(flow.known), applied=list(flow.applied), changes=[_changed(change) for change in changes]
        )

    async def apply_profile(self, call: Call) -> t.ProfileChange:
        return _changed(await self._runtime.apply_profile(call.path("name"), by=_who(call), reason="over HTTP"))

    async def roll_back_profile(self, call: Call) -> t.ProfileChange:
        return _changed(await self._runtime.roll_back_profile(call.path("name"), by=_who(call), reason="over HTTP"))

    async def schedule_profile(self, call: Call) -> t.ProfileScheduleRequest:
        asked: t.ProfileScheduleRequest = call.body
        await self._runtime.schedule_profile(
            call.path("name"),
            asked.cron,
            asked.profile,
            action="roll_back" if asked.action == "roll_back" else "apply",
            catch_up="skip" if asked.catch_up == "skip" else "once",
        )
        return asked

    async def unschedule_profile(self, call: Call) -> Response:
        await self._runtime.unschedule_profile(call.path("name"))
        return Response(status_code=204)

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
    return t.ProfileChange(
        profile=change.profile,
        action=change.action,
        at=change.at_ns / 1e9,
        by=change.by,
        reason=change.reason,
        digest_before=change.digest_before,
        digest_after=change.digest_after,
    )
