"""Calendar windows in UTC: hours, days and months, each beginning at a time of its own. Pure integer arithmetic."""

from datetime import date
from enum import StrEnum
from typing import Final

from agentrt.errors import InputError

HOUR_NS: Final = 3600 * 10**9
DAY_NS: Final = 24 * HOUR_NS
_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()


class Span(StrEnum):
    """How long a window is."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


#: The shortest month: no window of the span is shorter, so a reset time lies within each.
SHORTEST_NS: Final = {Span.HOUR: HOUR_NS, Span.DAY: DAY_NS, Span.MONTH: 28 * DAY_NS}
#: The last moment that has a window: Unix ns of the year 9998.
NOW_NS_MAX: Final = (date(9999, 1, 1).toordinal() - _EPOCH_ORDINAL) * DAY_NS - 1


def window_of(span: Span, now_ns: int, reset_ns: int = 0) -> tuple[int, int]:
    """(start, end) in Unix ns of the window that holds ``now_ns``; the end belongs to the next one. ``reset_ns`` is how
    long after the full hour, midnight, or the first of the month (UTC) a window begins. Raises InputError for times
    before 1970 or beyond `NOW_NS_MAX`, or a reset beyond the span."""
    if not 0 <= reset_ns < SHORTEST_NS[span]:
        raise InputError(f"a window of a {span} begins 0 to {SHORTEST_NS[span] - 1} ns after it, not {reset_ns}")
    if not reset_ns <= now_ns <= NOW_NS_MAX:
        raise InputError(f"there is no window at {now_ns} ns")
    at = now_ns - reset_ns
    if span is not Span.MONTH:
        length = SHORTEST_NS[span]
        start = at - at % length + reset_ns
        return start, start + length
    day = date.fromordinal(_EPOCH_ORDINAL + at // DAY_NS)
    year, month = (day.year, day.month + 1) if day.month < 12 else (day.year + 1, 1)
    return _month_ns(day.year, day.month) + reset_ns, _month_ns(year, month) + reset_ns


def _month_ns(year: int, month: int) -> int:
    return (date(year, month, 1).toordinal() - _EPOCH_ORDINAL) * DAY_NS


def later_window(span: Span, start_ns: int, count: int, reset_ns: int = 0) -> int:
    """The start of the window ``count`` windows after the one that starts at ``start_ns``."""
    if span is not Span.MONTH:
        return start_ns + count * SHORTEST_NS[span]
    day = date.fromordinal(_EPOCH_ORDINAL + (start_ns - reset_ns) // DAY_NS)
    months = day.year * 12 + day.month - 1 + count
    return _month_ns(months // 12, months % 12 + 1) + reset_ns
