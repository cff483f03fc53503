"""The endpoints about runs: start, look, cancel, answer."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrt.callbacks.address import check_url, parse_networks
from agentrt.callbacks.secrets import CallbackSecrets
from agentrt.callbacks.signing import secret_text
from agentrt.engine.accept import Via, check_name
from agentrt.engine.info import RunInfo
from agentrt.errors import AgentrtError, InputError, UnknownRunError
from agentrt.flow.decisions import Decision, Scope
from agentrt.http import types as t
from agentrt.http.endpoint import Call, Endpoint, Parameter
from agentrt.http.keys import ANY_TENANT, KeyRing, StoredKey
from agentrt.http.sse import Streams, run_events
from agentrt.http.steps import page_of_steps
from agentrt.ids import parse_run_id
from agentrt.records import Record, RunAccepted
from agentrt.run import Run
from agentrt.runtime import Runtime
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import Store

PAGE_MAX: Final = 500
WAIT_S_MAX: Final = 60.0
_SOON_S: Final = 0.25
_PIECE_BYTES: Final = 256 << 10
_PEOPLE: Final = ("approval", "operator")

_encode: Final = msgspec.json.Encoder().encode


class Runs:
    """Handlers over one runtime."""

    def __init__(
        self, runtime: Runtime, keys: KeyRing, streams: Streams, secrets: CallbackSecrets | None = None
    ) -> None:
        self._runtime = runtime
        self._secrets = CallbackSecrets(runtime) if secrets is None else secrets
        self._keys = keys
        self._streams = streams
        self._callback_networks = parse_networks(runtime.config.http.callback_networks)

    def endpoints(self) -> list[Endpoint]:
        """The table's part about runs."""
        limit = Parameter("limit", "integer", f"at most so many, 1 to {PAGE_MAX}")
        return [
            Endpoint(
                "POST",
                "/v1/runs",
                "runs:write",
                self.start,
                "Start a run; it is durable when this is answered. The same Idempotency-Key of a tenant, with the same "
                "agent and input, gives the same run.",
                t.Accepted,
                t.RunRequest,
                202,
                (
                    Parameter("Idempotency-Key", "string", "any text up to 4,096 bytes", "header"),
                    Parameter("traceparent", "string", "the caller's span (W3C trace context)", "header"),
                    Parameter(
                        "wait",
                        "number",
                        "seconds to wait for the end of a short agent while no person is asked; 200 if it ended",
                    ),
                ),
                refuse=self._refused_unread,
            ),
            Endpoint(
                "GET",
                "/v1/runs",
                "runs:read",
                self.page,
                "Runs in order of acceptance, or the newest first. A search looks at 20,000 runs at most, of a "
                "tenant's key at that tenant's only: a page may have few or none and a next one all the same.",
                t.RunPage,
                parameters=(
                    Parameter("state", "string", "only runs in this state"),
                    Parameter("tenant", "string", "only this tenant's"),
                    Parameter("agent", "string", "only this agent's"),
                    Parameter("text", "string", "only runs with this in their id, agent, state or reason to wait"),
                    Parameter("newest_first", "boolean", "backwards"),
                    Parameter("after", "string", "the cursor of the page before"),
                    limit,
                ),
            ),
            Endpoint(
                "GET", "/v1/runs/{run_id}", "runs:read", self.show, "A run now, with its result if it ended.", t.Run
            ),
            Endpoint(
                "GET",
                "/v1/runs/{run_id}/steps",
                "runs:read",
                self.steps,
                "The steps of a run since its last checkpoint, in the order in which they began.",
                t.StepPage,
                parameters=(Parameter("after", "integer", "the cursor of the page before"), limit),
            ),
            Endpoint(
                "GET",
                "/v1/runs/{run_id}/decisions",
                "runs:read",
                self.decisions,
                "What flow control has decided about a run, in order: the latest 50, as long as the run is kept.",
                t.Decisions,
            ),
            Endpoint(
                "GET",
                "/v1/runs/{run_id}/frame",
                "admin",
                self.frame,
                "The state of a run as a frame, its memory included, up to 64 MiB: of its guest as it waits now, or "
                "else the one that it left memory as. 422 if there is none now. `agentrt frame show --run` shows it.",
                parameters=(Parameter("id", "string", "another frame of the run, to which that one is a delta"),),
                media_type="application/octet-stream",
            ),
            Endpoint(
                "GET",
                "/v1/runs/{run_id}/events",
                "runs:read",
                self.events,
                "What happens to a run, from its beginning or after Last-Event-ID, until its end: server-sent events "
                "whose ids number the journal's records.",
                parameters=(
                    Parameter("Last-Event-ID", "string", "the last event seen", "header"),
                    Parameter("text", "boolean", "also what models answer as it comes: events `text` without an id"),
                ),
                media_type="text/event-stream",
            ),
            Endpoint(
                "POST",
                "/v1/runs/{run_id}/cancel",
                "runs:write",
                self.cancel,
                "Cancel a run and what it started; the wish is durable when this is answered.",
                t.Run,
                t.CancelRequest,
                202,
                body_optional=True,
            ),
            Endpoint(
                "POST",
                "/v1/runs/{run_id}/approvals",
                "runs:decide",
                self.approve,
                "Answer an approval that the run waits for; it counts once.",
                t.Answered,
                t.ApprovalRequest,
            ),
            Endpoint(
                "POST",
                "/v1/runs/{run_id}/steps/{step}/settle",
                "runs:decide",
                self.settle,
                "Say how a step ended whose outcome nobody saw.",
                t.Answered,
                t.SettleRequest,
            ),
            Endpoint(
                "POST",
                "/v1/runs/{run_id}/steps/{step}/retry",
                "runs:decide",
                self.retry,
                "Let such a step run once more, whatever its kind and attempts.",
                t.Answered,
            ),
            Endpoint(
                "POST",
                "/v1/runs/{run_id}/resume",
                "runs:decide",
                self.resume,
                "Let a run go on that waits for an operator: all its steps whose outcome nobody saw run once more, "
                "whatever their kind and attempts.",
                t.Run,
                status=202,
            ),
            Endpoint(
                "POST",
                "/v1/events",
                "runs:write",
                self.send,
                "Send an event to a run's mailbox or to a topic.",
                t.EventSent,
                t.EventRequest,
                202,
            ),
            Endpoint(
                "GET",
                "/v1/callback-secret",
                "runs:write",
                self.callback_secret,
                "The secret with which callbacks of this tenant are signed (standardwebhooks.com).",
                t.CallbackSecret,
                parameters=(Parameter("tenant", "string", "for keys that may act for any"),),
            ),
            Endpoint(
                "POST",
                "/v1/callback-secret/rotate",
                "runs:write",
                self.rotate_callback_secret,
                "Make a new one. For a while callbacks are signed with the one before as well, so that receivers can "
                "be told in the meantime.",
                t.CallbackSecret,
                t.RotateRequest,
                body_optional=True,
            ),
        ]

    # --- starting -------------------------------------------------------------------

    def _refused_unread(self, key: StoredKey, request: Request) -> AgentrtError | None:
        idempotency_key = request.headers.get("idempotency-key")
        if idempotency_key is not None and key.tenant == ANY_TENANT:  # whose it is stands in the body
            return None
        return self._runtime.refuse_unread(key.max_tier, key.tenant, idempotency_key)

    async def start(self, call: Call) -> Any:
        asked: t.RunRequest = call.body
        wait_s = call.query("wait", float, 0.0)
        if not 0 <= wait_s <= WAIT_S_MAX:
            raise InputError(f"wait is 0 to {WAIT_S_MAX:.0f} seconds", limit="wait")
        idempotency_key = call.request.headers.get("idempotency-key")
        if asked.callback_url is not None:
            check_url(asked.callback_url, self._callback_networks)
        agent = self._runtime.agent(asked.agent)
        run = await self._runtime.submit(
            asked.agent,
            asked.input,
            tier=None if asked.tier is None else call.owner.tier_for(asked.tier, None),
            tenant=call.owner.tenant_for(asked.tenant),
            idempotency_key=idempotency_key,
            fuel=asked.fuel,
            budget=asked.budget,
            timeout_s=asked.timeout_s,
            run_at=asked.run_at,
            callback_url=asked.callback_url,
            traceparent=call.request.headers.get("traceparent"),
            via=self._via(call, asked),
        )
        location = f"/v1/runs/{run.run_id}"
        if wait_s and not asked.agent:  # a rule has named it
            agent = self._runtime.agent((await self._runtime.describe_run(run.run_id)).agent)
        if wait_s and agent is not None and agent.short and await self._ends_within(run.run_id, wait_s):
            return Response(
                _encode(await run_now(self._runtime, run.run_id)), 200, {"location": location}, "application/json"
            )
        return Response(
            _encode(t.Accepted(run_id=run.run_id, location=location)), 202, {"location": location}, "application/json"
        )

    def _via(self, call: Call, asked: t.RunRequest) -> Via:
        headers = call.request.headers
        seen = {name: headers[name] for name in self._runtime.header_names if name in headers}
        return Via("http", asked.source, asked.type, seen, call.owner.max_tier)

    async def _ends_within(self, run_id: str, wait_s: float) -> bool:
        """Whether it ends so soon, and without a person."""
        run = self._runtime.run(run_id)
        try:
            async with self._streams.wait(min(wait_s, _SOON_S)):  # as most do: nothing else is asked for then
                await run.wait()
                return True
        except TimeoutError:
            return wait_s > _SOON_S and await self._ends_alone_within(run, wait_s - _SOON_S)

    async def _ends_alone_within(self, run: Run, wait_s: float) -> bool:
        changed = asyncio.Event()
        stop = await self._runtime.watch_run(run.run_id, changed.set)
        ending = asyncio.ensure_future(run.wait())
        ending.add_done_callback(lambda _: changed.set())
        try:
            async with self._streams.wait(wait_s):
                while not ending.done():
                    changed.clear()
                    if waits_for_people(await self._runtime.describe_run(run.run_id)):
                        return False
                    await changed.wait()
            return True
        except TimeoutError:
            return False
        finally:
            stop()
            ending.cancel()

    # --- looking ----------------------------------------------------------------------

    async def page(self, call: Call) -> t.RunPage:
        limit = _limit(call)
        state = call.query("state", _state)
        tenant = call.query("tenant")
        if not call.owner.sees(tenant or call.owner.tenant):
            tenant, limit = call.owner.tenant, 0
        tenant = tenant or (None if call.owner.sees("*") else call.owner.tenant)
        after = call.query("after", parse_run_id, "")
        if not limit:
            return t.RunPage(runs=[])
        found, going_on = await self._runtime.find_runs(
            state=state,
            tenant=tenant,
            agent=call.query("agent"),
            text=call.query("text"),
            after=after,
            limit=limit,
            newest_first=call.query("newest_first", _flag, False),
        )
        return t.RunPage(runs=[run_of(info) for info in found], next=going_on)

    async def show(self, call: Call) -> t.Run:
        return await run_now(self._runtime, (await self.owned(call)).run_id)

    async def steps(self, call: Call) -> t.StepPage:
        info = await self.owned(call)
        return await page_of_steps(self._runtime, info.run_id, call.query("after", int, 0), _limit(call))

    async def decisions(self, call: Call) -> t.Decisions:
        info = await self.owned(call)
        made = await self._runtime.decisions(info.run_id)
        if call.owner.tenant != ANY_TENANT:  # what all tenants have used together is none of theirs
            made = [
                msgspec.structs.replace(each, value=0, bound=0, detail="") if each.scope is Scope.NODE else each
                for each in made
            ]
        return t.Decisions(decisions=[_decision(each) for each in made])

    async def frame(self, call: Call) -> Response:
        info = await self.owned(call)
        data = memoryview(await self._runtime.frame_now(info.run_id, call.query("id")))
        headers = {"content-length": str(len(data)), "cache-control": "no-store"}
        return StreamingResponse(_pieces(data), media_type="application/octet-stream", headers=headers)

    async def events(self, call: Call) -> Response:
        info = await self.owned(call)
        text = call.request.headers.get("last-event-id", "0")
        if not text.isdecimal() or len(text) > 18:
            raise InputError(f"Last-Event-ID is a number, not {text[:40]!r}")
        key = call.owner
        texts = call.query("text", _flag, False)
        return run_events(
            self._runtime, self._streams, key.tenant, info.run_id, int(text), lambda: self._keys.has(key.id), texts
        )

    # --- deciding ---------------------------------------------------------------------

    async def cancel(self, call: Call) -> t.Run:
        info = await self.owned(call)
        if info.state not in TERMINAL:
            await self._runtime.run(info.run_id).cancel(call.body.reason)
        return await run_now(self._runtime, info.run_id)

    async def approve(self, call: Call) -> t.Answered:
        info, asked = await self.owned(call), call.body
        by = asked.by or call.owner.label or call.owner.id
        step = await self._runtime.run(info.run_id).approve(
            asked.approved, step=asked.step, by=by, comment=asked.comment
        )
        return t.Answered(step=step)

    async def settle(self, call: Call) -> t.Answered:
        info, asked, step = await self.owned(call), call.body, call.path("step")
        run = self._runtime.run(info.run_id)
        if asked.failed:
            await run.settle_failed(step, asked.message, asked.code)
        else:
            await run.settle(step, asked.result)
        return t.Answered(step=step)

    async def retry(self, call: Call) -> t.Answered:
        info, step = await self.owned(call), call.path("step")
        await self._runtime.run(info.run_id).retry(step)
        return t.Answered(step=step)

    async def resume(self, call: Call) -> t.Run:
        info = await self.owned(call)
        await self._runtime.run(info.run_id).resume()
        return await run_now(self._runtime, info.run_id)

    async def send(self, call: Call) -> t.EventSent:
        asked: t.EventRequest = call.body
        tenant = call.owner.tenant_for(asked.tenant)
        if asked.run_id is not None:
            tenant = (await self._owned(call, asked.run_id)).tenant
        sent = await self._runtime.send(
            asked.data, run_id=asked.run_id, topic=asked.topic, key=asked.key, id=asked.id, tenant=tenant
        )
        return t.EventSent(id=sent)

    async def callback_secret(self, call: Call) -> t.CallbackSecret:
        return self._secret_of(call.owner.tenant_for(call.query("tenant")))

    async def rotate_callback_secret(self, call: Call) -> t.CallbackSecret:
        tenant = call.owner.tenant_for(call.body.tenant)
        check_name("tenant", tenant)
        await self._secrets.rotate(tenant, call.body.overlap_s)
        return self._secret_of(tenant)

    def _secret_of(self, tenant: str) -> t.CallbackSecret:
        now_ns = time.time_ns()
        until_ns = self._secrets.previous_until_ns(tenant)
        return t.CallbackSecret(
            secret=secret_text(self._secrets.valid(tenant, now_ns)[0]),
            previous_until=until_ns / 1e9 if until_ns > now_ns else None,
        )

    # --- shared -----------------------------------------------------------------------

    async def owned(self, call: Call) -> RunInfo:
        """The run of the path. Raises UnknownRunError, whether there is none or it is another tenant's."""
        return await self._owned(call, call.path("run_id"))

    async def _owned(self, call: Call, text: str) -> RunInfo:
        unknown = UnknownRunError(f"there is no run {text[:64]}")
        try:
            run_id = parse_run_id(text)
        except InputError as error:
            raise unknown from error
        # One look into the store decides, whatever becomes of it and wherever the run is: a run that is in memory must
        # not be told from one that is not there by the time that the refusal takes.
        head = await self._runtime.read_store(lambda store: store.read_head(run_id))
        if head is None or not call.owner.sees(head.tenant):
            raise unknown
        return await self._runtime.describe_run(run_id)


def _decision(made: Decision) -> t.Decision:
    return t.Decision(
        at=made.at_ns / 1e9,
        control=made.control.value,
        action=made.action.value,
        scope=made.scope.value,
        name=made.name,
        limit=made.limit,
        value=made.value,
        bound=made.bound,
        step=made.step,
        until=made.until_ns / 1e9 if made.until_ns else None,
        detail=made.detail,
    )


async def run_now(runtime: Runtime, run_id: str) -> t.Run:
    """The run in full. Raises UnknownRunError."""
    info = await runtime.describe_run(run_id)
    bounds = await _bounds(runtime, run_id)
    if info.state not in TERMINAL:
        return run_of(info, **bounds)
    result = await runtime.run(run_id).wait()
    cost = result.cost
    return run_of(
        info,
        **bounds,
        cost=t.Cost(fuel=cost.fuel, slot_ns=cost.slot_ns, micro_usd=cost.micro_usd, tokens=cost.tokens),
        result=msgspec.Raw(result.result) if result.result is not None else msgspec.UNSET,
        error=msgspec.Raw(result.error) if result.error is not None else msgspec.UNSET,
    )


async def _bounds(runtime: Runtime, run_id: str) -> dict[str, Any]:
    """What the run was accepted with."""

    def look(store: Store) -> list[Record]:
        return store.read_records(run_id, 0, 1)

    for record in await runtime.read_store(look):
        if isinstance(record, RunAccepted):
            return {
                "budget": record.budget or None,
                "fuel_max": record.fuel_max,
                "deadline_at": record.deadline_ns / 1e9 if record.deadline_ns else None,
            }
    return {}


def waits_for_people(info: RunInfo) -> bool:
    """Whether it goes on only when somebody decides."""
    return info.wait_reason in _PEOPLE or any(step.op == "approval.request" for step in info.steps)


def run_of(info: RunInfo, **more: Any) -> t.Run:
    """A run as the API shows it."""
    return t.Run(
        run_id=info.run_id,
        state=info.state,
        tenant=info.tenant,
        agent=info.agent,
        agent_version=info.agent_version,
        tier=info.tier,
        base_tier=info.base_tier,
        version=info.version,
        accepted_at=info.accepted_ns / 1e9,
        ended_at=info.ended_ns / 1e9 if info.ended_ns else None,
        wait_reason=info.wait_reason,
        detail=info.detail,
        cancel_requested=info.cancel_requested,
        scheduler=info.scheduler,
        stuck=info.stuck,
        resume_token=None if info.token is None else str(info.token),
        steps=tuple(t.OpenStep(path=s.path, op=s.op, tool=s.tool or None, attempt=s.attempt) for s in info.steps),
        **more,
    )


async def _pieces(data: memoryview) -> AsyncIterator[bytes]:
    """Of a size that is copied in no time."""
    for at in range(0, len(data), _PIECE_BYTES):
        yield bytes(data[at : at + _PIECE_BYTES])


def _state(text: str) -> str:
    if text.upper() not in RunState.__members__:
        raise InputError(f"there is no state {text[:80]!r}", hint=f"States: {', '.join(RunState.__members__)}")
    return text.upper()


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _limit(call: Call) -> int:
    limit: int = call.query("limit", int, 100)
    if not 1 <= limit <= PAGE_MAX:
        raise InputError(f"limit is 1 to {PAGE_MAX}, not {limit}", limit="limit")
    return limit
