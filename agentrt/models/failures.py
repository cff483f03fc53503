"""What goes wrong in a call to a model, and of which kind it is. Pure."""

import email.utils
import re
from enum import StrEnum
from typing import Any, Final

import msgspec

from agentrt.models.prices import Usage


class FailureKind(StrEnum):
    """``transport``: the way or the server broke; another attempt may work, and the one before may have cost something.
    ``rate``: the server wants less; another attempt may work later, and this one cost nothing. ``conflict``: the answer
    is not what was asked for; only the agent can know what to do. ``fatal``: another attempt would end the same."""

    TRANSPORT = "transport"
    RATE = "rate"
    CONFLICT = "conflict"
    FATAL = "fatal"


MESSAGE_CHARS_MAX: Final = 500


class ModelFailure(Exception):
    """A call that failed. ``code`` is for the agent; ``usage`` what it cost all the same, if that is known;
    ``unseen``: the server may have worked for it, and nobody knows how long."""

    def __init__(
        self,
        kind: FailureKind,
        code: str,
        message: str,
        *,
        status: int = 0,
        retry_after_ns: int | None = None,
        usage: Usage | None = None,
        unseen: bool = False,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code
        self.message = message[:MESSAGE_CHARS_MAX]
        self.status = status
        self.retry_after_ns = retry_after_ns
        self.usage = usage
        self.unseen = unseen
        self.details = details or {}

    def to_dict(self) -> dict[str, Any]:
        """As the agent gets it."""
        known: dict[str, Any] = {"status": self.status or None, "retry_after_s": None}
        if self.retry_after_ns is not None:
            known["retry_after_s"] = self.retry_after_ns / 1e9
        return (
            {"code": self.code, "message": self.message, "kind": self.kind.value}
            | {key: value for key, value in known.items() if value is not None}
            | self.details
        )


#: Of 429 and 403: no waiting helps, somebody must pay.
_SPENT: Final = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "quota_exceeded", "account_deactivated"}
)
_TOO_LONG: Final = frozenset({"context_length_exceeded", "string_above_max_length"})
_TRANSPORT: Final = frozenset({408, 425, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_CONFLICT: Final = frozenset({409, 412})


class _Error(msgspec.Struct, frozen=True):
    message: Any = None
    type: Any = None
    code: Any = None


class _Body(msgspec.Struct, frozen=True):
    error: _Error | str | None = None


_decode: Final = msgspec.json.Decoder(_Body).decode


def failure_of(status: int, body: bytes, retry_after_ns: int | None) -> ModelFailure:
    """What an HTTP answer other than 200 means. Whatever ``body`` holds, this does not raise."""
    error = _error_in(body)
    message = error.message if isinstance(error.message, str) and error.message else f"the provider answered {status}"
    names = {name for name in (error.code, error.type) if isinstance(name, str)}
    kind, code = FailureKind.FATAL, "model_refused"
    if names & _SPENT or status == 402:
        code = "model_quota"
    elif status == 429:
        kind, code = FailureKind.RATE, "model_rate"
    elif status in _TRANSPORT or status >= 500:
        kind, code = FailureKind.TRANSPORT, "model_transport"
    elif status in _CONFLICT:
        kind, code = FailureKind.CONFLICT, "model_conflict"
    elif status in (401, 403):
        code = "model_auth"
    elif names & _TOO_LONG or status == 413:
        code = "model_context"
    elif 300 <= status < 400:
        message = f"the provider answered {status}; redirects are not followed"
    if kind not in (FailureKind.RATE, FailureKind.TRANSPORT):
        retry_after_ns = None
    return ModelFailure(kind, code, message, status=status, retry_after_ns=retry_after_ns)


def _error_in(body: bytes) -> _Error:
    try:
        found = _decode(body).error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _Error()
    if found is None:
        return _Error()
    return _Error(found) if isinstance(found, str) else found


_SECONDS: Final = re.compile(r"\s*(\d{1,9})(?:\.(\d{1,9}))?\d*\s*")


def retry_after(seconds: str | None, milliseconds: str | None, now_ns: int, max_ns: int) -> int | None:
    """How long to wait, in ns, at most ``max_ns``: from ``retry-after-ms`` if there is one, else from ``Retry-After``
    as seconds or as a date. None: nothing (sensible) was said. ``now_ns`` is the wall clock."""
    if milliseconds is not None and (match := _SECONDS.fullmatch(milliseconds)):
        return min(int(match[1]) * 1_000_000, max_ns)
    if seconds is None:
        return None
    if match := _SECONDS.fullmatch(seconds):
        fraction = int((match[2] or "0").ljust(9, "0"))
        return min(int(match[1]) * 1_000_000_000 + fraction, max_ns)
    if seconds.strip().isdecimal():  # more digits than anybody waits for
        return max_ns
    try:
        date = email.utils.parsedate_to_datetime(seconds)
        until_ns = int(date.timestamp() * 1e9)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return min(max(0, until_ns - now_ns), max_ns)
