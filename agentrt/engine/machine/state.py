"""What a run in memory knows, and how its records go to the journal. The lowest layer of `RunMachine`."""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from agentrt.backends.base import Exit, Guest, Request
from agentrt.engine.budget import loop_ns
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.history import History, Recorded
from agentrt.engine.outcome import Outcome, towards
from agentrt.engine.ports import Hold, RunPort
from agentrt.engine.steps import BadRequestError, Join, LockAcquire, StepInFlight, ToolCall, decode
from agentrt.errors import AgentrtError, StoreError
from agentrt.flow.accounts import Entry
from agentrt.flow.admission import Applicant
from agentrt.flow.timeouts import Clock, Timeouts
from agentrt.fold import RunFold
from agentrt.records import Cost, Ending, Record, Resumed, RunAccepted, Waiting
from agentrt.states import RunState
from agentrt.stores.base import READY, TIMERS, Batch, Head, Row
from agentrt.stores.frames import Kept
from agentrt.stores.keys import ready_key, ready_value, timer_key

MODEL: Final = "model.generate"
#: The path of a run's own deadline among its timers.
DEADLINE_PATH: Final = "!deadline"
#: The same of a run that begins later, and what it waits at until then.
START_PATH: Final = "!start"
#: The same of a run that waits in the store for a step that may not begin yet.
HOLD_PATH: Final = "!hold"
THE_RUN_ENDS: Final = "the run ends"
NO_COST: Final = Cost()


class _Token(msgspec.Struct, frozen=True):
    token: int


decode_token: Final = msgspec.json.Decoder(_Token).decode
decode_call: Final = msgspec.json.Decoder(ToolCall).decode
encode: Final = msgspec.json.encode


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


class Tell(NamedTuple):
    """What happens after a commit, and who hears of it in any case."""

    after: "list[StepInFlight] | Callable[[], None] | None"
    told: list[Told]


After = list[StepInFlight] | Callable[[], None] | Tell | None

ACCEPTING, REPLAY, LIVE = Phase.ACCEPTING, Phase.REPLAY, Phase.LIVE
ENDING, PARKING, ENDED, DISCARDED, GONE = Phase.ENDING, Phase.PARKING, Phase.ENDED, Phase.DISCARDED, Phase.GONE


class MachineState:
    """Made with a RunAccepted that is not in the store yet, or with a `History`."""

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

    def __init__(self, run_id: str, accepted: RunAccepted, port: RunPort[Any], history: History | None = None) -> None:
        self.run_id = run_id
        self.accepted = accepted
        self.tier = accepted.base_tier
        self.agent_version = accepted.version  # of the guest: what its pins say, unless it is upgraded
        self.pins = accepted.pins
        self._port = port
        self.guest: Guest | None = None
        self.phase = ACCEPTING
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
        joins = [step for step in run.steps.values() if step.op == "run.join" and step.ok is not None]
        joined = {child_joined(step.request or b"") for step in joins}
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
        self.phase = REPLAY if self._history or run.ending is not None else LIVE

    def _load_locks(self, run: RunFold) -> None:
        """Which steps acquired its locks, and what it lost and was not told."""
        handles: dict[tuple[str, int], int] = {}
        told: list[tuple[int, bytes]] = []
        for step in run.steps.values():
            if step.op == "lock.acquire" and step.ok and (request := lock_asked(step.request or b"")) is not None:
                token = decode_token(step.result or b"").token
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

    @property
    def settled(self) -> bool:
        """Nothing of it is under way: no guest, no tool, no commit."""
        return self.guest is None and not self._calls and not self._inflight

    def mind_clock(self) -> None:
        """Whether it is at work may have changed: that is a guest that computes or has yet to, and a tool or model that
        has work to do for it; a run whose guest is brought back, waits or may not begin its next step is not."""
        clock = self.clock
        if clock is None:
            return
        now_ns = self._port.now_ns()
        rests = self._suspended is not None and self._waits_open == len(self.open)
        if self.guest is None or rests or self.phase is not LIVE or self.ending is not None:
            clock.rest(now_ns)
            return
        clock.go(now_ns)
        if not self._clock_set:
            self._clock_set = True
            self._port.mind_clock(self, max(0, self.timeouts.loop_ns - clock.spent_ns(now_ns)))

    def _active_ns(self) -> int:
        return 0 if self.clock is None else self.clock.spent_ns(self.at_ns)

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
            then, self._told = Tell(after, self._told), []
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
            self.at_ns if self.phase is ENDED else 0,
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

    def flush(self) -> None:
        """Commit records that wait for company."""
        if self._pending and self.phase is not DISCARDED:
            self._commit(None, "outcome")

    def _flush_soon(self) -> None:
        if not self.joining:
            self.joining = True
            self._port.join_later(self)

    def on_committed(self, error: StoreError | None) -> None:
        """The store's answer to the oldest batch under way."""
        after = self._inflight.popleft()
        if type(after) is Tell:
            for told in after.told:
                told(error)
            after = after.after
        if error is not None:
            self._refused(error)
        elif self.phase is DISCARDED:
            self._maybe_gone()
        elif after is not None:
            if isinstance(after, list):
                self._start(after)
            else:
                after()  # type: ignore[operator]
        if self.phase is PARKING:
            self._maybe_parked()

    if TYPE_CHECKING:  # of the layers above

        def _start(self, steps: list[StepInFlight]) -> None: ...
        def _advance(self) -> None: ...
        def _fail(self, error: AgentrtError, details: dict[str, Any]) -> None: ...
        def _end(self, outcome: Outcome, reason: str, limit: str | None = None) -> None: ...
        def _maybe_end(self) -> None: ...
        def _maybe_parked(self) -> None: ...
        def _maybe_gone(self) -> None: ...
        def _after_end(self) -> None: ...
        def _refused(self, error: StoreError) -> None: ...
        def _kill(self) -> None: ...
        def wait_for_operator(self, path: str | None, detail: str) -> None: ...
        def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None: ...


def lock_asked(request: bytes) -> LockAcquire | None:
    try:
        wanted = decode("lock.acquire", request)
    except BadRequestError:
        return None
    return wanted if isinstance(wanted, LockAcquire) else None


def child_joined(request: bytes) -> str | None:
    try:
        join = decode("run.join", request)
    except BadRequestError:
        return None
    return join.run_id if isinstance(join, Join) else None
