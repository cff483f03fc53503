"""A guest is brought to where its run was: it asks again for what the journal has, and gets the same answers."""

from agentrt.backends.base import Request, Status
from agentrt.digest import digest
from agentrt.engine.history import Recorded
from agentrt.engine.machine.state import ENDING, LIVE, MODEL, THE_RUN_ENDS
from agentrt.engine.machine.unseen import RETRY_REASON, Unseen
from agentrt.engine.outcome import shown
from agentrt.engine.steps import EXECUTED, WAIT_REASON, StepInFlight, registration
from agentrt.errors import InputError, NonDeterminismError
from agentrt.fold import Step
from agentrt.records import OutcomeUnknown
from agentrt.states import StepState
from agentrt.syscalls import BY_OP
from agentrt.tools.outcome import ToolOutcome


class Replaying(Unseen):
    """Layer: REPLAY, and how it becomes LIVE."""

    __slots__ = ()

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

    def _asked_again(self, step: StepInFlight, recorded: Recorded) -> bool | None:
        """The guest repeats a syscall that the journal knows. True: it starts after the commit; None: the run is over
        or waits for an operator."""
        known = recorded.step
        if known.op != step.op or known.digest != step.digest:
            self._diverged(step, recorded)
            return None
        if recorded.committed:
            live = self.phase is LIVE
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
            elif known.reason == THE_RUN_ENDS and self.ending is None and step.op in WAIT_REASON:
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
        if step.op == MODEL:
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
        if self.phase >= ENDING:
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
        self.phase = LIVE
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
