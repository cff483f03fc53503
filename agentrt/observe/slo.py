"""Service-level targets: which runs are measured against which, and how many were good."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from agentrt.observe.labels import CLASSES, TIERS
from agentrt.observe.settings import SloConfig, TargetConfig

_SUCCEEDED: Final = "SUCCEEDED"
_CANCELLED: Final = "CANCELLED"


class Target(msgspec.Struct, frozen=True):
    """``objective``: the share, 0 to 1, that must be good."""

    name: str
    tiers: tuple[int, ...]
    classes: tuple[str, ...]
    latency_ns: int
    objective: float


class Attained(msgspec.Struct, frozen=True):
    """What became of a target since the start of the node."""

    target: Target
    runs: int
    good: int

    @property
    def share(self) -> float | None:
        """Of good runs; None: there were none."""
        return self.good / self.runs if self.runs else None

    @property
    def met(self) -> bool | None:
        """None: there were no runs."""
        return None if self.share is None else self.share >= self.target.objective


def targets_of(config: SloConfig) -> list[Target]:
    """The targets of the configuration, by name."""
    return [_target(name, table) for name, table in sorted(config.targets.items())]


def _target(name: str, table: Mapping[str, Any]) -> Target:
    given = TargetConfig(**table)
    return Target(
        name,
        tuple(range(len(TIERS))) if given.tier < 0 else (given.tier,),
        CLASSES if given.run_class == "any" else (given.run_class,),
        given.latency_ms * 1_000_000,
        given.objective_permille / 1000,
    )


class Targets:
    """Counts runs against targets. One thread adds, any may look."""

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        self._all = tuple(targets)
        self._runs = dict.fromkeys((target.name for target in self._all), 0)
        self._good = dict(self._runs)
        self._of: dict[tuple[int, str], tuple[Target, ...]] = {}
        for tier in range(len(TIERS)):
            for cls in CLASSES:
                found = tuple(each for each in self._all if tier in each.tiers and cls in each.classes)
                if found:
                    self._of[tier, cls] = found

    def ended(self, tier: int, cls: str, state: str, latency_ns: int) -> None:
        """A run has ended."""
        if state == _CANCELLED:
            return  # somebody's wish is nobody's failure
        for target in self._of.get((tier, cls), ()):
            self._runs[target.name] += 1
            if state == _SUCCEEDED and latency_ns <= target.latency_ns:
                self._good[target.name] += 1

    def attained(self) -> list[Attained]:
        """As they stand."""
        return [Attained(target, self._runs[target.name], self._good[target.name]) for target in self._all]
