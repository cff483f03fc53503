"""The endpoints about the node: agents, schedules, keys, queues, health."""

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.responses import Response

from agentrt.errors import ClosedError
from agentrt.http import types as t
from agentrt.http.endpoint import Call, Endpoint, Parameter
from agentrt.http.keys import KeyRing, StoredKey
from agentrt.runtime import Runtime
from agentrt.tiers import Tier


class Node:
    """Handlers over one runtime. ``heartbeat_bound_ms``: an older sign of life of the control loop is ill health."""

    def __init__(self, runtime: Runtime, keys: KeyRing, heartbeat_bound_ms: int) -> None:
        self._runtime = runtime
        self._keys = keys
        self._heartbeat_bound_ms = heartbeat_bound_ms
        self._parking: asyncio.Task[None] | None = None

    def endpoints(self) -> list[Endpoint]:
        """The table's part about the node."""
        return [
            Endpoint(
                "GET",
                "/healthz",
                None,
                self.health,
                "Whether the node lives. Answered beside the control loop, so also while that is busy.",
                t.Health,
            ),
            Endpoint("GET", "/readyz", None, self.ready, "Whether the node takes work: 503 while it drains.", t.Health),
            Endpoint("GET", "/v1/agents", "runs:read", self.agents, "The registered agents.", t.Agents),
            Endpoint("GET", "/v1/queues", "node:read", self.queues, "What waits and runs, and where, now.", t.Queues),
            Endpoint("GET", "/v1/tiers", "node:read", self.tiers, "The scheduler's tiers, now.", t.Tiers),
            Endpoint("GET", "/v1/tenants", "admin", self.tenants, "The tenants that are switched off.", t.Tenants),
            Endpoint(
                "PUT",
                "/v1/tenants/{tenant}",
                "admin",
                self.switch_tenant,
                "Switch a tenant off or on, durably. While it is off, nothing new of it is accepted and what waits "
                "does not go on.",
                t.Tenant,
                t.TenantRequest,
            ),
            Endpoint(
                "POST",
                "/v1/drain",
                "admin",
                self.drain,
                "Take no more runs, and if asked park those that are there at their places in the journal; answered at "
                "once. `/readyz` says 503 from now on: `draining`, then `parked`.",
                t.Health,
                t.DrainRequest,
                status=202,
                body_optional=True,
            ),
            Endpoint("GET", "/v1/schedules", "runs:read", self.schedules, "Runs by the clock.", t.Schedules),
            Endpoint(
                "PUT",
                "/v1/schedules/{name}",
                "runs:write",
                self.schedule,
                "Make or change a schedule.",
                t.ScheduleRequest,
                t.ScheduleRequest,
            ),
            Endpoint(
                "DELETE",
                "/v1/schedules/{name}",
                "runs:write",
                self.unschedule,
                "Remove a schedule; its runs go on.",
                status=204,
                parameters=(Parameter("tenant", "string", "for keys that may act for any"),),
            ),
            Endpoint("GET", "/v1/keys", "admin", self.list_keys, "The API keys, without their secrets.", t.Keys),
            Endpoint(
                "POST",
                "/v1/keys",
                "admin",
                self.make_key,
                "Make an API key. Its secret is in this answer and nowhere else.",
                t.Key,
                t.KeyRequest,
                201,
            ),
            Endpoint("DELETE", "/v1/keys/{id}", "admin", self.remove_key, "Remove an API key.", status=204),
        ]

    async def health(self, call: Call) -> Any:
        age_ms = self._runtime.loop_watch.age_ms()
        alive = age_ms <= self._heartbeat_bound_ms
        return _health("ok" if alive else "stuck", age_ms, 200 if alive else 503)

    async def ready(self, call: Call) -> Any:
        if self._runtime.accepting:
            return _health("ready", 0, 200)
        return _health("parked" if self._runtime.parked else "draining", 0, 503)

    async def drain(self, call: Call) -> t.Health:
        self._runtime.stop_accepting()
        if call.body.park and self._parking is None:
            self._parking = asyncio.create_task(self._park())
        return t.Health(status="parked" if self._runtime.parked else "draining", heartbeat_age_ms=0)

    async def _park(self) -> None:
        with contextlib.suppress(ClosedError):  # the node was stopped, which parks as well
            await self._runtime.park()

    async def agents(self, call: Call) -> t.Agents:
        return t.Agents(
            agents=[
                t.Agent(
                    name=a.name, version=a.version, backend=a.backend, tier=a.tier, fuel_max=a.fuel_max, short=a.short
                )
                for a in self._runtime.agents()
            ]
        )

    async def queues(self, call: Call) -> t.Queues:
        found = await self._runtime.statistics()
        return t.Queues(
            live=found.engine.live,
            queued_bytes=found.engine.queued_bytes,
            parked=found.engine.parked,
            recovering=found.engine.recovering,
            store_backlog_items=found.store_backlog[0],
            store_backlog_bytes=found.store_backlog[1],
            ended=found.engine.ended,
        )

    async def tiers(self, call: Call) -> t.Tiers:
        core = (await self._runtime.statistics()).backends["wasm"]
        return t.Tiers(
            tiers=[
                t.Tier(
                    tier=tier.value,
                    name=tier.name.lower(),
                    quantum_ms=self._runtime.config.scheduler.quantum_ms[tier],
                    queued=core["queued"][tier],
                    started=core["pops"][tier],
                    promoted=core["promotions_count"][tier] + core["promotions_wait"][tier],
                    slot_s=core["slot_ns"][tier] / 1e9,
                )
                for tier in Tier
            ]
        )

    async def tenants(self, call: Call) -> t.Tenants:
        off = await self._runtime.disabled_tenants()
        return t.Tenants(
            tenants=[t.Tenant(tenant=name, enabled=False, reason=why) for name, why in sorted(off.items())]
        )

    async def switch_tenant(self, call: Call) -> t.Tenant:
        tenant, asked = call.path("tenant"), call.body
        if asked.enabled:
            await self._runtime.enable_tenant(tenant)
        else:
            await self._runtime.disable_tenant(tenant, asked.reason)
        return t.Tenant(tenant=tenant, enabled=asked.enabled, reason="" if asked.enabled else asked.reason)

    # --- schedules --------------------------------------------------------------------

    async def schedules(self, call: Call) -> t.Schedules:
        tenant = None if call.owner.sees("*") else call.owner.tenant
        return t.Schedules(
            schedules=[
                t.Schedule(
                    name=s.name,
                    tenant=s.tenant,
                    cron=s.cron,
                    agent=s.agent,
                    catch_up=s.catch_up,
                    action=s.action,
                    next_at=s.next_ns / 1e9,
                )
                for s in await self._runtime.schedules(tenant=tenant)
            ]
        )

    async def schedule(self, call: Call) -> t.ScheduleRequest:
        asked: t.ScheduleRequest = call.body
        agent = self._runtime.agent(asked.agent)
        await self._runtime.schedule(
            call.path("name"),
            asked.cron,
            asked.agent,
            asked.input,
            tier=call.owner.tier_for(asked.tier, None if agent is None else agent.tier),
            tenant=call.owner.tenant_for(asked.tenant),
            catch_up="skip" if asked.catch_up == "skip" else "once",
        )
        return asked

    async def unschedule(self, call: Call) -> Response:
        await self._runtime.unschedule(call.path("name"), tenant=call.owner.tenant_for(call.query("tenant")))
        return Response(status_code=204)

    # --- keys ---------------------------------------------------------------------------

    async def list_keys(self, call: Call) -> t.Keys:
        return t.Keys(keys=[_key(key) for key in self._keys.all()])

    async def make_key(self, call: Call) -> t.Key:
        asked: t.KeyRequest = call.body
        key, secret = await self._keys.make(asked.tenant, asked.scopes, asked.max_tier, asked.label)
        return msgspec.structs.replace(_key(key), secret=secret)

    async def remove_key(self, call: Call) -> Response:
        await self._keys.remove(call.path("id"))
        return Response(status_code=204)


def _health(status: str, age_ms: int, code: int) -> Response:
    return Response(
        msgspec.json.encode(t.Health(status=status, heartbeat_age_ms=age_ms)), code, None, "application/json"
    )


def _key(key: StoredKey) -> t.Key:
    return t.Key(
        id=key.id,
        tenant=key.tenant,
        scopes=list(key.scopes),
        max_tier=key.max_tier,
        label=key.label,
        created_at=key.created_ns / 1e9,
    )
