"""`fold`: a journal's records to the state of the run. Pure; the head row is its cache.

`fold(records)` and `apply(state, record)` are the same code: recovery folds from the start, the engine applies
each record as it makes it. A sequence that no run can have written is refused with StoreCorruptError naming the
seq; a refused record leaves the state as it was. What must hold:

- seq runs from 1 without gaps; the first record is RunAccepted and no other is; nothing follows RunEnded.
- an exported run has no record but that of its import, from the same export.
- runs and steps move only along the tables of `states`.
- a step is first seen under a path of the current segment; preparing it again keeps op, kind, request and key, and
  its attempt stays or grows by one; its commit names the attempt and digest last prepared.
- without phase one only a pure step (no result kept) or an op whose row in the syscall table says so commits.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from agentrt import records as r
from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.states import (
    OPEN,
    STEP_KINDS,
    TERMINAL,
    WAIT_REASONS,
    RunState,
    StepState,
    can_change_run,
    can_change_step,
)
from agentrt.stores.base import Head
from agentrt.syscalls import BY_OP

_PATH: Final = re.compile(r"([1-9][0-9]{0,18}):[0-9]+(?:\.[0-9]+)*")
_NOTHING: Final = r.Cost()
_LOCK_OPS: Final = frozenset({"lock.acquire", "lock.release", "lock.foreign"})


class _LockRequest(msgspec.Struct):
    name: str


class _LockResult(msgspec.Struct):
    token: int


class _Hold(msgspec.Struct):
    name: str
    token: int | None  # None: released


class _ForeignHold(msgspec.Struct):
    name: str
    owner: str
    held: bool


class Step(msgspec.Struct):
    """What the journal knows of a step; ``request``, ``key`` and ``kind`` are None without phase one."""

    path: str
    op: str
    state: StepState
    digest: bytes  # of the request
    attempt: int
    kind: str | None = None
    request: bytes | None = None
    key: str | None = None
    reserved: r.Cost = _NOTHING  # held until the step is settled
    reason: str | None = None  # of the last abort, eviction or loss
    ok: bool | None = None  # None until committed
    result: bytes | None = None  # None when committed: a pure step, replay runs it again
    result_digest: bytes | None = None
    seq: int = 0  # of the record that put it into this state
    prepared_ns: int = 0  # when it was first prepared: key_ttl counts from here
    first_seq: int = 0  # of the record that prepared it first

    @property
    def pure(self) -> bool:
        """Committed with nothing but a digest."""
        return self.state is StepState.COMMITTED and self.result is None

    @property
    def told(self) -> bytes:
        """What the guest was told: the result, but that of an emit is what it has emitted."""
        return b"null" if self.op == "emit" and self.ok else self.result or b"null"


class Child(msgspec.Struct, frozen=True):
    run_id: str
    detached: bool


class RunFold(msgspec.Struct):
    """A run after the records so far; version 0 and state None: there is none yet. Changed by `apply` only."""

    version: int = 0  # state_version: seq of the last record
    at_ns: int = 0  # time of the last record
    state: RunState | None = None
    accepted: r.RunAccepted | None = None
    tier: int = 0
    segment: int = 1
    restored: bytes | None = None  # state of the last checkpoint
    checkpoint_seq: int = 0  # its record; 0: none
    segment_ns: int = 0  # when the segment began: time of that record, or of the acceptance
    steps: dict[str, Step] = {}  # this segment's, and older ones still open; by path
    committed: list[str] = []  # paths of this segment in journal order of their commits: what replay delivers
    open: dict[str, Step] = {}  # started and not settled, in order of first sight
    tool_calls: int = 0  # steps of tool.call, all segments
    children: dict[str, Child] = {}  # by path of the spawning step
    pins: dict[str, str] = {}
    frame: r.FrameTaken | None = None
    cancel_requested: str | None = None  # the reason; sticky
    wait: r.Waiting | None = None  # set exactly while WAITING, or while EXPORTED from there
    ending: r.Ending | None = None
    ended: r.RunEnded | None = None
    exported: r.Exported | None = None  # set exactly while EXPORTED
    exported_from: RunState | None = None  # the state in which it goes on
    spent: r.Cost = _NOTHING  # sum over committed steps, all segments
    active_ns: int = 0  # how long it has been at work, all segments, if that is bounded
    broken_locks: list[r.LockBroken] = []
    locks: dict[str, int] = {}  # held: name -> token
    foreign_locks: dict[str, str] = {}  # held elsewhere, and declared: owner -> name
    retry: set[str] = set()  # open steps that an operator lets run once more

    def run(self) -> r.RunAccepted:
        """The record that made the run. Raises StoreCorruptError if there is none."""
        if self.accepted is None:
            raise StoreCorruptError("a run without records")
        return self.accepted

    @property
    def reserved(self) -> r.Cost:
        """Sum of what the open steps hold."""
        return sum_costs(step.reserved for step in self.open.values())


def sum_costs(costs: Iterable[r.Cost]) -> r.Cost:
    """Field by field."""
    total = _NOTHING
    for cost in costs:
        if cost != _NOTHING:
            total = r.Cost(
                total.fuel + cost.fuel,
                total.slot_ns + cost.slot_ns,
                total.micro_usd + cost.micro_usd,
                total.tokens + cost.tokens,
            )
    return total


def fold(records: Iterable[r.Record]) -> RunFold:
    """The state after the records, which start at seq 1. Raises StoreCorruptError."""
    state = RunFold()
    for record in records:
        apply(state, record)
    return state


def apply(state: RunFold, record: r.Record) -> None:
    """Moves the state past one record. Raises StoreCorruptError, and then the state is what it was."""
    if record.seq != state.version + 1:
        raise StoreCorruptError(f"record {record.seq} follows record {state.version}")
    if state.ended is not None:
        raise _bad(record, "follows the end of the run")
    if state.exported is not None and type(record) is not r.Imported:
        raise _bad(record, "follows the export of the run")
    if (state.accepted is None) is not (type(record) is r.RunAccepted):
        raise _bad(record, "is the first record" if state.accepted is None else "accepts the run again")
    _HANDLERS[type(record)](state, record)
    state.version = record.seq
    state.at_ns = record.at_ns


def head_of(state: RunFold, run_id: str) -> Head:
    """The run's head row."""
    run = state.run()
    assert state.state is not None
    return Head(
        run_id,
        state.version,
        state.state.value,
        run.tenant,
        run.agent,
        state.pins.get("agent", run.version),
        state.tier,
        run.base_tier,
        run.at_ns,
        state.ended.at_ns if state.ended is not None else 0,
        state.wait.reason if state.wait is not None and state.exported is None else None,
        state.segment,
        state.cancel_requested is not None,
    )


def _bad(record: r.Record, what: str) -> StoreCorruptError:
    return StoreCorruptError(f"record {record.seq} ({type(record).__name__}) {what}")


def _enter(state: RunFold, record: r.Record, new: RunState) -> None:
    if not can_change_run(state.state, new):
        raise _bad(record, f"takes a run from {state.state} to {new}")
    state.state = new
    if new is not RunState.WAITING:
        state.wait = None


def _terminal(record: r.Record, name: str) -> RunState:
    if name not in TERMINAL:
        raise _bad(record, f"names {name!r}, which is no terminal state")
    return RunState(name)


def _first_seen(state: RunFold, record: r.StepPrepared | r.StepCommitted) -> None:
    match = _PATH.fullmatch(record.path)
    if match is None or int(match[1]) != state.segment:
        raise _bad(record, f"starts step {record.path!r} in segment {state.segment}")
    if record.op not in BY_OP:
        raise _bad(record, f"names the unknown op {record.op!r}")


def _accepted(state: RunFold, record: r.RunAccepted) -> None:
    if not 0 <= record.base_tier <= 3:
        raise _bad(record, f"names tier {record.base_tier}")
    _enter(state, record, RunState.ACTIVE)
    state.accepted = record
    state.tier = record.base_tier
    state.pins = dict(record.pins)
    state.segment_ns = record.at_ns


def _prepared(state: RunFold, record: r.StepPrepared) -> None:
    path = record.path
    step = state.steps.get(path)
    if step is None:
        _first_seen(state, record)
        if record.kind not in STEP_KINDS or record.kind == "pure":
            raise _bad(record, f"prepares a step of kind {record.kind!r}")
        if record.attempt != 1:
            raise _bad(record, f"starts step {path} with attempt {record.attempt}")
        step = state.steps[path] = Step(
            path, record.op, StepState.PREPARED, record.digest, 1, record.kind, record.request, record.key
        )
        step.prepared_ns = record.at_ns
        step.first_seq = record.seq
        state.tool_calls += record.op == "tool.call"
    else:
        if not can_change_step(step.state, StepState.PREPARED):
            raise _bad(record, f"prepares step {path}, which is {step.state}")
        if (record.op, record.kind, record.key, record.digest, record.request) != (
            step.op,
            step.kind,
            step.key,
            step.digest,
            step.request,
        ):
            raise _bad(record, f"prepares step {path} again as another")
        if not step.attempt <= record.attempt <= step.attempt + 1:
            raise _bad(record, f"goes from attempt {step.attempt} to {record.attempt} of step {path}")
        step.state = StepState.PREPARED
        step.attempt = record.attempt
        state.retry.discard(path)
    step.reserved = record.reserved
    step.seq = record.seq
    state.open[path] = step


def _committed(state: RunFold, record: r.StepCommitted) -> None:
    path = record.path
    step = state.steps.get(path)
    hold = _hold(record, step) if record.ok and record.op in _LOCK_OPS else None
    if step is None:
        _first_seen(state, record)
        if record.result is not None and record.ok and BY_OP[record.op].prepare:
            raise _bad(record, f"commits step {path}, which is not pure and was never prepared")
        if not BY_OP[record.op].step:
            raise _bad(record, f"commits {record.op}, which is no step")
        step = state.steps[path] = Step(path, record.op, StepState.COMMITTED, record.digest, record.attempt)
        state.tool_calls += record.op == "tool.call"
    else:
        if not can_change_step(step.state, StepState.COMMITTED):
            raise _bad(record, f"commits step {path}, which is {step.state}")
        if (record.op, record.digest, record.attempt) != (step.op, step.digest, step.attempt):
            raise _bad(record, f"commits step {path} as another than was prepared")
        if record.result is None:
            raise _bad(record, f"commits step {path}, which was prepared, without a result")
        if step.state is StepState.ABORTED and record.ok:
            raise _bad(record, f"commits step {path}, which had no effect, as a success")
        step.state = StepState.COMMITTED
        step.reserved = _NOTHING
        state.open.pop(path, None)
        state.retry.discard(path)
    if hold is not None:
        _change_hold(state, hold)
    step.ok = record.ok
    step.result = record.result
    step.result_digest = record.result_digest
    step.seq = record.seq
    if record.cost != _NOTHING:
        state.spent = sum_costs((state.spent, record.cost))
    if record.active_ns > state.active_ns:
        state.active_ns = record.active_ns
    if path.startswith(f"{state.segment}:"):
        state.committed.append(path)
    else:  # prepared before the checkpoint; the guest that asked is gone
        del state.steps[path]


def _hold(record: r.StepCommitted, step: Step | None) -> _ForeignHold | _Hold:
    """What a step about locks says. Raises StoreCorruptError if that cannot be read."""
    result = record.result or b""
    try:
        if record.op == "lock.foreign":
            return msgspec.json.decode(result, type=_ForeignHold)
        name = msgspec.json.decode(b"" if step is None else step.request or b"", type=_LockRequest).name
        acquired = record.op == "lock.acquire"
        return _Hold(name, msgspec.json.decode(result, type=_LockResult).token if acquired else None)
    except UNREADABLE as error:
        raise _bad(record, f"commits step {record.path} with what is no answer of {record.op}: {error}") from None


def _change_hold(state: RunFold, hold: _ForeignHold | _Hold) -> None:
    if isinstance(hold, _ForeignHold):
        if hold.held:
            state.foreign_locks[hold.owner] = hold.name
        else:
            state.foreign_locks.pop(hold.owner, None)
    elif hold.token is not None:
        state.locks[hold.name] = hold.token
    else:
        state.locks.pop(hold.name, None)


def _settled(new: StepState) -> Any:
    def handle(state: RunFold, record: r.StepAborted | r.StepEvicted | r.OutcomeUnknown) -> None:
        step = state.steps.get(record.path)
        old = None if step is None else step.state
        if step is None or not can_change_step(old, new):
            raise _bad(record, f"takes step {record.path!r} from {old} to {new}")
        step.state = new
        step.reason = record.reason
        step.seq = record.seq
        if new not in OPEN:
            step.reserved = _NOTHING
            state.open.pop(record.path, None)
            state.retry.discard(record.path)

    return handle


def _waiting(state: RunFold, record: r.Waiting) -> None:
    if record.reason not in WAIT_REASONS:
        raise _bad(record, f"waits for {record.reason!r}")
    _enter(state, record, RunState.WAITING)
    state.wait = record
    state.active_ns = max(state.active_ns, record.active_ns)


def _resumed(state: RunFold, record: r.Resumed) -> None:
    for path in record.retry:
        if path not in state.open:
            raise _bad(record, f"lets step {path!r} run again, which is not open")
    _enter(state, record, RunState.ACTIVE)
    state.retry.update(record.retry)


def _spawned(state: RunFold, record: r.Spawned) -> None:
    if record.path in state.children:
        raise _bad(record, f"spawns at step {record.path!r} again")
    state.children[record.path] = Child(record.child, record.detached)


def _checkpoint(state: RunFold, record: r.Checkpoint) -> None:
    if record.segment != state.segment + 1:
        raise _bad(record, f"starts segment {record.segment} after {state.segment}")
    state.segment = record.segment
    state.restored = record.state
    state.checkpoint_seq = record.seq
    state.segment_ns = record.at_ns
    state.frame = None  # it was of the old segment
    state.steps = dict(state.open)
    state.committed = []


def _frame(state: RunFold, record: r.FrameTaken) -> None:
    state.frame = record


def _tier(state: RunFold, record: r.TierChanged) -> None:
    if not 0 <= record.tier <= 3:
        raise _bad(record, f"names tier {record.tier}")
    state.tier = record.tier


def _cancel(state: RunFold, record: r.CancelRequested) -> None:
    if state.cancel_requested is None:
        state.cancel_requested = record.reason


def _ending(state: RunFold, record: r.Ending) -> None:
    _terminal(record, record.towards)
    before = state.ending
    if before is not None and (before.answers >= 0 or record.answers < 0 or before.towards != record.towards):
        raise _bad(record, "tells a run to end that was told so")
    _enter(state, record, RunState.ENDING)
    state.ending = record


def _lock(state: RunFold, record: r.LockBroken) -> None:
    state.broken_locks.append(record)
    if state.locks.get(record.lock) == record.token:
        del state.locks[record.lock]


def _upgraded(state: RunFold, record: r.Upgraded) -> None:
    state.pins.update(record.pins)


def _ended(state: RunFold, record: r.RunEnded) -> None:
    new = _terminal(record, record.state)
    if state.ending is not None and state.ending.towards != new:
        raise _bad(record, f"ends a run as {new} that was ending towards {state.ending.towards}")
    _enter(state, record, new)
    state.ended = record


def _exported(state: RunFold, record: r.Exported) -> None:
    wait, before = state.wait, state.state
    _enter(state, record, RunState.EXPORTED)
    state.wait, state.exported, state.exported_from = wait, record, before


def _imported(state: RunFold, record: r.Imported) -> None:
    if state.exported is None or state.exported_from is None or state.exported.export_id != record.export_id:
        raise _bad(record, "imports a run that was not exported so")
    state.state = state.exported_from
    state.exported = state.exported_from = None


_HANDLERS: Final[dict[type, Any]] = {
    r.RunAccepted: _accepted,
    r.StepPrepared: _prepared,
    r.StepCommitted: _committed,
    r.StepAborted: _settled(StepState.ABORTED),
    r.StepEvicted: _settled(StepState.UNCOMMITTED_EVICTED),
    r.OutcomeUnknown: _settled(StepState.OUTCOME_UNKNOWN),
    r.Waiting: _waiting,
    r.Resumed: _resumed,
    r.Spawned: _spawned,
    r.Checkpoint: _checkpoint,
    r.FrameTaken: _frame,
    r.TierChanged: _tier,
    r.CancelRequested: _cancel,
    r.Ending: _ending,
    r.LockBroken: _lock,
    r.Upgraded: _upgraded,
    r.RunEnded: _ended,
    r.Exported: _exported,
    r.Imported: _imported,
}
