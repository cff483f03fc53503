"""What a call comes to: the exit of a guest as the result that an agent gets. Pure.

What the guest wrote is what the code made of it: it is read as strictly as anything that strangers send.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentrt.backends.base import Exit
from agentrt_sandbox.request import FILES_MAX, Bytes, Limits

_TEXT_MAX: Final = 4_000
_PATH_MAX: Final = 1_024
#: wasmtime's.
_STACK_OVERFLOW: Final = 0
#: Ends the line that the core puts before a stream whose beginning is cut off.
_CUT: Final = b" bytes cut]"

#: What an interpreter says when it has no memory left to say it with.
_NO_MEMORY: Final = (b"MemoryError", b"out of memory", b"memory allocation failed")

_Text = Annotated[str, Meta(max_length=_TEXT_MAX)]


class _Failure(msgspec.Struct):
    kind: _Text
    type: _Text = ""
    message: _Text = ""
    traceback: _Text = ""


class _Answer(msgspec.Struct):
    """As the harness writes it."""

    value: msgspec.Raw | UnsetType = UNSET
    repr: _Text | UnsetType = UNSET
    files: dict[Annotated[str, Meta(max_length=_PATH_MAX)], str | Bytes] = {}
    error: _Failure | None = None


class Error(msgspec.Struct, omit_defaults=True):
    """Why the code came to no value. ``limit``: which argument bounded it, ``limit_value``: how much that was;
    ``hint``: what to do."""

    code: str
    message: str
    type: str = ""
    traceback: str = ""
    limit: str = ""
    limit_value: int = 0
    hint: str = ""


class Result(msgspec.Struct):
    """``value``: of the last expression, as JSON; ``repr``: of what is no JSON. ``stdout``, ``stderr``: the ends of
    them. ``files``: those that the code wrote."""

    value: msgspec.Raw
    repr: str | None
    error: Error | None
    stdout: str
    stderr: str
    files: dict[str, str | Bytes]
    fuel: int


#: What harnesses may say, and what an agent can do about it.
_SAID: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "raised": ("raised", "", ""),
        "syntax": ("syntax", "", ""),
        "exited": ("exited", "", ""),
        "memory": ("memory", "memory_bytes", "Use less memory at a time, or ask for more memory_bytes"),
        "stack": ("stack", "", "Use a loop instead of recursion"),
        "result": ("result", "result_bytes", "Return less, or write less to files"),
    }
)
_HINTS: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "fuel": ("fuel", "it had used up its fuel", "Do less, or ask for more fuel"),
        "memory": ("memory_bytes", "it needed more memory than it may have", "Ask for more memory_bytes"),
        "time": ("time_ms", "it had used up its CPU time", "Do less, or ask for more time_ms"),
    }
)
_decode: Final = msgspec.json.Decoder(_Answer).decode
_NULL: Final = msgspec.Raw(b"null")


def result_of(exit: Exit, limits: Limits, why: str | None = None) -> Result:
    """``why``: the guest was killed for that: time, syscall; or memory: it could not begin."""
    result = Result(_NULL, None, None, "", "", {}, exit.fuel)
    result.stdout = _tail(exit.stdout, limits.output_bytes)
    result.stderr = _tail(exit.stderr, limits.output_bytes)
    if why is None and exit.output is not None and len(exit.output) > limits.result_bytes:
        message = f"value and files have {len(exit.output)} bytes as JSON"
        result.error = _error_of_harness(_Failure("result", message=message), limits)
        return result
    answer = _answer(exit.output) if why is None and exit.reason in ("returned", "failed") else None
    if answer is None:
        result.error = _error_of_exit(exit, limits, why)
        return result
    result.files = answer.files
    if answer.error is not None:
        result.error = _error_of_harness(answer.error, limits)
    elif answer.value is not UNSET:
        result.value = msgspec.Raw(bytes(answer.value))
    elif answer.repr is not UNSET:
        result.repr = answer.repr
    return result


def encode(result: Result, bytes_max: int) -> bytes:
    """As JSON of at most that; a result that does not fit is an error that says so."""
    data = msgspec.json.encode(result)
    if len(data) <= bytes_max:
        return data
    message = f"value, files and output have {len(data)} bytes as JSON"
    result.error = Error("result", message, limit="limits.result_bytes_max", limit_value=bytes_max)
    result.value, result.repr, result.files = _NULL, None, {}
    data = msgspec.json.encode(result)
    if len(data) > bytes_max:
        result.stdout = result.stderr = ""
    return msgspec.json.encode(result)


def _answer(output: bytes | None) -> _Answer | None:
    if not output:
        return None
    try:
        output.decode()
        answer = _decode(output)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if len(answer.files) > FILES_MAX or (answer.error is not None and answer.error.kind not in _SAID):
        return None
    return answer


def _error_of_harness(failure: _Failure, limits: Limits) -> Error:
    code, limit, hint = _SAID[failure.kind]
    message = failure.message or failure.type or code
    value = getattr(limits, limit) if limit else 0
    return Error(code, message, failure.type, failure.traceback, limit, value, hint)


def _error_of_exit(exit: Exit, limits: Limits, why: str | None) -> Error:
    why = why or exit.reason
    if why in _HINTS:
        limit, message, hint = _HINTS[why]
        return Error(why, message, limit=limit, limit_value=getattr(limits, limit), hint=hint)
    if why == "syscall":
        return Error("syscall", "code in the sandbox has no syscalls", hint="Return what is needed, and call it after")
    if why == "trap":
        if exit.code == _STACK_OVERFLOW:
            return Error("stack", "it was nested too deeply", hint="Use a loop instead of recursion")
        return Error("crashed", f"the interpreter stopped: {_first_line(exit.message)}")
    if why == "failed" and any(word in exit.stderr[-_TEXT_MAX:] for word in _NO_MEMORY):
        return _error_of_harness(_Failure("memory", "MemoryError"), limits)
    return Error("exited", f"it ended without a result, with exit code {exit.code}")


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:200]


def _tail(stream: bytes, bytes_max: int) -> str:
    """The end of a stream, and a line before it that says so if there was more."""
    head, newline, rest = stream.partition(b"\n")
    cut = bool(newline) and head.startswith(b"[") and head.endswith(_CUT)
    body = rest if cut else stream
    if len(body) > bytes_max or cut:
        body = body[len(body) - bytes_max :] if bytes_max else b""
        return "… (the beginning is cut)\n" + body.decode(errors="replace")
    return body.decode(errors="replace")


def failure(code: str, message: str, **details: Any) -> bytes:
    """The payload of a step that failed."""
    return msgspec.json.encode({"code": code, "message": message} | details)
