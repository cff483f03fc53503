"""Timing of what can be repeated in a loop, by pyperf's rules, and processes of their own for what cannot."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pyperf  # type: ignore[import-untyped]

T = TypeVar("T")

#: The clock of `median_ns`, seconds.
clock: Callable[[], float] = pyperf.perf_counter

_LOOPS_MAX = 1 << 24

# How Linux makes a clock id of a thread's id; clock_getcpuclockid would do it for processes only.
_CPUCLOCK_SCHED = 2
_CPUCLOCK_PERTHREAD = 4


def median_ns(loop: Callable[[int], float], *, tiny: bool, values: int = 11, value_s: float = 0.05) -> float:
    """Nanoseconds per iteration of ``loop(iterations)``, which returns the seconds that they took on
    `clock`: loops calibrated so that a value takes at least ``value_s``, one warm-up, median."""
    if tiny:
        values, value_s = 3, 0.001
    loops, taken = 1, loop(1)
    while taken < value_s and loops < _LOOPS_MAX:
        loops *= 2
        taken = loop(loops)
    warmup = loop(loops) / loops
    run = pyperf.Run(
        [loop(loops) / loops for _ in range(values)],
        warmups=[(loops, warmup)],
        metadata={"name": "loop", "loops": loops},
        collect_metadata=False,
    )
    return float(pyperf.Benchmark([run]).median()) * 1e9


def isolated(function: Callable[..., T], *arguments: object) -> T:
    """``function(*arguments)`` in a fresh process; both must be importable, and the result must pickle."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def interleaved(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """What the measures gave, a list per round; they take turns, so that what disturbs one disturbs all."""
    return [[measure() for measure in measures] for _ in range(rounds)]


def resident_kb() -> float:
    """Resident memory of this process in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def thread_cpu_ns(thread_id: int) -> int:
    """CPU time of one of this process's threads, now (schedstat lags behind a thread that runs)."""
    return time.clock_gettime_ns(~thread_id << 3 | _CPUCLOCK_PERTHREAD | _CPUCLOCK_SCHED)


def worker_cpu_ns() -> int:
    """The same of the core's worker threads together."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(thread_cpu_ns(int(task.name)) for task in tasks if (task / "comm").read_text().startswith("agentrt-w"))
