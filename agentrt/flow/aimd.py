"""How many calls at once a provider's model takes, found by trying (AIMD), per (class, provider, model).

Up by one place per round trip while calls succeed within the latency target and the places are used; down by a factor
on a 429, a time-out or a context past its budget. One overload is one cut: outcomes of calls that began before the last
cut say nothing new. There is no ceiling to configure.
"""

from typing import Final

import msgspec

from agentrt.errors import ConfigError
from agentrt.flow.bulkhead import KEPT_PCT, Bulkhead

_ONE: Final = 10**6  # a place, in millionths: steps are fractions of one, and integers


class AimdLimits(msgspec.Struct, frozen=True):
    """``latency_ns``: the target; 0: none. ``cut_pct``: what a cut leaves. A start of 8 is what a
    new account at a provider takes without trouble; a cut leaves 70 % as CUBIC's does, for a call is dear to repeat."""

    start: int = 8
    floor: int = 1
    cut_pct: int = 70
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.floor <= self.start or not 10 <= self.cut_pct <= 95 or self.latency_ns < 0:
            raise ConfigError(
                f"an adaptive limit from {self.floor} over {self.start}, cut to {self.cut_pct} %",
                hint="1 <= floor <= start, cut_pct 10 to 95",
            )


class Aimd(Bulkhead):
    """A bulkhead whose limit moves. ``epoch`` grows with each cut; a call carries the one it began in."""

    __slots__ = ("_scaled", "epoch", "limits")

    def __init__(self, limits: AimdLimits | None = None, kept_pct: int = KEPT_PCT) -> None:
        self.limits = AimdLimits() if limits is None else limits
        self._scaled = self.limits.start * _ONE
        self.epoch = 0
        super().__init__(self.limits.start, kept_pct)

    def succeeded(self, latency_ns: int) -> bool:
        """A call has succeeded; call it while the call still holds its place. Whether the limit grew by a place."""
        target = self.limits.latency_ns
        if (target and latency_ns > target) or 2 * self.held < self.limit:
            return False  # late, or nobody needs more: what is not used says nothing about what is possible
        self._scaled += _ONE * _ONE // self._scaled
        if self._scaled < (self.limit + 1) * _ONE:
            return False
        self.resize(self._scaled // _ONE)
        return True

    def overloaded(self, epoch: int) -> bool:
        """A call that began in ``epoch`` met a limit. Whether this cut the limit."""
        if epoch != self.epoch:
            return False
        self.epoch += 1
        floor = self.limits.floor * _ONE
        before, self._scaled = self._scaled, max(floor, self._scaled * self.limits.cut_pct // 100)
        self.resize(self._scaled // _ONE)
        return self._scaled < before

    @property
    def state(self) -> int:
        """All there is to keep over a restart: millionths of a place."""
        return self._scaled

    def restore(self, state: int) -> None:
        """Go on from a state."""
        self._scaled = max(self.limits.floor * _ONE, state)
        self.resize(self._scaled // _ONE)
