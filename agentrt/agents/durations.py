"""Durations as authors write them: seconds as a number, or text such as ``"250ms"``, ``"1h30m"`` or ``"2d"``."""

import math
import re
from typing import Final

from agentrt.errors import InputError

Duration = int | float | str

#: Longer than any timer makes sense; a year-long typo in seconds is found here and not by waiting for it.
SECONDS_MAX: Final = 10 * 366 * 86_400.0

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def parse_duration(value: Duration) -> float:
    """Seconds. Raises InputError for what is no duration, is negative, not finite, or more than ten years."""
    if isinstance(value, str):
        seconds = _parse_text(value)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{value!r} is no duration", hint="Give seconds, or text such as 15m or 2d")
    else:
        seconds = float(value)
    if not math.isfinite(seconds) or not 0 <= seconds <= SECONDS_MAX:
        raise InputError(f"{value!r} is not between 0 seconds and ten years")
    return seconds


def _parse_text(text: str) -> float:
    total, position = 0.0, 0
    for part in _PART.finditer(text):
        if part.start() != position:
            break
        total += float(part[1]) * _UNITS[part[2]]
        position = part.end()
    if not text or position != len(text):
        raise InputError(f"{text!r} is no duration", hint="Write it like 250ms, 30s, 15m, 1h30m or 2d")
    return total
