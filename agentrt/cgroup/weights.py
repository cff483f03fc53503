"""How CPU time is shared between leaves: each tier has a weight, which its leaves divide. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

#: By tier; the node itself, whose workers and control plane stand beside the leaves, has as much as tier 0.
TIER_WEIGHTS: Final = (10_000, 1_000, 100, 10)
NODE_WEIGHT: Final = 10_000
WEIGHT_MIN, WEIGHT_MAX = 1, 10_000

Key = TypeVar("Key")


def weights(tiers: Mapping[Key, int], tier_weights: Iterable[int] = TIER_WEIGHTS) -> dict[Key, int]:
    """Weight of each leaf, 1 to 10,000: its tier's over the number of leaves of that tier."""
    counts = [0, 0, 0, 0]
    for tier in tiers.values():
        counts[tier] += 1
    share = [
        min(WEIGHT_MAX, max(WEIGHT_MIN, weight // max(1, count)))
        for weight, count in zip(tier_weights, counts, strict=True)
    ]
    return {key: share[tier] for key, tier in tiers.items()}
