"""What is counted and bounded: the keys of budgets, and how limits on them are written. Pure.

A **counted** key is summed over time and up the levels; a **bound** holds for each run, call or family by itself. A
limit is written as key (``tokens``), or, above runs, as key and window (``tokens/day``). Money is in micro-dollars.
"""

from collections.abc import Mapping
from typing import Any, Final

from agentrt.errors import InputError
from agentrt.flow.windows import Span

#: Counted keys; the place of each is its index in a vector.
COUNTED: Final = ("model_calls", "tool_calls", "tokens", "microdollars", "fuel", "retries")
#: Per call: context_tokens; per run: wall_s, active_s (without what it waits), fan_out (children it starts),
#: result_bytes; per family: depth (1: no child has children).
BOUNDS: Final = ("context_tokens", "wall_s", "active_s", "fan_out", "depth", "result_bytes")
#: Of these, times of one run, which no account above runs holds.
TIMES: Final = ("wall_s", "active_s")
KEYS: Final = (*COUNTED, *BOUNDS)
WIDTH: Final = len(COUNTED)
INDEX: Final = {key: index for index, key in enumerate(COUNTED)}
MODEL_CALLS, TOOL_CALLS, TOKENS, MICRODOLLARS, FUEL, RETRIES = range(WIDTH)
#: More than anything is ever counted to.
NO_LIMIT: Final = 2**63 - 1
LIMIT_MAX: Final = 2**62
_SPANS: Final = tuple(span.value for span in Span)

#: What is reserved or used: (index of a counted key, how much), each key once, all above 0.
Amounts = tuple[tuple[int, int], ...]
NOTHING: Final[Amounts] = ()
ONE_TOOL_CALL: Final[Amounts] = ((TOOL_CALLS, 1),)


def amounts(**values: int) -> Amounts:
    """``amounts(model_calls=1, tokens=900)``; what is 0 is left out. Raises InputError."""
    found = []
    for key, value in values.items():
        index = INDEX.get(key)
        if index is None:
            raise InputError(f"{key!r} is not counted", hint="Use " + ", ".join(COUNTED))
        if value < 0:
            raise InputError(f"{key} of {value}")
        if value:
            found.append((index, value))
    return tuple(sorted(found))


def check_limits(what: str, limits: Mapping[str, Any] | None, *, windows: bool = False) -> dict[str, int]:
    """A budget or the limits of an account, checked; ``windows`` allows ``key/hour``, ``/day``, ``/month``. Raises
    InputError naming ``what`` and the key."""
    checked: dict[str, int] = {}
    for name, limit in (limits or {}).items():
        key, slash, span = name.partition("/") if isinstance(name, str) else ("", "", "")
        if key not in KEYS:
            raise InputError(f"{what}: there is no {name!r}", hint="Use " + ", ".join(KEYS))
        if slash and not (windows and span in _SPANS and key in INDEX):
            allowed = "Windows are " + ", ".join(_SPANS) + " of a counted key" if windows else "A run has no windows"
            raise InputError(f"{what}: there is no {name!r}", hint=allowed)
        if windows and key in TIMES:
            raise InputError(f"{what}: {key} is of one run", hint="Give it as a budget of agents")
        whole = isinstance(limit, int) or (isinstance(limit, float) and limit.is_integer())  # 1e6 is how people write
        if isinstance(limit, bool) or not whole or not 0 <= limit <= LIMIT_MAX:
            raise InputError(f"{what}: {name} is a whole number of at least 0, not {limit!r}")
        checked[name] = int(limit)
    return checked


def vector(limits: Mapping[str, int], span: Span | None = None) -> list[int] | None:
    """The limits of one window (None: without one) by index; None if there are none."""
    suffix = f"/{span.value}" if span is not None else ""
    found = [limits.get(key + suffix, NO_LIMIT) for key in COUNTED]
    return found if any(limit != NO_LIMIT for limit in found) else None


def bounds_of(limits: Mapping[str, int]) -> dict[str, int]:
    """The bounds among them."""
    return {key: limits[key] for key in BOUNDS if key in limits}
