"""A histogram with fixed bounds: constant memory, and what two of them say can be added."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

#: Durations, from what a commit takes to a week of waiting, in ns.
DURATION_BOUNDS_NS: Final = tuple(
    round(seconds * 1e9)
    for seconds in (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
        *(1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200, 86_400, 604_800),
    )
)
#: Waits for a CPU slot, as the core counts them (csrc/worker.h, ART_WAIT_BUCKETS), in ns.
WAIT_BOUNDS_NS: Final = tuple(1 << bit for bit in range(10, 37))
COUNT_BOUNDS: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000)


class Buckets(msgspec.Struct, frozen=True):
    """A histogram at one moment. ``counts`` has one more than ``bounds``: what is above them all."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int  # sum of the values

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """The value below which the share ``q`` lies, evenly spread within its bucket; None if there are none. Above
        the last bound it is that bound: no more is known."""
        return quantile(self.bounds, self.counts, q)


def quantile(bounds: Sequence[int], counts: Sequence[int], q: float) -> float | None:
    """As `Buckets.quantile`."""
    left = q * sum(counts)
    if not any(counts):
        return None
    low = 0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return low + (bound - low) * left / count
        left -= count
        low = bound
    return float(bounds[-1])


class Histogram:
    """One thread adds; any may take a snapshot."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0

    def add(self, value: int) -> None:
        """A value, in the unit of the bounds."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Buckets:
        """As it is now."""
        return Buckets(self._bounds, tuple(self._counts), self._total)
