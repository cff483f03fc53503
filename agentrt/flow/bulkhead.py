"""Bulkheads: so many calls at once per class, provider, pool or risky tool, so that one flooded part leaves the others
afloat. What is counted are holders (never places in a line); some places are kept for tier 0."""

from typing import Final

from agentrt.errors import ConfigError

#: Of the places, rounded down: with fewer than five none is kept.
KEPT_PCT: Final = 20


class Bulkhead:
    """``limit`` places; lower tiers leave ``kept_pct`` of them to tier 0."""

    __slots__ = ("held", "kept_pct", "limit", "low_limit")

    def __init__(self, limit: int, kept_pct: int = KEPT_PCT) -> None:
        if limit < 1 or not 0 <= kept_pct <= 90:
            raise ConfigError(f"a bulkhead of {limit} places, {kept_pct} % kept", hint="At least 1 place, at most 90 %")
        self.kept_pct = kept_pct
        self.held = 0
        self.limit = self.low_limit = 0
        self.resize(limit)

    def resize(self, limit: int) -> None:
        """Another number of places; holders stay, and no new ones come while there are too many."""
        self.limit = limit
        self.low_limit = limit - limit * self.kept_pct // 100

    def has_room(self, tier: int) -> bool:
        return self.held < (self.low_limit if tier else self.limit)

    def enter(self) -> None:
        self.held += 1

    def leave(self) -> None:
        assert self.held > 0, "a place was given back twice"
        self.held -= 1
