"""Runs come and go, a million of them: memory, mappings, descriptors, threads and objects stay where they were.

Everything is real but the store: the one in memory keeps what it is given, so a run that ended a while ago is
taken out of it here.
"""

import asyncio
import ctypes
import gc
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import uvloop
import wasmtime

from agentrt import RunState, Runtime, load_config
from agentrt.hooks import HOOKS_VERSION, hookimpl
from agentrt.plugins import Plugins
from agentrt.stores.base import Batch, Store
from agentrt.stores.memory import MemoryDisk, MemoryStore

sys.path.insert(0, str(Path(__file__).parent))
import runtime_tools

TENANTS = 5000
TENANTS_MAX = 3000  # places in the scheduler: they change hands
KEPT = 5000  # ended runs in the store: more than are under way
TENTHS = 10

TOOL_IMPORTS = """
    (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
    (import "agentrt" "output" (func $output (param i32 i32) (result i32)))"""
REQUEST = '{"tool":"double","args":{"x":21}}'
LOG_LINE = '{"level":"info","message":"soak"}'


def data(text: str) -> str:
    """For a module: the text at 0."""
    return '(data (i32.const 0) "' + text.replace('"', '\\"') + '")'


#: Modules, and how a run of each is to end.
AGENTS: dict[str, tuple[str, RunState]] = {
    "noop": ('(module (func (export "agentrt_run") (result i32) (i32.const 0)))', RunState.SUCCEEDED),
    "echo": (
        """(module (import "agentrt" "input" (func $input (param i32 i32 i32) (result i32)))
            (import "agentrt" "output" (func $output (param i32 i32) (result i32))) (memory (export "memory") 1)
            (func (export "agentrt_run") (result i32)
              (call $output (i32.const 0) (call $input (i32.const 0) (i32.const 0) (i32.const 65536)))))""",
        RunState.SUCCEEDED,
    ),
    # 16 pages, each written to
    "grows": (
        """(module (memory (export "memory") 1) (func (export "agentrt_run") (result i32) (local $at i32)
            (drop (memory.grow (i32.const 15)))
            (loop $more (i32.store8 (local.get $at) (i32.const 7))
              (br_if $more (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 65536))) (i32.const 0x100000))))
            (i32.const 0)))""",
        RunState.SUCCEEDED,
    ),
    "prints": (
        """(module (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
            (memory (export "memory") 1)
            (data (i32.const 0) "\\10\\00\\00\\00\\05\\00\\00\\00") (data (i32.const 16) "12345")
            (func (export "_start") (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))""",
        RunState.SUCCEEDED,
    ),
    "logs": (
        f"""(module (import "agentrt" "submit" (func $submit (param i32 i32 i32) (result i32)))
            (memory (export "memory") 1) {data(LOG_LINE)} (func (export "agentrt_run") (result i32)
              (call $submit (i32.const 13) (i32.const 0) (i32.const {len(LOG_LINE)}))))""",
        RunState.SUCCEEDED,
    ),
    "calls": (
        f"""(module {TOOL_IMPORTS} (memory (export "memory") 1) {data(REQUEST)}
            (func (export "agentrt_run") (result i32) (call $output (i32.const 64)
              (call $call (i32.const 1) (i32.const 0) (i32.const {len(REQUEST)}) (i32.const 64) (i32.const 64)))))""",
        RunState.SUCCEEDED,
    ),
    "traps": ('(module (func (export "agentrt_run") (result i32) unreachable))', RunState.FAILED),
    # by a signal, which others only pass on
    "reaches_out": (
        """(module (memory (export "memory") 1)
            (func (export "agentrt_run") (result i32) (i32.load (i32.const 65536))))""",
        RunState.FAILED,
    ),
    "fails": ('(module (func (export "agentrt_run") (result i32) (i32.const 3)))', RunState.FAILED),
    "hungry": (
        '(module (func (export "agentrt_run") (result i32) (loop $l (br $l)) (i32.const 0)))',
        RunState.BUDGET_EXHAUSTED,
    ),
    # until it is cancelled
    "endless": (
        '(module (func (export "agentrt_run") (result i32) (loop $l (br $l)) (i32.const 1)))',
        RunState.CANCELLED,
    ),
}
SHARES = {"noop": 40, "echo": 20, "grows": 5, "prints": 8, "logs": 8, "calls": 2, "traps": 4, "reaches_out": 3,
          "fails": 5, "hungry": 3, "endless": 2}  # fmt: skip


class ForgetfulDisk(MemoryDisk):
    """Keeps so many ended runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: deque[str] = deque()

    def apply(self, generation: int, batch: Batch, *stored: Any) -> None:
        super().apply(generation, batch, *stored)
        if batch.head is not None and batch.head.ended_ns:
            self.ended.append(batch.head.run_id)
            while len(self.ended) > KEPT:
                run_id = self.ended.popleft()
                del self.heads[run_id], self.journals[run_id]


class ForgetfulStores:
    """A plugin."""

    AGENTRT_HOOKS = HOOKS_VERSION

    @hookimpl
    def agentrt_stores(self) -> dict[str, Callable[[Any, asyncio.AbstractEventLoop], Store]]:
        return {"forgetful": lambda config, loop: MemoryStore(loop, ForgetfulDisk())}


class Footprint(NamedTuple):
    """What the process takes, with no run under way."""

    rss_kb: int
    mappings: int
    descriptors: int
    threads: int
    objects: int

    @classmethod
    def now(cls) -> "Footprint":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back is no growth
        status = Path("/proc/self/status").read_text()
        return cls(
            int(status.split("VmRSS:")[1].split()[0]),
            len(Path("/proc/self/maps").read_bytes().splitlines()),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(gc.get_objects()),
        )


class Load:
    """Submits runs of all kinds, so many at once, and checks how each ends."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime = runtime
        self.random = random.Random(seed)
        self.ends: Counter[tuple[str, RunState]] = Counter()
        self.names, self.weights = list(SHARES), list(SHARES.values())

    async def one(self, name: str, tenant: str, tier: int) -> None:
        run = await self.runtime.submit(name, {"n": 1}, tenant=tenant, tier=tier)
        if name == "endless":
            await asyncio.sleep(0)
            await run.cancel()
        result = await run.wait()
        self.ends[name, result.state] += 1
        assert result.state is AGENTS[name][1], f"{name} ended {result.state}: {result.error}"

    async def worker(self, count: int) -> None:
        for _ in range(count):
            name = self.random.choices(self.names, self.weights)[0]
            # A tool host serves one tenant and tier: few of those.
            few = name == "calls"
            tenant = f"t{self.random.randrange(2 if few else TENANTS)}"
            await self.one(name, tenant, 1 if few else 3 if name == "endless" else self.random.randrange(4))

    async def runs(self, count: int, at_once: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self.worker(count // at_once))


async def soak(warm_up: int, count: int, at_once: int, cache: Path) -> list[Footprint]:
    """Footprints after the warm-up, in which every place is taken once, and after each tenth of the runs."""
    config = load_config(
        arguments={
            "store.kind": "forgetful",
            "wasm.cache_path": str(cache),
            "wasm.guests_max": 100,  # so few that each place is used in the warm-up
            "scheduler.tenants_max": TENANTS_MAX,
            "tools.spares": 0,
        }
    )
    plugins = Plugins.load({"forgetful": ForgetfulStores()})
    footprints: list[Footprint] = []
    async with Runtime(config=config, plugins=plugins, tools=[runtime_tools.double]) as runtime:
        for name, (text, _) in AGENTS.items():
            fuel = 100_000 if name == "hungry" else None
            await runtime.register(name, bytes(wasmtime.wat2wasm(text)), fuel=fuel)
        load = Load(runtime, 20)
        for runs in [warm_up] + [count // TENTHS] * TENTHS:
            await load.runs(runs, at_once)
            assert (await runtime.statistics()).engine.live == 0
            footprints.append(Footprint.now())
        assert load.ends.total() == warm_up + count
        assert {name for name, _ in load.ends} == set(AGENTS)
    return footprints


def check_flat(footprints: list[Footprint], grown_kb_max: int) -> None:
    told = "\n".join(map(str, footprints))
    warm, last = footprints[0], footprints[-1]
    assert last.rss_kb - warm.rss_kb < grown_kb_max, told
    assert abs(last.mappings - warm.mappings) <= 16, told
    assert abs(last.descriptors - warm.descriptors) <= 4, told
    assert abs(last.threads - warm.threads) <= 2, told
    # Some are on their way at any time; what each run left behind would be tens of thousands by now.
    began, ended = (median(each.objects for each in three) for three in (footprints[:3], footprints[-3:]))
    assert ended - began < 1000, told


@pytest.mark.stress
def test_runs_leave_nothing(tmp_path: Path) -> None:
    check_flat(uvloop.run(soak(20_000, 20_000, 500, tmp_path)), 8 << 10)


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_a_million_runs_leave_nothing(tmp_path: Path) -> None:
    # By then what is bounded by names is full: what flow control, metrics and schedulers know of tenants.
    footprints = uvloop.run(soak(400_000, 600_000, 2000, tmp_path))
    print(*footprints, sep="\n")
    check_flat(footprints, 8 << 10)
