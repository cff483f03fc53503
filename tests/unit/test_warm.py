"""Modules are ready for their first guest, and places are made ready where a profile says so."""

import asyncio
from pathlib import Path

import wasmtime
from capture_kit import Driver
from core_fixture import LIBRARY, LIMITS
from wasm_bench import Bench, bench, settings

from agentrt import _core

#: Some data, which the engine maps, and nothing to do.
DATA = "".join(f'(data (i32.const {at}) "{"x" * 1000}")' for at in range(0, 60_000, 1000))
TEXT = f'(module (memory (export "memory") 2) {DATA} (func (export "agentrt_run") (result i32) (i32.const 0)))'
STARTS = '(module (memory (export "memory") 1) (func $f (loop $l (br $l))) (start $f) (func (export "agentrt_run")))'


def mapped() -> int:
    """Places of guests that have a module's memory in them."""
    return Path("/proc/self/maps").read_text().count("wasm-memory-image")


def test_so_many_guests_begin_as_there_are_places_for_and_leave_them() -> None:
    driver = Driver(_core.compile_module(LIBRARY, bytes(wasmtime.wat2wasm(TEXT)), **LIMITS), guests_max=5, stacks_max=5)
    try:
        assert [driver.module.warm(count) for count in (0, 1, 5, 10_000)] == [0, 1, 5, 5]
        for _ in range(10):
            driver.start(b"")
            assert driver.next().kind == "exit"
    finally:
        driver.close()


def test_a_start_function_that_never_ends_does_not_hold_it_up() -> None:
    text = STARTS.replace('"agentrt_run")', '"agentrt_run") (result i32) (i32.const 0)')
    driver = Driver(_core.compile_module(LIBRARY, bytes(wasmtime.wat2wasm(text)), **LIMITS))
    try:
        driver.module.warm(3)
    finally:
        driver.close()


def test_a_module_is_loaded_with_its_memory_ready_and_more_places_where_that_is_wanted(tmp_path: Path) -> None:
    async def test(made: Bench) -> None:
        before = mapped()
        program = await made.backend.prepare(bytes(wasmtime.wat2wasm(TEXT)))
        assert mapped() > before
        made.backend.prewarm([(program, 7)])
        for _ in range(200):
            if mapped() >= before + 7:
                break
            await asyncio.sleep(0.01)
        assert mapped() >= before + 7
        made.backend.prewarm([(program, 0)])
        exit = await asyncio.wait_for(made.begin(program).ended, 60)
        assert exit.reason == "returned"

    bench(settings(tmp_path), test)
