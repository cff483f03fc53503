"""How many suspended guests fit, and what does each take besides its own memory?

``live_guests``: guests on the core that have started, written to 8 KiB of their memory, and wait for an answer;
``live_guest_kb``: resident memory per guest without those pages. 10,000 are wanted; the mapping limit may allow fewer,
which a note says. ``live_run_kb``: the same of whole runs in a runtime (journal in memory), that wait for a tool.
``tenant_2mb_kb``: resident memory per tenant, for tenants with one guest that has written to 2 MiB; all included.
``queued_runs``: runs accepted by a runtime in memory that wait for a slot, ``queued_run_kb`` what each takes, and
``queued_guest_kb`` what one takes in the core alone.

Baselines: a suspended asyncio task, a thread that waits, and a store with an instance of wasmtime-py that has written
the same (it cannot be suspended: it has returned).
"""

import asyncio
import gc
import threading
from collections.abc import Callable

import wasmtime

from agentrt import RuntimeStatistics
from agentrt.config import load_config
from agentrt.errors import ConfigError
from agentrt.plugins import Plugins
from agentrt.sizing import core_parameters
from perf import guests, inline_tools
from perf.bench import CoreBench, run_async, runtime, until
from perf.report import Report, machine, proc_field
from perf.timing import isolated, resident_kb

_DIRTY_BYTES = 8192
_OWN_KB = (_DIRTY_BYTES + 4096) / 1024  # and the page that holds the request
_TENANT_BYTES = 2 << 20
_FULL_QUANTA = (2**60,) * 4
_TENANT_MEMORY_SHARE = 0.5  # of the memory that is free


def _pool(count: int) -> tuple[dict[str, int], int]:
    """(settings, live guests) for ``count`` of them, or for as many as the mapping limit allows."""
    wanted = {"wasm.guests_max": count, "wasm.stacks_max": count}
    try:
        core_parameters(load_config(arguments=wanted, env={}))
    except ConfigError:
        return {}, core_parameters(load_config(env={}))["stacks_max"]
    return wanted, count


def _groups(count: int) -> tuple[tuple[int, int], ...]:
    """(tier, guests) in the order in which they fit: the last sixteenth of the places is tier 0's."""
    return (1, count - count // 16), (0, count // 16)


def live_guest_kb(count: int) -> tuple[float, float]:
    """(live guests, KiB per guest besides its own memory) on the core."""
    settings, count = _pool(count)
    with CoreBench(settings) as bench:
        module = bench.load(guests.waiter(_DIRTY_BYTES))
        gc.collect()
        before = resident_kb()
        waiting = []
        for tier, many in _groups(count):
            for _ in range(many):
                bench.submit(module, tier)
            waiting += bench.take_waiting(many)
        grown = resident_kb() - before
        live = bench.core.statistics()["live"]
        del waiting
        return live, grown / count - _OWN_KB


def tenant_kb(count: int) -> tuple[float, float]:
    """(tenants, KiB per tenant) with a guest of 2 MiB each."""
    free_kb = int(proc_field("/proc/meminfo", "MemAvailable").split()[0])
    count = min(count, int(free_kb * _TENANT_MEMORY_SHARE) * 1024 // _TENANT_BYTES)
    with CoreBench() as bench:
        module = bench.load(guests.waiter(_TENANT_BYTES))
        gc.collect()
        before = resident_kb()
        for tenant in range(count):
            bench.submit(module, tenant=tenant)
        waiting = bench.take_waiting(count)
        grown = resident_kb() - before
        del waiting
        return count, grown / count


def queued_guest_kb(count: int) -> float:
    """KiB per guest that is queued in the core and has not started."""
    with CoreBench({"scheduler.queue_items_max": count + 100}, quantum_ns=_FULL_QUANTA) as bench:
        noop, hog = bench.load(guests.NOOP), bench.load(guests.HOG)
        for _ in range(bench.parameters["workers"]):
            bench.submit(hog, 0)
        gc.collect()
        before = resident_kb()
        for _ in range(count):
            bench.submit(noop, 3)
        grown = resident_kb() - before
        assert sum(bench.core.statistics()["queued"]) >= count
        return grown / count


async def _queued_runs(count: int) -> tuple[float, float]:
    settings = {
        "scheduler.queue_items_max": count + 1000, "scheduler.tier0_share_pct": 100,
        "scheduler.quantum_ms": (10**8,) * 4, "node.close_timeout_ms": 60_000,
    }  # fmt: skip
    async with runtime(False, {"hog": guests.HOG, "noop": guests.NOOP}, settings=settings) as made:
        workers = core_parameters(made.config)["workers"]
        await asyncio.gather(*(made.submit("hog", tier=0) for _ in range(workers)))
        await until(made, lambda now: now.backends["wasm"]["live"] >= workers)
        gc.collect()
        before = resident_kb()
        for start in range(0, count, 1000):
            await asyncio.gather(*(made.submit("noop", tier=3) for _ in range(min(1000, count - start))))
        now = await until(made, lambda now: sum(now.backends["wasm"]["pushes"]) >= count + workers)
        return sum(now.backends["wasm"]["queued"]), (resident_kb() - before) / count


def queued_runs(count: int) -> tuple[float, float]:
    """(runs queued, KiB per run) in a runtime."""
    return run_async(_queued_runs(count))


def _called(count: int) -> Callable[[RuntimeStatistics], bool]:
    return lambda now: bool(now.tools["calls"] >= count)


async def _live_run_kb(count: int) -> float:
    settings, count = _pool(count)
    inline_tools.InlineTools.answers = False
    plugins = Plugins({"perf.inline_tools": inline_tools})
    agents = {"waiter": guests.waiter(_DIRTY_BYTES)}
    async with runtime(False, agents, tools=(inline_tools.echo,), settings=settings, plugins=plugins) as made:
        gc.collect()
        before = resident_kb()
        started = 0
        for tier, many in _groups(count):
            for start in range(0, many, 1000):
                await asyncio.gather(*(made.submit("waiter", tier=tier) for _ in range(min(1000, many - start))))
            started += many
            await until(made, _called(started))
        return (resident_kb() - before) / count - _OWN_KB


def live_run_kb(count: int) -> float:
    """KiB per run that waits for a tool, besides its guest's own memory."""
    return run_async(_live_run_kb(count))


async def _asyncio_kb(count: int) -> float:
    gc.collect()
    before = resident_kb()
    gate = asyncio.Event()
    tasks = [asyncio.create_task(gate.wait()) for _ in range(count)]
    await asyncio.sleep(0)
    grown = resident_kb() - before
    gate.set()
    await asyncio.gather(*tasks)
    return grown / count


def asyncio_kb(count: int) -> float:
    """KiB per task that waits."""
    return run_async(_asyncio_kb(count))


def thread_kb(count: int) -> float:
    """KiB per thread that waits."""
    before = resident_kb()
    gate = threading.Event()
    threads = [threading.Thread(target=gate.wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    grown = resident_kb() - before
    gate.set()
    for thread in threads:
        thread.join()
    return grown / count


def wasmtime_py_kb(count: int) -> float:
    """KiB per store and instance of wasmtime-py besides the guest's own memory."""
    config = wasmtime.Config()
    config.consume_fuel = True
    engine = wasmtime.Engine(config)
    module = wasmtime.Module(engine, guests.waiter(_DIRTY_BYTES))
    linker = wasmtime.Linker(engine)
    i32 = wasmtime.ValType.i32()
    linker.define_func("agentrt", "clock_now", wasmtime.FuncType([], [wasmtime.ValType.i64()]), lambda: 0)
    linker.define_func("agentrt", "call", wasmtime.FuncType([i32] * 5, [i32]), lambda *_: 0)
    gc.collect()
    before = resident_kb()
    kept = []
    for _ in range(count):
        store = wasmtime.Store(engine)
        store.set_fuel(10**9)
        instance = linker.instantiate(store, module)
        instance.exports(store)["agentrt_run"](store)  # type: ignore[operator]
        kept.append((store, instance))
    return (resident_kb() - before) / count - _OWN_KB


def run(tiny: bool) -> Report:
    count, tenants, queued, others = (50, 10, 500, 50) if tiny else (10_000, 1000, 100_000, 1000)
    notes = []
    live, live_kb = isolated(live_guest_kb, count)
    if live < count:
        notes.append(f"vm.max_map_count allows {live:.0f} live guests, not {count}")
    found_tenants, per_tenant_kb = isolated(tenant_kb, tenants)
    if found_tenants < tenants:
        notes.append(f"memory for {found_tenants:.0f} tenants of 2 MiB, not {tenants}")
    queued_count, queued_kb = isolated(queued_runs, queued)
    figures = {
        "live_guests": live,
        "live_guest_kb": live_kb,
        "live_run_kb": isolated(live_run_kb, count),
        "tenants": found_tenants,
        "tenant_2mb_kb": per_tenant_kb,
        "queued_runs": queued_count,
        "queued_run_kb": queued_kb,
        "queued_guest_kb": isolated(queued_guest_kb, queued),
    }
    baselines = {
        "asyncio_task_kb": isolated(asyncio_kb, others * 10),
        "thread_kb": isolated(thread_kb, others),
        "wasmtime_py_kb": isolated(wasmtime_py_kb, others),
    }
    return Report("density", figures, baselines, machine(notes))
