"""Fuel is what the guest did, whatever the slots: the same runs on other workers, micro-slices and quanta, among urgent
work that preempts them, cost the same. csrc/tests/stress_accounting.c does the same in the core, by the thousand, and
compares memories too.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop
import wasmtime

from agentrt import RunState, Runtime, load_config
from agentrt.backends.base import Exit
from agentrt.config import Config

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import runtime_tools
from interpreters import script
from wasm_bench import Bench, bench, settings

EXAMPLES = Path(__file__).parents[2] / "examples" / "guests"
GUESTS = Path(__file__).parents[1] / "guests"

#: Workers, micro-slice and quanta: from hardly ever interrupted to always.
SLOTS: list[dict[str, Any]] = [
    {"scheduler.workers": 1, "scheduler.micro_slice_fuel": 10_000_000, "scheduler.quantum_ms": [10**6] * 4},
    {"scheduler.workers": 2, "scheduler.micro_slice_fuel": 50_000},
    {"scheduler.workers": 3, "scheduler.micro_slice_fuel": 1_000, "scheduler.quantum_ms": [1] * 4},
]

#: Works for a million turns, in one function without a call, then ends in the given way.
WORK = """(module (import "agentrt" "clock_now" (func $clock (result i64))) (memory (export "memory") 1) (tag $tag)
    (table 1 funcref) (func $deeper (call $deeper) (call $deeper))
    (func (export "agentrt_run") (result i32) (local $n i32) {called}
      (local.set $n (i32.const 1000000))
      (loop $more (i32.store (i32.and (local.get $n) (i32.const 0xfffc)) (local.get $n))
        (br_if $more (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
      {end}))"""
CALLED = "(drop (call $clock))"
#: Ends at which the engine's count is exact are charged whole; at others it is up to the last call of a host function.
EXACT = {
    "returns": "(i32.const 0)",
    "unreachable": "unreachable",
    "throws": "(throw $tag)",
    "recurses": "(call $deeper) (i32.const 0)",
    "calls_null": "(call_indirect (i32.const 0)) (i32.const 0)",
}
ROUGH = {
    "reaches_out": "(i32.load (i32.const 65536))",
    "divides": "(i32.div_u (i32.const 1) (local.get $n))",
    "converts": "(i32.trunc_f32_s (f32.div (f32.const 1) (f32.convert_i32_u (local.get $n))))",
    "fills": "(memory.fill (local.get $n) (i32.const 0) (i32.const 65537)) (i32.const 0)",
    "calls_outside": "(call_indirect (i32.const 1)) (i32.const 0)",
}
NOOP = '(module (func (export "agentrt_run") (result i32) (i32.const 0)))'
HUNGRY_FUEL = 3_000_000


def wasm(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def config_of(slots: dict[str, Any], cache: Path) -> Config:
    common = {"store.kind": "memory", "wasm.cache_path": str(cache), "wasm.guests_max": 200, "tools.spares": 0}
    return load_config(arguments=common | slots)


async def fuels(slots: dict[str, Any], cache: Path) -> dict[str, set[tuple[RunState, int]]]:
    """How each agent's runs ended and what they cost, among urgent runs."""
    seen: dict[str, set[tuple[RunState, int]]] = {}
    tools = [runtime_tools.ledger_add]
    async with Runtime(config=config_of(slots, cache), tools=tools) as runtime:
        for name, end in (EXACT | ROUGH).items():
            await runtime.register(name, wasm(WORK.format(called="", end=end)))
            await runtime.register(f"{name}_called", wasm(WORK.format(called=CALLED, end=end)))
        await runtime.register("hungry", GUESTS / "spin.wasm", fuel=HUNGRY_FUEL)
        await runtime.register("steps", EXAMPLES / "steps.wasm")
        await runtime.register("noop", wasm(NOOP))

        async def one(name: str, tier: int) -> None:
            run = await runtime.submit(name, {"order": "a", "steps": 3}, tier=tier)
            result = await run.wait()
            seen.setdefault(name, set()).add((result.state, result.cost.fuel))
            assert result.cost.slot_ns > 0

        async def urgent(over: asyncio.Event) -> None:
            while not over.is_set():
                await one("noop", 0)

        over = asyncio.Event()
        disturbing = asyncio.ensure_future(urgent(over))
        names = [agent.name for agent in runtime.agents() if agent.name != "noop"]
        await asyncio.gather(*(one(name, 1 + turn % 3) for name in names for turn in range(6)))
        over.set()
        await disturbing
    return seen


@pytest.mark.stress
def test_the_cost_of_a_run_follows_from_the_run_alone(ledger: Path, tmp_path: Path) -> None:
    seen = [uvloop.run(fuels(slots, tmp_path / "modules")) for slots in SLOTS]
    for name, ends in seen[0].items():
        assert len(ends) == 1, f"{name}: {ends}"
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    cost = {name: next(iter(ends)) for name, ends in seen[0].items()}
    assert cost["hungry"] == (RunState.BUDGET_EXHAUSTED, HUNGRY_FUEL)
    assert cost["steps"][0] is RunState.SUCCEEDED and cost["returns"][0] is RunState.SUCCEEDED
    assert all(cost[name][0] is RunState.FAILED for name in (*EXACT, *ROUGH) if name != "returns")
    for name in EXACT:
        assert cost[name][1] >= cost["returns"][1] - 5 > 1_000_000  # `unreachable` counts one less than a return
        assert cost[f"{name}_called"][1] > cost[name][1]
    for name in ROUGH:
        assert cost[name][1] == 0
        assert 0 < cost[f"{name}_called"][1] < 100


SCRIPTS = {
    "micropython": "t = []\nfor i in range(20000):\n    t.append(str(i * i))\nprint(len(''.join(t)))",
    "quickjs": "let t = []; for (let i = 0; i < 50000; i++) t.push({i, s: String(i * i)});"
    "console.log(t.map(x => x.s).join('').length)",
}


@pytest.mark.stress
@pytest.mark.parametrize("name", SCRIPTS)
def test_interpreters_cost_the_same_everywhere(name: str, tmp_path: Path) -> None:
    ends: list[Exit] = []

    def run_in(slots: dict[str, Any]) -> None:
        async def test(bench: Bench) -> None:
            program = await bench.backend.prepare(script(name, SCRIPTS[name]))
            noop = await bench.backend.prepare(wasm(NOOP))
            runs = [bench.begin(program, tier=1 + turn % 3) for turn in range(4)]
            while not all(run.ended.done() for run in runs):
                await bench.begin(noop, tier=0).ended
            ends.extend(run.ended.result() for run in runs)

        changed = {key.replace(".", "__"): value for key, value in slots.items()}
        bench(settings(tmp_path / "modules", **changed), test)

    for slots in SLOTS:
        run_in(slots)
    assert len({(end.reason, end.fuel, end.output or end.stdout) for end in ends}) == 1, ends
    assert ends[0].reason == "returned" and ends[0].fuel > 1_000_000
    assert any(end.preemptions for end in ends)
