"""What a run may be given a budget of, and what of that its children can have. Pure.

Counted keys (`agentrt.flow.amounts`) bound a run and all that it starts: the ledger sees to it. For the others a child
gets what its spawn and its agent say, and never more than its parent has left then; wall time is a moment for it as it
is for its parent, also when it is detached.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from agentrt.engine.steps import WAIT_S_MAX
from agentrt.errors import InputError
from agentrt.flow.amounts import KEYS, TIMES
from agentrt.records import RunAccepted

Budget = dict[str, int | float]

#: What a run may be given a budget of. ``wall_s``: seconds from the moment at which it may begin; ``active_s``: seconds
#: in which it is at work. ``depth``: how many levels of runs may be below it.
BUDGETS: Final = KEYS
#: What holds for each run below by itself.
_EACH: Final = ("context_tokens", "active_s", "fan_out", "result_bytes")
_COUNT_MAX: Final = 2**53 - 1
_SECOND: Final = 10**9


def check_budget(budget: Mapping[str, int | float] | None) -> Budget:
    """The budget of a run, checked. Raises InputError."""
    if budget is None:
        return {}
    if not isinstance(budget, Mapping):
        raise InputError(f"a budget is a mapping, not {type(budget).__name__}", hint="Use " + ", ".join(BUDGETS))
    checked: Budget = {}
    for name, limit in budget.items():
        if name not in BUDGETS:
            raise InputError(f"there is no budget {name!r:.200}", hint="Use " + ", ".join(BUDGETS))
        if name in TIMES:
            if not _is_number(limit) or not 0 < limit <= WAIT_S_MAX:
                raise InputError(f"budget {name} is more than 0 and at most {WAIT_S_MAX} seconds, not {limit!r:.200}")
        elif not _is_number(limit) or limit != int(limit) or not 0 <= limit <= _COUNT_MAX:
            raise InputError(f"budget {name} is a whole number of at least 0, not {limit!r:.200}")
        else:
            limit = int(limit)
        checked[name] = limit
    return checked


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def wall_end_ns(budget: Mapping[str, int | float], begin_ns: int) -> int:
    """When the wall time of a run that may begin at ``begin_ns`` is used up (Unix ns); 0: it has no budget of that."""
    seconds = budget.get("wall_s")
    return 0 if seconds is None else begin_ns + max(1, round(seconds * _SECOND))


def deadline_of(budget: Mapping[str, int | float], begin_ns: int, deadline_ns: int) -> int:
    """The earlier of a deadline and the end of the wall time, 0 if there is neither."""
    end = wall_end_ns(budget, begin_ns)
    return min(end, deadline_ns) if end and deadline_ns else end or deadline_ns


def loop_ns(budget: Mapping[str, int | float]) -> int:
    """How long a run may be at work; 0: it has no budget of that."""
    seconds = budget.get("active_s")
    return 0 if seconds is None else max(1, round(seconds * _SECOND))


def deadline_limit(accepted: RunAccepted) -> str:
    """Which limit the run's deadline is: ``wall_s`` of its budget, or ``deadline``."""
    end = wall_end_ns(accepted.budget, accepted.start_ns or accepted.at_ns)
    return "wall_s" if end and end == accepted.deadline_ns else "deadline"


def child_budget(asked: Budget, parent: RunAccepted, tool_calls_used: int, now_ns: int) -> Budget:
    """What a child gets that is asked for now, with its parent's part used as said: never more than is left."""
    left: Budget = {}
    given = parent.budget
    if not given:
        return asked
    if (calls := given.get("tool_calls")) is not None:
        left["tool_calls"] = max(0, int(calls) - tool_calls_used)
    if end := wall_end_ns(given, parent.start_ns or parent.at_ns):
        # A microsecond less: seconds as a float are rounded, and a child must not outlast its parent by that.
        left["wall_s"] = max(1, (end - now_ns) // 1_000 - 1) / 1e6
    for name in _EACH:
        if (each := given.get(name)) is not None:
            left[name] = each
    if (depth := given.get("depth")) is not None:
        left["depth"] = max(0, int(depth) - 1)
    return asked | {name: min(limit, asked.get(name, limit)) for name, limit in left.items()}
