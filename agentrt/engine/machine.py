r"""The state machine of one run. It decides; its port does.

Pure: no I/O, no clock, no randomness of its own. Events come in as method calls on the control loop (the guest's, the
store's `on_committed`, a tool's `on_outcome`, `cancel`, `halt`); what has to happen goes out through the `RunPort` and
the guest's methods, none of which call back before they have returned.

    ACCEPTING -> REPLAY or LIVE -> ENDING -> ENDED          any but ENDED -> DISCARDED (an append was refused)
                              \-> PARKING (waits for something far off or an operator, or the node stops)

While it unwinds (`ending` is set, the durable state is ENDING) a run is still REPLAY or LIVE: its handlers make steps.

What must hold:
- `_version` is the seq of the last record made. Records are made in the order in which answers are given and wait in
  `_pending` until a batch takes all of them; so batches carry consecutive records and a guest's next step is
  never durable before an answer it has seen.
- A step with an effect begins only after its StepPrepared is durable, and never for a run that was told to end.
- Answers reach the guest in the order of their records' seq. While the journal still holds answers (REPLAY), one is
  given per wait: the one with the lowest seq among those waited for, which is what the guest got the first time.
- `_keyed_open` counts tool steps that were prepared and are not settled; a run ends only when it is 0. Steps that only
  wait are aborted at the end; children that nobody joined and that are not detached end first.
- The side rows of a step (`steps.registration`) are written with its StepPrepared and removed with its outcome.
"""

from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from agentrt import records as journal
from agentrt.backends.base import Exit, Guest, Request, Status
from agentrt.decoding import UNREADABLE
from agentrt.digest import digest, request_digest
from agentrt.engine.budget import deadline_limit, loop_ns
from agentrt.engine.callbacks import Callback, callback_row
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.history import History, Recorded
from agentrt.engine.modelsteps import MODEL_SPEC
from agentrt.engine.outcome import Outcome, failed, out_of_fuel, outcome_of, shown, towards
from agentrt.engine.ports import Hold, RunPort
from agentrt.engine.steps import (
    EXECUTED,
    UNWINDING_OPS,
    WAIT_REASON,
    BadRequestError,
    CapacityGet,
    Checkpoint,
    Emit,
    EventSend,
    Join,
    LockAcquire,
    LockForeign,
    LockRelease,
    Spawn,
    StepInFlight,
    ToolCall,
    decode,
    dirty_row,
    due_answer,
    registration,
)
from agentrt.errors import (
    AgentrtError,
    ClosedError,
    DeniedError,
    InputError,
    LoopDetectedError,
    NonDeterminismError,
    RunCancelledError,
    RunError,
    RunTimedOutError,
    StepSettledError,
    StoreError,
    UnknownToolError,
)
from agentrt.flow.accounts import Entry
from agentrt.flow.admission import Applicant
from agentrt.flow.timeouts import Clock, Timeouts
from agentrt.fold import RunFold, Step, sum_costs
from agentrt.ids import child_run_id, idempotency_key, segment_seed
from agentrt.records import (
    CancelRequested,
    Cost,
    Ending,
    OutcomeUnknown,
    Record,
    Resumed,
    RunAccepted,
    RunEnded,
    Spawned,
    StepAborted,
    StepCommitted,
    StepEvicted,
    StepPrepared,
    Waiting,
)
from agentrt.states import OPEN, RunState, StepState
from agentrt.stores.base import INBOX, READY, TIMERS, Batch, Head, Row
from agentrt.stores.frames import Kept
from agentrt.stores.keys import inbox_key, ready_key, ready_value, timer_key
from agentrt.syscalls import BY_NUMBER, BY_OP
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolSpec

_TOOL_CALL: Final = 1
_MODEL: Final = "model.generate"
_LOG: Final = 13
_UNWIND_CALLS_MAX: Final = 20
_FOREIGN_MAX: Final = 64  # locks elsewhere that a run can hold: each may cost a call when it unwinds
#: The path of a run's own deadline among its timers.
DEADLINE_PATH: Final = "!deadline"
#: The same of a run that begins later, and what it waits at until then.
START_PATH: Final = "!start"
#: The same of a run that waits in the store for a step that may not begin yet.
HOLD_PATH: Final = "!hold"
#: How the reason of a step's end begins that is tried again.
RETRY_REASON: Final = "another attempt follows"
_THE_RUN_ENDS: Final = "the run ends"
_NO_COST: Final = Cost()


class _Token(msgspec.Struct, frozen=True):
    token: int


_decode_token: Final = msgspec.json.Decoder(_Token).decode
_LOCK_OPS: Final = frozenset({"lock.acquire", "lock.release"})
_LENDING_OPS: Final = frozenset({"lock.acquire", "run.join"})  # waits for other runs
#: How guests end whose program would end so again, brought to where it was. What a trap, memory and fuel are a matter
#: of may be the machine's.
_AGAIN: Final = frozenset({"returned", "failed", "non_determinism"})
#: Of calls that did not come to an end by themselves, and certainly or perhaps had no effect.
_ENDED_CODES: Final = frozenset({"cancelled", "tool_host_died"})


class _Found(msgspec.Struct, frozen=True):
    """Payload of a reconcile function's outcome."""

    found: str  # yes, no, unknown
    result: msgspec.Raw = msgspec.Raw(b"null")


_decode_found: Final = msgspec.json.Decoder(_Found).decode
_decode_call: Final = msgspec.json.Decoder(ToolCall).decode
_encode: Final = msgspec.json.encode


class Phase(IntEnum):
    ACCEPTING = 0  # RunAccepted is not durable
    REPLAY = 1  # the journal holds answers that the guest has not seen
    LIVE = 2
    ENDING = 3  # the outcome is known; steps in flight are still to be recorded
    PARKING = 4  # the guest goes; steps in flight are still to be recorded
    ENDED = 5  # RunEnded is on its way
    DISCARDED = 6  # the store knows better
    GONE = 7  # parked: the store has it, and this is nobody's any more


Told = Callable[[AgentrtError | None], None]


class _Tell(NamedTuple):
    """What happens after a commit, and who hears of it in any case."""

    after: "list[StepInFlight] | Callable[[], None] | None"
    told: list[Told]


After = list[StepInFlight] | Callable[[], None] | _Tell | None

_ACCEPTING, _REPLAY, _LIVE = Phase.ACCEPTING, Phase.REPLAY, Phase.LIVE
_ENDING, _PARKING, _ENDED, _DISCARDED, _GONE = Phase.ENDING, Phase.PARKING, Phase.ENDED, Phase.DISCARDED, Phase.GONE


class RunMachine:
    """One run in memory. Make it with a RunAccepted that is not in the store yet, or with a `History`."""

    __slots__ = (
        "_asked",
        "_awaited",
        "_broken_locks",
        "_call_fuel",
        "_calls",
        "_children",
        "_children_told",
        "_clock_set",
        "_committed_left",
        "_error",
        "_given",
        "_halted",
        "_handlers",
        "_held",
        "_held_back",
        "_history",
        "_inflight",
        "_journal_bytes",
        "_keyed_open",
        "_known",
        "_lock_handles",
        "_lost_locks",
        "_pending",
        "_port",
        "_restarting",
        "_retry",
        "_returned",
        "_rows",
        "_segment",
        "_segment_prefix",
        "_sudden",
        "_suspended",
        "_told",
        "_tool_calls",
        "_undelivered",
        "_unjoined",
        "_unwind_calls",
        "_unwinding",
        "_version",
        "_waiting",
        "_waits_open",
        "accepted",
        "account",
        "agent_version",
        "at_ns",
        "cancel_reason",
        "clock",
        "ending",
        "exit",
        "foreign",
        "frame",
        "frame_copy",
        "frame_named",
        "guest",
        "joining",
        "loaded_version",
        "locks",
        "open",
        "outcome",
        "pending_since_ns",
        "phase",
        "pins",
        "place",
        "restored",
        "rests",
        "run_id",
        "segment_ns",
        "spawned",
        "state",
        "tag",
        "tier",
        "timeouts",
        "unwinds",
        "wait",
    )

    def __init__(self, run_id: str, accepted: RunAccepted, port: RunPort, history: History | None = None) -> None:
        self.run_id = run_id
        self.accepted = accepted
        self.tier = accepted.base_tier
        self.agent_version = accepted.version  # of the guest: what its pins say, unless it is upgraded
        self.pins = accepted.pins
        self._port = port
        self.guest: Guest | None = None
        self.phase = _ACCEPTING
        self.state = RunState.ACTIVE
        self.wait: Waiting | None = None
        self.cancel_reason: str | None = None
        self.outcome: Outcome | None = None
        self.exit: Exit | None = None
        self.tag: Any = None  # the engine's
        self.place: Applicant | None = None  # as what admission counts it
        self.rests = False  # it only waits for children: admission does not count it meanwhile
        self.open: dict[int, StepInFlight] = {}
        self.at_ns = accepted.at_ns
        self.joining = False
        self.loaded_version = 0  # of the journal that it was made from
        self.pending_since_ns = 0
        self._version = 0
        self._pending: list[Record] = []
        self._inflight: deque[After] = deque()
        self._keyed_open = 0
        self._calls = 0
        self._returned = False
        self._halted = False
        self._error: AgentrtError | None = None
        self._segment = 1
        self.segment_ns = accepted.at_ns  # when it began, as its journal has it
        self._segment_prefix = "1:"
        self._journal_bytes = 0
        self._history: dict[str, Recorded] = {}
        self._committed_left = 0
        self._known: dict[int, tuple[int, int, bytes, int]] = {}  # handle -> seq, status, payload, at
        self._awaited: dict[int, int] = {}  # handle -> seq, of pure steps executed again
        self._undelivered: set[int] = set()
        self._asked = 0  # handle of the last step of its guest's program
        self._given = 0  # answers that its guest has got in REPLAY
        self._waiting: tuple[int, ...] | None = None
        self._suspended: tuple[int, ...] | None = None  # LIVE: what the guest waits for
        self._waits_open = 0  # of `open`, those that only wait
        self._rows: list[Row] = []  # go with the pending records
        self._told: list[Told] = []  # of the pending records
        self._children: set[str] = set()  # those that end with this run and may not have ended
        self._unjoined: set[str] = set()  # all that may have left a row in INBOX
        self._tool_calls = 0
        self._call_fuel = 0  # that guests of tool calls have used
        self._unwind_calls = 0
        self._unwinding = False  # the guest has been told to unwind
        self.locks: dict[str, int] = {}  # held: name -> token
        self.foreign: dict[str, str] = {}  # held elsewhere, and declared: owner -> name
        self._held_back: list[StepInFlight] = []  # of unwinding handlers, until the program's calls have returned
        self.account: Entry | None = None  # the run's part of the ledger; None: nothing of it is counted
        self.timeouts = Timeouts(loop_ns(accepted.budget), accepted.deadline_ns)
        self.clock = Clock() if self.timeouts.loop_ns else None  # how long it has been at work, if that is bounded
        self._clock_set = False  # to be looked at
        self.spawned = 0  # children that it has started, all segments
        self._held: dict[int, tuple[StepInFlight, Hold]] = {}  # by handle: they may not begin yet
        self._broken_locks: list[tuple[str, int, int]] = []  # in this segment: handle of its acquire, seq of its end
        self._lost_locks: list[tuple[str, int]] = []  # broken, and the guest does not know yet; handle of its acquire
        self._lock_handles: dict[str, int] = {}  # of the steps that acquired `locks` in this segment
        self._handlers = False  # it has begun: its requests are those of its unwinding handlers
        self._restarting = 0  # a new segment begins: 1 asked for, 2 durable
        self._children_told = False
        self._sudden = False  # its outcome is none that a replay would bring again
        self._retry: set[str] = set()  # steps that an operator lets run again
        self.ending: Ending | None = None
        self.restored: bytes | None = None  # state of the last checkpoint
        self.frame: Kept | None = None  # that its next guest may go on from, unopened
        self.frame_named: str | None = None  # by the journal it was made from
        self.frame_copy = 0  # of that, which its guest has begun with
        self.unwinds = False  # whether its agent may have something to do before a forced end; set by the engine
        if history is not None:
            self._load(history)

    def _load(self, history: History) -> None:
        run = history.run
        assert run.state is not None
        self.tier = run.tier
        self.at_ns = run.at_ns
        self.state = run.state
        self.wait = run.wait
        self.cancel_reason = run.cancel_requested
        self.pins = run.pins
        self.agent_version = run.pins.get("agent", self.accepted.version)
        self.ending = run.ending
        self.restored = run.restored
        if self.clock is not None:
            self.clock.active_ns = run.active_ns
        self._tool_calls = run.tool_calls
        self._call_fuel = run.spent.fuel
        self.spawned = len(run.children)
        self._retry = set(run.retry)
        self.locks = dict(run.locks)
        self._segment = run.segment
        self.foreign = dict(run.foreign_locks)
        self._load_locks(run)
        joined = {
            _joined(step.request or b"") for step in run.steps.values() if step.op == "run.join" and step.ok is not None
        }
        unjoined = [child for child in run.children.values() if child.run_id not in joined]
        self._unjoined = {child.run_id for child in unjoined}
        self._children = {child.run_id for child in unjoined if not child.detached}
        if run.ending is not None:
            self.outcome = towards(self.run_id, run.ending)
        self._version = self.loaded_version = run.version
        self.segment_ns = run.segment_ns
        self._segment_prefix = f"{run.segment}:"
        self._journal_bytes = history.journal_bytes
        self.frame = history.frame
        self.frame_named = run.frame.frame if run.frame is not None else None
        self._history = dict(history.steps)
        self._committed_left = sum(1 for recorded in self._history.values() if recorded.committed)
        # A run that was told to end has to be brought to where it was told so before it unwinds. One that has steps but
        # no answers may get them before its guest has asked: they must reach it in the order of their records.
        self.phase = _REPLAY if self._history or run.ending is not None else _LIVE

    def _load_locks(self, run: RunFold) -> None:
        """Which steps acquired its locks, and what it lost and was not told."""
        handles: dict[tuple[str, int], int] = {}
        told: list[tuple[int, bytes]] = []
        for step in run.steps.values():
            if step.op == "lock.acquire" and step.ok and (request := _acquired(step.request or b"")) is not None:
                token = _decode_token(step.result or b"").token
                handles[request.name, token] = self._handle_of(step.path)
            elif step.ok is False and b'"lock_lost"' in (step.result or b""):
                told.append((step.seq, step.result or b""))
        self._lock_handles = {name: handles.get((name, token), 0) for name, token in run.locks.items()}
        for lost in run.broken_locks:
            if lost.seq <= run.checkpoint_seq:
                continue
            shown, since = repr(lost.lock).encode(), handles.get((lost.lock, lost.token), 0)
            self._broken_locks.append((lost.lock, since, lost.seq))
            if not any(seq > lost.seq and shown in text for seq, text in told):
                self._lost_locks.append((lost.lock, since))

    def _handle_of(self, path: str) -> int:
        """0: it is of an earlier segment."""
        prefix = f"{self._segment}:"
        return int(path[len(prefix) :]) if path.startswith(prefix) else 0

    # --- for the engine: the run's life -----------------------------------------

    @property
    def tool_calls(self) -> int:
        """How many the run has made, those of its unwinding handlers not counted."""
        return self._tool_calls

    @property
    def version(self) -> int:
        """Seq of the last record made, durable or not."""
        return self._version

    @property
    def replays(self) -> bool:
        """Whether a guest started now gets answers from the journal first."""
        return self.phase is _REPLAY or self.ending is not None

    @property
    def at_segment_start(self) -> bool:
        """No guest of this segment has asked for anything."""
        return self.guest is None and self.phase is _LIVE and not self._history and not self.open

    def upgrade(self, pins: dict[str, str], state: bytes | None = None) -> None:
        """The next guest runs under these pins; with ``state``, in a new segment that begins with it. It is durable
        before any step of that guest."""
        self.pins = self.pins | pins
        self.agent_version = self.pins.get("agent", self.agent_version)
        self._pending.append(journal.Upgraded(self._next_seq(), self._time(), pins))
        if state is not None:
            self._segment += 1
            self._segment_prefix = f"{self._segment}:"
            self._journal_bytes = 0
            self.restored = state
            self.segment_ns = self._time()
            self._pending.append(journal.Checkpoint(self._next_seq(), self.segment_ns, self._segment, state))
        if self.wait is None or self.wait.reason == "operator":
            self._rows.append(self._ready_row())
        self._commit(None, "upgrade")

    @property
    def waits(self) -> bool:
        """Whether records wait for company."""
        return bool(self._pending)

    @property
    def queued(self) -> bool:
        """Whether its guest can go on and waits for a CPU slot, as far as its backend says."""
        return getattr(self.guest, "scheduler_state", None) in ("QUEUED", "PREEMPTED")

    @property
    def unheard(self) -> bool:
        """Whether its guest has gone on with its answers and waits or has ended again, as far as its backend says: an
        event that says so is on its way here."""
        guest = self.guest
        return guest is not None and self._suspended is None and getattr(guest, "scheduler_state", "") is None

    @property
    def segment(self) -> int:
        return self._segment

    @property
    def segment_seed(self) -> bytes:
        """16 bytes for what is random in this segment: a new one does not repeat the numbers of those before."""
        return segment_seed(self.accepted.seed, self._segment)

    @property
    def committing(self) -> bool:
        """Records are on their way into the store, or will be soon."""
        return bool(self._inflight or self._pending)

    @property
    def calls(self) -> int:
        """Tools that have been asked and have not answered."""
        return self._calls

    @property
    def suspended(self) -> bool:
        """The guest waits, as far as it has said."""
        return self._suspended is not None

    @property
    def awaits_children(self) -> bool:
        """It ends, and children of it end first."""
        return self._children_told and bool(self._children)

    def discard(self, error: AgentrtError) -> None:
        """Drop the guest and what is not durable; `RunPort.on_discarded` follows."""
        if self.phase <= _LIVE and self.phase is not _ACCEPTING:
            self._discard(error)

    @property
    def settled(self) -> bool:
        """Nothing of it is under way: no guest, no tool, no commit."""
        return self.guest is None and not self._calls and not self._inflight

    def accept(self, unique: tuple[Row, ...] = (), rows: tuple[Row, ...] = ()) -> None:
        """Journal the acceptance; `RunPort.on_accepted` follows."""
        self._version = 1
        self._pending.append(self.accepted)
        start_ns = self.accepted.start_ns
        if start_ns:
            self.state = RunState.WAITING
            self.wait = Waiting(self._next_seq(), self.accepted.at_ns, "timer", START_PATH)
            self._pending.append(self.wait)
            rows = (*rows, Row(TIMERS, timer_key(start_ns, self.run_id, START_PATH), b"start"))
        else:
            rows = (*rows, self._ready_row())
        if self.accepted.deadline_ns:
            rows = (*rows, Row(TIMERS, timer_key(self.accepted.deadline_ns, self.run_id, DEADLINE_PATH), b"deadline"))
        self._commit(self._on_accepted, "accept", rows, unique)

    def stuck_step(self) -> tuple[str, str] | None:
        """A recorded open step that only an operator can settle, and why; None if there is none."""
        for path, recorded in self._history.items():
            step = recorded.step
            if step.op not in EXECUTED or step.state not in OPEN:
                continue
            if path in self._retry or self._lost_over(step, self._handle_of(path)) is not None:
                continue
            tool = step.op if step.op == _MODEL else _decode_call(step.request or b"").tool
            if step.kind == "at_most_once":
                return path, _may_not_repeat(tool)
            if step.state is StepState.UNCOMMITTED_EVICTED:
                continue
            try:
                spec = MODEL_SPEC if step.op == _MODEL else self._port.tool(tool)
            except UnknownToolError:
                spec = None
            attempts_max = self._port.attempts_max if spec is None else self._attempts_max(spec)
            if step.attempt >= attempts_max and (spec is None or not spec.reconcile):  # else it is asked first
                return path, _out_of_attempts(tool, step.attempt)
        return None

    def _attempts_max(self, spec: ToolSpec) -> int:
        return self._port.attempts_max if spec.attempts_max is None else spec.attempts_max

    def allow_retry(self, told: Told) -> None:
        """An operator lets every stuck step run once more; ``told`` as in `answer`."""
        steps = [recorded.step for recorded in self._history.values()]
        self._permit(tuple(step.path for step in steps if step.op in EXECUTED and step.state in OPEN), told)

    def _permit(self, paths: tuple[str, ...], told: Told) -> None:
        """Journal that the steps may run once more: whatever happens next, they may."""
        waits = self.wait is not None and self.wait.reason == "operator"
        if self.ending is not None or not (waits or paths):
            told(None)  # there is nothing to permit
            return
        if not waits:
            self._pending.append(Waiting(self._next_seq(), self._time(), "operator", None, "an operator looks at it"))
        self._retry.update(paths)
        self._told.append(told)
        self._resumed(paths)
        self.flush()

    def resume(self) -> None:
        """The run is not WAITING any more: its guest starts now."""
        if self.state is RunState.WAITING:
            self._resumed()
        if self._pending:
            self._commit(None, "wait")

    def _stop_waiting(self) -> None:
        if self.wait is not None and self.wait.path == START_PATH:
            self._rows.append(Row(TIMERS, timer_key(self.accepted.start_ns, self.run_id, START_PATH), None))
        elif self.wait is not None and self.wait.until_ns:
            self._rows.append(Row(TIMERS, timer_key(self.wait.until_ns, self.run_id, HOLD_PATH), None))
        self.wait = None

    def _resumed(self, retry: tuple[str, ...] = ()) -> None:
        self.state = RunState.ACTIVE
        self._stop_waiting()
        self._pending.append(Resumed(self._next_seq(), self._time(), None, retry))
        self._rows.append(self._ready_row())

    @property
    def cold(self) -> bool:
        """It waits for something that is not an operator, and nothing of that has come: it needs no guest."""
        return self._waits_for_something and not self._pending

    @property
    def _waits_for_something(self) -> bool:
        return self.wait is not None and self.wait.reason != "operator"

    def rest(self) -> None:
        """A cold run was loaded and needs no guest: it goes when what came of that is durable. `RunPort.on_parked`
        follows."""
        self.phase = _PARKING
        self._maybe_parked()

    @property
    def may_be_parked(self) -> bool:
        """Whether the guest is suspended and something is waited for. It is parked once that is all there is: tools
        that it does not wait for any more may be at work, and records on their way to the store."""
        return (
            self._suspended is not None
            and self.phase is _LIVE
            and self.guest is not None
            and self.ending is None
            and (self._waits_open > 0 or bool(self._held))
        )

    @property
    def may_be_framed(self) -> bool:
        """Whether it could be parked now, all that its guest has seen being durable."""
        durable = not self._inflight and not self._pending
        # a step that is held has no record, and only a guest that is replayed would ask for it again
        return self.may_be_parked and self._waits_open == len(self.open) and durable and not self._held

    @property
    def may_be_framed_as_it_is(self) -> bool:
        """Whether a frame of its guest, which is suspended or at a safe point and stays, would be one to go on from:
        all that it has seen is durable, and what it has under way is in the journal."""
        live = self.phase is _LIVE and self.guest is not None and self.ending is None and not self._restarting
        durable = not self._inflight and not self._pending and not self._held
        return live and durable and all(step.kind != "pure" for step in self.open.values())

    def note_frame(self, frame: str, fuel: int, segment: int, told: Told) -> bool:
        """Journal that there is a frame of its guest, taken in that segment; false if it is of no use any more."""
        if self.phase is not _LIVE or self.ending is not None or self._segment != segment or self._restarting:
            return False
        self._pending.append(journal.FrameTaken(self._next_seq(), self._time(), frame, fuel))
        self._told.append(told)
        self._flush_soon()
        return True

    def on_safe_point(self) -> None:
        """See `GuestEvents`."""
        if self.guest is not None:
            self._port.on_safe_point(self)

    def go_on_from(self, seq: int, next_handle: int) -> None:
        """The guest that has just been started is one that has seen all records up to ``seq`` and made the syscalls
        before ``next_handle``. What it knows is no part of the replay; what is open of its syscalls it asks for again,
        so to speak."""
        again: list[Request] = []
        for path, recorded in [*self._history.items()]:
            handle = int(path[len(self._segment_prefix) :]) if path.startswith(self._segment_prefix) else next_handle
            if handle >= next_handle:
                continue
            step = recorded.step
            if recorded.committed and step.seq <= seq:
                del self._history[path]
                self._committed_left -= 1
            elif step.request is not None:
                again.append(Request(handle, BY_OP[step.op].number, step.request))
        again.sort()
        self.on_syscalls(again, None)

    def park(self, frame: tuple[str, int] | None = None, told: Told | None = None) -> bool:
        """Let the guest go while the run only waits, all of it durable; false if not. ``frame``: name and fuel of one
        that was taken since the last record; ``told`` as in `answer`. `RunPort.on_parked` follows."""
        suspended = self._suspended
        if suspended is None or not self.may_be_parked or self._waits_open != len(self.open):
            return False
        if self._inflight or self._pending:
            return False
        held = next((self._held[handle] for handle in suspended if handle in self._held), None)
        if held is not None:
            step, hold = held
            self.wait = Waiting(
                self._next_seq(),
                self._time(),
                hold.reason,
                step.path,
                hold.detail,
                max(hold.until_ns, self.at_ns + 1),
                self._active_ns(),
            )
            self._rows.append(Row(TIMERS, timer_key(self.wait.until_ns, self.run_id, HOLD_PATH), b"hold"))
        else:
            waiting = next((self.open[handle] for handle in suspended if handle in self.open), None)
            if waiting is None:
                return False
            if frame is not None:
                self._pending.append(journal.FrameTaken(self._next_seq(), self._time(), *frame))
            if told is not None:
                self._told.append(told)
            seq, reason = self._next_seq(), WAIT_REASON[waiting.op]
            self.wait = Waiting(seq, self._time(), reason, waiting.path, None, 0, self._active_ns())
        self.state = RunState.WAITING
        self._pending.append(self.wait)
        self._rows.append(Row(READY, self.ready_key(), None))
        self._commit(None, "wait")
        self.phase = _PARKING
        self._kill()
        self._maybe_parked()
        return True

    def answer(
        self,
        path: str,
        ok: bool,
        payload: bytes,
        rows: tuple[Row, ...] = (),
        told: Told | None = None,
        *,
        deliver: bool = True,
    ) -> bool:
        """Settle a step that is no tool's, in memory or only in the journal. ``rows`` go with its outcome;
        ``told(None)`` is called when that is durable, ``told(error)`` if it was refused. Without ``deliver`` a guest
        that is there does not get it: it is about to go. False, and nothing happens: the step is settled, or there is
        none."""
        if self.phase >= _ENDED or self.phase is _ACCEPTING:
            return False
        step = None
        if path.startswith(self._segment_prefix):
            step = self.open.get(int(path[len(self._segment_prefix) :]))
        recorded = self._history.get(path) if step is None else None
        if step is not None:
            if step.tool:
                return False
        elif recorded is None or recorded.step.state is not StepState.PREPARED or recorded.step.op in EXECUTED:
            return False
        self._rows += rows
        if told is not None:
            self._told.append(told)
        if step is not None:
            self._settle(step, ok, payload, None, deliver)
            if self.phase is _PARKING:
                if self._waits_for_something:
                    self._resumed()
                self.flush()
            elif told is not None:  # somebody waits for it
                self.flush()
        elif recorded is not None:
            self._settle_recorded(path, recorded, ok, payload)
            if self._waits_for_something:
                self._resumed()  # with it, whoever else commits for the run: nothing else would wake it
            if self.phase is _PARKING or told is not None:
                self.flush()
            else:
                self._flush_soon()
        return True

    def _settle_recorded(self, path: str, recorded: Recorded, ok: bool, payload: bytes) -> None:
        """Settle a step that no guest has asked for yet in this life."""
        step = recorded.step
        seq, at = self._next_seq(), self._time()
        self._pending.append(
            StepCommitted(seq, at, path, step.op, step.digest, ok, payload, digest(payload), step.attempt)
        )
        self._journal_bytes += len(payload)
        if self.account is not None:
            self._port.settled_recorded(self, step)
        self._port.count_step(step.op, ok, step.attempt, at - step.prepared_ns, Cost())
        if step.op not in EXECUTED:
            self._unregister(path, step.op, step.request or b"", step.prepared_ns)
        if ok and step.op in _LOCK_OPS:
            self._note_lock(path, step.op, step.request or b"", payload)
        step.state, step.ok, step.result, step.seq = StepState.COMMITTED, ok, payload, seq
        self._history[path] = Recorded(step, at)
        if self.phase is _LIVE and self.guest is not None:
            return  # the guest has not asked for it again yet, and is answered when it does
        self._committed_left += 1
        if self.phase is _LIVE:
            self.phase = _REPLAY

    def fall_due(self, path: str) -> bool:
        """The timer of a step, of the deadline or of the start has run out. False: it is nothing to this run."""
        if path == DEADLINE_PATH:
            self.time_out()
            return self.phase is not _ENDED
        if path == START_PATH:
            if self.wait is None or self.wait.path != START_PATH:
                return False
            self._resumed()
            self._flush_soon()
            return True
        if path == HOLD_PATH:
            return self.unhold()
        for open_path, op, _, _ in self.open_steps():
            if open_path == path:
                return self.answer(path, *due_answer(op))
        return False

    def mind_clock(self) -> None:
        """Whether it is at work may have changed: that is a guest that computes or has yet to, and a tool or model that
        has work to do for it; a run whose guest is brought back, waits or may not begin its next step is not."""
        clock = self.clock
        if clock is None:
            return
        now_ns = self._port.now_ns()
        rests = self._suspended is not None and self._waits_open == len(self.open)
        if self.guest is None or rests or self.phase is not _LIVE or self.ending is not None:
            clock.rest(now_ns)
            return
        clock.go(now_ns)
        if not self._clock_set:
            self._clock_set = True
            self._port.mind_clock(self, max(0, self.timeouts.loop_ns - clock.spent_ns(now_ns)))

    def clock_due(self) -> None:
        """The time that was given to `RunPort.mind_clock` has passed."""
        self._clock_set = False
        clock = self.clock
        if clock is not None and clock.since_ns and clock.spent_ns(self._port.now_ns()) >= self.timeouts.loop_ns:
            seconds = self.accepted.budget["active_s"]
            self._end_by_time(f"the run has been at work for its {seconds:g} seconds", "active_s")
        self.mind_clock()

    def _active_ns(self) -> int:
        return 0 if self.clock is None else self.clock.spent_ns(self.at_ns)

    def unhold(self) -> bool:
        """Steps that were not to begin may be looked at again. False: there are none, and none in the store."""
        if self.phase is _PARKING or not self._held:
            if self.wait is None or not self.wait.until_ns:
                return False
            self._resumed()
            if self.phase is _PARKING:
                self.flush()
            else:
                self._flush_soon()
            return True
        starts = []
        for handle in [*self._held]:
            if (held := self._held.pop(handle, None)) is not None and self._admit(held[0]) and self._began(held[0]):
                starts.append(held[0])
        if starts and self.phase < _ENDED:
            self._commit(starts, "prepare")
        if self.phase is _LIVE and self._held:
            self._port.on_idle(self)
        self.mind_clock()
        return True

    @property
    def idle(self) -> bool:
        """Its guest is suspended, and all that it has under way are waits."""
        waits = self._waits_open
        return self._suspended is not None and not self._held and bool(waits) and waits == len(self.open)

    @property
    def waits_for_children(self) -> bool:
        """Its guest is suspended, nothing of it is at work, and among what it waits for are children of its own, or the
        room to start one."""
        suspended, open_steps = self._suspended, self.open
        if suspended is None or self._waits_open != len(open_steps):
            return False
        for handle in suspended:
            step = open_steps.get(handle)
            if step is not None and step.op == "run.join":
                return True
            if step is None and handle in self._held and self._held[handle][0].op == "run.spawn":
                return True
        return False

    def bound(self, key: str) -> int | None:
        """What a budget or limit says of a key that is not summed; None: nothing."""
        above = self.account.bounds if self.account is not None else {}
        known = [limits[key] for limits in (self.accepted.budget, above) if key in limits]
        return int(min(known)) if known else None

    @property
    def holds(self) -> Hold | None:
        """Why a step of it may not begin; the first of them."""
        return next((hold for _, hold in self._held.values()), None)

    def refuse_held(self, path: str, error: AgentrtError) -> None:
        """The step that is held under this path, if any, will not begin."""
        handle = next((handle for handle, (step, _) in self._held.items() if step.path == path), None)
        if handle is not None:
            step, _ = self._held.pop(handle)
            self._port.unheld(self, step)
            self._settle(step, False, _encode(error.to_dict()))

    def add_rows(self, rows: tuple[Row, ...]) -> None:
        """Rows that go with the records that are pending."""
        self._rows += rows

    def _admit(self, step: StepInFlight) -> bool:
        """Whether the step may begin. If not it is held, refused, or the run ends."""
        verdict = self._port.admit(self, step)
        if verdict is None:
            return True
        if isinstance(verdict, Hold):
            self._held[step.handle] = step, verdict
        elif verdict.ends and self.ending is None:
            error = verdict.error
            state = RunState.LOOP_DETECTED if isinstance(error, LoopDetectedError) else RunState.BUDGET_EXHAUSTED
            self._end(Outcome(state, None, _encode(error.to_dict())), error.message, error.limit)
        else:
            self._settle(step, False, _encode(verdict.error.to_dict()))
        return False

    def _drop_held(self) -> None:
        held, self._held = self._held, {}
        for step, _ in held.values():
            self._port.unheld(self, step)

    def open_steps(self) -> list[tuple[str, str, bytes, int]]:
        """(path, op, request, prepared_ns) of steps that wait, whether or not a guest is there."""
        found = [(step.path, step.op, step.request, step.prepared_ns) for step in self.open.values() if not step.tool]
        for path, recorded in self._history.items():
            step = recorded.step
            if step.state is StepState.PREPARED and step.op not in EXECUTED:
                found.append((path, step.op, step.request or b"", step.prepared_ns))
        return found

    def decide(self, path: str, ok: bool | None, payload: bytes, told: Told) -> None:
        """An operator settles a step whose outcome nobody saw: with a result, with an error, or (None) by letting it
        run again. The machine has no guest yet. ``told`` as in `answer`. Raises StepSettledError."""
        recorded = self._history.get(path)
        if recorded is None or recorded.step.op not in EXECUTED or recorded.step.state not in OPEN:
            raise StepSettledError(f"step {path} does not wait for a decision", run=self.run_id, step=path)
        if ok is None:
            self._permit((path,), told)
        else:
            self._told.append(told)
            self._settle_recorded(path, recorded, ok, payload)
            self.flush()

    def joined(self) -> list[tuple[str, str]]:
        """(path, child) of the open steps that wait for a child."""
        joins = [(path, _joined(request)) for path, op, request, _ in self.open_steps() if op == "run.join"]
        return [(path, child) for path, child in joins if child is not None]

    def joins(self, child: str) -> list[str]:
        """Paths of the open steps that wait for the child."""
        return [path for path, op, request, _ in self.open_steps() if op == "run.join" and _joined(request) == child]

    def lock_of(self, path: str) -> str | None:
        """The lock that the step waits for; None if it does not wait for one (any more)."""
        for open_path, op, request, _ in self.open_steps():
            if open_path == path and op == "lock.acquire":
                wanted = decode(op, request)
                return wanted.name if isinstance(wanted, LockAcquire) else None
        return None

    def lock_broken(self, name: str, token: int, rows: tuple[Row, ...], told: Told) -> None:
        """The run kept a lock too long: it is taken from it, and what it does under it goes no further; its next step
        says so, if none of these does. ``rows`` and ``told`` as in `answer`."""
        self._rows += rows
        self._told.append(told)
        self._pending.append(journal.LockBroken(self._next_seq(), self._time(), name, token))
        if self.locks.get(name) == token:
            del self.locks[name]
            since = self._lock_handles.pop(name, 0)
            self._broken_locks.append((name, since, self._version))
            self._lost_locks.append((name, since))
            self._roll_back(name, since)
        self._commit(None, "lock")

    def _roll_back(self, name: str, since: int) -> None:
        """What was asked after that handle was asked under the lock: what has not begun does not begin, and calls that
        have are stopped if they can be, and not done again."""
        steps = [*self.open.values(), *(step for step, _ in self._held.values())]
        for step in steps:
            unbegun = step.handle in self._held and step.key is None
            if step.op != "tool.call" and not unbegun:
                continue
            if step.kind == "pure" or step.handle <= since or self._told_to_end(step):
                continue
            if step.called:
                step.lost_lock = name
                self._port.stop_call(self, step)
                continue
            if self._held.pop(step.handle, None) is not None:
                self._port.unheld(self, step)
            self._lose_lock(step, name)

    def _lost_over(self, known: Step, handle: int) -> str | None:
        """The lock under which that recorded step was begun, if it is lost."""
        return next((lock for lock, since, seq in self._broken_locks if since < handle and known.first_seq < seq), None)

    def _lose_lock(self, step: StepInFlight, name: str, more: str = "") -> None:
        """Tell the guest with this step."""
        self._lost_locks = [lost for lost in self._lost_locks if lost[0] != name]
        self._refuse(step, "lock_lost", f"lock {name!r} was held too long and is another's now{more}")

    def _rolled_back(self, step: StepInFlight, name: str, outcome: ToolOutcome) -> None:
        """A call under a lock that is lost has ended without a result."""
        more = ""
        if outcome.host_died or outcome.unknown:
            self._pending.append(StepEvicted(self._next_seq(), self._time(), step.path, f"lock {name!r} was lost"))
            more = f"; nobody saw whether tool {step.tool} had its effect"
        self._lose_lock(step, name, more)

    def change_tier(self, tier: int, reason: str) -> None:
        """It runs at this tier from now on, durably; its guest is the engine's to move."""
        if tier == self.tier or self.phase is _ACCEPTING or self.phase >= _ENDED:
            return
        self.tier = tier
        self._pending.append(journal.TierChanged(self._next_seq(), self._time(), tier, reason))
        self._commit(None, "tier")  # at once: a run that only waits is let go when nothing is pending

    def child_gone(self, child: str) -> None:
        """The child has ended, durably."""
        if child in self._children:
            self._children.remove(child)
            self._maybe_end()

    def wait_for_operator(self, path: str | None, detail: str) -> None:
        """Let the run wait until somebody steps in, and drop its guest. `RunPort.on_parked` follows. A run that was
        told to end does not wait: it ends without unwinding."""
        if self.phase >= _ENDING:
            return
        if self.ending is not None:
            self._end_guest()
            return
        wait = self.wait
        if wait is None or (wait.reason, wait.path, wait.detail) != ("operator", path, detail):
            self._lose_prepared()
            if self.state is RunState.WAITING:
                self._stop_waiting()
                self._rows.append(self._ready_row())
            self.wait = Waiting(self._next_seq(), self._time(), "operator", path, detail)
            self.state = RunState.WAITING
            self._pending.append(self.wait)
            self._commit(None, "wait")
        self.phase = _PARKING
        self._kill()
        self._maybe_parked()

    def time_out(self) -> None:
        """End the run as TIMED_OUT: its deadline has passed."""
        limit = deadline_limit(self.accepted)
        what = "the run's deadline has passed"
        if limit == "wall_s":
            what = f"the run has used its {self.accepted.budget['wall_s']:g} seconds of wall time"
        self._end_by_time(what, limit)

    def _end_by_time(self, what: str, limit: str) -> None:
        if self.phase is _ACCEPTING or self.phase >= _ENDING or self.ending is not None:
            return
        if self.cancel_reason is not None:  # it was cancelled first, and loaded just now
            self._cancelled()
            return
        error = RunTimedOutError(what, run=self.run_id, limit=limit)
        self._end(Outcome(RunState.TIMED_OUT, None, _encode(error.to_dict())), error.message, limit)

    def refuse(self, error: DeniedError) -> None:
        """End the run as FAILED: it may not go on."""
        if self.phase is _ACCEPTING or self.phase >= _ENDING or self.ending is not None:
            return
        if self.cancel_reason is not None:
            self._cancelled()
            return
        self._end(failed(error), error.message, code=error.code)

    def cancel(self, reason: str) -> None:
        """End the run as CANCELLED. The guest unwinds, or goes at once; a step in flight is still recorded.

        `RunPort.on_cancelled` follows when the request is durable, unless the run is cancelled or ended already."""
        if self.phase >= _ENDED or self.phase is _ACCEPTING or self.cancel_reason is not None:
            return
        self.cancel_reason = reason
        self._pending.append(CancelRequested(self._next_seq(), self._time(), reason))
        self._commit(self._on_cancelled, "cancel")
        self._cancelled()

    def end_cancelled(self) -> None:
        """For a run that was loaded with its cancel flag set: end it. If it still has something to unwind, it is not
        past LIVE afterwards and needs a guest."""
        if self.ending is None:
            self._cancelled()

    def end_told(self) -> None:
        """For a run that was loaded while it ended, and whose agent has nothing to unwind."""
        if self.phase <= _LIVE:
            self._end_guest()

    def fail(self, error: AgentrtError) -> None:
        """End the run as FAILED: its guest cannot be started."""
        if self.phase <= _LIVE:
            self._fail(error, {})

    def halt(self) -> None:
        """The node stops: drop the guest, record what is in flight, leave the run to the next start."""
        self._halted = True
        self._let_handlers_on()
        if self.phase in (_REPLAY, _LIVE):
            self.phase = _PARKING
            self._kill()
            self.flush()
            self._maybe_parked()

    def flush(self) -> None:
        """Commit records that wait for company."""
        if self._pending and self.phase is not _DISCARDED:
            self._commit(None, "outcome")

    # --- events of the guest ------------------------------------------------------

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        phase = self.phase
        if (phase is not _LIVE and phase is not _REPLAY) or self._restarting:
            return
        self._suspended = waiting
        starts: list[StepInFlight] | None = None
        for handle, number, payload in requests:
            if number == _LOG:
                if phase is _LIVE or not (self._committed_left or self._awaited or self._undelivered):
                    self._port.log(self, payload)
                continue
            if not self._handlers:
                self._asked = handle
            op = BY_NUMBER[number].op
            path = self._segment_prefix + str(handle)
            step = StepInFlight(handle, path, op, payload, request_digest(op, payload))
            step.unwinding = self._handlers
            if self._history and (recorded := self._history.pop(path, None)) is not None:
                again = self._asked_again(step, recorded)
                if again is None:
                    break
                if again:
                    starts = [step] if starts is None else [*starts, step]
                continue
            if self.ending is not None and not self._handlers:
                continue  # the program's last wishes: it is told to end
            if self._lost_locks and not self._handlers:
                self._lose_lock(step, self._lost_locks[-1][0])
                continue
            if number != _TOOL_CALL:
                if self._ask(step):
                    starts = [step] if starts is None else [*starts, step]
                continue
            if self.ending is None:
                if self._call_fuel >= self.accepted.fuel_max:
                    self._end(
                        out_of_fuel(self.run_id, self.accepted, " in tool calls"),
                        "its tool calls have used its fuel",
                        "fuel_max",
                    )
                    if self.phase > _LIVE:
                        break
                    continue
                self._tool_calls += 1
            elif not self._may_call_ending():
                self._refuse(step, "ending", f"the run ends and has used its {_UNWIND_CALLS_MAX} tool calls for that")
                continue
            try:
                call = _decode_call(payload)
                spec = self._port.tool(call.tool)
            except UNREADABLE as error:
                self._refuse(step, "bad_request", f"tool.call: {error}")
                continue
            except UnknownToolError as error:
                self._refuse(step, error.code, str(error))
                continue
            step.tool = call.tool
            step.args = bytes(call.args)
            step.kind = spec.kind
            if (self._port.admits or self.account is not None) and not self._admit(step):
                if self.phase > _LIVE:
                    break
                continue  # told to end or not: what follows may be in the journal
            if self._began(step):
                if starts is None:
                    starts = [step]
                else:
                    starts.append(step)
        if starts is not None:
            self._commit(starts, "prepare")
        if self.phase is _REPLAY:
            self._waiting = waiting
            self._advance()
        elif waiting is not None and (self._waits_open or self._held):
            self._port.on_idle(self)
        if self.clock is not None:
            self.mind_clock()
        if self._journal_bytes > self._port.journal_bytes_max:
            self._check_journal()

    def _began(self, step: StepInFlight) -> bool:
        """The step begins: at once if it is pure, else, true, after the commit of the record that this makes."""
        op, path = step.op, step.path
        if op == "run.spawn":
            self._prepare_other(step, decode(op, step.request))
            return True
        if step.kind == "pure":
            self.open[step.handle] = step
            self._call(step)
            return False
        if step.key is not None:  # another attempt
            self._keyed_open += 1
            self.open[step.handle] = step
            self._prepare_again(step)
            return True
        key = step.key = idempotency_key(self.run_id, path, step.tool if op != _MODEL else op)
        self._version = seq = self._version + 1
        at = step.prepared_ns = self._time()
        self._pending.append(
            StepPrepared(seq, at, path, op, step.kind, step.request, step.digest, key, 1, step.reserved)
        )
        self._journal_bytes += len(step.request)
        self._keyed_open += 1
        self.open[step.handle] = step
        return True

    def _may_call_ending(self) -> bool:
        """Count a tool call against the run's allowance for its end."""
        self._unwind_calls += 1
        return self._unwind_calls <= _UNWIND_CALLS_MAX

    def _ask(self, step: StepInFlight) -> bool:
        """A syscall that is no tool call and that the journal does not know. Whether it begins after a commit."""
        op = step.op
        if not BY_OP[op].served:
            self._refuse(step, "unsupported", f"{op} is not served by this release")
            return False
        if self.ending is not None and op not in UNWINDING_OPS:
            self._refuse(step, "ending", f"{op} is not possible while the run ends")
            return False
        if op == _MODEL:
            return self._ask_model(step)
        try:
            request = decode(op, step.request)
        except BadRequestError as error:
            self._refuse(step, "bad_request", str(error))
            return False
        kind = type(request)
        if kind is Emit:
            self._told.append(partial(self._emitted, step.path, bytes(request.data)))  # type: ignore[union-attr]
            self._settle(step, True, b"null", bytes(request.data))  # type: ignore[union-attr]
            return False
        if kind is Checkpoint:
            self._checkpoint(step, bytes(request.state))  # type: ignore[union-attr]
            return False
        if kind is LockForeign:
            self._hold_elsewhere(step, request)  # type: ignore[arg-type]
            return False
        if kind is CapacityGet:
            self._settle(step, True, self._port.capacity(self))
            return False
        if kind is Spawn and not self._admit(step):
            return False
        if kind is EventSend and self._port.admits and not self._admit(step):
            return False
        self._prepare_other(step, request)
        return True

    def _prepare_other(self, step: StepInFlight, request: Any) -> None:
        """Phase one of a step that is no call of a tool."""
        op, path = step.op, step.path
        step.kind = "keyed"
        key = step.key = idempotency_key(self.run_id, path, op)
        at = step.prepared_ns = self._time()
        self._pending.append(StepPrepared(self._next_seq(), at, path, op, "keyed", step.request, step.digest, key, 1))
        if isinstance(request, Spawn):
            child = child_run_id(self.run_id, path)
            self._pending.append(Spawned(self._next_seq(), at, path, child, request.detached))
            self.spawned += 1
            self._unjoined.add(child)
            if not request.detached:
                self._children.add(child)
        self._rows += registration(self.run_id, self.accepted.tenant, op, path, step.request, at).rows
        self._journal_bytes += len(step.request)
        self._opened(step)

    def _hold_elsewhere(self, step: StepInFlight, request: LockForeign) -> None:
        """The run is about to hold a lock elsewhere, or holds it no more."""
        name, owner = request.name, request.owner
        if owner is None:
            if len(self.foreign) >= _FOREIGN_MAX:
                self._refuse(step, "too_many", f"the run holds {_FOREIGN_MAX} locks elsewhere already")
                return
            owner = f"{self.run_id}/{step.path}"
            self.foreign[owner] = name
        elif self.foreign.get(owner) == name:
            del self.foreign[owner]
        else:
            self._refuse(step, "not_declared", f"lock {name!r} is not declared under that owner")
            return
        answer = {"name": name, "owner": owner, "held": request.owner is None}
        self._settle(step, True, _encode(answer))
        self._port.on_foreign(self)

    def _ask_model(self, step: StepInFlight) -> bool:
        """A call to a model, executed like a keyed tool's: it changes nothing and may be repeated, at its cost."""
        try:
            self._port.plan_model(self, step)
        except AgentrtError as error:
            self._refuse(step, error.code, str(error))
            return False
        step.kind = "keyed"
        if self.account is not None or self._port.admits:
            return self._admit(step) and self._began(step)
        return self._began(step)

    def _opened(self, step: StepInFlight) -> None:
        self.open[step.handle] = step
        if step.op in WAIT_REASON:
            self._waits_open += 1

    def _unregister(self, path: str, op: str, request: bytes, prepared_ns: int, *, aborted: bool = False) -> None:
        self._rows += registration(self.run_id, self.accepted.tenant, op, path, request, prepared_ns).gone()
        if op in _LENDING_OPS:
            self._port.wait_over(self, path)
        if op == "run.join" and not aborted and (child := _joined(request)) is not None:
            self._rows.append(Row(INBOX, inbox_key(self.run_id, child), None))
            self._unjoined.discard(child)

    def _checkpoint(self, step: StepInFlight, state: bytes) -> None:
        if self.open or self._held:
            paths = ", ".join(other.path for other in (*self.open.values(), *(held for held, _ in self._held.values())))
            self._refuse(step, "steps_open", f"a checkpoint needs all steps settled; open: {paths[:200]}")
            return
        if self.foreign:
            names = ", ".join(sorted(set(self.foreign.values())))
            text = f"a checkpoint forgets how to release locks held elsewhere: {names[:200]}"
            self._refuse(step, "foreign_locks", text)
            return
        if len(state) > self._port.result_bytes_max:
            self._refuse(step, "too_big", f"the state has {len(state)} bytes, more than {self._port.result_bytes_max}")
            return
        self._segment += 1
        self._segment_prefix = f"{self._segment}:"
        self.restored = state
        self._restarting = 1
        self.segment_ns = self._time()
        self._pending.append(journal.Checkpoint(self._next_seq(), self.segment_ns, self._segment, state))
        self._commit(self._on_checkpoint, "checkpoint")

    def _emitted(self, path: str, data: bytes, error: AgentrtError | None) -> None:
        if error is None:
            self._port.on_emitted(self, path, data)

    def on_unwinding(self) -> None:
        """What the guest asks for from now on, its unwinding handlers ask."""
        self._handlers = True

    def on_cut_short(self, reason: str, message: str, answers: int) -> bool:
        """See `GuestEvents`."""
        if self.phase not in (_REPLAY, _LIVE) or not self._may_be_brought_back:
            return False
        if self.ending is not None:
            if not self._history:
                self._unwind_after(answers, self._asked, Cost())
        elif self._history:
            return False  # what its handlers ask for would be taken for steps that it has not asked for again
        else:
            self._cut_short(Exit(reason, 0, None, message, 0, 0, 0, 0, 0, 0, answers=answers, steps=self._asked))
        if not self._unwinding:
            self._begin_unwinding()
        return True

    @property
    def _may_be_brought_back(self) -> bool:
        """Whether its guest, which cannot go on, has something to unwind, and is brought back for that the first
        time."""
        again = self.ending is not None and self.ending.answers >= 0
        return self.unwinds and not (self._handlers or self._restarting or again)

    def _cut_short(self, exit: Exit) -> None:
        """End the run as the guest's end says, which did not come by itself."""
        outcome = outcome_of(exit, self.run_id, self.accepted, self._port.result_bytes_max)
        told = msgspec.json.decode(outcome.error or b"{}", type=dict[str, Any])
        cost = Cost(exit.fuel, exit.slot_ns)
        self._end(outcome, told["message"], told.get("limit"), told["code"], (exit.answers, exit.steps, cost))

    def _unwind_after(self, answers: int, steps: int, cost: Cost) -> None:
        """It was told to end, and did not come to that: it unwinds where it waited last."""
        assert self.ending is not None
        place = {"seq": self._next_seq(), "at_ns": self._time(), "answers": answers, "steps": steps, "cost": cost}
        self.ending = msgspec.structs.replace(self.ending, **place)
        self._pending.append(self.ending)
        self._commit(None, "ending")

    def _comes_back_to_unwind(self, exit: Exit) -> bool:
        """The guest is gone, wherever its run was: whether another one unwinds, from where this one waited last."""
        if exit.answers < 0 or self._history or not self._may_be_brought_back:
            return False
        self.phase = _PARKING  # what is in flight is recorded first
        if self.ending is None:
            self._cut_short(exit)
        else:
            self._unwind_after(exit.answers, exit.steps, Cost(exit.fuel, exit.slot_ns))
        self._maybe_parked()
        return True

    @property
    def cost(self) -> Cost:
        """What its guests have used of what counts, as far as they are gone."""
        before = Cost() if self.ending is None else self.ending.cost
        if self.exit is None:
            return before
        return Cost(max(self.exit.fuel, before.fuel), max(self.exit.slot_ns, before.slot_ns))

    def on_abandoned(self, handles: tuple[int, ...]) -> None:
        """The guest will never take these answers. Waits end; what has an effect is settled in the background."""
        if self.phase not in (_LIVE, _REPLAY):
            return
        for handle in handles:
            if (held := self._held.pop(handle, None)) is not None:
                self._port.unheld(self, held[0])
        steps = [step for handle in handles if (step := self.open.get(handle)) is not None]
        self._stop_models(steps)
        dropped = [step for step in steps if step.op in WAIT_REASON]
        self._abort(dropped, "abandoned")
        self.mind_clock()
        if dropped:
            self._flush_soon()

    def _stop_models(self, steps: Iterable[StepInFlight]) -> None:
        """Nobody wants these answers any more: a model that is at work for one stops. Its outcome is still recorded."""
        for step in steps:
            if step.op == _MODEL and step.called:
                self._port.stop_model(self, step)

    def _abort(self, steps: list[StepInFlight], reason: str) -> None:
        """Give up steps that have not begun; of those that did in an earlier attempt nobody knows."""
        for step in steps:
            kind = StepAborted if step.attempt == 1 else OutcomeUnknown
            if self.account is not None and step.attempt == 1 and (self.phase is _ENDING or self.ending is not None):
                self._port.released(self, step)  # else it is prepared again, and keeps its reservation
            self._pending.append(kind(self._next_seq(), self._time(), step.path, reason))
            self._forget(step, aborted=True)

    def _drop_waits(self, reason: str) -> None:
        """Nobody waits any more. Steps that are on their way to others keep to themselves whether they arrived."""
        if self._held:
            self._drop_held()
        self._abort([step for step in self.open.values() if not step.tool], reason)
        for path, recorded in self._history.items():
            step = recorded.step
            if step.op not in EXECUTED and step.state is StepState.PREPARED:
                self._pending.append(StepAborted(self._next_seq(), self._time(), path, reason))
                self._unregister(path, step.op, step.request or b"", step.prepared_ns, aborted=True)
                step.state = StepState.ABORTED

    def may_snapshot(self) -> bool:
        """See `GuestEvents`; what is refused of a checkpoint would be a step that a replay does not make."""
        busy = self.open or self._held or self._history or self._awaited or self._undelivered
        refused = self.foreign or self._lost_locks or self.ending is not None
        return self.phase is _LIVE and not (busy or refused or self._restarting)

    def on_exit(self, exit: Exit) -> None:
        self.guest = None
        self.exit = exit
        self.mind_clock()
        phase = self.phase
        if phase in (_REPLAY, _LIVE):
            if exit.reason == "killed" and not self._restarting:  # not by us: the backend is closing
                self._discard(ClosedError("the backend closed", run=self.run_id))
                return
            if self._restarting:
                if self._restarting == 2:
                    self._start_segment()
                return  # else it ended by itself, and starts again when the checkpoint is durable
            if exit.reason == "evicted":  # what is in flight is recorded first, then it starts again
                self.phase = _PARKING
                self.flush()
                self._maybe_parked()
                return
            if exit.reason == "missing":
                self.wait_for_operator(None, exit.message)
                return
            if self._comes_back_to_unwind(exit):
                return
            self.phase = _ENDING
            if self.ending is None:
                self.outcome = self._outcome_of(exit)
                self._returned = exit.reason == "returned"
                self._sudden = exit.reason not in _AGAIN
            self._drop_waits(_THE_RUN_ENDS)
            self._lose_prepared()
            self._history = {}
            self._stop_models(self.open.values())
        if self.phase is _ENDING:
            self._maybe_end()
        elif self.phase is _PARKING:
            self._maybe_parked()
        elif self.phase is _DISCARDED:
            self._maybe_gone()

    # --- events of tools and store ------------------------------------------------

    def on_outcome(self, step: StepInFlight, outcome: ToolOutcome) -> None:
        """The tool's answer to `RunPort.call_tool`."""
        if ARMED:
            hit("tool.outcome")
        self._calls -= 1
        step.call = None  # which refers to the step: a cycle for each would be the garbage collector's
        if outcome.fuel:
            step.cost = sum_costs((step.cost, Cost(outcome.fuel, outcome.cost_ns)))
            self._call_fuel += outcome.fuel
        phase = self.phase
        if phase >= _ENDED:
            if phase is _DISCARDED:
                self._maybe_gone()
            return
        if step.kind == "pure" and self.open.get(step.handle) is not step:
            pass  # nobody waits for it any more
        elif outcome.evicted:
            self._evicted(step, outcome)
        elif step.lost_lock is not None and not outcome.ok and (outcome.unknown or outcome.code in _ENDED_CODES):
            self._rolled_back(step, step.lost_lock, outcome)
        elif outcome.host_died or (outcome.unknown and step.kind != "pure"):
            self._lost(step, outcome)
        elif step.recorded is not None:
            self._pure_again(step, step.recorded, outcome)
        elif phase <= _LIVE or step.kind != "pure":
            self._settle(step, outcome.ok, outcome.payload)
        if self._held_back:
            self._let_handlers_on()
        if phase > _LIVE:
            self._after_end()
        elif self._journal_bytes > self._port.journal_bytes_max:
            self._check_journal()

    def may_try_again(self, step: StepInFlight) -> bool:
        """Whether a step whose attempt has failed may be tried again, if the failure is worth it."""
        if self.phase is _PARKING:
            return step.kind != "pure"  # the next start tries
        return (
            self.phase <= _LIVE
            and not self._halted
            and not step.unwinding
            and step.lost_lock is None
            and step.recorded is None
            and not self._told_to_end(step)
            and self.open.get(step.handle) is step
            and step.attempt < self._attempts_max(self._spec_of(step))
        )

    def try_again(self, step: StepInFlight, not_before_ns: int, why: str, *, known: bool) -> None:
        """The step's attempt has failed, and `may_try_again`: it is held until the next one may begin, at
        ``not_before_ns`` or later. ``known``: the attempt certainly had no effect."""
        self._calls -= 1
        step.call = None
        if self.phase is not _PARKING and not self._may_repeat(step):
            return
        if step.kind != "pure":
            kind = StepAborted if known else OutcomeUnknown
            self._pending.append(kind(self._next_seq(), self._time(), step.path, f"{RETRY_REASON}: {why}"))
            if known and self.account is not None and step.op == _MODEL:
                self._port.released(self, step)  # the next attempt may be another model's
        self._forget(step)
        if self.phase is _PARKING:
            self._after_end()
            return
        step.attempt += 1
        step.called = False
        step.not_before_ns = not_before_ns
        if self._admit(step):
            if self._began(step):
                self._commit([step], "prepare")
            return
        self._flush_soon()
        if self._suspended is not None and self._held:
            self._port.on_idle(self)

    def on_reconciled(self, step: StepInFlight, outcome: ToolOutcome) -> None:
        """The answer to `RunPort.reconcile`: what became of a step whose outcome nobody saw."""
        self._calls -= 1
        phase = self.phase
        if phase >= _ENDED:
            if phase is _DISCARDED:
                self._maybe_gone()
            return
        found, result = _found(outcome)
        unwanted = self._told_to_end(step)
        if outcome.evicted:
            self._forget(step)  # the next start asks
        elif found == "yes":
            self._settle(step, True, result)
        elif found == "no" and (phase > _LIVE or unwanted):
            self._pending.append(StepAborted(self._next_seq(), self._time(), step.path, "it never began"))
            if self.account is not None:
                self._port.released(self, step)
            self._forget(step)
        elif step.lost_lock is not None and not unwanted:
            self._lose_lock(step, step.lost_lock)
        elif step.too_slow is not None and not unwanted:
            self._settle(step, False, _too_slow(step.too_slow, step.attempt, no_effect=found == "no"))
        elif found == "no":
            if not step.evicted and step.attempt >= self._attempts_max(self._port.tool(step.tool)):
                self._ask_operator(step, _out_of_attempts(step.tool, step.attempt))
            elif step.evicted or self._may_repeat(step):
                step.attempt += not step.evicted
                self._prepare_again(step)
                self._commit([step], "prepare")
            else:
                return
        else:
            self._ask_operator(step, f"tool {step.tool} cannot say what became of it")
        self._let_handlers_on()
        if phase > _LIVE:
            self._after_end()

    def _after_end(self) -> None:
        phase = self.phase
        self.flush()
        if phase is _ENDING:
            self._maybe_end()
        elif phase is _PARKING:
            self._maybe_parked()

    def on_committed(self, error: StoreError | None) -> None:
        """The store's answer to the oldest batch under way."""
        after = self._inflight.popleft()
        if type(after) is _Tell:
            for told in after.told:
                told(error)
            after = after.after
        if error is not None:
            self._refused(error)
        elif self.phase is _DISCARDED:
            self._maybe_gone()
        elif after is not None:
            if isinstance(after, list):
                self._start(after)
            else:
                after()  # type: ignore[operator]
        if self.phase is _PARKING:
            self._maybe_parked()

    # --- steps ----------------------------------------------------------------------

    def _start(self, steps: list[StepInFlight]) -> None:
        """Their StepPrepared is durable."""
        if ARMED:
            hit("prepare.durable")
        live = self.phase <= _LIVE and not self._halted
        calls = live or (self.phase is _ENDING and self._returned and not self._halted)
        lost: list[StepInFlight] = []
        for step in steps:
            if self.open.get(step.handle) is not step:  # given up meanwhile
                continue
            if calls and step.unwinding and self._program_works:
                self._held_back.append(step)
                continue
            if step.tool:
                if calls:
                    self._call(step)
                else:
                    lost.append(step)
            elif live:
                self._port.begin(self, step)
            # else: it waits on in the journal, or was aborted with the end
        if not lost:
            return
        self._abort(lost, "the run stopped before it")
        if self._halted and self._returned and self.phase is _ENDING:
            self.phase, self.outcome = _PARKING, None  # the guest has asked for them: the next start does them
        self.flush()
        if self.phase is _ENDING:
            self._maybe_end()

    @property
    def _program_works(self) -> bool:
        """Whether calls of a program that was told to end have not returned. What undoes them comes after them."""
        return any(step.called and not step.unwinding and step.kind != "pure" for step in self.open.values())

    def _let_handlers_on(self) -> None:
        if self._held_back and (self._halted or not self._program_works):
            steps, self._held_back = self._held_back, []
            self._start(steps)

    def _call(self, step: StepInFlight) -> None:
        step.called = True
        self._calls += 1
        if ARMED:
            hit("tool.before_dispatch")
        self._port.call_tool(self, step)
        if ARMED:
            hit("tool.after_dispatch")

    def _forget(self, step: StepInFlight, *, aborted: bool = False) -> None:
        """The step is not open any more; its rows go."""
        del self.open[step.handle]
        if step.tool:
            if step.kind != "pure":
                self._keyed_open -= 1
            return
        if step.op in WAIT_REASON:
            self._waits_open -= 1
        self._unregister(step.path, step.op, step.request, step.prepared_ns, aborted=aborted)

    def _refuse(self, step: StepInFlight, code: str, message: str) -> None:
        """Answer a syscall that is not executed."""
        self._settle(step, False, _encode({"code": code, "message": message}))

    def _settle(
        self, step: StepInFlight, ok: bool, payload: bytes, kept: bytes | None = None, deliver: bool = True
    ) -> None:
        """Record a step's outcome and give it to the guest; ``kept``: what the journal holds of it, if not that."""
        if step.handle in self.open:
            self._forget(step)
        at = self._time()
        if self.account is not None:
            self._port.settled(self, step)
        took_ns = at - step.prepared_ns if step.prepared_ns else None
        self._port.count_step(step.op, ok, step.attempt, took_ns, step.cost)
        result = kept if kept is not None else None if ok and step.kind == "pure" else payload
        if ok and step.op in _LOCK_OPS:
            self._note_lock(step.path, step.op, step.request, payload)
        self._version = seq = self._version + 1
        if not self._pending:
            self.pending_since_ns = at
        self._pending.append(
            StepCommitted(
                seq,
                at,
                step.path,
                step.op,
                step.digest,
                ok,
                result,
                digest(payload if kept is None else kept),
                step.attempt,
                step.cost,
                0 if self.clock is None else self.clock.spent_ns(at),
            )
        )
        if result is not None:
            self._journal_bytes += len(result)
        phase = self.phase
        if not deliver:
            pass
        elif phase is _LIVE:
            self._complete(step.handle, Status.OK if ok else Status.FAILED, payload, at, seq)
        elif phase is _REPLAY:
            self._known[step.handle] = (seq, Status.OK if ok else Status.FAILED, payload, at)
            self._undelivered.add(step.handle)
            self._advance()
        else:
            return
        self._flush_soon()

    def _note_lock(self, path: str, op: str, request: bytes, payload: bytes) -> None:
        decoded = decode(op, request)
        if isinstance(decoded, LockAcquire):
            self.locks[decoded.name] = _decode_token(payload).token
            self._lock_handles[decoded.name] = self._handle_of(path)
        elif isinstance(decoded, LockRelease):
            self.locks.pop(decoded.name, None)
            self._lock_handles.pop(decoded.name, None)

    def _flush_soon(self) -> None:
        if not self.joining:
            self.joining = True
            self._port.join_later(self)

    def _complete(self, handle: int, status: int, payload: bytes, at: int, seq: int) -> None:
        if self.guest is None:
            return
        suspended = self._suspended
        if suspended is not None and handle in suspended:  # what it does not wait for does not wake it
            self._suspended = None
            if self.rests:
                self._port.woken(self)
        if self.clock is not None:
            self.mind_clock()
        if ARMED:
            hit("guest.before_complete")
        self.guest.complete(handle, status, payload, at, seq)
        if ARMED:
            hit("guest.after_complete")

    def _lost(self, step: StepInFlight, outcome: ToolOutcome) -> None:
        """Nobody saw how the step ended; its kind says what that means."""
        payload = outcome.payload
        spec = self._spec_of(step)
        if step.kind == "pure":
            if self.phase >= _ENDING:
                return
            if step.attempt < self._attempts_max(spec):
                step.attempt += 1
                self._call(step)
            elif step.recorded is not None:
                self._wait_for_tool(step)
            else:
                self._settle(step, False, payload)
            return
        unwanted = self._told_to_end(step)
        if not (outcome.host_died or unwanted) and step.kind == "keyed" and step.attempt >= self._attempts_max(spec):
            # Its process is fine and so is its key: that it was too slow each time is an answer, which its agent gets,
            # unless it can be found out what became of it.
            if not spec.reconcile:
                self._settle(step, False, _too_slow(payload, step.attempt))
                return
            step.too_slow = payload
        reason = "the tool's host died" if outcome.host_died else "the tool was stopped by its time-out"
        self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), step.path, reason))
        if self.phase is _PARKING or unwanted:
            self._forget(step)
            return
        then = self._settle_lost(step, spec)
        if then == "again":
            self._commit([step], "prepare")
        elif then is not None:
            self._ask_operator(step, then)

    def _evicted(self, step: StepInFlight, outcome: ToolOutcome) -> None:
        """The node stops, and the step was ended for that, or never began; the next start settles it."""
        if step.kind == "pure":
            return
        if outcome.unknown or step.attempt > 1:
            self._pending.append(StepEvicted(self._next_seq(), self._time(), step.path, "the node stopped"))
            self._forget(step)
        else:
            self._abort([step], "the node stopped before it")
        if self._returned and self.phase is _ENDING:
            self.phase, self.outcome = _PARKING, None  # the guest has asked for it: the next start does it

    def _told_to_end(self, step: StepInFlight) -> bool:
        """Whether nobody wants the step done (again): its program was told to end."""
        if self.phase is _ENDING:
            return not self._returned
        return self.ending is not None and not step.unwinding

    def _settle_lost(self, step: StepInFlight, spec: ToolSpec) -> str | None:
        """Settle an open step with OutcomeUnknown by its kind. "again": a StepPrepared was made, the step starts when
        it is durable; None: it has an outcome, or its tool is asked for it; else why it waits for an operator."""
        spent = not step.evicted and step.attempt >= self._attempts_max(spec)
        if step.path in self._retry:
            self._retry.discard(step.path)
        elif spent and (step.kind == "at_most_once" or not spec.reconcile):
            return _out_of_attempts(step.tool, step.attempt)
        elif step.kind == "at_most_once":
            return _may_not_repeat(step.tool)
        elif spent or step.kind == "reconcilable" or self._time() - step.prepared_ns > spec.key_ttl_ns:
            if not spec.reconcile:
                return f"the idempotency key of tool {step.tool} is older than its key_ttl"
            self._calls += 1
            step.called = True
            self._port.reconcile(self, step)
            return None
        if not step.evicted:  # an eviction is no attempt
            if not self._may_repeat(step):
                return None
            step.attempt += 1
        self._prepare_again(step)
        return "again"

    def _may_repeat(self, step: StepInFlight) -> bool:
        """Whether the run may have one more attempt; if not, that is the step's outcome."""
        error = self._port.may_repeat(self, step) if self.account is not None else None
        if error is None:
            return True
        self._settle(step, False, _encode(error.to_dict()))
        return False

    def _spec_of(self, step: StepInFlight) -> ToolSpec:
        """What executes the step. Raises InputError kinds."""
        if step.op == _MODEL:
            if step.plan is None:
                self._port.plan_model(self, step)
            return MODEL_SPEC
        if not step.tool:
            call = _decode_call(step.request)
            spec = self._port.tool(call.tool)
            step.tool, step.args = call.tool, bytes(call.args)
            return spec
        return self._port.tool(step.tool)

    def _ask_operator(self, step: StepInFlight, detail: str) -> None:
        if self.ending is not None and step.unwinding and self.phase <= _LIVE:
            self._refuse(step, "outcome_unknown", detail)  # the run ends, whatever became of it; its handler goes on
            return
        self._forget(step)
        if self.ending is not None or self._told_to_end(step):
            return  # the run ends; the step keeps its unknown outcome
        if self.phase is _ENDING:  # the guest has returned; it will again
            self.phase, self.outcome = _LIVE, None
        self.wait_for_operator(step.path, detail)

    def _prepare_again(self, step: StepInFlight) -> None:
        assert step.key is not None
        step.called = step.evicted = False
        if step.op == _MODEL:
            self._port.reserve_model(step)
        self._pending.append(
            StepPrepared(
                self._next_seq(), self._time(), step.path, step.op, step.kind, step.request, step.digest, step.key,
                step.attempt, step.reserved,
            )
        )  # fmt: skip

    # --- replay ---------------------------------------------------------------------

    def _asked_again(self, step: StepInFlight, recorded: Recorded) -> bool | None:
        """The guest repeats a syscall that the journal knows. True: it starts after the commit; None: the run is over
        or waits for an operator."""
        known = recorded.step
        if known.op != step.op or known.digest != step.digest:
            self._diverged(step, recorded)
            return None
        if recorded.committed:
            live = self.phase is _LIVE
            if not live:
                self._committed_left -= 1
            if known.result is not None:
                status = Status.OK if known.ok else Status.FAILED
                if live:
                    self._complete(step.handle, status, known.told, recorded.at_ns, known.seq)
                    return False
                self._known[step.handle] = (known.seq, status, known.told, recorded.at_ns)
                self._undelivered.add(step.handle)
                return False
        if step.op not in EXECUTED:
            if known.state is StepState.PREPARED:
                step.kind = known.kind or "keyed"
                step.key = known.key
                step.prepared_ns = known.prepared_ns
                self._opened(step)
                self._port.begin(self, step)
            elif known.reason == _THE_RUN_ENDS and self.ending is None and step.op in WAIT_REASON:
                # That end was not durable. Its program may come to another one, or to none yet: it waits again.
                step.kind, step.key, step.attempt = known.kind or "keyed", known.key, known.attempt
                step.prepared_ns = known.prepared_ns
                self._prepare_again(step)
                there = registration(
                    self.run_id, self.accepted.tenant, step.op, step.path, step.request, known.prepared_ns
                )
                self._rows += there.rows
                self._opened(step)
                return True
            return False  # aborted: nobody waits for its answer
        try:
            spec = self._spec_of(step)
        except InputError:  # no such tool, or no model that may answer
            self._wait_for_tool(step)
            return None
        if recorded.committed:
            step.kind = "pure"
            step.recorded = recorded
            self._awaited[step.handle] = known.seq
            self.open[step.handle] = step
            if spec.kind != "pure":  # its result was not kept because it was; executing it now would be an effect
                self._wait_for_tool(step)
                return None
            self._call(step)
            return False
        step.kind = known.kind or "keyed"
        step.key = known.key
        step.attempt = known.attempt
        step.prepared_ns = known.prepared_ns
        step.reserved = known.reserved
        if known.state is StepState.PREPARED:
            self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), step.path, "the node ended"))
        if self._told_to_end(step):
            return False
        if step.op == _MODEL:
            return self._ask_model_again(step, known)
        lost = self._lost_over(known, step.handle)
        if lost is not None and self.ending is None and step.path not in self._retry:
            self._lose_lock(step, lost, f"; nobody saw whether tool {step.tool} had its effect")
            return False
        self._keyed_open += 1
        self.open[step.handle] = step
        step.evicted = known.state is StepState.UNCOMMITTED_EVICTED
        if known.state is StepState.ABORTED:  # it never began
            if (known.reason or "").startswith(RETRY_REASON):
                step.attempt += 1
            self._prepare_again(step)
            return True
        then = self._settle_lost(step, spec)
        if then is None or then == "again":
            return then is not None
        self._ask_operator(step, then)
        return False if self.ending is not None else None

    def _ask_model_again(self, step: StepInFlight, known: Step) -> bool:
        """A recorded call that has no outcome asks like a new one. What nobody saw the end of is charged in full."""
        if known.state is StepState.ABORTED:
            step.held = ()
            step.attempt += (known.reason or "").startswith(RETRY_REASON)
        else:
            step.cost = known.reserved
            self._retry.discard(step.path)
            if not self._may_repeat(step):
                return False
            step.attempt += 1
        if (self._port.admits or self.account is not None) and not self._admit(step):
            return False
        return self._began(step)

    def _pure_again(self, step: StepInFlight, recorded: Recorded, outcome: ToolOutcome) -> None:
        """A pure step was executed for a result that the journal knows by its digest only."""
        if self.phase >= _ENDING:
            return
        known = recorded.step
        if outcome.ok is not known.ok:
            # A time-out or the like is no proof of another result; trying again later may be enough.
            self._wait_for_tool(step)
            return
        found = digest(outcome.payload)
        if found != known.result_digest:
            self._fail(
                NonDeterminismError(
                    f"pure tool {step.tool} gave another result than before",
                    run=self.run_id,
                    step=step.path,
                    hint="A pure tool depends on its arguments only; declare it keyed",
                ),
                {
                    "recorded_digest": (known.result_digest or b"").hex(),
                    "digest": found.hex(),
                    "request": shown(step.request),
                    "result": shown(outcome.payload),
                },
            )
            return
        del self.open[step.handle]
        del self._awaited[step.handle]
        self._known[step.handle] = (
            known.seq, Status.OK if outcome.ok else Status.FAILED, outcome.payload, recorded.at_ns
        )  # fmt: skip
        self._undelivered.add(step.handle)
        self._advance()

    def _wait_for_tool(self, step: StepInFlight) -> None:
        self.wait_for_operator(step.path, f"tool {step.tool or step.op} cannot repeat the recorded step {step.path}")

    def _advance(self) -> None:
        """REPLAY: give the waiting guest the recorded answer it got the first time, or go live."""
        waiting = self._waiting
        if self.ending is not None and not self._unwinding and self._unwind_is_due(waiting):
            return
        if waiting is not None:
            known, awaited = self._known, self._awaited
            best = seq_min = 0
            for handle in waiting:
                seq = known[handle][0] if handle in known else awaited.get(handle, 0)
                if seq and (not seq_min or seq < seq_min):
                    best, seq_min = handle, seq
            if best:
                if best in awaited:
                    return
                self._waiting = None
                self._given += 1
                self._undelivered.discard(best)
                seq, status, payload, at = known[best]
                self._complete(best, status, payload, at, seq)
            elif self._committed_left:
                self._missed("waits for something else")
                return
            elif awaited:
                return
            else:
                self._go_live()
                return
        if not self._history and not self._awaited and not self._undelivered:
            self._go_live()

    def _unwind_is_due(self, waiting: tuple[int, ...] | None) -> bool:
        """Whether the program has had all answers that it got before the run was told to end; then it unwinds."""
        ending = self.ending
        if waiting is None or ending is None or self._given < ending.answers:
            return False
        for handle in () if ending.answers >= 0 else waiting:
            seq = self._known[handle][0] if handle in self._known else self._awaited.get(handle, 0)
            if seq and seq < ending.seq:
                return False
        self._waiting = None
        self._begin_unwinding()
        return True

    def _begin_unwinding(self) -> None:
        if self.guest is not None and self.ending is not None:
            self._unwinding = True
            self._suspended = None
            if self.rests:
                self._port.woken(self)
            skipped = max(0, self.ending.steps - self._asked)
            if skipped:
                self._pass_over(skipped)
                self.guest.unwind(self.ending.reason, skipped)
            else:
                self.guest.unwind(self.ending.reason)

    def _pass_over(self, count: int) -> None:
        """So many steps its guest has asked for in an earlier life, where it does not come again."""
        for handle in range(self._asked + 1, self._asked + 1 + count):
            recorded = self._history.pop(self._segment_prefix + str(handle), None)
            if recorded is not None:
                self._committed_left -= recorded.committed
                self._lose(recorded.step)

    def _go_live(self) -> None:
        self.phase = _LIVE
        suspended = self._suspended
        for handle in sorted(self._undelivered, key=lambda handle: self._known[handle][0]):
            seq, status, payload, at = self._known[handle]
            self._complete(handle, status, payload, at, seq)
        self._known, self._undelivered, self._waiting = {}, set(), None
        if self.guest is not None:
            self.guest.go_live()
            if self.ending is not None and not self._unwinding:
                self._begin_unwinding()
            elif suspended is not None and self._suspended is not None and (self._waits_open or self._held):
                self._port.on_idle(self)
            self.mind_clock()

    def _diverged(self, step: StepInFlight, recorded: Recorded) -> None:
        known = recorded.step
        self._fail(
            NonDeterminismError(
                f"the guest asked for {step.op} where its journal has {known.op}"
                if known.op != step.op
                else f"the guest asked for another {step.op} than its journal has",
                run=self.run_id,
                step=step.path,
            ),
            {
                "recorded_op": known.op,
                "op": step.op,
                "recorded_digest": known.digest.hex(),
                "digest": step.digest.hex(),
                "recorded_request": None if known.request is None else shown(known.request),
                "request": shown(step.request),
            },
        )

    def _missed(self, instead: str) -> None:
        """The guest passed by a step that its journal has."""
        path = min(self._history, key=lambda path: self._history[path].step.seq)
        known = self._history[path].step
        self._fail(
            NonDeterminismError(f"the guest {instead} before it asked for {known.op}", run=self.run_id, step=path),
            {
                "recorded_op": known.op,
                "recorded_digest": known.digest.hex(),
                "recorded_request": None if known.request is None else shown(known.request),
            },
        )

    # --- endings --------------------------------------------------------------------

    def _outcome_of(self, exit: Exit) -> Outcome:
        if self._history:
            self._missed(f"ended ({exit.reason})")
            assert self.outcome is not None
            return self.outcome
        return outcome_of(exit, self.run_id, self.accepted, self._port.result_bytes_max)

    def _fail(self, error: AgentrtError, details: dict[str, Any]) -> None:
        """End the run as FAILED, wherever its guest is, which is not trusted to unwind."""
        if self.ending is None:
            self.outcome = failed(error, details)
            self._sudden = not isinstance(error, NonDeterminismError)
        self._returned = False
        self._end_guest()

    def _end(
        self,
        outcome: Outcome,
        reason: str,
        limit: str | None = None,
        code: str | None = None,
        place: tuple[int, int, Cost] = (-1, -1, _NO_COST),
    ) -> None:
        """End the run: its guest unwinds first if its agent has something to unwind. ``place``: as in `Ending`."""
        if self.ending is not None:
            return
        self.outcome = outcome
        self._returned = False
        waits_to_begin = self.wait is not None and self.wait.path == START_PATH
        begun = not waits_to_begin and (self.guest is not None or self.phase is _PARKING or self.loaded_version > 0)
        if not self.unwinds or self.phase not in (_LIVE, _REPLAY, _PARKING) or self._restarting or not begun:
            self._sudden = True
            self._end_guest()
            return
        self._drop_waits(_THE_RUN_ENDS)
        self._abort([step for step in self.open.values() if step.tool and not step.called], _THE_RUN_ENDS)
        self._drop_pure()
        self._stop_models(self.open.values())
        self._commit_ending(None, outcome.state, reason, limit, code, place)
        if self.phase is _PARKING:
            pass  # it is read again once it is parked, and unwinds then
        elif self.guest is None:
            self.phase = _REPLAY  # its guest starts yet, and unwinds where it would go live
        elif self.phase is _LIVE:
            self._begin_unwinding()
        elif self.phase is _REPLAY:
            self._advance()
        # else it is read again once it is parked, and unwinds then

    def _drop_pure(self) -> None:
        """Nobody waits for pure steps any more, but for those of a replay: without their answers its program would not
        come to where it was told to end."""
        replaying = self._awaited if self.phase is _REPLAY else {}
        for handle in [handle for handle, step in self.open.items() if step.kind == "pure" and handle not in replaying]:
            del self.open[handle]
            self._awaited.pop(handle, None)

    def _check_journal(self) -> None:
        limit = self._port.journal_bytes_max
        if self.phase > _LIVE or self.ending is not None:
            return  # unwinding has an allowance of its own
        self._fail(
            RunError(
                f"the run's journal has more than {limit} bytes since its last checkpoint",
                run=self.run_id,
                limit="limits.journal_bytes_max",
            ),
            {},
        )

    def _cancelled(self) -> None:
        error = RunCancelledError(self.cancel_reason or "cancelled", run=self.run_id)
        self._end(Outcome(RunState.CANCELLED, None, _encode(error.to_dict())), error.message)

    def _end_guest(self) -> None:
        self.phase = _ENDING
        self._drop_waits(_THE_RUN_ENDS)
        self._lose_prepared()
        self._history = {}
        self._drop_pure()
        self._stop_models(self.open.values())
        self._kill()
        self._maybe_end()

    def _lose_prepared(self) -> None:
        """Steps of the journal that the guest will not ask for again: nobody saw how they ended."""
        for recorded in self._history.values():
            self._lose(recorded.step)

    def _lose(self, step: Step) -> None:
        if step.state is StepState.PREPARED and step.op in EXECUTED:
            self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), step.path, "the node ended"))
            step.state = StepState.OUTCOME_UNKNOWN

    def _kill(self) -> None:
        if self.guest is not None:
            self.guest.kill()

    def _maybe_end(self) -> None:
        if self.phase is not _ENDING or self.guest is not None or self._keyed_open or self.outcome is None:
            return
        if self._children:
            if not self._children_told:
                self._children_told = True
                if self._sudden and self.ending is None and self.cancel_reason is None:
                    self._journal_ending(self.outcome)
                elif self._pending or self._inflight:  # a replay without them might end in another way
                    self._commit(self._end_children, "outcomes")
                else:
                    self._end_children()
            return
        outcome, cost = self.outcome, self.cost
        self.phase = _ENDED
        self.state = outcome.state
        self._stop_waiting()
        self._pending.append(
            RunEnded(self._next_seq(), self._time(), outcome.state._value_, outcome.result, outcome.error, cost)
        )
        accepted = self.accepted
        self._rows.append(Row(READY, self.ready_key(), None))
        if accepted.deadline_ns:
            self._rows.append(Row(TIMERS, timer_key(accepted.deadline_ns, self.run_id, DEADLINE_PATH), None))
        self._rows += (Row(INBOX, inbox_key(self.run_id, child), None) for child in sorted(self._unjoined))
        self._rows += (dirty_row(accepted.tenant, name, token) for name, token in self.locks.items())
        if self.account is not None:
            self._rows += self._port.end_account(self)
        if accepted.callback_url is not None:
            due = Callback(accepted.tenant, accepted.callback_url, 0, self._pending[-1].at_ns)
            self._rows.append(callback_row(self.run_id, due))
        if accepted.parent is not None:
            parent, _, path = accepted.parent.partition("/")
            self._rows.append(Row(INBOX, inbox_key(parent, self.run_id), path.encode()))
        self._commit(self._on_ended, "end")

    def _journal_ending(self, outcome: Outcome) -> None:
        """Nothing unwinds, but the children are to end for this run's end: that it ends is durable before they are
        told, or a run whose node goes meanwhile would go on and find them cancelled."""
        told = msgspec.json.decode(outcome.error or b"{}", type=dict[str, Any])
        reason, limit, code = str(told.get("message", "")), told.get("limit"), told.get("code")
        self._commit_ending(self._end_children, outcome.state, reason, limit, code, (-1, -1, self.cost))

    def _commit_ending(
        self,
        after: Callable[[], None] | None,
        towards: RunState,
        reason: str,
        limit: str | None,
        code: str | None,
        place: tuple[int, int, Cost],
    ) -> None:
        """That the run ends, and how, is on its way to the journal; ``after`` happens when it is durable."""
        if self.state is RunState.WAITING:
            self._rows.append(self._ready_row())
        self.state = RunState.ENDING
        self._stop_waiting()
        self.ending = Ending(self._next_seq(), self._time(), towards.value, reason, limit, code, *place)
        self._pending.append(self.ending)
        self._commit(after, "ending")

    def _end_children(self) -> None:
        if self.phase is _ENDING and self._children:
            self._port.end_children(self, tuple(sorted(self._children)))  # `child_gone` follows for each

    def _maybe_parked(self) -> None:
        if self.phase is _PARKING and self.settled:
            if self._pending:
                self.flush()
            else:
                self.phase = _GONE  # what still refers to it gets no answer in any more
                self._port.on_parked(self)

    def _refused(self, error: StoreError) -> None:
        if self.phase is not _DISCARDED:
            self._discard(error)
        else:
            self._maybe_gone()

    def _discard(self, error: AgentrtError) -> None:
        self.phase = _DISCARDED
        self._error = error
        self._pending.clear()
        self._rows.clear()
        told, self._told = self._told, []
        for tell in told:
            tell(error)
        self._kill()
        self._maybe_gone()

    def _maybe_gone(self) -> None:
        if self.settled and self._error is not None:
            self._port.on_discarded(self, self._error)

    # --- durable moments --------------------------------------------------------------

    def _on_accepted(self) -> None:
        if ARMED:
            hit("accept.durable")
        self.phase = _LIVE
        self._port.on_accepted(self)

    def _on_cancelled(self) -> None:
        if ARMED:
            hit("cancel.durable")
        self._port.on_cancelled(self)

    def _on_checkpoint(self) -> None:
        if ARMED:
            hit("checkpoint.durable")
        if self.phase not in (_REPLAY, _LIVE):
            if self.phase is _PARKING:
                self._maybe_parked()
            return
        self._restarting = 2
        if self.guest is not None:
            self._kill()
        else:
            self._start_segment()

    def _start_segment(self) -> None:
        """The guest of the old segment is gone: a new one starts from the state."""
        self._restarting = 0
        self._journal_bytes = 0
        self._suspended = None
        # The replay of the old segment may not have come to its end: an answer that nobody waited for is left.
        self.phase = _LIVE
        self._history, self._committed_left = {}, 0
        self._known, self._undelivered, self._waiting = {}, set(), None
        self._asked = self._given = 0
        self.exit = None
        self._port.start_again(self)

    def _on_ended(self) -> None:
        if ARMED:
            hit("end.durable")
        self._port.on_ended(self)

    # --- records ----------------------------------------------------------------------

    def ready_key(self) -> bytes:
        """Key of the run's READY row."""
        return ready_key(self.accepted.base_tier, self.accepted.at_ns, self.run_id)

    def _ready_row(self) -> Row:
        return Row(READY, self.ready_key(), ready_value(self.agent_version, self.accepted.agent))

    def _next_seq(self) -> int:
        self._version += 1
        return self._version

    def _time(self) -> int:
        """Now, never before the last record."""
        now = self._port.now_ns()
        if now > self.at_ns:
            self.at_ns = now
        return self.at_ns

    def _commit(
        self,
        after: "list[StepInFlight] | Callable[[], None] | None",
        point: str,
        rows: tuple[Row, ...] = (),
        unique: tuple[Row, ...] = (),
    ) -> None:
        """Hand all waiting records to the store; ``after`` happens when they are durable."""
        records = tuple(self._pending)
        self._pending.clear()
        if self._rows:
            rows += tuple(self._rows)
            self._rows.clear()
        then: After = after
        if self._told:
            then, self._told = _Tell(after, self._told), []
        if self.account is not None and self.account.dirty:
            rows += self._port.account_rows(self)
        accepted = self.accepted
        version = self._version
        head = Head(
            self.run_id,
            version,
            self.state,
            accepted.tenant,
            accepted.agent,
            self.agent_version,
            self.tier,
            accepted.base_tier,
            accepted.at_ns,
            self.at_ns if self.phase is _ENDED else 0,
            self.wait.reason if self.wait is not None else None,
            self._segment,
            self.cancel_reason is not None,
        )
        batch = Batch(head, version - len(records), records, rows, unique)
        if ARMED:
            hit(point + ".before_commit")
        self._inflight.append(then)
        self._port.commit(self, batch, self.on_committed)
        if ARMED:
            hit(point + ".after_commit")


def _may_not_repeat(tool: str) -> str:
    return f"nobody saw whether tool {tool} had its effect, and it may not be done twice"


def _out_of_attempts(tool: str, attempts: int) -> str:
    return f"{attempts} attempts of tool {tool} ended without an outcome"


def _acquired(request: bytes) -> LockAcquire | None:
    try:
        wanted = decode("lock.acquire", request)
    except BadRequestError:
        return None
    return wanted if isinstance(wanted, LockAcquire) else None


def _joined(request: bytes) -> str | None:
    try:
        join = decode("run.join", request)
    except BadRequestError:
        return None
    return join.run_id if isinstance(join, Join) else None


def _too_slow(payload: bytes, attempts: int, *, no_effect: bool = False) -> bytes:
    """The failure of a keyed step that was stopped in each of its attempts. ``no_effect``: that is known by now."""
    try:
        told = msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        told = {"code": "tool_timeout", "message": "the tool was too slow"}
    effect = "it had no effect" if no_effect else "nobody saw whether it had its effect"
    message = f"{told.get('message')}; in {attempts} attempts {effect}"
    return _encode(told | {"message": message, "attempts": attempts})


def _found(outcome: ToolOutcome) -> tuple[str, bytes]:
    """What a reconcile function said: ("yes", result), ("no", b"") or ("unknown", b"")."""
    if not outcome.ok:
        return "unknown", b""
    try:
        answer = _decode_found(outcome.payload)
    except UNREADABLE:
        return "unknown", b""
    return answer.found, bytes(answer.result)
