"""Steps whose outcome nobody saw, and attempts that failed: what their kind says is done about it."""

from typing import Any, Final

import msgspec

from agentrt import records as journal
from agentrt.decoding import UNREADABLE
from agentrt.engine.machine.settling import Settling
from agentrt.engine.machine.state import DISCARDED, ENDED, ENDING, LIVE, MODEL, PARKING, Told, decode_call, encode
from agentrt.engine.modelsteps import MODEL_SPEC
from agentrt.engine.steps import EXECUTED, StepInFlight
from agentrt.errors import StepSettledError, UnknownToolError
from agentrt.fold import Step
from agentrt.records import OutcomeUnknown, StepAborted, StepEvicted, Waiting
from agentrt.states import OPEN, StepState
from agentrt.stores.base import Row
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolSpec

#: How the reason of a step's end begins that is tried again.
RETRY_REASON: Final = "another attempt follows"


class _Found(msgspec.Struct, frozen=True):
    """Payload of a reconcile function's outcome."""

    found: str  # yes, no, unknown
    result: msgspec.Raw = msgspec.Raw(b"null")


_decode_found: Final = msgspec.json.Decoder(_Found).decode


class Unseen(Settling):
    """Layer: what was perhaps done."""

    __slots__ = ()

    def _lost(self, step: StepInFlight, outcome: ToolOutcome) -> None:
        """Nobody saw how the step ended; its kind says what that means."""
        payload = outcome.payload
        spec = self._spec_of(step)
        if step.kind == "pure":
            if self.phase >= ENDING:
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
        if self.phase is PARKING or unwanted:
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
        if self._returned and self.phase is ENDING:
            self.phase, self.outcome = PARKING, None  # the guest has asked for it: the next start does it

    def _told_to_end(self, step: StepInFlight) -> bool:
        """Whether nobody wants the step done (again): its program was told to end."""
        if self.phase is ENDING:
            return not self._returned
        return self.ending is not None and not step.unwinding

    def _settle_lost(self, step: StepInFlight, spec: ToolSpec) -> str | None:
        """Settle an open step with OutcomeUnknown by its kind. "again": a StepPrepared was made, the step starts when
        it is durable; None: it has an outcome, or its tool is asked for it; else why it waits for an operator."""
        spent = not step.evicted and step.attempt >= self._attempts_max(spec)
        if step.path in self._retry:
            self._retry.discard(step.path)
        elif spent and (step.kind == "at_most_once" or not spec.reconcile):
            return out_of_attempts(step.tool, step.attempt)
        elif step.kind == "at_most_once":
            return may_not_repeat(step.tool)
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

    def _attempts_max(self, spec: ToolSpec) -> int:
        return self._port.attempts_max if spec.attempts_max is None else spec.attempts_max

    def _may_repeat(self, step: StepInFlight) -> bool:
        """Whether the run may have one more attempt; if not, that is the step's outcome."""
        error = self._port.may_repeat(self, step) if self.account is not None else None
        if error is None:
            return True
        self._settle(step, False, encode(error.to_dict()))
        return False

    def _spec_of(self, step: StepInFlight) -> ToolSpec:
        """What executes the step. Raises InputError kinds."""
        if step.op == MODEL:
            if step.plan is None:
                self._port.plan_model(self, step)
            return MODEL_SPEC
        if not step.tool:
            call = decode_call(step.request)
            spec = self._port.tool(call.tool)
            step.tool, step.args = call.tool, bytes(call.args)
            return spec
        return self._port.tool(step.tool)

    def _wait_for_tool(self, step: StepInFlight) -> None:
        self.wait_for_operator(step.path, f"tool {step.tool or step.op} cannot repeat the recorded step {step.path}")

    def _ask_operator(self, step: StepInFlight, detail: str) -> None:
        if self.ending is not None and step.unwinding and self.phase <= LIVE:
            self._refuse(step, "outcome_unknown", detail)  # the run ends, whatever became of it; its handler goes on
            return
        self._forget(step)
        if self.ending is not None or self._told_to_end(step):
            return  # the run ends; the step keeps its unknown outcome
        if self.phase is ENDING:  # the guest has returned; it will again
            self.phase, self.outcome = LIVE, None
        self.wait_for_operator(step.path, detail)

    def may_try_again(self, step: StepInFlight) -> bool:
        """Whether a step whose attempt has failed may be tried again, if the failure is worth it."""
        if self.phase is PARKING:
            return step.kind != "pure"  # the next start tries
        return (
            self.phase <= LIVE
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
        if self.phase is not PARKING and not self._may_repeat(step):
            return
        if step.kind != "pure":
            kind = StepAborted if known else OutcomeUnknown
            self._pending.append(kind(self._next_seq(), self._time(), step.path, f"{RETRY_REASON}: {why}"))
            if known and self.account is not None and step.op == MODEL:
                self._port.released(self, step)  # the next attempt may be another model's
        self._forget(step)
        if self.phase is PARKING:
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
        if phase >= ENDED:
            if phase is DISCARDED:
                self._maybe_gone()
            return
        found, result = _found(outcome)
        unwanted = self._told_to_end(step)
        if outcome.evicted:
            self._forget(step)  # the next start asks
        elif found == "yes":
            self._settle(step, True, result)
        elif found == "no" and (phase > LIVE or unwanted):
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
                self._ask_operator(step, out_of_attempts(step.tool, step.attempt))
            elif step.evicted or self._may_repeat(step):
                step.attempt += not step.evicted
                self._prepare_again(step)
                self._commit([step], "prepare")
            else:
                return
        else:
            self._ask_operator(step, f"tool {step.tool} cannot say what became of it")
        self._let_handlers_on()
        if phase > LIVE:
            self._after_end()

    def stuck_step(self) -> tuple[str, str] | None:
        """A recorded open step that only an operator can settle, and why; None if there is none."""
        for path, recorded in self._history.items():
            step = recorded.step
            if step.op not in EXECUTED or step.state not in OPEN:
                continue
            if path in self._retry or self._lost_over(step, self._handle_of(path)) is not None:
                continue
            tool = step.op if step.op == MODEL else decode_call(step.request or b"").tool
            if step.kind == "at_most_once":
                return path, may_not_repeat(tool)
            if step.state is StepState.UNCOMMITTED_EVICTED:
                continue
            try:
                spec = MODEL_SPEC if step.op == MODEL else self._port.tool(tool)
            except UnknownToolError:
                spec = None
            attempts_max = self._port.attempts_max if spec is None else self._attempts_max(spec)
            if step.attempt >= attempts_max and (spec is None or not spec.reconcile):  # else it is asked first
                return path, out_of_attempts(tool, step.attempt)
        return None

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


def may_not_repeat(tool: str) -> str:
    return f"nobody saw whether tool {tool} had its effect, and it may not be done twice"


def out_of_attempts(tool: str, attempts: int) -> str:
    return f"{attempts} attempts of tool {tool} ended without an outcome"


def _too_slow(payload: bytes, attempts: int, *, no_effect: bool = False) -> bytes:
    """The failure of a keyed step that was stopped in each of its attempts. ``no_effect``: that is known by now."""
    try:
        told = msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        told = {"code": "tool_timeout", "message": "the tool was too slow"}
    effect = "it had no effect" if no_effect else "nobody saw whether it had its effect"
    message = f"{told.get('message')}; in {attempts} attempts {effect}"
    return encode(told | {"message": message, "attempts": attempts})


def _found(outcome: ToolOutcome) -> tuple[str, bytes]:
    """What a reconcile function said: ("yes", result), ("no", b"") or ("unknown", b"")."""
    if not outcome.ok:
        return "unknown", b""
    try:
        answer = _decode_found(outcome.payload)
    except UNREADABLE:
        return "unknown", b""
    return answer.found, bytes(answer.result)
