"""The figures of docs/flow-control.md: ``python -m perf.flow_plots docs/plots``.

Each of `FIGURES` is measured in virtual time with the code that nodes run, so they are the same on every machine; a
test compares the files with what this makes. Those of `MEASURED` are of a node, on this machine.
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentrt.flow.aimd import AimdLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Scope
from agentrt.flow.gate import Call
from agentrt.flow.limits import AimdRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopGuard, LoopLimits
from agentrt.flow.retry import Again, Failure, Retries
from perf.bench import run_async
from perf.flow_amounts import budgets, children, places, quotas, timeouts
from perf.flow_world import START_NS, Done, Provider, S, World
from perf.overflow import overflow
from perf.svg import Series, plot

_SIXTY: Final = GateLimits(
    rates=(RateRule(Scope.PROVIDER, "p", RateLimit(60, 2 * S)),), weights={"a": 1, "b": 2, "c": 3, "d": 4}
)


def ask(tenant: str, tier: int = 1) -> Call:
    """A call of the provider's model."""
    return Call(tenant, tier, "model", provider="p", model="m")


def _seconds(at_ns: int) -> float:
    return (at_ns - START_NS) / S


def _per_window(provider: Provider, answer: str) -> list[tuple[float, float]]:
    width = provider.window_ns / S
    counts = Counter(int(_seconds(at_ns) // width) for at_ns, _, given in provider.log if given == answer)
    return [((index + 0.5) * width, counts[index]) for index in range(max(counts, default=0) + 1)]


def rates(path: Path) -> None:
    """A burst of 1,000 calls against 60 requests per 2 s."""
    world, provider = World(_SIXTY), Provider(60, 2 * S)
    for index in range(1000):
        world.call(ask("abcd"[index % 4]), provider)
    world.run()
    end = _seconds(world.now_ns)
    series = [
        Series("answered", _per_window(provider, "ok"), "bars"),
        Series("refused (429)", _per_window(provider, "rate"), "bars"),
        Series("allowed: 60", [(0, 60), (end, 60)]),
    ]
    plot(path, "Rates: 1,000 calls at once, 60 requests per 2 s allowed", "seconds", "attempts per 2 s", series)


def shares(path: Path) -> None:
    """The same burst, by tenant."""
    world, provider = World(_SIXTY), Provider(60, 2 * S)
    for index in range(1000):
        world.call(ask("abcd"[index % 4]), provider)
    world.run()
    series = []
    for tenant, weight in _SIXTY.weights.items():
        times = [_seconds(at_ns) for at_ns, whose, given in provider.log if whose == tenant and given == "ok"]
        points = [(at, count + 1.0) for count, at in enumerate(times)][::5]
        series.append(Series(f"weight {weight}", points))
    plot(path, "Tenants under one limit: 250 calls each", "seconds", "answered", series)


def urgent(path: Path) -> None:
    """Waiting times of single urgent calls beside a burst of others."""
    world, provider = World(_SIXTY), Provider(60, 2 * S)
    waits: dict[int, list[tuple[float, float]]] = {0: [], 2: []}

    def call(tier: int) -> None:
        asked = world.now_ns

        def done(done: Done) -> None:
            waits[tier].append((_seconds(asked), (done.at_ns - asked) / S))

        world.call(ask("d" if not tier else "a", tier), provider, done)

    for index in range(1200):
        world.after(index * S // 40, lambda: call(2))  # 40 a second where 30 are allowed
    for index in range(30):
        world.after(index * S, lambda: call(0))
    world.run(40 * S)
    series = [
        Series("tier 0", sorted(waits[0]), "dots"),
        Series("tier 2", sorted(waits[2])[::4], "dots"),
    ]
    plot(path, "Tier 0 beside an overload of 4/3", "asked at (seconds)", "answered after (seconds)", series)


def adaptive(path: Path) -> None:
    """A provider that takes 40 calls at once, then 15, and whose limit nobody has configured."""
    world = World(GateLimits(aimd=(AimdRule("*", AimdLimits(start=8)),)))
    provider = Provider(10**9, S, places=40)
    found: list[tuple[float, float]] = []

    def look() -> None:
        room = world.gate.headroom(ask("a"), world.now_ns)[0]
        found.append((_seconds(world.now_ns), room.left + provider.busy))
        if world.now_ns < START_NS + 120 * S:
            world.after(S // 2, look)

    def again(done: Done) -> None:
        if world.now_ns < START_NS + 120 * S:
            world.call(ask("a"), provider, again)

    def shrink() -> None:
        provider.places = 15

    look()
    for _ in range(60):
        world.call(ask("a"), provider, again)
    world.after(60 * S, shrink)
    world.run(121 * S)
    series = [
        Series("limit found", found, "steps"),
        Series("provider takes", [(0, 40), (60, 40), (60, 15), (120, 15)]),
    ]
    plot(path, "AIMD: calls at once of a model, no limit configured", "seconds", "calls at once", series)


def breaker(path: Path) -> None:
    """Ten calls a second, and nobody answers for half a minute."""
    world = World(GateLimits(aimd=()))
    provider = Provider(10**6, S, down=((10 * S, 40 * S),))
    for index in range(800):
        world.after(index * S // 10, lambda: world.call(ask("a"), provider))
    world.run()
    lost = Counter(int(_seconds(at_ns)) for at_ns, _, given in provider.log if given == "transport")
    good = Counter(int(_seconds(at_ns)) for at_ns, _, given in provider.log if given == "ok")
    refused = Counter(int(_seconds(done.at_ns)) for done in world.done if done.failure == "refused")
    series = [
        Series("answered", [(second, good[second]) for second in range(81)], "steps"),
        Series("tried in vain", [(second, lost[second]) for second in range(81)], "steps"),
        Series("refused at once", [(second, refused[second]) for second in range(81)], "steps"),
    ]
    plot(path, "Breaker: an outage from 10 s to 40 s", "seconds", "per second", series)


def retries(path: Path) -> None:
    """When attempts 2 to 5 come, of 60 calls each."""
    random_ = random.Random(1)
    series = []
    kinds = ((Failure.TRANSPORT, 0, "nobody answered"), (Failure.RATE, 60 * S, "429, limit per minute"))
    for failure, window_ns, name in kinds:
        points: list[tuple[float, float]] = []
        for _ in range(60):
            now_ns = 0
            for number in range(1, 5):
                verdict = Retries().decide(failure, number, now_ns, random_.random(), window_ns=window_ns)
                assert isinstance(verdict, Again)
                now_ns = verdict.at_ns
                points.append((now_ns / S, number + 1 + (0.2 if window_ns else 0)))
        series.append(Series(name, points, "dots"))
    plot(path, "Retries: when the next attempt is made", "seconds since the first", "attempt", series)


def admission(path: Path) -> None:
    """A hundred times what a node of 40 runs a second takes, for 30 s, of a 40 s life; in real time, on this machine's
    disk."""
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        seen = run_async(overflow(Path(folder), 5.0, 30.0))
    assert seen.asked == seen.answered
    rss = [(at, size / 2**20) for at, size in seen.rss_bytes]
    series = [
        Series("urgent: ms until accepted", [(at, took * 1e3) for at, took in seen.urgent], "dots"),
        Series("under way", seen.inside),
        Series("memory, MiB", rss),
        Series("refused / 100 s", [(at, many / 100) for at, many in seen.refused], "bars"),
    ]
    plot(path, "A node that takes 40 runs a second, asked for 4,000 from 5 to 35 s", "seconds", "", series)


def loops(path: Path) -> None:
    """After how many steps four kinds of stuck ensembles are stopped, by the limit."""

    def repeats(guard: LoopGuard, number: int) -> bool:
        return guard.step("r", "r", "a", "t", b"same") is not None

    def rounds(guard: LoopGuard, number: int) -> bool:
        return guard.step("r", "r", "a", "t", bytes([number % 3])) is not None

    def rally(guard: LoopGuard, number: int) -> bool:
        agent = ("writer", "critic")[number % 2]
        return guard.hand_over("r", "r", agent, "run.spawn", agent.encode(), f"c{number}") is not None

    def reflects(guard: LoopGuard, number: int) -> bool:
        return guard.step("r", f"c{number // 5}", "a", "t", number.to_bytes(4, "big")) is not None

    series = []
    kinds: tuple[tuple[str, Callable[[LoopGuard, int], bool]], ...] = (
        ("one call repeated", repeats),
        ("a round of three", rounds),
        ("to and fro", rally),
        ("always new, no output", reflects),
    )
    for name, act in kinds:
        points = []
        for limit in (2, 5, 10, 20, 40, 80):
            guard = LoopGuard(LoopLimits(iterations=limit, repeats=limit if act is not reflects else 0, rallies=limit))
            if act is not reflects:
                guard.limits = LoopLimits(iterations=0, repeats=limit, rallies=limit)
            number = 0
            while not act(guard, number):
                number += 1
            points.append((float(limit), number + 1.0))
        series.append(Series(name, points))
    plot(path, "Loop guard: steps until a stuck ensemble ends", "limit", "steps", series)


FIGURES: Final[dict[str, Callable[[Path], None]]] = {
    "rates": rates,
    "shares": shares,
    "urgent": urgent,
    "adaptive": adaptive,
    "breaker": breaker,
    "retries": retries,
    "loops": loops,
    "places": places,
    "budgets": budgets,
    "quotas": quotas,
    "timeouts": timeouts,
    "children": children,
}


MEASURED: Final[dict[str, Callable[[Path], None]]] = {"admission": admission}


def main(folder: Path) -> None:
    """Write all figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (FIGURES | MEASURED).items():
        make(folder / f"flow-{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
