"""Rates: so many units (requests, tokens) per window, taken before the call.

A token bucket kept as one number, the virtual time at which it will be full again (GCRA), in integer ns; so what passes
in any span T is at most ``burst + limit x T / window``, and one unit more for rounding. The burst is a tenth of the
limit unless it is given: whoever counts in windows of its own then sees at most 1.1 times the limit in any of them.

- A cost above the burst is granted when the bucket is full, and paid off afterwards: nobody gets anything meanwhile.
- Lower tiers leave ``kept`` units to tier 0 (law 1).
- What a call has really used is settled afterwards; that may put the bucket into debt, or give something back.
"""

from typing import Final

import msgspec

from agentrt.errors import ConfigError

_S: Final = 10**9
#: Of the burst; 20 % is what the scheduler leaves to the other tiers, the other way round.
KEPT_PCT: Final = 20


class RateLimit(msgspec.Struct, frozen=True):
    """``limit`` units per ``window_ns``; ``burst`` at once, 0: a tenth of the limit. ``kept_pct`` of the burst is for
    tier 0 only. ``unit``: what is counted, ``requests`` or ``tokens``."""

    limit: int
    window_ns: int = 60 * _S
    unit: str = "requests"
    burst: int = 0
    kept_pct: int = KEPT_PCT

    def __post_init__(self) -> None:
        if self.limit < 1 or self.window_ns < 1 or not 0 <= self.burst <= self.limit or not 0 <= self.kept_pct <= 90:
            raise ConfigError(
                f"a rate of {self.limit} {self.unit} per {self.window_ns} ns, burst {self.burst},"
                f" {self.kept_pct} % kept",
                hint="limit and window at least 1, burst at most the limit, at most 90 % kept",
            )
        if self.unit not in ("requests", "tokens"):
            raise ConfigError(f"a rate of {self.unit!r}", hint="Use requests or tokens")

    @property
    def text(self) -> str:
        """As decisions and people call it, e.g. ``requests/60s``."""
        return f"{self.unit}/{self.window_ns / _S:g}s"


class Bucket:
    """One rate limit's state. Times are ns of one clock, which the caller passes in; they may stand still."""

    __slots__ = ("_burst_ns", "_low_ns", "full_ns", "low_slack_ns", "rate", "slack_ns", "unit_ns")

    def __init__(self, rate: RateLimit) -> None:
        self.full_ns = 0  # when it is full again: all there is to keep over a restart
        self.resize(rate)

    def resize(self, rate: RateLimit) -> None:
        """Another limit from now on; what was taken stays taken."""
        self.rate = rate
        self.unit_ns = -(-rate.window_ns // rate.limit)  # up: never faster than allowed
        burst = rate.burst or max(1, rate.limit // 10)
        kept = min(burst - 1, -(-burst * rate.kept_pct // 100))
        self._burst_ns = self.price_ns(burst)
        self._low_ns = self.price_ns(burst - kept)
        # A unit may be taken while `full_ns` is no further off than this, by tier 0 and by the others.
        self.slack_ns = self._burst_ns - self.unit_ns
        self.low_slack_ns = self._low_ns - self.unit_ns

    def price_ns(self, cost: int) -> int:
        """How long the bucket takes to earn ``cost`` units."""
        return self.unit_ns if cost == 1 else -(-cost * self.rate.window_ns // self.rate.limit)

    def free_ns(self, tier: int, cost: int, now_ns: int) -> int:
        """The first moment at which ``cost`` units may be taken, if nobody else takes any; now or before: at once."""
        price = self.unit_ns if cost == 1 else self.price_ns(cost)
        room = self._low_ns if tier else self._burst_ns
        if price > room:
            price = room
        full = self.full_ns
        return (full if full > now_ns else now_ns) + price - room

    def take(self, cost: int, now_ns: int) -> None:
        """Take units that `free_ns` has allowed."""
        full = self.full_ns
        price = self.unit_ns if cost == 1 else self.price_ns(cost)
        self.full_ns = (full if full > now_ns else now_ns) + price

    def settle(self, reserved: int, actual: int, now_ns: int) -> None:
        """``actual`` units were used where ``reserved`` were taken."""
        if actual > reserved:
            self.take(actual - reserved, now_ns)
        else:
            self.full_ns -= (reserved - actual) * self.rate.window_ns // self.rate.limit

    def pause(self, until_ns: int) -> None:
        """The other side says when it takes calls again: one at that moment, the rest at the limit's pace."""
        self.full_ns = max(self.full_ns, until_ns + self._burst_ns - self.unit_ns)

    def left(self, now_ns: int) -> int:
        """Units that could be taken at once."""
        return max(0, self._burst_ns - max(0, self.full_ns - now_ns)) // self.unit_ns

    def shift(self, delta_ns: int) -> None:
        """The clock was set; negative: back."""
        self.full_ns += delta_ns

    def restore(self, full_ns: int, now_ns: int) -> None:
        """Go on from an old `full_ns`. What no such bucket can have (limit or clock were changed) is cut."""
        self.full_ns = max(self.full_ns, min(full_ns, now_ns + self._burst_ns + self.rate.window_ns))
