"""Executing calls of a tool in the process where its code runs: one call, a batch, or the question what became of one.

The same code serves async tools on a host's loop and sync tools in a worker: a coroutine that never waits is run by
`run_to_end`.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import ToolConflictError, ToolError, ToolRateLimitedError, ToolUnavailableError
from agentrt.tools.binding import Binding, encode_result, error_payload, failure
from agentrt.tools.declare import BatchItem
from agentrt.tools.protocol import Call, Reply
from agentrt.tools.reconcile import encode_found
from agentrt.tools.secretrefs import redact, redact_payload

Value = TypeVar("Value")
#: Kinds of failure that a tool may name by what it raises.
_CODES: Final = frozenset({ToolUnavailableError.code, ToolRateLimitedError.code, ToolConflictError.code})


class Stop:
    """Why an execution was cancelled, set by who cancels it; None: the tool did that to itself."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: tuple[bytes, str] | None = None


def run_to_end(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """The value of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: Value = end.value
        return value
    coroutine.close()
    raise TypeError("a sync tool waited for something")


async def execute(binding: Binding, call: Call, stop: Stop, result_bytes_max: int) -> Reply:
    """Execute one call. Raises nothing."""
    more = call.more
    secrets = None if more is None else more.secrets
    asks = more is not None and more.reconcile
    try:
        if asks:
            function = binding.reconcile
            if function is None:
                return Reply(call.id, *failure("tool_import", "the tool has no reconcile function any more"), 0)
            keywords = binding.reconcile_arguments(call.args, call.key, call.attempt, secrets)
        else:
            function = binding.function
            keywords = binding.arguments(call.args, call.key, call.attempt, secrets)
    except UNREADABLE as error:
        return _unfit(call, error)
    began = time.monotonic_ns()
    unknown = False
    payload: bytes
    code: str | None
    try:
        if binding.is_async:
            result = await function(**keywords)
        else:
            result = _sync_result(function(**keywords))
        payload, code = encode_found(result, result_bytes_max) if asks else encode_result(result, result_bytes_max)
    except BaseException as error:  # SystemExit would end the loop and with it the calls of others
        payload, code, unknown = _stopped_or_raised(error, stop)
    cost_ns = time.monotonic_ns() - began
    if secrets:
        return _reply(call, payload, code, cost_ns, unknown)
    return Reply(call.id, payload, code, cost_ns, unknown)


def _sync_result(result: Any) -> Any:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("a sync tool returned a coroutine")
    return result


async def execute_batch(binding: Binding, calls: list[Call], stop: Stop, result_bytes_max: int) -> list[Reply]:
    """Give the tool's batch function what fits; each item ends for itself. Raises nothing.

    A batch that raises as a whole is done again one by one where that is safe, so that one bad item does not fail the
    others.
    """
    replies: list[Reply] = []
    fit: list[Call] = []
    items: list[BatchItem] = []
    for call in calls:
        try:
            items.append(BatchItem(binding.given(call.args, _secrets_of(call)), call.key, call.attempt))
        except UNREADABLE as error:
            replies.append(_unfit(call, error))
        else:
            fit.append(call)
    if len(fit) < 2 or binding.batch is None:
        return replies + [await execute(binding, call, stop, result_bytes_max) for call in fit]
    began = time.monotonic_ns()
    try:
        results = await binding.batch(items) if binding.is_async else binding.batch(items)
        if not isinstance(results, (list, tuple)) or len(results) != len(fit):
            what = f"{len(results)} results" if isinstance(results, (list, tuple)) else type(results).__name__
            raise TypeError(f"a batch of {len(fit)} returned {what}, not a list of as many results")
    except BaseException as error:
        if stop.reason is None and binding.kind in ("pure", "keyed"):
            return replies + [await execute(binding, call, stop, result_bytes_max) for call in fit]
        cost_ns = (time.monotonic_ns() - began) // len(fit)
        payload, code, unknown = _stopped_or_raised(error, stop)
        return replies + [_reply(call, payload, code, cost_ns, unknown) for call in fit]
    cost_ns = (time.monotonic_ns() - began) // len(fit)
    for call, result in zip(fit, results, strict=True):
        if isinstance(result, BaseException):
            replies.append(_reply(call, *raised(result), cost_ns, False))
        else:
            replies.append(_reply(call, *encode_result(result, result_bytes_max), cost_ns, False))
    return replies


def _stopped_or_raised(error: BaseException, stop: Stop) -> tuple[bytes, str, bool]:
    """(payload, code, unknown) of what came out of a tool's code."""
    if stop.reason is not None and not isinstance(error, ToolError):  # a ToolError says how it ended all the same
        return *stop.reason, True
    return *raised(error), False


def _secrets_of(call: Call) -> dict[str, str] | None:
    return None if call.more is None else call.more.secrets


def _unfit(call: Call, error: Exception) -> Reply:
    return _reply(call, *failure("tool_args", f"the arguments do not fit: {error}"), 0, False)


def _reply(call: Call, payload: bytes, code: str | None, cost_ns: int, unknown: bool) -> Reply:
    secrets = _secrets_of(call)
    if secrets:
        if code is None:
            payload = redact_payload(payload, secrets)
        else:
            told = msgspec.json.decode(payload)
            more = {key: value for key, value in told.items() if key not in ("code", "message")}
            payload = error_payload(code, redact(told["message"], secrets), more)
    return Reply(call.id, payload, code, cost_ns, unknown)


def raised(error: BaseException) -> tuple[bytes, str]:
    """(payload, code) for what a tool raised. A ToolError keeps its own words."""
    if isinstance(error, ToolError):
        code = error.code if error.code in _CODES else "tool_failed"
        after_s = getattr(error, "retry_after_s", None)
        known = isinstance(after_s, int | float) and math.isfinite(after_s)
        return error_payload(code, error.message, {"retry_after_s": after_s} if known else None), code
    if isinstance(error, asyncio.CancelledError):
        return failure("tool_failed", "CancelledError")
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    name = type(error).__name__
    return failure("tool_failed", f"{name}: {text}" if text else name)


def timed_out(timeout_ns: int) -> tuple[bytes, str]:
    """(payload, code) for a call stopped at its time-out."""
    return failure("tool_timeout", f"not finished within {timeout_ns / 1e9:g} seconds")


def cancelled() -> tuple[bytes, str]:
    """(payload, code) for a call stopped because its caller does not want it any more."""
    return failure("cancelled", "the call was cancelled")
