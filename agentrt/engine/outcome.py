"""How runs end: from what the backend said, and from what a run was told. Pure."""

from typing import Any, Final

import msgspec

from agentrt.backends.base import Exit
from agentrt.decoding import UNREADABLE
from agentrt.errors import (
    AgentrtError,
    BudgetExhaustedError,
    EngineError,
    HostDiedError,
    LoopDetectedError,
    NonDeterminismError,
    RunCancelledError,
    RunError,
    RunTimedOutError,
    TrapError,
    errors_by_code,
)
from agentrt.records import Ending, RunAccepted
from agentrt.states import RunState

_SHOWN_BYTES: Final = 2_000  # of a request or an output in an error
_TRACE_CHARS: Final = 8_000
_encode: Final = msgspec.json.encode
_check_json: Final = msgspec.json.Decoder(msgspec.Raw).decode


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended: ``result`` is JSON when SUCCEEDED, ``error`` an error as JSON otherwise."""

    state: RunState
    result: bytes | None
    error: bytes | None


_NULL: Final = Outcome(RunState.SUCCEEDED, b"null", None)


def out_of_fuel(run_id: str, accepted: RunAccepted, where: str = "") -> Outcome:
    """``where``: what has used it, if not the run's own guest."""
    error = BudgetExhaustedError(f"the run has used its {accepted.fuel_max} fuel{where}", run=run_id, limit="fuel_max")
    return Outcome(RunState.BUDGET_EXHAUSTED, None, _encode(error.to_dict()))


def outcome_of(exit: Exit, run_id: str, accepted: RunAccepted, result_bytes_max: int) -> Outcome:
    """What the end of a guest that nobody ended means for its run. ``result_bytes_max``: the node's."""
    error: AgentrtError
    if exit.reason == "returned":
        if exit.output is None:
            return _NULL
        result = exit.output
        try:
            _check_json(result)
            result.decode()
        except UNREADABLE as wrong:
            return failed(RunError(f"the result is not JSON: {wrong}", run=run_id))
        size = len(result)
        if size > (most := accepted.budget.get("result_bytes", size)):
            error = BudgetExhaustedError(
                f"the result has {size} bytes, and the run's budget is {most}", run=run_id, limit="result_bytes"
            )
            return Outcome(RunState.BUDGET_EXHAUSTED, None, _encode(error.to_dict()))
        limits = {"limits.result_bytes_max": result_bytes_max}
        if accepted.result_bytes_max:
            limits["max_result_bytes"] = accepted.result_bytes_max
        limit = min(limits, key=limits.__getitem__)
        if size <= limits[limit]:
            return Outcome(RunState.SUCCEEDED, result, None)
        error = RunError(f"the result has {size} bytes, more than {limits[limit]}", run=run_id, limit=limit)
    elif exit.reason == "fuel":
        return out_of_fuel(run_id, accepted)
    elif exit.reason == "failed" and exit.message and exit.output is not None:
        return Outcome(RunState.FAILED, None, _with_trace(exit.output, exit.message))
    elif exit.reason == "failed":
        error = RunError(f"the agent returned {exit.code}", run=run_id)
        details: dict[str, Any] = {"exit_code": exit.code}
        if exit.output is not None:
            details["output"] = shown(exit.output)
        if exit.stderr:
            details["stderr"] = exit.stderr[-_SHOWN_BYTES:].decode(errors="replace")
        return failed(error, details)
    elif exit.reason == "non_determinism":
        error = NonDeterminismError(exit.message, run=run_id)
    elif exit.reason == "host_died":
        error = HostDiedError(exit.message or "the run ended its host", run=run_id)
    elif exit.reason in ("trap", "memory"):
        error = TrapError(exit.message or f"trap {exit.code}", run=run_id)
    else:
        error = EngineError(exit.message or exit.reason, run=run_id)
    return failed(error)


def _with_trace(error: bytes, trace: str) -> bytes:
    """The error as JSON that a program ended with, and where."""
    try:
        told = msgspec.json.decode(error, type=dict[str, Any])
    except UNREADABLE:
        told = {"code": RunError.code, "message": shown(error)}
    return _encode(told | {"trace": trace[-_TRACE_CHARS:]})


def failed(error: AgentrtError, details: dict[str, Any] | None = None) -> Outcome:
    """FAILED with the error, and what else is known."""
    return Outcome(RunState.FAILED, None, _encode(error.to_dict() | (details or {})))


def towards(run_id: str, ending: Ending) -> Outcome:
    """The outcome of a run that was told to end in an earlier life of the node."""
    kinds: dict[str, type[AgentrtError]] = {
        RunState.CANCELLED: RunCancelledError,
        RunState.TIMED_OUT: RunTimedOutError,
        RunState.BUDGET_EXHAUSTED: BudgetExhaustedError,
        RunState.LOOP_DETECTED: LoopDetectedError,
    }
    kind = errors_by_code().get(ending.code or "") or kinds.get(ending.towards, RunError)
    error = kind(ending.reason, run=run_id, limit=ending.limit)
    return Outcome(RunState(ending.towards), None, _encode(error.to_dict()))


def shown(data: bytes) -> str:
    """The beginning of the data as text, for an error."""
    text = data[:_SHOWN_BYTES].decode(errors="replace")
    return text if len(data) <= _SHOWN_BYTES else text + f"… ({len(data)} bytes)"
