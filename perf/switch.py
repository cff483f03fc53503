"""What does it cost to go from one guest to the next, and what does scheduling take of a guest's time?

All times are CPU time of the worker thread, for the same work of the same guests (fuel is deterministic):

    A  one micro-slice, no switch            the work alone
    B  short micro-slices, no switch         + yields
    C  the same, quanta that end at once     + yields and switches: charge, requeue, pick, go on with another

``yield_us`` = (B - A) / micro-slices, ``requeue_us`` = (C - B) / switches, ``switch_us`` = both: yield, requeue, the
next guest running. ``switch_1000_us`` is of 1,000 guests in turn instead of 8. ``overhead_…_pct``: what the default
micro-slice and quanta take of a guest's time, against A. Medians of differences within a round of A, B and C.

Baselines: a switch between tasks of asyncio (`sleep(0)`), and between two threads that hand each other a lock.
"""

import asyncio
import statistics
import threading
from collections.abc import Callable
from typing import Any

from perf import guests
from perf.bench import CoreBench, run_async
from perf.report import Report, machine
from perf.timing import clock, interleaved, isolated, median_ns, worker_cpu_ns

_NEVER = 2**60
_WARM_ROUNDS = 3_000  # enough micro-slices for all to be live at once: their slots are warm then
_SHORT_FUEL = 500  # so that switches are many enough to be seen beside the work
_ONE_WORKER = {"scheduler.workers": 1}


def _work_ns(text: str, count: int, **over: Any) -> tuple[float, dict[str, Any]]:
    """CPU time of one worker for ``count`` guests, and the core's counters."""
    with CoreBench(_ONE_WORKER, **over) as bench:
        module = bench.load(text)
        warm = bench.load(guests.counter(_WARM_ROUNDS))
        for _ in range(count):
            bench.submit(warm, 3)
        bench.take_exits(count)
        start, counted = worker_cpu_ns(), bench.core.statistics()
        for _ in range(count):
            bench.submit(module, 3)
        bench.take_exits(count)
        after = bench.core.statistics()
        return worker_cpu_ns() - start, {key: after[key] - counted[key] for key in ("slices", "micro_slices")}


def switch_figures(count: int, rounds: int, loops: int) -> tuple[float, float]:
    """(yield_us, requeue_us) among ``count`` guests of an empty loop."""
    text = guests.counter(loops)
    never = (_NEVER,) * 4
    at_once = (1,) * 4
    counters: dict[str, dict[str, Any]] = {}

    def measure(name: str, fuel: int, quantum_ns: tuple[int, ...]) -> Callable[[], float]:
        def take() -> float:
            taken, counters[name] = _work_ns(text, count, micro_slice_fuel=fuel, quantum_ns=quantum_ns)
            return taken

        return take

    taken = interleaved(
        rounds,
        measure("A", _NEVER, never),
        measure("B", _SHORT_FUEL, never),
        measure("C", _SHORT_FUEL, at_once),
    )
    # Guests that end before the next one was submitted do not switch: a tiny run on a busy machine may see none.
    yields = max(1, counters["B"]["micro_slices"] - counters["A"]["micro_slices"])
    switches = max(1, counters["C"]["slices"] - counters["B"]["slices"])
    yielding = statistics.median(b - a for a, b, _ in taken) / yields
    return yielding / 1000, statistics.median(c - b for _, b, c in taken) / switches / 1000


def overhead_pct(text: str, rounds: int) -> float:
    """What scheduling takes of the time of two guests at the default micro-slice and quanta, %."""
    taken = interleaved(
        rounds,
        lambda: _work_ns(text, 2, micro_slice_fuel=_NEVER, quantum_ns=(_NEVER,) * 4)[0],
        lambda: _work_ns(text, 2)[0],
    )
    return statistics.median((scheduled - alone) / alone for alone, scheduled in taken) * 100


def _guests_of_overhead(tiny: bool) -> dict[str, str]:
    """Whose time: key of the figure and guest. An interpreter, whose fuel is slower, has a key of its own."""
    return {"overhead_compute_pct": guests.compute(2 if tiny else 150)}


async def _asyncio_switches(loops: int) -> float:
    async def go_round(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    start = clock()
    await asyncio.gather(*(go_round(-(-loops // 8)) for _ in range(8)))
    return clock() - start


def _thread_switches(loops: int) -> float:
    mine, other = threading.Lock(), threading.Lock()
    mine.acquire()
    other.acquire()
    rounds = -(-loops // 2)

    def answer() -> None:
        for _ in range(rounds):
            other.acquire()
            mine.release()

    thread = threading.Thread(target=answer)
    thread.start()
    start = clock()
    for _ in range(rounds):
        other.release()
        mine.acquire()
    taken = clock() - start
    thread.join()
    return taken


def run(tiny: bool) -> Report:
    rounds = 2 if tiny else 15
    few, loops = 8, (100_000 if tiny else 1_500_000)
    many, many_loops = (30, 30_000) if tiny else (1000, 15_000)
    yielding, requeueing = isolated(switch_figures, few, rounds, loops)
    figures = {"switch_us": yielding + requeueing, "yield_us": yielding, "requeue_us": requeueing}
    figures["switch_1000_us"] = sum(isolated(switch_figures, many, rounds, many_loops))
    for key, text in _guests_of_overhead(tiny).items():
        figures[key] = isolated(overhead_pct, text, rounds)
    baselines = {
        "asyncio_switch_us": median_ns(lambda loops: run_async(_asyncio_switches(loops)), tiny=tiny) / 1000,
        "thread_switch_us": median_ns(_thread_switches, tiny=tiny) / 1000,
    }
    notes = ["overhead is of a compute guest; an interpreter needs WASI, which this release does not serve"]
    return Report("switch", figures, baselines, machine(notes))
