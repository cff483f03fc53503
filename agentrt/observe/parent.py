"""Whose trace a run belongs to: the ``traceparent`` of https://www.w3.org/TR/trace-context, as callers send it.
Pure."""

import re
from typing import Final

import msgspec

#: What any caller may send and we keep; a version that we do not know may be longer, and has the same beginning.
TRACEPARENT_CHARS_MAX: Final = 512

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(msgspec.Struct, frozen=True):
    """The caller's span. ``sampled``: the caller keeps this trace."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_traceparent(text: str | None) -> TraceParent | None:
    """The header's value. None for what is none: a trace that cannot be continued begins anew, as the standard has
    it."""
    if text is None or len(text) > TRACEPARENT_CHARS_MAX:
        return None
    found = _FORM.fullmatch(text.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceParent(trace_id, span_id, bool(int(found[4], 16) & 1))


def known_traceparent(text: str) -> str | None:
    """What is kept of a caller's header."""
    parent = parse_traceparent(text)
    return None if parent is None else str(parent)
