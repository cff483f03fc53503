"""How soon does urgent work start beside native processes that compute without end?

64 shells that count, called as tools by agents of tier 2; urgent guests are submitted at random intervals, 25 ms on
average, and counted from `Runtime.submit` to their first instruction, in memory. ``p50_ms``, ``p99_ms``, ``max_ms``:
of those. ``idle_p99_ms``: without the processes. ``hogs_pct``: of the CPU time there is, what the processes got
meanwhile. Whether there are leaves with a share of the CPU is in the notes: without, the kernel ranks them by policy
and niceness only.

Baseline, what a user would do: the same shells under plain ``nice -n 19``, beside the same runtime, which knows nothing
of them (``nice_p50_ms``, ``nice_p99_ms``, ``nice_max_ms``, ``nice_hogs_pct``).
"""

import asyncio
import contextlib
import os
import random
import resource
import time
from collections.abc import AsyncIterator
from typing import Any

from agentrt import Runtime
from agentrt.demo.agents import agents
from agentrt.demo.figures import percentile
from agentrt.tools.commands import command_tool
from perf import guests
from perf.bench import run_async, runtime, until
from perf.hogs import COUNT, nice_hogs, report_beside
from perf.report import Report
from perf.timing import isolated

_HOGS = 64
_INTERVAL_S = 0.05  # at most; uniform
_SETTLE_S = 1.0
_hog = command_tool("native_hog", ["sh", "-c", COUNT], kind="pure", timeout=3600, input="text")


async def _latencies_ms(made: Runtime, submits: int) -> list[float]:
    rng = random.Random(1)
    first_ns: dict[str, int] = {}
    submitted_ns: dict[str, int] = {}

    def observe(event: str, data: Any) -> None:
        if event == "ended" and data.exit is not None:
            first_ns[data.run_id] = data.exit.first_ns

    made.observe(observe)  # once more each time: what it notes of the runs of others is not looked at
    for _ in range(submits):
        await asyncio.sleep(rng.uniform(0, _INTERVAL_S))
        start_ns = time.monotonic_ns()
        run = await made.submit("urgent", tier=0)
        submitted_ns[run.run_id] = start_ns
        await run.wait()
    return [(first_ns[run_id] - start_ns) / 1e6 for run_id, start_ns in submitted_ns.items()]


@contextlib.asynccontextmanager
async def _our_hogs(made: Runtime, count: int) -> AsyncIterator[None]:
    runs = [await made.submit("hog", {"rounds": 0}, tier=2) for _ in range(count)]
    await until(made, lambda now: now.tools.processes["started"] >= count)
    await asyncio.sleep(_SETTLE_S)
    yield
    for run in runs:
        await run.cancel()
    for run in runs:
        await run.wait()


def _others_cpu_s() -> float:
    """CPU time of all processes of the machine but this one."""
    with open("/proc/stat") as file:
        user, nice, system = map(int, file.readline().split()[1:4])
    own = resource.getrusage(resource.RUSAGE_SELF)
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


async def _measure(made: Runtime, submits: int) -> tuple[list[float], float]:
    began, cpu_s = time.monotonic(), _others_cpu_s()
    latencies = await _latencies_ms(made, submits)
    share = (_others_cpu_s() - cpu_s) / (time.monotonic() - began) / len(os.sched_getaffinity(0))
    return latencies, 100 * share


async def _all(hogs: int, submits: int) -> tuple[dict[str, float], bool]:
    settings = {"tools.classes.code.hosts_max": hogs + 2, "process.processes_max": hogs + 8}
    settings |= {"process.allow_unsandboxed": True}
    said: dict[str, float] = {}
    async with runtime(False, {"urgent": guests.NOOP}, tools=(_hog,), settings=settings) as made:
        await made.register("hog", agents("process")["hog"])
        await _latencies_ms(made, 10)
        said["idle_p99_ms"] = percentile(await _latencies_ms(made, submits), 99)
        with nice_hogs(hogs):
            await asyncio.sleep(_SETTLE_S)
            latencies, said["nice_hogs_pct"] = await _measure(made, submits)
        said |= _named("nice_", latencies)
        async with _our_hogs(made, hogs):
            latencies, said["hogs_pct"] = await _measure(made, submits)
            said |= _named("", latencies)
            controllers = (await made.statistics()).tools.processes["controllers"]
    return said, "cpu" in controllers


def _named(prefix: str, latencies: list[float]) -> dict[str, float]:
    return {
        f"{prefix}p50_ms": percentile(latencies, 50),
        f"{prefix}p99_ms": percentile(latencies, 99),
        f"{prefix}max_ms": max(latencies),
    }


def latencies(hogs: int, submits: int) -> tuple[dict[str, float], bool]:
    """Figures and baselines, and whether the leaves have shares of the CPU."""
    return run_async(_all(hogs, submits))


def run(tiny: bool) -> Report:
    said, shares = isolated(latencies, 2 if tiny else _HOGS, 3 if tiny else 400)
    return report_beside("native_hogs", said, shares)
