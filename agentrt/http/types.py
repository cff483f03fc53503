"""What the HTTP API takes and gives, as the client and the OpenAPI document know it. Plain data: no engine behind it.

Times are Unix seconds as numbers. Members that are not known are left out or null. Unknown members of a request are
refused, so that a misspelt one is not taken for a default.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentrt.states import RunState

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Seconds = Annotated[float, Meta(ge=0, lt=2**33)]
EventId = Annotated[str, Meta(min_length=1, max_length=256)]


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class RunRequest(_Request, frozen=True, kw_only=True):
    """A run to start. ``tier``: 0 to 3, a name or an alias. ``budget``: limits of this run. ``timeout_s``: wall time
    from now. ``run_at``: Unix time before which it does not begin. ``callback_url``: gets the run by POST when it has
    ended. ``tenant``: only for keys that may act for any. ``source`` and ``type``: where it comes from and what it is,
    for the node's rules, which may also name the ``agent``."""

    agent: Annotated[str, Meta(max_length=128)] = ""
    input: Any = None
    tier: Annotated[int, Meta(ge=0, le=3)] | Annotated[str, Meta(max_length=32)] | None = None
    tenant: Name | None = None
    budget: dict[str, int | float] | None = None
    timeout_s: Seconds | None = None
    run_at: Seconds | None = None
    fuel: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    callback_url: Annotated[str, Meta(max_length=2048)] | None = None
    source: Annotated[str, Meta(max_length=1000)] = ""
    type: Annotated[str, Meta(max_length=1000)] = ""


class Accepted(_Answer, frozen=True, kw_only=True):
    """The run is durable."""

    run_id: str
    location: str


class Cost(_Answer, frozen=True, kw_only=True):
    """What a run has used: guest work, time in CPU slots, money in micro-dollars, tokens of models."""

    fuel: int = 0
    slot_ns: int = 0
    micro_usd: int = 0
    tokens: int = 0


class OpenStep(_Answer, frozen=True, kw_only=True):
    """A step under way."""

    path: str
    op: str
    tool: str | None = None
    attempt: int = 1


class Run(_Answer, frozen=True, kw_only=True):
    """A run now. Only where one run was asked for: its bounds (``budget``, ``fuel_max``, ``deadline_at``) and, when it
    has ended, ``result`` or ``error`` and its ``cost``. ``stuck``: why it makes no progress while it waits for nothing
    that could come. ``resume_token``: where it is in its journal, run/segment/seq/frame/fuel/tier."""

    run_id: str
    state: RunState
    tenant: str
    agent: str
    agent_version: str
    tier: int
    base_tier: int
    version: int
    accepted_at: float
    ended_at: float | None = None
    wait_reason: str | None = None
    detail: str | None = None
    cancel_requested: bool = False
    scheduler: str | None = None
    stuck: str | None = None
    resume_token: str | None = None
    steps: tuple[OpenStep, ...] = ()
    budget: dict[str, int | float] | None = None
    fuel_max: int | None = None
    deadline_at: float | None = None
    cost: Cost | None = None
    result: msgspec.Raw | UnsetType = UNSET
    error: msgspec.Raw | UnsetType = UNSET


class RunPage(_Answer, frozen=True, kw_only=True):
    """Runs; ``next`` is the cursor of the following page, absent on the last. A page may be empty and not the last."""

    runs: list[Run]
    next: str | None = None


class Step(_Answer, frozen=True, kw_only=True):
    """A step of a run with what the journal knows of it. ``started_at`` is when it was first prepared (a pure step
    never is), ``ended_at`` when it was settled. ``request`` and ``result`` are JSON; one that is large or was of a pure
    step is left out."""

    path: str
    op: str
    state: str
    kind: str | None = None
    tool: str | None = None
    attempt: int = 1
    ok: bool | None = None
    started_at: float | None = None
    ended_at: float | None = None
    cost_fuel: int = 0
    cost_slot_ns: int = 0
    cost_micro_usd: int = 0
    cost_tokens: int = 0
    request: msgspec.Raw | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET


class StepPage(_Answer, frozen=True, kw_only=True):
    """Steps of the run's present segment in the order in which they began; ``next`` as in `RunPage`."""

    steps: list[Step]
    next: int | None = None


class Decision(_Answer, frozen=True, kw_only=True):
    """What flow control has decided about a run: which ``control`` did what (``action``), by which ``limit`` of whom
    (``scope`` and ``name``), which stood at ``value`` of ``bound``; ``until``: when it may be otherwise."""

    at: float
    control: str
    action: str
    scope: str
    name: str = ""
    limit: str = ""
    value: int = 0
    bound: int = 0
    step: str | None = None
    until: float | None = None
    detail: str = ""


class Decisions(_Answer, frozen=True, kw_only=True):
    """In the order in which they were made."""

    decisions: list[Decision]


class CancelRequest(_Request, frozen=True, kw_only=True):
    reason: Annotated[str, Meta(max_length=500)] = "cancelled by request"


class ApprovalRequest(_Request, frozen=True, kw_only=True):
    """``step``: which approval, if the run waits for several."""

    approved: bool
    step: Annotated[str, Meta(max_length=64)] | None = None
    by: Annotated[str, Meta(max_length=200)] | None = None
    comment: Annotated[str, Meta(max_length=2000)] | None = None


class Answered(_Answer, frozen=True, kw_only=True):
    """Which step was answered."""

    step: str


class SettleRequest(_Request, frozen=True, kw_only=True):
    """An operator knows the outcome of a step: it had this ``result``, or failed with ``message`` and ``code``."""

    result: Any = None
    failed: bool = False
    message: Annotated[str, Meta(max_length=2000)] = "given up by an operator"
    code: Annotated[str, Meta(max_length=64)] = "operator"


class EventRequest(_Request, frozen=True, kw_only=True):
    """An event for a run's mailbox (``run_id``) or for a topic and key of the tenant. The same ``id`` at the same
    address counts once."""

    data: Any = None
    run_id: Annotated[str, Meta(max_length=64)] | None = None
    topic: Name | None = None
    key: Annotated[str, Meta(max_length=256)] = ""
    id: EventId | None = None
    tenant: Name | None = None


class EventSent(_Answer, frozen=True, kw_only=True):
    id: str


class CallbackSecret(_Answer, frozen=True, kw_only=True):
    """``previous_until``: until then callbacks are signed with the secret before as well."""

    secret: str
    previous_until: float | None = None


class RotateRequest(_Request, frozen=True, kw_only=True):
    """``overlap_s``: how long callbacks are signed with the old secret as well. ``tenant``: only for keys that may act
    for any."""

    overlap_s: Annotated[float, Meta(ge=0, le=2_592_000)] = 86_400
    tenant: Name | None = None


class Agent(_Answer, frozen=True, kw_only=True):
    """``short``: callers may wait for its runs, with ``?wait=``."""

    name: str
    version: str
    backend: str
    tier: int
    fuel_max: int
    short: bool = False


class Agents(_Answer, frozen=True, kw_only=True):
    agents: list[Agent]


class ScheduleRequest(_Request, frozen=True, kw_only=True):
    """``cron``: five fields, UTC. ``catch_up``: what happens to times missed while the node was down."""

    cron: Annotated[str, Meta(max_length=200)]
    agent: Name
    input: Any = None
    tier: Annotated[int, Meta(ge=0, le=3)] | Annotated[str, Meta(max_length=32)] | None = None
    catch_up: Annotated[str, Meta(pattern="^(skip|once)$")] = "once"
    tenant: Name | None = None


class Schedule(_Answer, frozen=True, kw_only=True):
    name: str
    tenant: str
    cron: str
    agent: str
    catch_up: str
    next_at: float
    action: str = "run"


class Schedules(_Answer, frozen=True, kw_only=True):
    schedules: list[Schedule]


class KeyRequest(_Request, frozen=True, kw_only=True):
    """A key to make. ``tenant`` "*": for every tenant. ``max_tier``: the most urgent tier its runs may have."""

    tenant: Name
    scopes: list[str]
    max_tier: Annotated[int, Meta(ge=0, le=3)] = 1
    label: Annotated[str, Meta(max_length=200)] = ""


class Key(_Answer, frozen=True, kw_only=True):
    """An API key as it can be shown; ``secret`` only in the answer that makes it."""

    id: str
    tenant: str
    scopes: list[str]
    max_tier: int
    label: str = ""
    created_at: float
    secret: str | UnsetType = UNSET


class Keys(_Answer, frozen=True, kw_only=True):
    keys: list[Key]


class IngressSource(_Answer, frozen=True, kw_only=True):
    """A topic whose events become runs. Counts are since the start of the node; ``state``: connecting, running, or why
    it is not. ``held``: fetched, and no runs yet; ``lag``: these and those that the bus had left at its last word."""

    name: str
    state: str
    delivered: int
    repeated: int
    accepted: int
    dead: int
    refused: int
    held: int
    held_bytes: int
    acknowledged: int
    failures: int
    lag: int = 0
    paused: list[str]


class IngressSources(_Answer, frozen=True, kw_only=True):
    sources: list[IngressSource]


class DeadLetterInfo(_Answer, frozen=True, kw_only=True):
    """An event that became no run: ``code`` and ``message`` say why. ``payload`` or, if it is no text,
    ``payload_base64``: only where one is asked for."""

    id: str
    ingress: str
    source: str
    partition: str
    offset: int
    topic: str
    agent: str
    tenant: str
    code: str
    message: str
    size_bytes: int
    at: float
    payload: str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET


class DeadLetters(_Answer, frozen=True, kw_only=True):
    letters: list[DeadLetterInfo]


class RetriedLetter(_Answer, frozen=True, kw_only=True):
    run_id: str


class Queues(_Answer, frozen=True, kw_only=True):
    """What waits and runs now. ``ended`` counts since the start of the node."""

    live: int
    queued_bytes: int
    parked: int
    recovering: int
    store_backlog_items: int
    store_backlog_bytes: int
    ended: dict[str, int]


class Tier(_Answer, frozen=True, kw_only=True):
    """A tier of the scheduler. Counted since the start of the node: ``started``, tasks that got a CPU slot;
    ``promoted``, those that aging brought there; ``slot_s``, time in slots."""

    tier: int
    name: str
    quantum_ms: int
    queued: int
    started: int
    promoted: int
    slot_s: float


class Tiers(_Answer, frozen=True, kw_only=True):
    tiers: list[Tier]


class TenantRequest(_Request, frozen=True, kw_only=True):
    """Switch a tenant off, and why, or on again."""

    enabled: bool
    reason: Annotated[str, Meta(max_length=1000)] = ""


class Tenant(_Answer, frozen=True, kw_only=True):
    tenant: str
    enabled: bool
    reason: str = ""


class Tenants(_Answer, frozen=True, kw_only=True):
    tenants: list[Tenant]


class DrainRequest(_Request, frozen=True, kw_only=True):
    """``park``: runs that were accepted do not go on here either. Steps under way are recorded first, within
    `node.close_timeout_ms`; runs can be looked at until the node ends, and go on at its next start."""

    park: bool = False


class ProfileScheduleRequest(_Request, frozen=True, kw_only=True):
    """``profile``: of the file `flow.file`; may be left out to roll back the last one. ``cron`` and ``catch_up`` as of
    schedules."""

    cron: Annotated[str, Meta(max_length=200)]
    profile: Annotated[str, Meta(max_length=128)] = ""
    action: Annotated[str, Meta(pattern="^(apply|roll_back)$")] = "apply"
    catch_up: Annotated[str, Meta(pattern="^(skip|once)$")] = "once"


class ProfileChange(_Answer, frozen=True, kw_only=True):
    """``action``: apply or roll_back. The digests are of all limits in force."""

    profile: str
    action: str
    at: float
    by: str
    reason: str = ""
    digest_before: str = ""
    digest_after: str = ""


class Profiles(_Answer, frozen=True, kw_only=True):
    """``known``: those of the file `flow.file`; ``applied``: those in force, the last one over the others; ``changes``:
    who did what, the newest last."""

    known: list[str]
    applied: list[str]
    changes: list[ProfileChange]


class Budget(_Answer, frozen=True, kw_only=True):
    """One limit of an account above runs. ``scope``: node, tenant or agent; ``tenant``: whose it is, empty for the
    node's; ``key``: what is counted, with its window, as limits are written; ``held``: reserved by steps under way."""

    scope: str
    name: str
    tenant: str
    key: str
    used: int
    held: int
    limit: int


class Budgets(_Answer, frozen=True, kw_only=True):
    """The fullest first."""

    budgets: list[Budget]


class Breaker(_Answer, frozen=True, kw_only=True):
    """A breaker that is not closed: ``state`` is open or half_open."""

    scope: str
    name: str
    state: str
    until_at: float


class Breakers(_Answer, frozen=True, kw_only=True):
    breakers: list[Breaker]


class Health(_Answer, frozen=True, kw_only=True):
    """``heartbeat_age_ms``: since the control loop's last sign of life."""

    status: str
    heartbeat_age_ms: int


class Problem(_Answer, frozen=True, kw_only=True):
    """RFC 9457. ``code`` is the error's stable name; ``limit`` the limit that was met; ``retry_after_s`` the exact time
    of Retry-After, where the node knows one."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    run: str | None = None
    step: str | None = None
    limit: str | None = None
    hint: str | None = None
    retry_after_s: float | None = None
