"""Percentiles and rates of the demo."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))  # ceiling
    return ordered[min(len(ordered), int(rank)) - 1]


def sum_counters(lives: Sequence[dict[str, object]], name: str) -> int:
    """A counter over the node's lives, each of which starts at 0; lists are summed."""
    total = 0
    for life in lives:
        value = life.get(name, 0)
        if isinstance(value, list):
            total += sum(int(item) for item in value)
        elif isinstance(value, int):
            total += value
    return total
