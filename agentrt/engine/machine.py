r"""The state machine of one run. It decides; its port does.

Pure: no I/O, no clock, no randomness of its own. Events come in as method calls on the control loop (the guest's, the
store's `on_committed`, a tool's `on_outcome`, `cancel`, `halt`); what has to happen goes out through the `RunPort` and
the guest's methods, none of which call back before they have returned.

    ACCEPTING -> REPLAY or LIVE -> ENDING -> ENDED          any but ENDED -> DISCARDED (an append was refused)
                              \-> PARKING (waits for an operator, or the node stops)

What must hold:
- `_version` is the seq of the last record made. Records are made in the order in which answers are given and wait in
  `_pending` until a batch takes all of them; so batches carry consecutive records and a guest's next step is
  never durable before an answer it has seen.
- A tool of kind keyed is called only after its StepPrepared is durable, and never for a run that was told to end.
- Answers reach the guest in the order of their records' seq. While the journal still holds answers (REPLAY), one is
  given per wait: the one with the lowest seq among those waited for, which is what the guest got the first time.
- `_keyed_open` counts steps that were prepared and are not settled; a run ends only when it is 0.
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import msgspec

from agentrt.backends.base import Exit, Guest, Request, Status
from agentrt.decoding import UNREADABLE
from agentrt.digest import digest, request_digest
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.history import History, Recorded
from agentrt.engine.ports import RunPort
from agentrt.errors import (
    AgentrtError,
    BudgetExhaustedError,
    ClosedError,
    EngineError,
    NonDeterminismError,
    RunCancelledError,
    RunError,
    StoreError,
    TrapError,
    UnknownToolError,
)
from agentrt.ids import idempotency_key
from agentrt.records import (
    CancelRequested,
    Cost,
    OutcomeUnknown,
    Record,
    Resumed,
    RunAccepted,
    RunEnded,
    StepAborted,
    StepCommitted,
    StepPrepared,
    Waiting,
)
from agentrt.states import RunState, StepState
from agentrt.stores.base import READY, Batch, Head, Row
from agentrt.stores.keys import ready_key
from agentrt.syscalls import BY_NUMBER
from agentrt.tools.outcome import ToolOutcome

_TOOL_CALL: Final = 1
_LOG: Final = 13
_SHOWN_BYTES: Final = 2_000  # of each request in a NonDeterminism error


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``tool.call``."""

    tool: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


_decode_call: Final = msgspec.json.Decoder(ToolCall).decode
_check_json: Final = msgspec.json.Decoder(msgspec.Raw).decode
_encode: Final = msgspec.json.encode


class Phase(IntEnum):
    ACCEPTING = 0  # RunAccepted is not durable
    REPLAY = 1  # the journal holds answers that the guest has not seen
    LIVE = 2
    ENDING = 3  # the outcome is known; steps in flight are still to be recorded
    PARKING = 4  # the guest goes; steps in flight are still to be recorded
    ENDED = 5  # RunEnded is on its way
    DISCARDED = 6  # the store knows better


class StepInFlight:
    """A step between its syscall and its answer."""

    __slots__ = ("args", "attempt", "digest", "handle", "key", "kind", "op", "path", "recorded", "request", "tool")

    def __init__(self, handle: int, path: str, op: str, request: bytes, request_digest: bytes) -> None:
        self.handle = handle
        self.path = path
        self.op = op
        self.request = request
        self.digest = request_digest
        self.tool = ""
        self.kind = ""
        self.args = b""
        self.key: str | None = None
        self.attempt = 1
        self.recorded: Recorded | None = None  # a pure step that is executed again for its result


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended: ``result`` is JSON when SUCCEEDED, ``error`` an error as JSON otherwise."""

    state: RunState
    result: bytes | None
    error: bytes | None


_NULL: Final = Outcome(RunState.SUCCEEDED, b"null", None)
_ACCEPTING, _REPLAY, _LIVE = Phase.ACCEPTING, Phase.REPLAY, Phase.LIVE
_ENDING, _PARKING, _ENDED, _DISCARDED = Phase.ENDING, Phase.PARKING, Phase.ENDED, Phase.DISCARDED


class RunMachine:
    """One run in memory. Make it with a RunAccepted that is not in the store yet, or with a `History`."""

    __slots__ = (
        "_awaited",
        "_calls",
        "_committed_left",
        "_error",
        "_halted",
        "_history",
        "_inflight",
        "_journal_bytes",
        "_keyed_open",
        "_known",
        "_pending",
        "_port",
        "_returned",
        "_segment",
        "_segment_prefix",
        "_undelivered",
        "_version",
        "_waiting",
        "accepted",
        "at_ns",
        "cancel_reason",
        "exit",
        "guest",
        "joining",
        "loaded_version",
        "open",
        "outcome",
        "pending_since_ns",
        "phase",
        "run_id",
        "state",
        "tag",
        "tier",
        "wait",
    )

    def __init__(self, run_id: str, accepted: RunAccepted, port: RunPort, history: History | None = None) -> None:
        self.run_id = run_id
        self.accepted = accepted
        self.tier = accepted.base_tier
        self._port = port
        self.guest: Guest | None = None
        self.phase = _ACCEPTING
        self.state = RunState.ACTIVE
        self.wait: Waiting | None = None
        self.cancel_reason: str | None = None
        self.outcome: Outcome | None = None
        self.exit: Exit | None = None
        self.tag: Any = None  # the engine's
        self.open: dict[int, StepInFlight] = {}
        self.at_ns = accepted.at_ns
        self.joining = False
        self.loaded_version = 0  # of the journal that it was made from
        self.pending_since_ns = 0
        self._version = 0
        self._pending: list[Record] = []
        self._inflight: deque[list[StepInFlight] | Callable[[], None] | None] = deque()
        self._keyed_open = 0
        self._calls = 0
        self._returned = False
        self._halted = False
        self._error: AgentrtError | None = None
        self._segment = 1
        self._segment_prefix = "1:"
        self._journal_bytes = 0
        self._history: dict[str, Recorded] = {}
        self._committed_left = 0
        self._known: dict[int, tuple[int, int, bytes, int]] = {}  # handle -> seq, status, payload, at
        self._awaited: dict[int, int] = {}  # handle -> seq, of pure steps executed again
        self._undelivered: set[int] = set()
        self._waiting: tuple[int, ...] | None = None
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
        self._version = self.loaded_version = run.version
        self._segment = run.segment
        self._segment_prefix = f"{run.segment}:"
        self._journal_bytes = history.journal_bytes
        self._history = dict(history.steps)
        self._committed_left = sum(1 for recorded in self._history.values() if recorded.committed)
        self.phase = _REPLAY if self._committed_left else _LIVE

    # --- for the engine: the run's life -----------------------------------------

    @property
    def version(self) -> int:
        """Seq of the last record made, durable or not."""
        return self._version

    @property
    def replays(self) -> bool:
        """Whether a guest started now gets answers from the journal first."""
        return self.phase is _REPLAY

    @property
    def waits(self) -> bool:
        """Whether records wait for company."""
        return bool(self._pending)

    @property
    def settled(self) -> bool:
        """Nothing of it is under way: no guest, no tool, no commit."""
        return self.guest is None and not self._calls and not self._inflight

    def accept(self, rows: tuple[Row, ...], unique: tuple[Row, ...]) -> None:
        """Journal the acceptance; `RunPort.on_accepted` follows."""
        self._version = 1
        self._pending.append(self.accepted)
        self._commit(self._on_accepted, "accept", rows, unique)

    def exhausted_step(self) -> str | None:
        """The path of a recorded open step that has had all its attempts, or None."""
        for path, recorded in self._history.items():
            lost = recorded.step.state in (StepState.PREPARED, StepState.OUTCOME_UNKNOWN)
            if lost and recorded.step.attempt >= self._port.attempts_max:
                return path
        return None

    def resume(self) -> None:
        """The run is not WAITING any more: its guest starts now."""
        if self.state is RunState.WAITING:
            self.state = RunState.ACTIVE
            self.wait = None
            self._pending.append(Resumed(self._next_seq(), self._time()))
            self._commit(None, "wait")

    def wait_for_operator(self, path: str | None, detail: str) -> None:
        """Let the run wait until somebody steps in, and drop its guest. `RunPort.on_parked` follows."""
        if self.phase >= _ENDING:
            return
        if self.state is not RunState.WAITING:
            self._lose_prepared()
            self.wait = Waiting(self._next_seq(), self._time(), "operator", path, detail)
            self.state = RunState.WAITING
            self._pending.append(self.wait)
            self._commit(None, "wait")
        self.phase = _PARKING
        self._kill()
        self._maybe_parked()

    def cancel(self, reason: str) -> None:
        """End the run as CANCELLED. The guest goes at once; a step in flight is still recorded.

        `RunPort.on_cancelled` follows when the request is durable, unless the run is cancelled or ended already."""
        if self.phase >= _ENDED or self.phase is _ACCEPTING or self.cancel_reason is not None:
            return
        self.cancel_reason = reason
        self._pending.append(CancelRequested(self._next_seq(), self._time(), reason))
        self._commit(self._on_cancelled, "cancel")
        self._cancelled()

    def end_cancelled(self) -> None:
        """For a run that was loaded with its cancel flag set: end it without a guest."""
        self._cancelled()

    def fail(self, error: AgentrtError) -> None:
        """End the run as FAILED: its guest cannot be started."""
        if self.phase <= _LIVE:
            self._fail(error, {})

    def halt(self) -> None:
        """The node stops: drop the guest, record what is in flight, leave the run to the next start."""
        self._halted = True
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
        if phase is not _LIVE and phase is not _REPLAY:
            return
        starts: list[StepInFlight] | None = None
        for handle, number, payload in requests:
            if number == _LOG:
                if phase is _LIVE:
                    self._port.log(self, payload)
                continue
            op = BY_NUMBER[number].op
            path = self._segment_prefix + str(handle)
            step = StepInFlight(handle, path, op, payload, request_digest(op, payload))
            if self._history and (recorded := self._history.pop(path, None)) is not None:
                if not self._asked_again(step, recorded):
                    break
                if step.recorded is None and not recorded.committed:
                    starts = [step] if starts is None else [*starts, step]
                continue
            if number != _TOOL_CALL:
                self._refuse(step, "unsupported", f"{op} is not served by this release")
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
            step.kind = kind = spec.kind
            if kind == "keyed":
                key = step.key = idempotency_key(self.run_id, path, call.tool)
                self._version = seq = self._version + 1
                self._pending.append(StepPrepared(seq, self._time(), path, op, kind, payload, step.digest, key, 1))
                self._journal_bytes += len(payload)
                self._keyed_open += 1
                self.open[handle] = step
                if starts is None:
                    starts = [step]
                else:
                    starts.append(step)
            elif kind == "pure":
                self.open[handle] = step
                self._call(step)
            else:
                self._refuse(step, "unsupported", f"tools of kind {kind} are not served by this release")
        if starts is not None:
            self._commit(starts, "prepare")
        if self.phase is _REPLAY:
            self._waiting = waiting
            self._advance()
        self._check_journal()

    def on_exit(self, exit: Exit) -> None:
        self.guest = None
        self.exit = exit
        phase = self.phase
        if phase in (_REPLAY, _LIVE):
            if exit.reason == "killed":  # not by us: the backend is closing
                self._discard(ClosedError("the backend closed", run=self.run_id))
                return
            self.phase = _ENDING
            self.outcome = self._outcome_of(exit)
            self._returned = exit.reason == "returned"
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
        phase = self.phase
        if phase >= _ENDED:
            if phase is _DISCARDED:
                self._maybe_gone()
            return
        if outcome.host_died:
            self._host_died(step, outcome.payload)
        elif step.recorded is not None:
            self._pure_again(step, step.recorded, outcome)
        elif phase <= _LIVE or step.kind != "pure":
            self._settle(step, outcome.ok, outcome.payload)
        if phase <= _LIVE:
            self._check_journal()
            return
        self.flush()
        if phase is _ENDING:
            self._maybe_end()
        else:
            self._maybe_parked()

    def on_committed(self, error: StoreError | None) -> None:
        """The store's answer to the oldest batch under way."""
        after = self._inflight.popleft()
        if error is not None:
            self._refused(error)
        elif self.phase is _DISCARDED:
            self._maybe_gone()
        elif after is not None:
            if type(after) is list:
                self._start(after)
            else:
                after()  # type: ignore[operator]
        elif self.phase is _PARKING:
            self._maybe_parked()

    # --- steps ----------------------------------------------------------------------

    def _start(self, steps: list[StepInFlight]) -> None:
        """Their StepPrepared is durable."""
        if ARMED:
            hit("prepare.durable")
        if (self.phase <= _LIVE or (self.phase is _ENDING and self._returned)) and not self._halted:
            for step in steps:
                self._call(step)
            return
        for step in steps:  # told to end meanwhile: it never began
            self._pending.append(StepAborted(self._next_seq(), self._time(), step.path, "the run stopped before it"))
            self._forget(step)
        if self._halted and self._returned and self.phase is _ENDING:
            self.phase, self.outcome = _PARKING, None  # the guest has asked for them: the next start does them
        self.flush()
        if self.phase is _ENDING:
            self._maybe_end()

    def _call(self, step: StepInFlight) -> None:
        self._calls += 1
        if ARMED:
            hit("tool.before_dispatch")
        self._port.call_tool(self, step)
        if ARMED:
            hit("tool.after_dispatch")

    def _forget(self, step: StepInFlight) -> None:
        del self.open[step.handle]
        if step.kind == "keyed":
            self._keyed_open -= 1

    def _refuse(self, step: StepInFlight, code: str, message: str) -> None:
        """Answer a syscall that is not executed."""
        self._settle(step, False, _encode({"code": code, "message": message}))

    def _settle(self, step: StepInFlight, ok: bool, payload: bytes) -> None:
        """Record a step's outcome and give it to the guest."""
        self.open.pop(step.handle, None)
        at = self._time()
        kind = step.kind
        result: bytes | None = payload
        if kind == "keyed":
            self._keyed_open -= 1
        elif ok:
            result = None
        self._version = seq = self._version + 1
        if not self._pending:
            self.pending_since_ns = at
        self._pending.append(
            StepCommitted(seq, at, step.path, step.op, step.digest, ok, result, digest(payload), step.attempt)
        )
        if result is not None:
            self._journal_bytes += len(result)
        phase = self.phase
        if phase is _LIVE:
            self._complete(step.handle, Status.OK if ok else Status.FAILED, payload, at, seq)
        elif phase is _REPLAY:
            self._known[step.handle] = (seq, Status.OK if ok else Status.FAILED, payload, at)
            self._undelivered.add(step.handle)
            self._advance()
        else:
            return
        if not self.joining:
            self.joining = True
            self._port.join_later(self)

    def _complete(self, handle: int, status: int, payload: bytes, at: int, seq: int) -> None:
        if self.guest is None:
            return
        if ARMED:
            hit("guest.before_complete")
        self.guest.complete(handle, status, payload, at, seq)
        if ARMED:
            hit("guest.after_complete")

    def _host_died(self, step: StepInFlight, payload: bytes) -> None:
        """Nobody saw how the step ended. Both kinds may be done again; a keyed one with its key."""
        if step.kind == "pure":
            if self.phase >= _ENDING:
                return
            if step.attempt < self._port.attempts_max:
                step.attempt += 1
                self._call(step)
            elif step.recorded is not None:
                self._wait_for_tool(step)
            else:
                self._settle(step, False, payload)
            return
        self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), step.path, "the tool's host died"))
        if self.phase is _PARKING or (self.phase is _ENDING and not self._returned):
            self._forget(step)
        elif step.attempt < self._port.attempts_max:
            step.attempt += 1
            self._prepare_again(step)
            self._commit([step], "prepare")
        else:
            self._forget(step)
            was_ending = self.phase is _ENDING
            if was_ending:  # the guest has returned; it will again
                self.phase, self.outcome = _LIVE, None
            self.wait_for_operator(step.path, f"{step.attempt} attempts of tool {step.tool} ended without an outcome")

    def _prepare_again(self, step: StepInFlight) -> None:
        assert step.key is not None
        self._pending.append(
            StepPrepared(
                self._next_seq(), self._time(), step.path, step.op, step.kind, step.request, step.digest, step.key,
                step.attempt,
            )
        )  # fmt: skip

    # --- replay ---------------------------------------------------------------------

    def _asked_again(self, step: StepInFlight, recorded: Recorded) -> bool:
        """The guest repeats a syscall that the journal knows. False: the run is over."""
        known = recorded.step
        if known.op != step.op or known.digest != step.digest:
            self._diverged(step, recorded)
            return False
        if recorded.committed:
            self._committed_left -= 1
            if known.result is not None:
                status = Status.OK if known.ok else Status.FAILED
                self._known[step.handle] = (known.seq, status, known.result, recorded.at_ns)
                self._undelivered.add(step.handle)
                return True
        try:
            call = _decode_call(step.request)
            spec = self._port.tool(call.tool)
        except UnknownToolError:
            self._wait_for_tool(step)
            return False
        step.tool = call.tool
        step.args = bytes(call.args)
        if recorded.committed:
            step.kind = "pure"
            step.recorded = recorded
            self._awaited[step.handle] = known.seq
            self.open[step.handle] = step
            if spec.kind != "pure":  # its result was not kept because it was; executing it now would be an effect
                self._wait_for_tool(step)
                return False
            self._call(step)
            return True
        step.kind = known.kind or "keyed"
        step.key = known.key
        step.attempt = known.attempt
        if known.state is StepState.PREPARED:
            self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), step.path, "the node ended"))
        if known.state in (StepState.PREPARED, StepState.OUTCOME_UNKNOWN):
            step.attempt += 1
        self._prepare_again(step)
        self._keyed_open += 1
        self.open[step.handle] = step
        return True

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
                    "request": _shown(step.request),
                    "result": _shown(outcome.payload),
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
        if not self._committed_left and not self._awaited and not self._undelivered:
            self._go_live()

    def _go_live(self) -> None:
        self.phase = _LIVE
        for handle in sorted(self._undelivered, key=lambda handle: self._known[handle][0]):
            seq, status, payload, at = self._known[handle]
            self._complete(handle, status, payload, at, seq)
        self._known, self._undelivered, self._waiting = {}, set(), None
        if self.guest is not None:
            self.guest.go_live()

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
                "recorded_request": None if known.request is None else _shown(known.request),
                "request": _shown(step.request),
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
                "recorded_request": None if known.request is None else _shown(known.request),
            },
        )

    # --- endings --------------------------------------------------------------------

    def _outcome_of(self, exit: Exit) -> Outcome:
        error: AgentrtError
        if self._history:
            self._missed(f"ended ({exit.reason})")
            assert self.outcome is not None
            return self.outcome
        if exit.reason == "returned":
            if exit.output is None:
                return _NULL
            result = exit.output
            try:
                _check_json(result)
                result.decode()
            except UNREADABLE as wrong:
                return _failed(RunError(f"the result is not JSON: {wrong}", run=self.run_id))
            if len(result) <= self._port.result_bytes_max:
                return Outcome(RunState.SUCCEEDED, result, None)
            error = RunError(
                f"the result has {len(result)} bytes, more than {self._port.result_bytes_max}",
                run=self.run_id,
                limit="limits.result_bytes_max",
            )
        elif exit.reason == "fuel":
            error = BudgetExhaustedError(
                f"the run has used its {self.accepted.fuel_max} fuel", run=self.run_id, limit="fuel_max"
            )
            return Outcome(RunState.BUDGET_EXHAUSTED, None, _encode(error.to_dict()))
        elif exit.reason == "failed":
            error = RunError(f"the agent returned {exit.code}", run=self.run_id)
            details: dict[str, Any] = {"exit_code": exit.code}
            if exit.output is not None:
                details["output"] = _shown(exit.output)
            if exit.stderr:
                details["stderr"] = exit.stderr[-_SHOWN_BYTES:].decode(errors="replace")
            return _failed(error, details)
        elif exit.reason in ("trap", "memory"):
            error = TrapError(exit.message or f"trap {exit.code}", run=self.run_id)
        else:
            error = EngineError(exit.message or exit.reason, run=self.run_id)
        return _failed(error)

    def _fail(self, error: AgentrtError, details: dict[str, Any]) -> None:
        """End the run as FAILED, wherever its guest is."""
        self.outcome = _failed(error, details)
        self._returned = False
        self._end_guest()

    def _check_journal(self) -> None:
        limit = self._port.journal_bytes_max
        if self._journal_bytes <= limit or self.phase > _LIVE:
            return
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
        self.outcome = Outcome(RunState.CANCELLED, None, _encode(error.to_dict()))
        self._returned = False
        self._end_guest()

    def _end_guest(self) -> None:
        self.phase = _ENDING
        self._lose_prepared()
        for handle in [handle for handle, step in self.open.items() if step.kind == "pure"]:
            del self.open[handle]
        self._kill()
        self._maybe_end()

    def _lose_prepared(self) -> None:
        """Steps of the journal that the guest will not ask for again: nobody saw how they ended."""
        for recorded in self._history.values():
            if recorded.step.state is StepState.PREPARED:
                path = recorded.step.path
                self._pending.append(OutcomeUnknown(self._next_seq(), self._time(), path, "the node ended"))
        self._history = {}

    def _kill(self) -> None:
        if self.guest is not None:
            self.guest.kill()

    def _maybe_end(self) -> None:
        if self.phase is not _ENDING or self.guest is not None or self._keyed_open or self.outcome is None:
            return
        outcome, exit = self.outcome, self.exit
        cost = Cost(exit.fuel, exit.slot_ns) if exit is not None else Cost()
        self.phase = _ENDED
        self.state = outcome.state
        self.wait = None
        self._pending.append(
            RunEnded(self._next_seq(), self._time(), outcome.state._value_, outcome.result, outcome.error, cost)
        )
        self._commit(self._on_ended, "end", (Row(READY, self.ready_key(), None),))

    def _maybe_parked(self) -> None:
        if self.phase is _PARKING and self.settled and not self._pending:
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

    def _on_ended(self) -> None:
        if ARMED:
            hit("end.durable")
        self._port.on_ended(self)

    # --- records ----------------------------------------------------------------------

    def ready_key(self) -> bytes:
        """Key of the run's READY row."""
        return ready_key(self.accepted.base_tier, self.accepted.at_ns, self.run_id)

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
        after: list[StepInFlight] | Callable[[], None] | None,
        point: str,
        rows: tuple[Row, ...] = (),
        unique: tuple[Row, ...] = (),
    ) -> None:
        """Hand all waiting records to the store; ``after`` happens when they are durable."""
        records = tuple(self._pending)
        self._pending.clear()
        accepted = self.accepted
        version = self._version
        head = Head(
            self.run_id,
            version,
            self.state,
            accepted.tenant,
            accepted.agent,
            accepted.version,
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
        self._inflight.append(after)
        self._port.commit(self, batch, self.on_committed)
        if ARMED:
            hit(point + ".after_commit")




def _failed(error: AgentrtError, details: dict[str, Any] | None = None) -> Outcome:
    return Outcome(RunState.FAILED, None, _encode(error.to_dict() | (details or {})))


def _shown(data: bytes) -> str:
    text = data[:_SHOWN_BYTES].decode(errors="replace")
    return text if len(data) <= _SHOWN_BYTES else text + f"… ({len(data)} bytes)"
