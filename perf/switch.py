"""What does it cost to go from one guest to the next, and what does scheduling take of a guest's time?

All times are CPU time of the thread that works, for the same work of the same guests (fuel is deterministic):

    A  long micro-slices, no switch          the work, nearly alone
    B  short micro-slices, no switch         + yields
    C  the same, quanta that end at once     + yields and switches: charge, requeue, pick, go on with another

``yield_us`` = (B - A) / micro-slices, ``requeue_us`` = (C - B) / switches, ``switch_us`` = both: yield, requeue, the
next guest running. ``switch_1000_us`` is of 1,000 guests in turn instead of 8. Medians of differences within a round of
A, B and C.

``overhead_pct``: two MicroPython scripts, each a loop of arithmetic longer than its quantum, through the core with its
default micro-slice and quanta (submit, start, yields, clock, demotion, switch, end), against the same scripts run one
after the other by wasmtime-py: the same machine code, counting fuel, called like a function, with no yield at all, at
the workers' priority. Both use the same fuel, or the benchmark fails. ``overhead_compute_pct``: the same of a guest
that sieves. The median over processes of the median quotient of rounds in which both take turns, less 1.

Baselines: a switch between tasks of asyncio (`sleep(0)`), and between two threads that hand each other a lock.
"""

import asyncio
import os
import statistics
import threading
from collections.abc import Callable
from typing import Any

from perf import guests
from perf.bench import CoreBench, run_async, unpacked
from perf.plain import PlainEngine
from perf.report import Report, machine
from perf.timing import clock, interleaved, isolated, median_ns, worker_cpu_ns

_NEVER = 2**60
_WARM_ROUNDS = 3_000  # enough micro-slices for all to be live at once: their slots are warm then
_SHORT_FUEL = 500  # so that switches are many enough to be seen beside the work
_ONE_WORKER = {"scheduler.workers": 1}
_OVERHEAD_GUESTS = 2
_OVERHEAD_PROCESSES = 7
_OVERHEAD_ROUNDS = 3


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


def machine_code(guest: str | bytes) -> bytes:
    """What the core's engine makes of a guest."""
    with CoreBench(_ONE_WORKER) as bench:
        return bench.compile(guest)


def overhead_pct(guest: str | bytes, artifact: bytes, rounds: int) -> float:
    """What scheduling takes of the time of two guests at the default micro-slice and quanta, %, in this process."""
    packed = unpacked(guest)[1]
    with CoreBench(_ONE_WORKER) as bench:
        program, engine = bench.load(guest, artifact), PlainEngine(bench.parameters)
        module = engine.load(artifact)
        fuels: set[int] = set()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), bench.parameters["nice"])

        def plain() -> float:
            runs = [engine.run(module, packed) for _ in range(_OVERHEAD_GUESTS)]
            fuels.update(fuel for _, fuel in runs)
            return sum(taken_ns for taken_ns, _ in runs)

        def scheduled() -> float:
            start_ns = worker_cpu_ns()
            for _ in range(_OVERHEAD_GUESTS):
                bench.submit(program)
            fuels.update(exit.fuel for exit in bench.take_exits(_OVERHEAD_GUESTS))
            return worker_cpu_ns() - start_ns

        taken = interleaved(rounds, plain, scheduled)
        if len(fuels) > 1:
            raise RuntimeError(f"the guests did not do the same: {fuels} fuel")
    return (statistics.median(scheduled / plain for plain, scheduled in taken) - 1) * 100


def _guests_of_overhead(tiny: bool) -> dict[str, str | bytes]:
    """Whose time: key of the figure and guest."""
    return {
        "overhead_pct": guests.script_compute(1_000 if tiny else 1_200_000),
        "overhead_compute_pct": guests.compute(2 if tiny else 500),
    }


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
    notes = []
    for key, guest in _guests_of_overhead(tiny).items():
        artifact = isolated(machine_code, guest)
        # Where code and memory happen to lie makes a difference of its own, the same all the life of a process.
        found = [
            isolated(overhead_pct, guest, artifact, 1 if tiny else _OVERHEAD_ROUNDS)
            for _ in range(2 if tiny else _OVERHEAD_PROCESSES)
        ]
        figures[key] = statistics.median(found)
        notes.append(f"{key}: {min(found):.1f} to {max(found):.1f} in {len(found)} processes")
    baselines = {
        "asyncio_switch_us": median_ns(lambda loops: run_async(_asyncio_switches(loops)), tiny=tiny) / 1000,
        "thread_switch_us": median_ns(_thread_switches, tiny=tiny) / 1000,
    }
    return Report("switch", figures, baselines, machine(notes))
