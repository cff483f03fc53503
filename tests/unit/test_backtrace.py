"""What a frame's guest was doing, told by name: in a syscall, at a safe point in a loop, of a delta."""

import hashlib
from typing import Any

import pytest
import wasmtime
from capture_kit import Driver, opened
from core_fixture import LIBRARY, LIMITS

from agentrt import _core
from agentrt.capture.backtrace import backtrace
from agentrt.capture.instrument import Preempt, instrument
from agentrt.config import load_config
from agentrt.errors import FrameError
from agentrt.sizing import core_parameters

#: Functions that call each other; the innermost computes, then asks.
TEXT = """(module
  (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 40)
  (data (i32.const 16) "{\\"tool\\":\\"echo\\",\\"args\\":{}}")
  (func $asks (result i32) (call $call (i32.const 1) (i32.const 16) (i32.const 25) (i32.const 1024) (i32.const 256)))
  (func $computes (param $left i32)
    (loop $again
      (i32.store (i32.mul (local.get $left) (i32.const 4096)) (local.get $left))
      (br_if $again (local.tee $left (i32.sub (local.get $left) (i32.const 1))))))
  (func $middle (result i32) (call $computes (i32.const 500)) (call $asks))
  (func (export "agentrt_run") (result i32) (drop (call $middle)) (drop (call $middle)) (i32.const 0)))"""


@pytest.fixture(scope="module")
def module() -> bytes:
    return instrument(bytes(wasmtime.wat2wasm(TEXT)), Preempt.ANYWHERE)


def names(module: bytes, frame: bytes, base: bytes | None = None) -> list[str]:
    calls = backtrace(
        module, opened(frame), core_parameters(load_config(env={})), None if base is None else opened(base)
    )
    return [call.function for call in calls]


def frames(module: bytes, at: str) -> tuple[bytes, bytes]:
    """One where its guest waits for its first answer or stands in a loop, and a delta to it from a little later."""
    driver = Driver(_core.compile_module(LIBRARY, module, **LIMITS))
    try:
        digest: dict[str, Any] = {"module": hashlib.sha256(module).digest()}
        driver.start(b"", safe_point=at == "safe_point")
        stop = driver.next()
        assert stop.kind == at
        one = driver.capture(keep=True, **digest)
        if at == "waiting":
            driver.answer(stop)
        else:
            driver.guest.leave_safe_point(again=True)
        assert driver.next().kind == at
        return one, driver.capture(keep=True, frame_id=b"2" * 16, base=opened(one), **digest)
    finally:
        driver.close()


@pytest.mark.parametrize("at", ["waiting", "safe_point"])
def test_the_functions_on_its_stack_are_told_the_innermost_first(module: bytes, at: str) -> None:
    inner = {"waiting": ["asks", "middle"], "safe_point": ["computes", "middle"]}[at]
    one, two = frames(module, at)
    for frame, base in ((one, None), (two, one)):
        told = names(module, frame, base)
        assert told[-1] == "agentrt_run" or told[-1].isdigit(), told
        assert [name for name in told if name in ("asks", "computes", "middle")] == inner


def test_a_frame_that_does_not_fit_says_so(module: bytes) -> None:
    one, two = frames(module, "waiting")
    with pytest.raises(FrameError, match="base"):
        names(module, two)
    plain = bytes(wasmtime.wat2wasm(TEXT))
    with pytest.raises(FrameError, match="not of this module"):
        names(plain, one)
