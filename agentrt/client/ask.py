"""The requests of the API as plain data: what is sent, what comes back, and whether sending it again is safe.

Pure. The functions here are the client's methods; `AsyncClient` and `Client` send what they make.
"""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from agentrt.errors import InputError
from agentrt.http import types as t

T = TypeVar("T")

_encode: Final = msgspec.json.Encoder().encode


class Ask(msgspec.Struct, Generic[T], frozen=True):
    """A request. ``answer``: type of what comes back, None for nothing, bytes for what is no JSON. ``again``: whether
    it may be sent again when nobody knows what became of it; everything may if it was certainly not taken."""

    method: str
    path: str
    answer: type[T] | None
    query: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    body: bytes | None = None
    again: bool = True


def submit(
    agent: str,
    input: Any = None,
    *,
    tier: int | str | None = None,
    tenant: str | None = None,
    budget: dict[str, int | float] | None = None,
    timeout_s: float | None = None,
    run_at: float | None = None,
    fuel: int | None = None,
    callback_url: str | None = None,
    idempotency_key: str | None = None,
    source: str = "",
    type: str = "",
    traceparent: str | None = None,
) -> Ask[t.Accepted]:
    """Start a run; it is durable when this returns. ``tier``: 0 to 3, a name or an alias; default: the agent's.
    ``budget``: limits of the run. ``timeout_s``: wall time from now. ``run_at``: Unix time before which it does not
    begin. ``callback_url``: gets the run by POST when it has ended. ``source``, ``type``: where it comes from and what
    it is, for the node's rules. Without an ``idempotency_key`` a new one is made, so that sending again starts nothing
    twice. ``traceparent``: the caller's span (W3C trace context), below which the run's trace goes on. Raises what the
    node answers: UnknownAgentError, InputError, IdempotencyConflictError, QueueFullError once it was asked often
    enough."""
    request = t.RunRequest(
        agent=agent,
        input=input,
        tier=tier,
        tenant=tenant,
        budget=budget,
        timeout_s=timeout_s,
        run_at=run_at,
        fuel=fuel,
        callback_url=callback_url,
        source=source,
        type=type,
    )
    key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
    headers = {"idempotency-key": key} | ({} if traceparent is None else {"traceparent": traceparent})
    return Ask("POST", "/v1/runs", t.Accepted, headers=headers, body=_body(request))


def run(run_id: str) -> Ask[t.Run]:
    """A run now, with its result or error if it has ended. Raises UnknownRunError."""
    return Ask("GET", _path("/v1/runs", run_id), t.Run)


def runs(
    *,
    state: str | None = None,
    tenant: str | None = None,
    agent: str | None = None,
    text: str | None = None,
    after: str | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> Ask[t.RunPage]:
    """A page of runs in order of acceptance, or backwards; ``after`` is the ``next`` of the page before, and a page
    may be empty and not the last. ``text`` is in their id, agent, state or reason to wait."""
    query = _query(
        state=state,
        tenant=tenant,
        agent=agent,
        text=text,
        after=after,
        limit=limit,
        newest_first="true" if newest_first else None,
    )
    return Ask("GET", "/v1/runs", t.RunPage, query=query)


def steps(run_id: str, *, after: int = 0, limit: int = 100) -> Ask[t.StepPage]:
    """A page of a run's steps."""
    return Ask("GET", _path("/v1/runs", run_id, "steps"), t.StepPage, query=_query(after=after, limit=limit))


def decisions(run_id: str) -> Ask[t.Decisions]:
    """What flow control has decided about a run lately."""
    return Ask("GET", _path("/v1/runs", run_id, "decisions"), t.Decisions)


def frame(run_id: str, frame_id: str | None = None) -> Ask[bytes]:
    """The state of a run as a frame (docs/frames.md); ``frame_id``: another one, to which that one is a delta."""
    return Ask("GET", _path("/v1/runs", run_id, "frame"), bytes, query=_query(id=frame_id))


def cancel(run_id: str, reason: str = "cancelled by request") -> Ask[t.Run]:
    """Cancel a run and what it started; the wish is durable when this returns."""
    return Ask("POST", _path("/v1/runs", run_id, "cancel"), t.Run, body=_body(t.CancelRequest(reason=reason)))


def approve(
    run_id: str,
    approved: bool = True,
    *,
    step: str | None = None,
    by: str | None = None,
    comment: str | None = None,
) -> Ask[t.Answered]:
    """Answer an approval that the run waits for; durable when this returns. Raises StepSettledError: it is gone,
    answered or too late; InputError: there are several, and ``step`` must say which."""
    request = t.ApprovalRequest(approved=approved, step=step, by=by, comment=comment)
    return Ask("POST", _path("/v1/runs", run_id, "approvals"), t.Answered, body=_body(request), again=False)


def settle(run_id: str, step: str, result: Any) -> Ask[t.Answered]:
    """An operator knows the outcome of a step that nobody saw: it had this result. Raises StepSettledError."""
    path = _path("/v1/runs", run_id, "steps", step, "settle")
    return Ask("POST", path, t.Answered, body=_body(t.SettleRequest(result=result)), again=False)


def settle_failed(run_id: str, step: str, message: str, code: str = "operator") -> Ask[t.Answered]:
    """An operator knows that the step failed, or gives it up. Raises StepSettledError."""
    path = _path("/v1/runs", run_id, "steps", step, "settle")
    request = t.SettleRequest(failed=True, message=message, code=code)
    return Ask("POST", path, t.Answered, body=_body(request), again=False)


def retry(run_id: str, step: str) -> Ask[t.Answered]:
    """An operator lets the step run once more, whatever its kind and attempts."""
    return Ask("POST", _path("/v1/runs", run_id, "steps", step, "retry"), t.Answered, again=False)


def resume(run_id: str) -> Ask[t.Run]:
    """Let a run go on that waits for an operator."""
    return Ask("POST", _path("/v1/runs", run_id, "resume"), t.Run, again=False)


def send(
    data: Any = None,
    *,
    run_id: str | None = None,
    topic: str | None = None,
    key: str = "",
    id: str | None = None,
    tenant: str | None = None,
) -> Ask[t.EventSent]:
    """Send an event to a run's mailbox or to a topic; durable when this returns. Without an ``id`` a new one is made,
    so that sending again sends nothing twice."""
    made = uuid.uuid4().hex if id is None else id
    request = t.EventRequest(data=data, run_id=run_id, topic=topic, key=key, id=made, tenant=tenant)
    return Ask("POST", "/v1/events", t.EventSent, body=_body(request))


def callback_secret(*, tenant: str | None = None) -> Ask[t.CallbackSecret]:
    """The secret with which callbacks of the tenant are signed."""
    return Ask("GET", "/v1/callback-secret", t.CallbackSecret, query=_query(tenant=tenant))


def rotate_callback_secret(*, tenant: str | None = None, overlap_s: float = 86_400) -> Ask[t.CallbackSecret]:
    """Make a new one. For ``overlap_s`` seconds callbacks are signed with the one before as well."""
    request = t.RotateRequest(overlap_s=overlap_s, tenant=tenant)
    return Ask("POST", "/v1/callback-secret/rotate", t.CallbackSecret, body=_body(request), again=False)


def agents() -> Ask[t.Agents]:
    """The agents that the node knows."""
    return Ask("GET", "/v1/agents", t.Agents)


def queues() -> Ask[t.Queues]:
    """What waits and runs, now."""
    return Ask("GET", "/v1/queues", t.Queues)


def tiers() -> Ask[t.Tiers]:
    """The scheduler's tiers, now."""
    return Ask("GET", "/v1/tiers", t.Tiers)


def budgets() -> Ask[t.Budgets]:
    """Limits of accounts above runs, the fullest first."""
    return Ask("GET", "/v1/budgets", t.Budgets)


def breakers() -> Ask[t.Breakers]:
    """Breakers that are not closed."""
    return Ask("GET", "/v1/breakers", t.Breakers)


def profiles() -> Ask[t.Profiles]:
    """The profiles of the node's file, those in force, and who put them there."""
    return Ask("GET", "/v1/profiles", t.Profiles)


def apply_profile(name: str) -> Ask[t.ProfileChange]:
    """Put a profile of the node's file over the limits in force."""
    return Ask("PUT", _path("/v1/profiles", name), t.ProfileChange)


def roll_back_profile(name: str) -> Ask[t.ProfileChange]:
    """Take a profile off again."""
    return Ask("DELETE", _path("/v1/profiles", name), t.ProfileChange)


def tenants() -> Ask[t.Tenants]:
    """The tenants that are switched off."""
    return Ask("GET", "/v1/tenants", t.Tenants)


def disable_tenant(tenant: str, reason: str = "") -> Ask[t.Tenant]:
    """Switch a tenant off, durably."""
    body = _body(t.TenantRequest(enabled=False, reason=reason))
    return Ask("PUT", _path("/v1/tenants", tenant), t.Tenant, body=body)


def enable_tenant(tenant: str) -> Ask[t.Tenant]:
    """Switch a tenant on."""
    return Ask("PUT", _path("/v1/tenants", tenant), t.Tenant, body=_body(t.TenantRequest(enabled=True)))


def schedules() -> Ask[t.Schedules]:
    """Runs by the clock."""
    return Ask("GET", "/v1/schedules", t.Schedules)


def schedule(
    name: str,
    cron: str,
    agent: str,
    input: Any = None,
    *,
    tier: int | str | None = None,
    tenant: str | None = None,
    catch_up: str = "once",
) -> Ask[t.ScheduleRequest]:
    """Make or change a schedule: five fields of cron, UTC."""
    request = t.ScheduleRequest(cron=cron, agent=agent, input=input, tier=tier, catch_up=catch_up, tenant=tenant)
    return Ask("PUT", _path("/v1/schedules", name), t.ScheduleRequest, body=_body(request))


def unschedule(name: str, *, tenant: str | None = None) -> Ask[None]:
    """Remove a schedule; its runs go on."""
    return Ask("DELETE", _path("/v1/schedules", name), None, query=_query(tenant=tenant))


def ingresses() -> Ask[t.IngressSources]:
    """The sources whose events become runs, now."""
    return Ask("GET", "/v1/ingresses", t.IngressSources)


def dead_letters(*, after: str | None = None) -> Ask[t.DeadLetters]:
    """Events of buses that became no runs, a page after the id ``after``."""
    return Ask("GET", "/v1/dead-letters", t.DeadLetters, query=_query(after=after))


def dead_letter(id: str) -> Ask[t.DeadLetterInfo]:
    """One, with its payload."""
    return Ask("GET", _path("/v1/dead-letters", id), t.DeadLetterInfo)


def retry_dead_letter(id: str) -> Ask[t.RetriedLetter]:
    """Make the event's one run of it after all, and drop it."""
    return Ask("POST", _path("/v1/dead-letters", id, "retry"), t.RetriedLetter, again=False)


def drop_dead_letter(id: str) -> Ask[None]:
    """Throw one away."""
    return Ask("DELETE", _path("/v1/dead-letters", id), None)


def keys() -> Ask[t.Keys]:
    """The API keys, without their secrets."""
    return Ask("GET", "/v1/keys", t.Keys)


def make_key(tenant: str, scopes: Iterable[str], *, max_tier: int = 1, label: str = "") -> Ask[t.Key]:
    """Make an API key; its secret is in the answer and nowhere else."""
    request = t.KeyRequest(tenant=tenant, scopes=list(scopes), max_tier=max_tier, label=label)
    return Ask("POST", "/v1/keys", t.Key, body=_body(request), again=False)


def remove_key(id: str) -> Ask[None]:
    """Remove an API key."""
    return Ask("DELETE", _path("/v1/keys", id), None)


def drain(*, park: bool = False) -> Ask[t.Health]:
    """Have the node take no more runs; ``park``: and leave those that are there at their places in the journal, for its
    next start."""
    return Ask("POST", "/v1/drain", t.Health, body=_body(t.DrainRequest(park=park)))


def _path(base: str, *parts: str) -> str:
    for part in parts:
        if not part:
            raise InputError("an id or name is empty")
    return "/".join((base, *(quote(part, safe=":") for part in parts)))


def _query(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _body(request: msgspec.Struct) -> bytes:
    try:
        return _encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"the request cannot be written as JSON: {error}") from error
