"""What is counted where it happens: accepted and ended runs, settled steps. Constant memory, whatever the node does.

The engine calls it on the control loop, at about a microsecond each. Everything else that is shown comes from the
statistics that the parts keep of themselves.
"""

from collections.abc import Iterable

import msgspec

from agentrt.observe.histogram import COUNT_BOUNDS, DURATION_BOUNDS_NS, Buckets, Histogram
from agentrt.observe.labels import CLASSES, OPS, OUTCOMES, STATES, TIERS
from agentrt.observe.slo import Attained, Target, Targets
from agentrt.records import Cost


class Measured(msgspec.Struct, frozen=True):
    """A snapshot. Keys are values of the labels named in `Meter`."""

    accepted: dict[tuple[str, str], int]
    ended: dict[tuple[str, str, str], int]
    run_ns: dict[tuple[str, str], Buckets]
    run_tool_calls: dict[tuple[str, str], Buckets]
    steps: dict[tuple[str, str], int]
    retries: dict[str, int]
    step_ns: dict[str, Buckets]
    fuel: dict[str, int]
    micro_usd: int
    tokens: int
    targets: list[Attained]


class Meter:
    """One thread counts, any may take a snapshot. Tiers are those that were asked for."""

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        pairs = [(tier, cls) for tier in TIERS for cls in CLASSES]
        self._accepted = dict.fromkeys(pairs, 0)  # tier, class
        self._ended = {(*pair, state): 0 for pair in pairs for state in STATES}  # tier, class, state
        self._run_ns = {pair: Histogram(DURATION_BOUNDS_NS) for pair in pairs}
        self._run_tool_calls = {pair: Histogram(COUNT_BOUNDS) for pair in pairs}
        self._steps = {(op, outcome): 0 for op in OPS for outcome in OUTCOMES}
        self._retries = dict.fromkeys(OPS, 0)
        self._step_ns = {op: Histogram(DURATION_BOUNDS_NS) for op in OPS}
        self._fuel = dict.fromkeys(TIERS, 0)
        self._micro_usd = self._tokens = 0
        self._targets = Targets(targets)

    def accepted(self, tier: int, cls: str) -> None:
        """A run is durable."""
        self._accepted[TIERS[tier], cls] += 1

    def ended(self, tier: int, cls: str, state: str, latency_ns: int, tool_calls: int, fuel: int) -> None:
        """A run has ended. ``latency_ns``: since it was accepted, or since it was to begin."""
        pair = TIERS[tier], cls
        self._ended[(*pair, state)] += 1
        self._run_ns[pair].add(latency_ns)
        self._run_tool_calls[pair].add(tool_calls)
        self._fuel[pair[0]] += fuel
        self._targets.ended(tier, cls, state, latency_ns)

    def settled(self, op: str, ok: bool, attempt: int, took_ns: int | None, cost: Cost) -> None:
        """A step has an outcome; ``took_ns``: since it was prepared, None for one that never is."""
        self._steps[op, "ok" if ok else "failed"] += 1
        if attempt > 1:
            self._retries[op] += attempt - 1
        if took_ns is not None:
            self._step_ns[op].add(took_ns)
        self._micro_usd += cost.micro_usd
        self._tokens += cost.tokens

    def snapshot(self) -> Measured:
        """As it is now."""
        return Measured(
            dict(self._accepted),
            dict(self._ended),
            {key: each.snapshot() for key, each in self._run_ns.items()},
            {key: each.snapshot() for key, each in self._run_tool_calls.items()},
            dict(self._steps),
            dict(self._retries),
            {key: each.snapshot() for key, each in self._step_ns.items()},
            dict(self._fuel),
            self._micro_usd,
            self._tokens,
            self._targets.attained(),
        )
