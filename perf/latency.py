"""How soon does urgent work start while every core is busy with code that never yields?

1,000 guests loop at tier 3 on all workers; 3,000 urgent ones are submitted at random intervals, 1 ms on average.
``core_*``: CLOCK_MONOTONIC from the core's submit to the first instruction (a host call), making its store and
instance included. ``submit_*``: from calling `Runtime.submit` in an asyncio program at ordinary priority, in memory and
durably. ``fill_*``: the same while 8 of the guests do fills of 64 MiB, and are the ones that run. ``mpy_*``: the same
while the guests are MicroPython scripts that never end (``while True: …``).

Baselines, at the same intervals: an urgent process that waits under SCHED_FIFO, one that forks for each submit (a
guest is made for each, too), and one that waits at nice 0, among looping processes at nice 19; a thread of a pool among
looping Python threads; a callback of an asyncio loop whose other tasks give way each millisecond (if they did not, it
would never come).
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrt.demo.figures import percentile
from agentrt.engine.priority import raise_thread
from perf import guests, native
from perf.bench import CoreBench, run_async, runtime
from perf.report import Report, machine
from perf.timing import isolated

_INTERVAL_S = 0.002  # at most; uniform
_OS_HOGS = 32  # more starve the process that submits
_OS_SECONDS = 4
_PYTHON_HOGS = 8
_PYTHON_SECONDS = 2.0
_CONTROL_NICE = -10  # the runtime's default for the thread that submits

Hogs = tuple[tuple[str | bytes, int], ...]


def _hogs() -> dict[str, Hogs]:
    """Who loops: prefix of the keys -> guests and how many."""
    return {
        "": ((guests.HOG, 1000),),
        "hogs200_": ((guests.HOG, 200),),
        "fill_": ((guests.FILL_HOG, 8), (guests.HOG, 992)),  # who comes first runs first
        "mpy_": ((guests.script_hog(), 1000),),
    }


def core_latencies_us(hogs: Hogs, submits: int) -> list[float]:
    """Core submit to first instruction, one value a submit."""
    rng = random.Random(1)
    with CoreBench() as bench:
        raise_thread(threading.get_native_id(), nice=_CONTROL_NICE, realtime=False)
        urgent = bench.load(guests.NOOP)
        for guest, count in hogs:
            program = bench.load(guest)
            for _ in range(count):
                bench.submit(program, 3)
        latencies = []
        for _ in range(submits):
            time.sleep(rng.uniform(0, _INTERVAL_S))
            bench.submit(urgent, 0)
            exit = bench.take_exits(1)[0]
            latencies.append((exit.first_ns - exit.submitted_ns) / 1000)
        return latencies


async def _submit_latencies_us(durable: bool, hogs: int, submits: int) -> list[float]:
    rng = random.Random(1)
    submitted_ns: dict[str, int] = {}
    first_ns: dict[str, int] = {}

    # By an observer, because a run may have ended before anybody asks for it; that costs each submit some microseconds.
    def observe(event: str, data: Any) -> None:
        if event == "ended" and data.exit is not None:
            first_ns[data.run_id] = data.exit.first_ns

    async with runtime(durable, {"hog": guests.HOG, "urgent": guests.NOOP}) as made:
        await asyncio.gather(*(made.submit("hog", tier=3) for _ in range(hogs)))
        made.observe(observe)
        for _ in range(submits):
            await asyncio.sleep(rng.uniform(0, _INTERVAL_S))
            start_ns = time.monotonic_ns()
            run = await made.submit("urgent", tier=0)
            submitted_ns[run.run_id] = start_ns
            await run.wait()
    return [(first_ns[run_id] - start_ns) / 1000 for run_id, start_ns in submitted_ns.items()]


def submit_latencies_us(durable: bool, hogs: int, submits: int) -> list[float]:
    """`Runtime.submit` called to first instruction, one value a submit."""
    return run_async(_submit_latencies_us(durable, hogs, submits))


def thread_latencies_us(seconds: float, submits: int) -> list[float]:
    """To the first instruction in a thread of a pool, among Python threads that loop."""
    rng = random.Random(1)
    stop = False

    def hog() -> None:
        while not stop:
            pass

    latencies: list[float] = []
    with ThreadPoolExecutor(_PYTHON_HOGS + 1) as pool:
        for _ in range(_PYTHON_HOGS):
            pool.submit(hog)
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(latencies) < submits:
            time.sleep(rng.uniform(0, _INTERVAL_S))
            start_ns = time.monotonic_ns()
            latencies.append((pool.submit(time.monotonic_ns).result() - start_ns) / 1000)
        stop = True
    return latencies


def _stamp(first: asyncio.Future[int]) -> None:
    first.set_result(time.monotonic_ns())


def asyncio_latencies_us(seconds: float, submits: int) -> list[float]:
    """To the first instruction of a callback, among tasks that give way each millisecond."""

    async def hog() -> None:
        while True:
            until = time.monotonic_ns() + 1_000_000
            while time.monotonic_ns() < until:
                pass
            await asyncio.sleep(0)

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        rng = random.Random(1)
        hogs = [asyncio.create_task(hog()) for _ in range(_PYTHON_HOGS)]
        latencies: list[float] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(latencies) < submits:
            await asyncio.sleep(rng.uniform(0, _INTERVAL_S))
            start_ns = time.monotonic_ns()
            first: asyncio.Future[int] = loop.create_future()
            loop.call_soon(_stamp, first)
            latencies.append((await first - start_ns) / 1000)
        for task in hogs:
            task.cancel()
        return latencies

    return run_async(main())


def _three(prefix: str, latencies: list[float]) -> dict[str, float]:
    return {
        f"{prefix}_p50_us": percentile(latencies, 50),
        f"{prefix}_p99_us": percentile(latencies, 99),
        f"{prefix}_p999_us": percentile(latencies, 99.9),
    }


def run(tiny: bool) -> Report:
    submits = 20 if tiny else 3000
    notes: list[str] = []
    figures: dict[str, float] = {}
    baselines: dict[str, float] = {}

    for prefix, hogs in _hogs().items():
        fewer = tuple((guest, min(count, 2) if tiny else count) for guest, count in hogs)
        figures |= _three(f"{prefix}core", isolated(core_latencies_us, fewer, submits))
    plain = 2 if tiny else 1000
    figures |= _three("submit", isolated(submit_latencies_us, False, plain, submits))
    figures |= _three("submit_durable", isolated(submit_latencies_us, True, plain, submits))
    for name, fifo, forks in (("fifo", 1, 0), ("fifo_fork", 1, 1), ("nice", 0, 0)):
        seconds = 0.2 if tiny else _OS_SECONDS
        found = native.run("latency_os.c", 4 if tiny else _OS_HOGS, submits, seconds, fifo, forks)
        if not found["permitted"]:
            notes.append(f"SCHED_FIFO is not permitted here: {name} is left out")
            continue
        baselines |= {f"{name}_{key}": found[key] for key in ("p50_us", "p99_us", "p999_us")}
        notes.append(f"{name}: {found['count']:g} submits among {_OS_HOGS} processes")
    python: dict[str, Callable[[float, int], list[float]]] = {
        "threads": thread_latencies_us,
        "asyncio": asyncio_latencies_us,
    }
    for name, measure in python.items():
        taken = isolated(measure, 0.2 if tiny else _PYTHON_SECONDS, submits)
        baselines |= {f"{name}_p50_us": percentile(taken, 50), f"{name}_p99_us": percentile(taken, 99)}
        notes.append(f"{name}: {len(taken)} submits among {_PYTHON_HOGS} Python threads or tasks")
    if os.geteuid() != 0:
        notes.append("not root: the submitting threads may lack their priority")
    return Report("latency", figures, baselines, machine(notes))
