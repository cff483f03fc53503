"""What the engine tells about agents and runs."""

from typing import Any

import msgspec

from agentrt.backends.base import Backend, Exit, Program
from agentrt.engine.token import ResumeToken
from agentrt.errors import (
    AgentrtError,
    BudgetExhaustedError,
    DeniedError,
    EngineError,
    HostDiedError,
    LoopDetectedError,
    NonDeterminismError,
    RunCancelledError,
    RunError,
    RunTimedOutError,
    TrapError,
    UpgradeError,
)
from agentrt.flow.admission import AdmissionLimits
from agentrt.records import Cost, RunAccepted
from agentrt.states import RunState


class Agent(msgspec.Struct, frozen=True):
    """A registered agent; ``version`` is the content address of its module."""

    name: str
    version: str
    backend: Backend
    program: Program
    tier: int
    fuel_max: int
    budget: dict[str, int | float] = {}  # of its runs, unless they are submitted with one
    on_upgrade: str = "pin"  # what becomes of runs of its older versions; see upgrade.py
    migrate: str | None = None  # the pure tool that makes a new version's state: (state, from_version) -> state
    short: bool = False  # whether callers over HTTP may wait for its runs


class Activation(msgspec.Struct, frozen=True):
    """A run's stay in memory, from its guest's start until that was gone; what came of it is a journal's matter.

    ``begun``: fresh, replay (of a journal) or frame. ``ended``: why it left: the reason of a wait, the run's state, or
    what became of its guest. ``tier``: at the end. Of the rest, what the backend counts, from the run's beginning on if
    it was replayed. Times are Unix ns."""

    run_id: str
    accepted: RunAccepted
    began_ns: int
    ended_ns: int
    begun: str
    ended: str
    tier: int
    fuel: int = 0
    slot_ns: int = 0
    queued_ns: int = 0  # from when it was ready to its first instruction
    preemptions: int = 0
    demotions: int = 0


class RunResult(msgspec.Struct, frozen=True):
    """How a run ended: ``result`` is JSON when SUCCEEDED, ``error`` an error as JSON otherwise. ``exit`` is what the
    backend said; None if the run ended without a guest, before this start of the node, or long before anybody asked."""

    run_id: str
    state: RunState
    result: bytes | None
    error: bytes | None
    cost: Cost
    tier: int
    exit: Exit | None = None
    tenant: str = ""
    agent: str = ""

    def value(self) -> Any:
        """The result as plain data. Raises the `RunError` (or other AgentrtError) that the run ended with."""
        if self.state is RunState.SUCCEEDED:
            return msgspec.json.decode(self.result or b"null")
        raise self.exception()

    def exception(self) -> AgentrtError:
        """The error of a run that did not succeed, as an exception."""
        return run_error(self.run_id, self.state, self.error)


def run_error(run_id: str, state: RunState, error: bytes | None) -> AgentrtError:
    """What a run ended with, ``error`` as JSON, as an exception."""
    data: dict[str, Any] = msgspec.json.decode(error or b"{}")
    kind = _ERRORS.get(data.get("code", ""), RunError)
    return kind(
        str(data.get("message", state)),
        run=run_id,
        step=data.get("step"),
        limit=data.get("limit"),
        hint=data.get("hint"),
    )


_ERRORS: dict[str, type[AgentrtError]] = {
    kind.code: kind
    for kind in (
        RunCancelledError,
        RunTimedOutError,
        BudgetExhaustedError,
        LoopDetectedError,
        TrapError,
        HostDiedError,
        NonDeterminismError,
        EngineError,
        DeniedError,
        UpgradeError,
        RunError,
    )
}


class Emitted(msgspec.Struct, frozen=True):
    """What a run told its observers: ``data`` is JSON, (run_id, path) says which emit it was."""

    run_id: str
    path: str
    data: bytes


class MigrationFailed(msgspec.Struct, frozen=True):
    """A migrate function made no state: the run is as it was. ``error`` is an error as JSON."""

    run_id: str
    agent: str
    from_version: str
    to_version: str
    error: bytes


class StepInfo(msgspec.Struct, frozen=True):
    """A step under way."""

    path: str
    op: str
    tool: str
    attempt: int


class RunInfo(msgspec.Struct, frozen=True):
    """A run as people and programs see it. Times are Unix ns, 0 when not yet. ``scheduler`` is QUEUED, RUNNING, … as
    the backend says it, None if it does not or the run has no guest. ``wait_reason`` is one of `states.WAIT_REASONS` or
    None; ``detail`` names the tier, tenant, lock, step or limit. ``token`` says where it is in its journal. ``stuck``:
    it has made no progress for a while and waits for nothing that could come; why."""

    run_id: str
    state: RunState
    tenant: str
    agent: str
    agent_version: str
    tier: int
    base_tier: int
    version: int
    accepted_ns: int
    ended_ns: int = 0
    wait_reason: str | None = None
    detail: str | None = None
    cancel_requested: bool = False
    scheduler: str | None = None
    steps: tuple[StepInfo, ...] = ()
    token: ResumeToken | None = None
    stuck: str | None = None


class FrameStatistics(msgspec.Struct, frozen=True):
    """Frames of runs since the start of the node (docs/frames.md)."""

    taken: int
    used: int  # runs that went on from one
    refused: int  # that were of no use, so the run was replayed, or the second copy taken
    failed: int  # that could not be taken or written
    deltas: int  # of `taken`
    pinned: int  # runs now that can be neither captured nor replayed within the bound, and stay in memory


class EngineStatistics(msgspec.Struct, frozen=True):
    """Counters since the start of the node, and what there is now."""

    accepted: int
    refused: int
    duplicates: int  # submits answered with the run of an earlier one
    ended: dict[str, int]  # by terminal state
    live: int  # runs in memory
    queued_bytes: int  # their inputs
    parked: int  # runs that wait for an operator
    recovering: int  # runs of the store that will start
    recovered: int
    unclaimed: int  # of `recovering`: nobody has registered their agent's version
    discarded: int  # guests dropped because an append was refused
    commits: int
    commits_alone: int  # of these, outcomes without company
    tool_calls: int
    log_lines_dropped: int
    stuck: int  # runs that made no progress and were helped, or reported
    decisions: dict[str, int] = {}  # of flow control: "control/action/scope", as flow/decisions.py has them
    frames: FrameStatistics = FrameStatistics(0, 0, 0, 0, 0, 0)


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of an engine; `engine_limits` in runtime.py makes them."""

    request_bytes_max: int = 1 << 20
    result_bytes_max: int = 4 << 20
    journal_bytes_max: int = 64 << 20
    run_fuel_max: int = 10**13
    attempts_max: int = 5
    queue_items_max: int = 100_000
    queue_bytes_max: int = 256 << 20
    #: Whose events at the topic APPLY_PROFILE change profiles; empty: nobody's.
    profiles_tenant: str = ""
    #: How much of these each tier, class and tenant may have, and who may wait; `node` is what the two above say.
    admission: AdmissionLimits = AdmissionLimits()
    backlog_items_max: int = 20_000
    backlog_bytes_max: int = 128 << 20
    commit_delay_ns: int = 200_000
    rehydrate_per_s: int = 5_000
    #: Of memories that come back from frames; 0: any number of.
    rehydrate_bytes_per_s: int = 1 << 30
    #: After the start, how long agents may take to be registered before their runs are journaled as waiting for it.
    register_grace_ns: int = 5_000_000_000
    #: How long a suspended guest that only waits stays in memory, and how many such at most.
    hot_ns: int = 1_000_000_000
    #: How long a run may make no progress while nothing is under way for it; 0: for ever.
    stuck_ns: int = 60 * 10**9
    hot_runs_max: int = 10_000
    #: And how much memory their guests may have; 0: any.
    hot_bytes_max: int = 0
    #: Slot time that a guest must have had for a frame of it to be taken when it leaves memory.
    frames_after_ns: int = 20_000_000
    #: What a replay may cost in fuel: guests that can be captured have a frame taken that often; 0: anything.
    replay_fuel_max: int = 10**10
    #: How long a lock may be held while somebody waits for it.
    lock_hold_ns: int = 60 * 10**9
    #: And how long its holder may run meanwhile.
    lock_grace_ns: int = 150 * 10**6
    #: How long ended runs are kept.
    retention_ns: int = 7 * 24 * 3600 * 10**9
    event_ttl_ns: int = 24 * 3600 * 10**9
    #: How many runs may be above one, and how many children one may start.
    depth_max: int = 16
    fan_out_max: int = 10_000
