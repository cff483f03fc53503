"""Estimates from what steps have used: tokens, money and time per agent and tool or model. Pure.

For each (agent, what it calls) the mean and the mean deviation, exponentially weighted as TCP weights round trips
(1/8, 1/4: RFC 6298). `upper` is mean + 4 deviations: what a reservation should be when the caller cannot say. Nothing
is stored: after a restart estimates begin again with the first steps, and limits hold without them.
"""

from collections import OrderedDict
from typing import Final

import msgspec

FIELDS: Final = ("tokens", "microdollars", "wall_ns")
#: What a child of an agent costs, without what it starts.
CHILD: Final = "child"
_MEAN_SHARE: Final = 1 / 8
_DEVIATION_SHARE: Final = 1 / 4
_DEVIATIONS: Final = 4


class Estimate(msgspec.Struct, frozen=True):
    """Means of ``count`` steps, and what few of them pass."""

    count: int
    tokens: int
    microdollars: int
    wall_ns: int
    tokens_upper: int
    microdollars_upper: int
    wall_ns_upper: int


class Estimates:
    """At most ``names_max`` pairs; the longest unused goes."""

    def __init__(self, names_max: int = 10_000) -> None:
        self._names_max = names_max
        self._known: OrderedDict[tuple[str, str], list[float]] = OrderedDict()
        self._of_agent: dict[str, OrderedDict[str, None]] = {}  # what each calls, the latest last

    def __len__(self) -> int:
        return len(self._known)

    def observe(self, agent: str, what: str, tokens: int, microdollars: int, wall_ns: int) -> None:
        """A step has ended. ``what``: ``tool:name`` or ``model:profile``, or CHILD for a run that it has started."""
        values = tokens, microdollars, wall_ns
        key = agent, what
        known = self._known.get(key)
        if known is None:
            while len(self._known) >= self._names_max:
                (gone, its), _ = self._known.popitem(last=False)
                del self._of_agent[gone][its]
                if not self._of_agent[gone]:
                    del self._of_agent[gone]
            self._of_agent.setdefault(agent, OrderedDict())[what] = None
            self._known[key] = [1.0, *(part for value in values for part in (float(value), value / 2))]
            return
        self._known.move_to_end(key)
        self._of_agent[agent].move_to_end(what)
        known[0] += 1
        place = 1
        for value in values:
            beyond = value - known[place]
            if beyond or known[place + 1]:  # tools use no tokens
                known[place] += _MEAN_SHARE * beyond
                known[place + 1] += _DEVIATION_SHARE * (abs(beyond) - known[place + 1])
            place += 2

    def of_agent(self, agent: str, most: int = 16) -> dict[str, Estimate]:
        """By what it calls, the latest first."""
        found: dict[str, Estimate] = {}
        for what in reversed(self._of_agent.get(agent, {})):
            if len(found) == most:
                break
            estimate = self.of(agent, what)
            assert estimate is not None
            found[what] = estimate
        return found

    def of(self, agent: str, what: str) -> Estimate | None:
        """None: no step of that kind has ended."""
        known = self._known.get((agent, what))
        if known is None:
            return None
        means = [round(known[place]) for place in (1, 3, 5)]
        uppers = [round(known[place] + _DEVIATIONS * known[place + 1]) for place in (1, 3, 5)]
        return Estimate(round(known[0]), *means, *uppers)
