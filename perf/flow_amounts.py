"""More figures of docs/flow-control.md, of what is counted: places, budgets, quotas, time-outs and children. In virtual
time, with the code that nodes run; see flow_plots.py."""

import heapq
import random
from collections.abc import Callable
from pathlib import Path

from agentrt.flow.accounts import AccountId, Entry, tenant_id
from agentrt.flow.amounts import TOKENS
from agentrt.flow.budgets import Ledger
from agentrt.flow.children import Ensemble, EnsembleLimits
from agentrt.flow.decisions import Scope
from agentrt.flow.gate import Call
from agentrt.flow.limits import BulkheadRule, GateLimits
from agentrt.flow.quotas import Full, Quota, Quotas
from agentrt.flow.timeouts import Clock, Layer, Timeouts
from agentrt.flow.windows import Span
from perf.flow_world import START_NS, Done, Provider, S, World
from perf.svg import Series, plot

_HOUR = 3600 * S


class _Events:
    """What happens when, in virtual time."""

    def __init__(self) -> None:
        self.now_ns = START_NS - START_NS % (24 * _HOUR)
        self.start_ns = self.now_ns
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0

    @property
    def seconds(self) -> float:
        return (self.now_ns - self.start_ns) / S

    def at(self, at_ns: int, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_ns, self._number, then))

    def run(self, until_ns: int) -> None:
        while self._events and self._events[0][0] <= self.start_ns + until_ns:
            self.now_ns, _, then = heapq.heappop(self._events)
            then()


def places(path: Path) -> None:
    """A tool that has become slow, in four places, beside one that has not."""
    world = World(GateLimits(bulkheads=(BulkheadRule(Scope.TOOL, "slow", 4, 0),), aimd=()))
    slow, quick = Provider(10**9, S, latency_ns=5 * S), Provider(10**9, S, latency_ns=S // 20)
    at_once: list[tuple[float, float]] = []
    waits: list[tuple[float, float]] = []

    def seconds() -> float:
        return (world.now_ns - START_NS) / S

    def ask_quick() -> None:
        asked = world.now_ns

        def done(done: Done) -> None:
            waits.append(((asked - START_NS) / S, (done.at_ns - asked) / S))

        world.call(Call("a", 1, "tool", tool="quick"), quick, done)

    for index in range(200):
        world.after(index * S // 20, lambda: world.call(Call("a", 1, "tool", tool="slow"), slow))
    for index in range(60):
        world.after(index * S // 2, ask_quick)
    for index in range(120):
        world.after(index * S // 4, lambda: at_once.append((seconds(), float(slow.busy))))
    world.run(30 * S)
    series = [
        Series("slow: at once", at_once, "steps"),
        Series("quick: s per call", sorted(waits), "dots"),
        Series("places: 4", [(0, 4), (30, 4)]),
    ]
    plot(path, "Places: 20 calls a second of a tool that takes 5 s", "seconds", "", series)


def budgets(path: Path) -> None:
    """Ten runs that want tokens of one tenant, who has 100,000 an hour; each call reserves 2,000 and uses less."""
    limit, reserved = 100_000, 2_000
    tenant = tenant_id("t")
    limits: dict[AccountId, dict[str, int]] = {tenant: {"tokens/hour": limit}}
    ledger = Ledger(lambda id: limits.get(id, {}))
    events, draw = _Events(), random.Random(1)
    waiting: list[Entry] = []
    used: list[tuple[float, float]] = []
    with_held: list[tuple[float, float]] = []

    def look() -> None:
        (account,) = [each for each in ledger.accounts() if each.id == tenant]
        minutes = events.seconds / 60
        sums = limit - ledger.left(entries[0], TOKENS, events.now_ns)
        with_held.append((minutes, float(sums)))
        used.append((minutes, float(sums - account.held[TOKENS])))

    def ask(entry: Entry) -> None:
        if ledger.reserve(entry, ((TOKENS, reserved),), events.now_ns) is not None:
            waiting.append(entry)
            return
        took = draw.randrange(400, 1_600)
        events.at(events.now_ns + draw.randrange(20 * S, 60 * S), lambda: answered(entry, took))

    def answered(entry: Entry, took: int) -> None:
        ledger.settle(entry, ((TOKENS, reserved),), ((TOKENS, took),), events.now_ns)
        look()
        again, waiting[:] = [*waiting], []
        for each in again:
            ask(each)
        look()
        events.at(events.now_ns + draw.randrange(120 * S, 300 * S), lambda: ask(entry))

    def window_begins() -> None:
        again, waiting[:] = [*waiting], []
        for each in again:
            ask(each)
        look()

    entries = [ledger.open(f"run_{n}", "t", "a", {}, None, f"run_{n}", events.now_ns) for n in range(10)]
    for entry in entries:
        events.at(events.now_ns, lambda entry=entry: ask(entry))  # type: ignore[misc]
    events.at(events.now_ns + _HOUR, window_begins)
    events.run(2 * _HOUR)
    assert max(value for _, value in with_held) <= limit
    series = [
        Series("used", used, "steps"),
        Series("and reserved", with_held, "steps"),
        Series("limit per hour", [(0, limit), (120, limit)]),
    ]
    plot(path, "Budgets: 10 runs of a tenant with 100,000 tokens an hour", "minutes", "tokens", series)


def quotas(path: Path) -> None:
    """A call every 20 s where 100 an hour are allowed: those beyond wait for the next free place."""
    quota = Quotas((Quota(Scope.TOOL, "search", 100, Span.HOUR, 0),))
    events = _Events()
    asked: list[tuple[float, float]] = []
    made: list[tuple[float, float]] = []

    def ask() -> None:
        found = quota.take(((Scope.TOOL, "search"),), events.now_ns)
        if isinstance(found, Full):
            events.at(found.until_ns, ask)
        else:
            made.append((events.seconds / 3600, len(made) + 1.0))

    def begin() -> None:
        asked.append((events.seconds / 3600, len(asked) + 1.0))
        ask()

    for index in range(360):
        events.at(events.now_ns + index * 20 * S, begin)
    events.run(5 * _HOUR)
    series = [Series("asked for", asked), Series("made", made, "steps")]
    plot(path, "Quotas: 180 calls an hour for two hours, 100 an hour allowed", "hours", "calls", series)


def timeouts(path: Path) -> None:
    """How long a call may take, of a run with 60 s of active time and 115 s of life that waits for a minute in between;
    its tool has 30 s."""
    bounds, clock = Timeouts(60 * S, START_NS + 115 * S), Clock()
    left: dict[Layer, list[tuple[float, float]]] = {layer: [] for layer in Layer}
    clock.go(START_NS)
    for second in range(121):
        now = START_NS + second * S
        if second == 40:
            clock.rest(now)
        if second == 100:
            clock.go(now)
        may, layer = bounds.left(clock.spent_ns(now), now, 30 * S)
        left[layer].append((float(second), max(0.0, may / S)))
    series = [Series(f"bound by: {layer.value}", points, "dots") for layer, points in left.items() if points]
    plot(
        path,
        "Time-outs: 60 s of work, 115 of life, a tool's 30; waiting from 40 to 100",
        "seconds",
        "s for a call",
        series,
    )


def children(path: Path) -> None:
    """A planner that wants 2,000 children where 100 may be queued, of which ten begin each second."""
    ensemble, events = Ensemble(EnsembleLimits(queued_max=100)), _Events()
    ensemble.begin("root")
    asked = begun = 0
    queue: list[str] = []
    queued: list[tuple[float, float]] = []
    started: list[tuple[float, float]] = []

    def plan() -> None:
        nonlocal asked
        while asked < 2_000:
            asked += 1
            if not ensemble.spawn(f"root/{asked}", "root", 1, wait=True):
                return  # blocked: the planner goes on when it has its place
            queue.append(f"root/{asked}")

    def begin() -> None:
        nonlocal begun
        if not queue:
            return
        begun += 1
        key = queue.pop(0)
        ensemble.queue(key, f"c{begun}")
        ensemble.begin(f"c{begun}")
        ensemble.leave(f"c{begun}")
        for placed in ensemble.settle().placed:
            queue.append(placed)
            plan()
        queued.append((events.seconds, float(ensemble.queued)))
        started.append((events.seconds, begun / 10))

    plan()
    for index in range(2_000):
        events.at(events.now_ns + (index + 1) * S // 10, begin)
    events.run(220 * S)
    series = [Series("queued", queued), Series("begun / 10", started), Series("bound", [(0, 100), (200, 100)])]
    plot(path, "A planner that wants 2,000 children, 100 may be queued", "seconds", "children", series)
