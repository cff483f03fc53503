"""Steps begin, and settle: what is journaled of them, and what their guest is given."""

from collections.abc import Iterable
from typing import Any, Final

from agentrt.backends.base import Status
from agentrt.digest import digest
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.history import Recorded
from agentrt.engine.machine.state import (
    ENDING,
    LIVE,
    MODEL,
    PARKING,
    REPLAY,
    MachineState,
    child_joined,
    decode_token,
    encode,
)
from agentrt.engine.outcome import Outcome
from agentrt.engine.ports import Hold
from agentrt.engine.steps import (
    EXECUTED,
    WAIT_REASON,
    LockAcquire,
    LockRelease,
    Spawn,
    StepInFlight,
    decode,
    registration,
)
from agentrt.errors import LoopDetectedError
from agentrt.fold import Step
from agentrt.ids import child_run_id, idempotency_key
from agentrt.records import Cost, OutcomeUnknown, Spawned, StepAborted, StepCommitted, StepPrepared
from agentrt.states import RunState, StepState
from agentrt.stores.base import INBOX, Row
from agentrt.stores.keys import inbox_key

_LOCK_OPS: Final = frozenset({"lock.acquire", "lock.release"})
_LENDING_OPS: Final = frozenset({"lock.acquire", "run.join"})  # waits for other runs


class Settling(MachineState):
    """Layer: steps of the guest, from their beginning to their outcome."""

    __slots__ = ()

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
            self._end(Outcome(state, None, encode(error.to_dict())), error.message, error.limit)
        else:
            self._settle(step, False, encode(verdict.error.to_dict()))
        return False

    def _drop_held(self) -> None:
        held, self._held = self._held, {}
        for step, _ in held.values():
            self._port.unheld(self, step)

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
        key = step.key = idempotency_key(self.run_id, path, step.tool if op != MODEL else op)
        self._version = seq = self._version + 1
        at = step.prepared_ns = self._time()
        self._pending.append(
            StepPrepared(seq, at, path, op, step.kind, step.request, step.digest, key, 1, step.reserved)
        )
        self._journal_bytes += len(step.request)
        self._keyed_open += 1
        self.open[step.handle] = step
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

    def _prepare_again(self, step: StepInFlight) -> None:
        assert step.key is not None
        step.called = step.evicted = False
        if step.op == MODEL:
            self._port.reserve_model(step)
        self._pending.append(
            StepPrepared(
                self._next_seq(), self._time(), step.path, step.op, step.kind, step.request, step.digest, step.key,
                step.attempt, step.reserved,
            )
        )  # fmt: skip

    def _opened(self, step: StepInFlight) -> None:
        self.open[step.handle] = step
        if step.op in WAIT_REASON:
            self._waits_open += 1

    def _start(self, steps: list[StepInFlight]) -> None:
        """Their StepPrepared is durable."""
        if ARMED:
            hit("prepare.durable")
        live = self.phase <= LIVE and not self._halted
        calls = live or (self.phase is ENDING and self._returned and not self._halted)
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
        if self._halted and self._returned and self.phase is ENDING:
            self.phase, self.outcome = PARKING, None  # the guest has asked for them: the next start does them
        self.flush()
        if self.phase is ENDING:
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
        elif phase is LIVE:
            self._complete(step.handle, Status.OK if ok else Status.FAILED, payload, at, seq)
        elif phase is REPLAY:
            self._known[step.handle] = (seq, Status.OK if ok else Status.FAILED, payload, at)
            self._undelivered.add(step.handle)
            self._advance()
        else:
            return
        self._flush_soon()

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
        if self.phase is LIVE and self.guest is not None:
            return  # the guest has not asked for it again yet, and is answered when it does
        self._committed_left += 1
        if self.phase is LIVE:
            self.phase = REPLAY

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

    def _unregister(self, path: str, op: str, request: bytes, prepared_ns: int, *, aborted: bool = False) -> None:
        self._rows += registration(self.run_id, self.accepted.tenant, op, path, request, prepared_ns).gone()
        if op in _LENDING_OPS:
            self._port.wait_over(self, path)
        if op == "run.join" and not aborted and (child := child_joined(request)) is not None:
            self._rows.append(Row(INBOX, inbox_key(self.run_id, child), None))
            self._unjoined.discard(child)

    def _note_lock(self, path: str, op: str, request: bytes, payload: bytes) -> None:
        decoded = decode(op, request)
        if isinstance(decoded, LockAcquire):
            self.locks[decoded.name] = decode_token(payload).token
            self._lock_handles[decoded.name] = self._handle_of(path)
        elif isinstance(decoded, LockRelease):
            self.locks.pop(decoded.name, None)
            self._lock_handles.pop(decoded.name, None)

    def _refuse(self, step: StepInFlight, code: str, message: str) -> None:
        """Answer a syscall that is not executed."""
        self._settle(step, False, encode({"code": code, "message": message}))

    def _abort(self, steps: list[StepInFlight], reason: str) -> None:
        """Give up steps that have not begun; of those that did in an earlier attempt nobody knows."""
        for step in steps:
            kind = StepAborted if step.attempt == 1 else OutcomeUnknown
            if self.account is not None and step.attempt == 1 and (self.phase is ENDING or self.ending is not None):
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

    def _stop_models(self, steps: Iterable[StepInFlight]) -> None:
        """Nobody wants these answers any more: a model that is at work for one stops. Its outcome is still recorded."""
        for step in steps:
            if step.op == MODEL and step.called:
                self._port.stop_model(self, step)

    def _drop_pure(self) -> None:
        """Nobody waits for pure steps any more, but for those of a replay: without their answers its program would not
        come to where it was told to end."""
        replaying = self._awaited if self.phase is REPLAY else {}
        for handle in [handle for handle, step in self.open.items() if step.kind == "pure" and handle not in replaying]:
            del self.open[handle]
            self._awaited.pop(handle, None)

    def _lose_prepared(self) -> None:
        """Steps of the journal that the guest will not ask for again: nobody saw how they ended."""
        for recorded in self._history.values():
            self._lose(recorded.step)

    def _lose(self, step: Step) -> None:
        if step.state is StepState.PREPARED and step.op in EXECUTED:
            self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), step.path, "the node ended"))
            step.state = StepState.OUTCOME_UNKNOWN
