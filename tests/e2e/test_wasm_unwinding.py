"""Guests of wasm that trap, or have used their fuel: their handlers run all the same, as things were when they waited
last; after a restart, and of a guest that went on from a frame, too."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import wasmtime
from frames_kit import counters, go, in_memory, loop, settings, until

from agentrt import Run, RunState, Runtime, tool
from agentrt.capture.instrument import Preempt, instrument
from agentrt.config import load_config
from agentrt.engine.info import RunResult
from agentrt.records import Ending, Record, StepCommitted


def _request(text: str) -> str:
    return text.replace('"', '\\"')


def _call(x: int, at: int) -> str:
    """Data of a call of the tool, at that address."""
    return f'(data (i32.const {at}) "{_request(msgspec.json.encode({"tool": "note", "args": {"x": x}}).decode())}")'


#: Asks for 1, waits for an event if it is to, asks for 2, then without waiting for 3 and 4, and ends. What its handlers
#: ask for is 100, and before that 101 or 102: the last that it had set.
MODULE = """(module
  (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (import "agentrt" "submit" (func $submit (param i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  {data} (data (i32.const 1800) "{event}")
  (global $last (export "last") (mut i32) (i32.const 0))
  (func $note (param $at i32) (param $len i32)
    (drop (call $call (i32.const 1) (local.get $at) (local.get $len) (i32.const 4096) (i32.const 64))))
  (func (export "agentrt_run") (result i32)
    (call $note (i32.const 1100) (i32.const 30))
    (global.set $last (i32.const 1500))
    {waits}
    (call $note (i32.const 1200) (i32.const 30))
    (global.set $last (i32.const 1600))
    {asks}
    {ends}
    (i32.const 0))
  (func (export "agentrt_unwind") (result i32)
    (call $note (global.get $last) (i32.const 32))
    {handlers}
    (call $note (i32.const 1700) (i32.const 32))
    (i32.const 0)))"""
EVENT = '{"key":"go"}'
ENDS = {
    "trap": "(unreachable)",
    "zero": "(drop (i32.div_s (i32.const 1) (i32.const 0)))",
    "fuel": "(loop $on (br $on))",
}


def module(ends: str, *, asks: int = 0, waits: int = 0, handlers: str = "") -> bytes:
    places = {1: 1100, 2: 1200, 3: 1300, 4: 1400, 101: 1500, 102: 1600, 100: 1700}
    event = f"(i32.const 4) (i32.const 1800) (i32.const {len(EVENT)}) (i32.const 4096) (i32.const 64)"
    text = MODULE.format(
        data="\n".join(_call(x, at) for x, at in places.items()),
        event=_request(EVENT),
        waits=f"(drop (call $call {event}))" * waits,
        asks="".join(
            f"(drop (call $submit (i32.const 1) (i32.const {places[3 + n]}) (i32.const 30)))" for n in range(asks)
        ),
        ends=ENDS[ends],
        handlers=handlers,
    )
    return bytes(wasmtime.wat2wasm(text))


@tool(kind="keyed", timeout=10)
def note(x: int) -> int:
    """What is noted is in the journal."""
    return x


def told(records: list[Record]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """What its program has had done, what its handlers have, and where it unwound."""
    results = [
        msgspec.json.decode(record.result)
        for record in records
        if isinstance(record, StepCommitted) and record.op == "tool.call" and record.ok and record.result
    ]
    endings = [(record.answers, record.steps) for record in records if isinstance(record, Ending)]
    return sorted(x for x in results if x < 100), [x for x in results if x >= 100], endings


def expects(result: RunResult, ends: str) -> None:
    code = msgspec.json.decode(result.error or b"{}").get("code")
    if ends == "fuel":
        assert (result.state, code) == (RunState.BUDGET_EXHAUSTED, "budget_exhausted")
    else:
        assert (result.state, code) == (RunState.FAILED, "trap")


def node(folder: Path, **more: Any) -> Runtime:
    return Runtime(config=load_config(arguments=settings(folder) | more, env={}), tools=[note])


async def told_of(made: Runtime, run: Run) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    return told(await made.read_store(lambda store: store.read_records(run.run_id)))


@pytest.mark.parametrize("asks", [0, 2])
@pytest.mark.parametrize("ends", [*ENDS])
def test_who_cannot_go_on_unwinds_from_where_it_waited_last(ends: str, asks: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, **{"limits.hot_ms": 60_000}) as made:
            await made.register("ends", module(ends, asks=asks))
            run = await made.submit("ends", fuel=50_000_000)
            result = await run.wait()
            expects(result, ends)
            if ends == "fuel":
                assert result.cost.fuel >= 50_000_000  # and not only what its unwinding took
            program, handlers, endings = await told_of(made, run)
            # What it asked for last had been begun, or not.
            assert program[:2] == [1, 2] and set(program[2:]) <= {*range(3, 3 + asks)}
            assert (handlers, endings) == ([101, 100], [(1, 2 + asks)])

    loop(main)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("ends", ["trap", "fuel"])
def test_who_came_back_from_the_store_unwinds_the_same(ends: str, captured: bool, tmp_path: Path) -> None:
    """It has waited for an event out of memory; if it can be captured it goes on from a frame."""

    async def main() -> None:
        code = module(ends, waits=1)
        async with node(tmp_path) as made:
            await made.register("ends", instrument(code, Preempt.SYSCALLS) if captured else code)
            run = await made.submit("ends", fuel=50_000_000)
            await until(lambda: not in_memory(made, run.run_id) and counters(made).taken >= captured)
            await go(made, run)
            expects(await run.wait(), ends)
            assert counters(made).used == captured
            assert await told_of(made, run) == ([1, 2], [101, 100], [(2, 3)])

    loop(main)


def test_who_never_waited_has_nothing_to_unwind(tmp_path: Path) -> None:
    async def main() -> None:
        text = """(module (memory (export "memory") 1) (func (export "agentrt_run") (result i32) (unreachable))
            (func (export "agentrt_unwind") (loop $on (br $on))))"""
        async with node(tmp_path) as made:
            await made.register("ends", bytes(wasmtime.wat2wasm(text)))
            run = await made.submit("ends")
            expects(await run.wait(), "trap")
            assert (await told_of(made, run))[2] == []

    loop(main)


def test_handlers_that_trap_are_not_run_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as made:
            await made.register("ends", module("trap", handlers="(unreachable)"))
            run = await made.submit("ends")
            expects(await run.wait(), "trap")
            assert await told_of(made, run) == ([1, 2], [101], [(1, 2)])

    loop(main)


def test_who_computes_on_when_it_is_cancelled_is_brought_back_to_unwind(tmp_path: Path) -> None:
    """It has 200 ms to come to a wait, and does not."""

    async def main() -> None:
        async with node(tmp_path, **{"limits.hot_ms": 60_000}) as made:
            await made.register("ends", module("fuel"))
            run = await made.submit("ends")
            while (await told_of(made, run))[0] != [1, 2]:
                await asyncio.sleep(0.005)
            await run.cancel()
            assert (await run.wait()).state is RunState.CANCELLED
            assert await told_of(made, run) == ([1, 2], [101, 100], [(-1, -1), (1, 2)])

    loop(main)
