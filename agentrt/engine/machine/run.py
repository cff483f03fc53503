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

from functools import partial
from typing import Final

from agentrt import records as journal
from agentrt.backends.base import Exit, Request
from agentrt.decoding import UNREADABLE
from agentrt.digest import request_digest
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.machine.endings import EndingRun
from agentrt.engine.machine.state import (
    ACCEPTING,
    DEADLINE_PATH,
    DISCARDED,
    ENDED,
    ENDING,
    HOLD_PATH,
    LIVE,
    MODEL,
    PARKING,
    REPLAY,
    START_PATH,
    THE_RUN_ENDS,
    Told,
    child_joined,
    decode_call,
    encode,
)
from agentrt.engine.outcome import out_of_fuel
from agentrt.engine.ports import Hold
from agentrt.engine.steps import (
    EXECUTED,
    UNWINDING_OPS,
    WAIT_REASON,
    BadRequestError,
    CapacityGet,
    Checkpoint,
    Emit,
    EventSend,
    LockAcquire,
    LockForeign,
    Spawn,
    StepInFlight,
    decode,
    due_answer,
)
from agentrt.errors import AgentrtError, ClosedError, UnknownToolError
from agentrt.fold import sum_costs
from agentrt.ids import segment_seed
from agentrt.records import Cost, Waiting
from agentrt.states import RunState, StepState
from agentrt.stores.base import READY, TIMERS, Row
from agentrt.stores.keys import timer_key
from agentrt.syscalls import BY_NUMBER, BY_OP
from agentrt.tools.outcome import ToolOutcome

_TOOL_CALL: Final = 1
_LOG: Final = 13
_UNWIND_CALLS_MAX: Final = 20
_FOREIGN_MAX: Final = 64  # locks elsewhere that a run can hold: each may cost a call when it unwinds
#: How guests end whose program would end so again, brought to where it was. What a trap, memory and fuel are a matter
#: of may be the machine's.
_AGAIN: Final = frozenset({"returned", "failed", "non_determinism"})
#: Of calls that did not come to an end by themselves, and certainly or perhaps had no effect.
_ENDED_CODES: Final = frozenset({"cancelled", "tool_host_died"})


class RunMachine(EndingRun):
    """One run in memory. Make it with a RunAccepted that is not in the store yet, or with a `History`."""

    __slots__ = ()

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
        return self.phase is REPLAY or self.ending is not None

    @property
    def at_segment_start(self) -> bool:
        """No guest of this segment has asked for anything."""
        return self.guest is None and self.phase is LIVE and not self._history and not self.open

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
        if self.phase <= LIVE and self.phase is not ACCEPTING:
            self._discard(error)

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

    def resume(self) -> None:
        """The run is not WAITING any more: its guest starts now."""
        if self.state is RunState.WAITING:
            self._resumed()
        if self._pending:
            self._commit(None, "wait")

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
        self.phase = PARKING
        self._maybe_parked()

    @property
    def may_be_parked(self) -> bool:
        """Whether the guest is suspended and something is waited for. It is parked once that is all there is: tools
        that it does not wait for any more may be at work, and records on their way to the store."""
        return (
            self._suspended is not None
            and self.phase is LIVE
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
        live = self.phase is LIVE and self.guest is not None and self.ending is None and not self._restarting
        durable = not self._inflight and not self._pending and not self._held
        return live and durable and all(step.kind != "pure" for step in self.open.values())

    def note_frame(self, frame: str, fuel: int, segment: int, told: Told) -> bool:
        """Journal that there is a frame of its guest, taken in that segment; false if it is of no use any more."""
        if self.phase is not LIVE or self.ending is not None or self._segment != segment or self._restarting:
            return False
        self._pending.append(journal.FrameTaken(self._next_seq(), self._time(), frame, fuel))
        self._told.append(told)
        self._flush_soon()
        return True

    def on_safe_point(self) -> None:
        """See `GuestEvents`."""
        if self.guest is not None:
            self._port.on_safe_point(self)

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
        self.phase = PARKING
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
        if self.phase >= ENDED or self.phase is ACCEPTING:
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
            if self.phase is PARKING:
                if self._waits_for_something:
                    self._resumed()
                self.flush()
            elif told is not None:  # somebody waits for it
                self.flush()
        elif recorded is not None:
            self._settle_recorded(path, recorded, ok, payload)
            if self._waits_for_something:
                self._resumed()  # with it, whoever else commits for the run: nothing else would wake it
            if self.phase is PARKING or told is not None:
                self.flush()
            else:
                self._flush_soon()
        return True

    def fall_due(self, path: str) -> bool:
        """The timer of a step, of the deadline or of the start has run out. False: it is nothing to this run."""
        if path == DEADLINE_PATH:
            self.time_out()
            return self.phase is not ENDED
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

    def clock_due(self) -> None:
        """The time that was given to `RunPort.mind_clock` has passed."""
        self._clock_set = False
        clock = self.clock
        if clock is not None and clock.since_ns and clock.spent_ns(self._port.now_ns()) >= self.timeouts.loop_ns:
            seconds = self.accepted.budget["active_s"]
            self._end_by_time(f"the run has been at work for its {seconds:g} seconds", "active_s")
        self.mind_clock()

    def unhold(self) -> bool:
        """Steps that were not to begin may be looked at again. False: there are none, and none in the store."""
        if self.phase is PARKING or not self._held:
            if self.wait is None or not self.wait.until_ns:
                return False
            self._resumed()
            if self.phase is PARKING:
                self.flush()
            else:
                self._flush_soon()
            return True
        starts = []
        for handle in [*self._held]:
            if (held := self._held.pop(handle, None)) is not None and self._admit(held[0]) and self._began(held[0]):
                starts.append(held[0])
        if starts and self.phase < ENDED:
            self._commit(starts, "prepare")
        if self.phase is LIVE and self._held:
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
            self._settle(step, False, encode(error.to_dict()))

    def add_rows(self, rows: tuple[Row, ...]) -> None:
        """Rows that go with the records that are pending."""
        self._rows += rows

    def open_steps(self) -> list[tuple[str, str, bytes, int]]:
        """(path, op, request, prepared_ns) of steps that wait, whether or not a guest is there."""
        found = [(step.path, step.op, step.request, step.prepared_ns) for step in self.open.values() if not step.tool]
        for path, recorded in self._history.items():
            step = recorded.step
            if step.state is StepState.PREPARED and step.op not in EXECUTED:
                found.append((path, step.op, step.request or b"", step.prepared_ns))
        return found

    def joined(self) -> list[tuple[str, str]]:
        """(path, child) of the open steps that wait for a child."""
        joins = [(path, child_joined(request)) for path, op, request, _ in self.open_steps() if op == "run.join"]
        return [(path, child) for path, child in joins if child is not None]

    def joins(self, child: str) -> list[str]:
        """Paths of the open steps that wait for the child."""
        return [path for path, found in self.joined() if found == child]

    def lock_of(self, path: str) -> str | None:
        """The lock that the step waits for; None if it does not wait for one (any more)."""
        for open_path, op, request, _ in self.open_steps():
            if open_path == path and op == "lock.acquire":
                wanted = decode(op, request)
                return wanted.name if isinstance(wanted, LockAcquire) else None
        return None

    def change_tier(self, tier: int, reason: str) -> None:
        """It runs at this tier from now on, durably; its guest is the engine's to move."""
        if tier == self.tier or self.phase is ACCEPTING or self.phase >= ENDED:
            return
        self.tier = tier
        self._pending.append(journal.TierChanged(self._next_seq(), self._time(), tier, reason))
        self._commit(None, "tier")  # at once: a run that only waits is let go when nothing is pending

    def halt(self) -> None:
        """The node stops: drop the guest, record what is in flight, leave the run to the next start."""
        self._halted = True
        self._let_handlers_on()
        if self.phase in (REPLAY, LIVE):
            self.phase = PARKING
            self._kill()
            self.flush()
            self._maybe_parked()

    # --- events of the guest ------------------------------------------------------

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        phase = self.phase
        if (phase is not LIVE and phase is not REPLAY) or self._restarting:
            return
        self._suspended = waiting
        starts: list[StepInFlight] | None = None
        for handle, number, payload in requests:
            if number == _LOG:
                if phase is LIVE or not (self._committed_left or self._awaited or self._undelivered):
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
                    if self.phase > LIVE:
                        break
                    continue
                self._tool_calls += 1
            elif not self._may_call_ending():
                self._refuse(step, "ending", f"the run ends and has used its {_UNWIND_CALLS_MAX} tool calls for that")
                continue
            try:
                call = decode_call(payload)
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
                if self.phase > LIVE:
                    break
                continue  # told to end or not: what follows may be in the journal
            if self._began(step):
                if starts is None:
                    starts = [step]
                else:
                    starts.append(step)
        if starts is not None:
            self._commit(starts, "prepare")
        if self.phase is REPLAY:
            self._waiting = waiting
            self._advance()
        elif waiting is not None and (self._waits_open or self._held):
            self._port.on_idle(self)
        if self.clock is not None:
            self.mind_clock()
        if self._journal_bytes > self._port.journal_bytes_max:
            self._check_journal()

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
        if op == MODEL:
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
        self._settle(step, True, encode(answer))
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

    def on_abandoned(self, handles: tuple[int, ...]) -> None:
        """The guest will never take these answers. Waits end; what has an effect is settled in the background."""
        if self.phase not in (LIVE, REPLAY):
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

    def may_snapshot(self) -> bool:
        """See `GuestEvents`; what is refused of a checkpoint would be a step that a replay does not make."""
        busy = self.open or self._held or self._history or self._awaited or self._undelivered
        refused = self.foreign or self._lost_locks or self.ending is not None
        return self.phase is LIVE and not (busy or refused or self._restarting)

    def on_exit(self, exit: Exit) -> None:
        self.guest = None
        self.exit = exit
        self.mind_clock()
        phase = self.phase
        if phase in (REPLAY, LIVE):
            if exit.reason == "killed" and not self._restarting:  # not by us: the backend is closing
                self._discard(ClosedError("the backend closed", run=self.run_id))
                return
            if self._restarting:
                if self._restarting == 2:
                    self._start_segment()
                return  # else it ended by itself, and starts again when the checkpoint is durable
            if exit.reason == "evicted":  # what is in flight is recorded first, then it starts again
                self.phase = PARKING
                self.flush()
                self._maybe_parked()
                return
            if exit.reason == "missing":
                self.wait_for_operator(None, exit.message)
                return
            if self._comes_back_to_unwind(exit):
                return
            self.phase = ENDING
            if self.ending is None:
                self.outcome = self._outcome_of(exit)
                self._returned = exit.reason == "returned"
                self._sudden = exit.reason not in _AGAIN
            self._drop_waits(THE_RUN_ENDS)
            self._lose_prepared()
            self._history = {}
            self._stop_models(self.open.values())
        if self.phase is ENDING:
            self._maybe_end()
        elif self.phase is PARKING:
            self._maybe_parked()
        elif self.phase is DISCARDED:
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
        if phase >= ENDED:
            if phase is DISCARDED:
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
        elif phase <= LIVE or step.kind != "pure":
            self._settle(step, outcome.ok, outcome.payload)
        if self._held_back:
            self._let_handlers_on()
        if phase > LIVE:
            self._after_end()
        elif self._journal_bytes > self._port.journal_bytes_max:
            self._check_journal()

    # --- durable moments --------------------------------------------------------------

    def _on_accepted(self) -> None:
        if ARMED:
            hit("accept.durable")
        self.phase = LIVE
        self._port.on_accepted(self)

    def _on_checkpoint(self) -> None:
        if ARMED:
            hit("checkpoint.durable")
        if self.phase not in (REPLAY, LIVE):
            if self.phase is PARKING:
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
        self.phase = LIVE
        self._history, self._committed_left = {}, 0
        self._known, self._undelivered, self._waiting = {}, set(), None
        self._asked = self._given = 0
        self.exit = None
        self._port.start_again(self)
