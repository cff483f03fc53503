"""How fast do runs start and end, and what does an idle one take?

``spawn_us``: 1,000 submits to the core in one go, until the first instruction of the last, over 1,000; all of them stay
live, their slots were used before. ``spawn_noop_us``: the same of guests that end at once, taking down included.
``spawn_cold_us``: of slots that nobody has used. ``idle_instance_kb``: resident memory that a started guest adds which
has written nothing and waits for an answer, all of ours and the engine's included. ``runs_per_s``: no-op runs from
`Runtime.submit` to their results by one asyncio program, without durability; ``durable_runs_per_s`` with. ``batch_…``:
the same by `Runtime.submit_many` and `Runtime.wait_many`, 250 runs a call.

Baselines: wasmtime-py with a store and an instance per guest (fuel on, kept alive); tasks of asyncio and of a thread
pool that do nothing, submitted and awaited the same way.
"""

import asyncio
import gc
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import wasmtime

from agentrt import Run, RunState
from agentrt.backends.base import Exit
from perf import guests
from perf.bench import CoreBench, run_async, run_many, runtime
from perf.report import Report, disk, machine
from perf.timing import clock, isolated, median_ns, resident_kb

_BATCH = 250  # runs


def _spread_us(exits: list[Exit]) -> float:
    """From the first submit to the last first instruction, per guest."""
    return (max(exit.first_ns for exit in exits) - min(exit.submitted_ns for exit in exits)) / 1000 / len(exits)


def core_figures(count: int, rounds: int) -> dict[str, float]:
    """Spawning on the core."""
    with CoreBench() as bench:
        idle, noop = bench.load(guests.IDLE), bench.load(guests.NOOP)

        def wave() -> float:
            for _ in range(count):
                bench.submit(idle)
            waiting = bench.take_waiting(count)
            for guest in waiting:
                guest.kill()
            return _spread_us(bench.take_exits(count))

        def end_at_once() -> float:
            for _ in range(count):
                bench.submit(noop)
            return _spread_us(bench.take_exits(count))

        end_at_once()
        cold = wave()
        return {
            "spawn_us": statistics.median(wave() for _ in range(rounds)),
            "spawn_noop_us": statistics.median(end_at_once() for _ in range(rounds)),
            "spawn_cold_us": cold,
        }


def idle_kb(count: int) -> float:
    """Resident memory per started guest that waits, KiB."""
    with CoreBench() as bench:
        idle = bench.load(guests.IDLE)
        bench.submit(idle)
        bench.take_waiting(1)  # what is there once
        gc.collect()
        before = resident_kb()
        for _ in range(count):
            bench.submit(idle)
        waiting = bench.take_waiting(count)
        grown = resident_kb() - before
        del waiting
        return grown / count


async def _runs_per_s(durable: bool, count: int, at_once: int) -> float:
    async with runtime(durable, {"noop": guests.NOOP}) as made:
        await run_many(made, "noop", at_once, at_once)
        start = time.perf_counter()
        await run_many(made, "noop", count, at_once)
        return count / (time.perf_counter() - start)


def runs_per_s(durable: bool, count: int, at_once: int) -> float:
    """No-op runs a second through a runtime."""
    return run_async(_runs_per_s(durable, count, at_once))


async def _batch_runs_per_s(durable: bool, count: int, at_once: int) -> float:
    size = min(_BATCH, at_once)
    async with runtime(durable, {"noop": guests.NOOP}) as made:

        async def run_batches(number: int) -> None:
            for _ in range(number):
                runs = [run for run in await made.submit_many("noop", repeat(None, size)) if isinstance(run, Run)]
                results = await made.wait_many(runs)
                if sum(result.state is RunState.SUCCEEDED for result in results) != size:
                    raise RuntimeError("not all runs of a batch succeeded")

        await run_batches(1)
        lanes = at_once // size
        each = count // size // lanes
        start = time.perf_counter()
        await asyncio.gather(*(run_batches(each) for _ in range(lanes)))
        return each * lanes * size / (time.perf_counter() - start)


def batch_runs_per_s(durable: bool, count: int, at_once: int) -> float:
    """No-op runs a second through a runtime, by batches."""
    return run_async(_batch_runs_per_s(durable, count, at_once))


def wasmtime_py_us(count: int, tiny: bool) -> float:
    """A store with fuel and an instance of the same module, called, and kept: what the package offers."""
    config = wasmtime.Config()
    config.consume_fuel = True
    engine = wasmtime.Engine(config)
    module = wasmtime.Module(engine, guests.NOOP)
    linker = wasmtime.Linker(engine)
    linker.define_func("agentrt", "clock_now", wasmtime.FuncType([], [wasmtime.ValType.i64()]), lambda: 0)

    def spawn(loops: int) -> float:
        kept = []
        start = clock()
        for _ in range(loops):
            store = wasmtime.Store(engine)
            store.set_fuel(10**9)
            instance = linker.instantiate(store, module)
            instance.exports(store)["agentrt_run"](store)  # type: ignore[operator]
            kept.append(store)
            if len(kept) == count:
                kept.clear()
        return clock() - start

    return median_ns(spawn, tiny=tiny, values=7) / 1000


async def _nothing() -> None:
    await asyncio.sleep(0)


async def _asyncio_per_s(count: int, at_once: int) -> float:
    start = time.perf_counter()
    for _ in range(count // at_once):
        await asyncio.gather(*(asyncio.create_task(_nothing()) for _ in range(at_once)))
    return count / (time.perf_counter() - start)


async def _threads_per_s(count: int, at_once: int) -> float:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        start = time.perf_counter()
        for _ in range(count // at_once):
            await asyncio.gather(*(loop.run_in_executor(pool, int) for _ in repeat(None, at_once)))
        return count / (time.perf_counter() - start)


def run(tiny: bool) -> Report:
    count, rounds, runs, at_once = (50, 2, 200, 50) if tiny else (1000, 15, 60_000, 1000)
    figures = isolated(core_figures, count, rounds)
    figures["idle_instance_kb"] = isolated(idle_kb, count)
    figures["runs_per_s"] = isolated(runs_per_s, False, runs, at_once)
    figures["durable_runs_per_s"] = isolated(runs_per_s, True, runs // 2, at_once)
    figures["batch_runs_per_s"] = isolated(batch_runs_per_s, False, runs, at_once)
    figures["batch_durable_runs_per_s"] = isolated(batch_runs_per_s, True, runs // 2, at_once)
    baselines = {
        "wasmtime_py_spawn_us": isolated(wasmtime_py_us, count, tiny),
        "asyncio_tasks_per_s": run_async(_asyncio_per_s(runs, at_once)),
        "thread_pool_tasks_per_s": run_async(_threads_per_s(runs // 2, at_once)),
    }
    return Report("spawn", figures, baselines, machine() | disk())
