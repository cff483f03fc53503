"""What do Python agents that wait for I/O notice of one that computes without end, and what do those of a higher tier?

In each round 50 agents of tier 1 and 10 of tier 0 take 20 steps each; from then on each waits for I/O, 30 ms on
average, again and again. Then a hog of tier 1 and of the same tenant begins: its host is stopped when the activation
has used its 5 ms, and the others are brought back in another one. An activation's delay is the time from the answer it
was waiting for to the next call it makes, so the hand-over to the host and the host's own work are in it; taken are
those whose answer came within 0.1 s of the hog's beginning. ``p99_ms``: of the agents of its tier;
``higher_tier_p99_ms``: of the others; ``quiet_…``: of rounds without a hog, which take turns with the others.
``p50_ms``, ``max_ms``: of its tier. ``moves``: how many agents a hog has moved.
"""

import asyncio
import time

from agentrt import Run, Runtime
from agentrt.demo.figures import percentile
from agentrt.plugins import Plugins
from perf import delayed_tools, hog_agents
from perf.bench import run_async, runtime, until
from perf.delayed_tools import Activation, DelayedTools, io
from perf.report import Report, machine
from perf.timing import isolated

_SAME, _HIGHER = 50, 10
_STEPS = 20
_WINDOW_S = 0.1
_SETTLE_S = 0.1  # I/O of all before the window
_HOG = 0


class _Round:
    """What one round saw, ms."""

    def __init__(self) -> None:
        self.same: list[float] = []
        self.higher: list[float] = []

    def take(self, activations: list[Activation], begin_ns: int) -> None:
        end_ns = begin_ns + int(_WINDOW_S * 1e9)
        for activation in activations:
            if activation.number != _HOG and begin_ns <= activation.at_ns < end_ns:
                (self.same if activation.number <= _SAME else self.higher).append(activation.delay_ns / 1e6)


async def _round(made: Runtime, hogs: bool, seen: _Round) -> None:
    tools = DelayedTools.current
    tools.begin(_STEPS)
    runs: list[Run] = []
    for number in range(1, _SAME + _HIGHER + 1):
        runs.append(await made.submit("patient", number, tier=1 if number <= _SAME else 0))
    while len(tools.counts) < len(runs) or min(tools.counts.values()) <= _STEPS:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await until(made, lambda now: now.backends["python"]["spares"] > 0)
    await asyncio.sleep(_SETTLE_S)
    hog = await made.submit("hog", tier=1) if hogs else None
    while hogs and _HOG not in tools.answered_ns:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    begin_ns = tools.answered_ns[_HOG] if hogs else time.monotonic_ns()
    await asyncio.sleep(_WINDOW_S * 1.5)
    seen.take(tools.activations, begin_ns)
    tools.enough = True
    if hog is not None:
        await hog.cancel()
        await hog.wait()
    for run in runs:
        await run.result()


async def _rounds(count: int) -> dict[str, float]:
    plugins = Plugins({"perf.delayed_tools": delayed_tools})
    loud, quiet = _Round(), _Round()
    async with runtime(False, {}, tools=(io,), plugins=plugins) as made:
        for agent in (hog_agents.patient, hog_agents.hog):
            await made.register(agent)
        await _round(made, True, _Round())  # hosts and a spare are up
        moved = (await made.statistics()).backends["python"]["moves"]
        for _ in range(count):
            await _round(made, True, loud)
            await _round(made, False, quiet)
        moves = (await made.statistics()).backends["python"]["moves"] - moved
    return {
        "p99_ms": percentile(loud.same, 99),
        "higher_tier_p99_ms": percentile(loud.higher, 99),
        "quiet_p99_ms": percentile(quiet.same, 99),
        "quiet_higher_tier_p99_ms": percentile(quiet.higher, 99),
        "p50_ms": percentile(loud.same, 50),
        "max_ms": max(loud.same),
        "moves": moves / count,
        "activations": len(loud.same),
    }


def rounds(count: int) -> dict[str, float]:
    """The figures of ``count`` rounds with a hog and as many without."""
    return run_async(_rounds(count))


def run(tiny: bool) -> Report:
    return Report("hog", isolated(rounds, 1 if tiny else 50), {}, machine())
