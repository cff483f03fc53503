"""What does it cost that a guest could be captured, while it is not? Part of `perf.frames`.

A sieve with a function call for each prime, and a tool call at its end, in times of the same module in a plain engine:
wasmtime without fuel. ``fuel_vs_plain``: as every guest runs here; ``syscalls_vs_plain``: made by `agentrt build`;
``syscalls_inside_vs_plain``: the same where the innermost loop could make the call, and never does;
``anywhere_vs_plain``: by ``agentrt build --preempt anywhere``. They take turns; each is the ratio of the medians.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import wasmtime

from agentrt.capture.instrument import Preempt, instrument
from perf.bench import CoreBench, Program
from perf.timing import interleaved

_CALL = "(drop (call $call (i32.const 1) (i32.const 16) (i32.const 25) (i32.const 1024) (i32.const 256)))"
_INSIDE = f"(if (i32.eqz (local.get $step)) (then {_CALL}))"


def _sieve(rounds: int, inside: bool = False) -> bytes:
    return bytes(
        wasmtime.wat2wasm(f"""(module
  (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 2)
  (data (i32.const 16) "{{\\"tool\\":\\"echo\\",\\"args\\":{{}}}}")
  (func $strike (param $step i32) (local $at i32)
    (local.set $at (i32.add (local.get $step) (local.get $step)))
    (loop $l
      {_INSIDE if inside else ""}
      (if (i32.lt_u (local.get $at) (i32.const 65536)) (then
        (i32.store8 offset=4096 (local.get $at) (i32.const 1))
        (local.set $at (i32.add (local.get $at) (local.get $step)))
        (br $l)))))
  (func $sieve (local $n i32)
    (local.set $n (i32.const 2))
    (loop $next
      (if (i32.eqz (i32.load8_u offset=4096 (local.get $n))) (then (call $strike (local.get $n))))
      (local.set $n (i32.add (local.get $n) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $n) (i32.const 60000)))))
  (func (export "agentrt_run") (result i32) (local $left i32)
    (local.set $left (i32.const {rounds}))
    (loop $again
      (memory.fill (i32.const 4096) (i32.const 0) (i32.const 65536))
      (call $sieve)
      (local.set $left (i32.sub (local.get $left) (i32.const 1)))
      (br_if $again (local.get $left)))
    {_CALL} (i32.const 0)))""")
    )


def _plain(module: bytes) -> Callable[[], object]:
    """It in an engine that counts nothing, its calls answered at once."""
    engine = wasmtime.Engine()
    store, linker = wasmtime.Store(engine), wasmtime.Linker(engine)
    i32 = wasmtime.ValType.i32()
    linker.define_func("agentrt", "call", wasmtime.FuncType([i32] * 5, [i32]), lambda *_: 0)
    instance = linker.instantiate(store, wasmtime.Module(engine, module))
    run = instance.exports(store)["agentrt_run"]
    assert isinstance(run, wasmtime.Func)
    return partial(run, store)


def _time_s(function: Callable[[], object]) -> float:
    began_s = time.thread_time()
    function()
    return time.thread_time() - began_s


def _time_here_s(bench: CoreBench, program: Program) -> float:
    """Until it waits for the answer of its call."""
    bench.submit(program)
    (guest,) = bench.take_waiting(1)
    ran_s = guest.ran_ns / 1e9
    bench.kill([guest])
    return ran_s


def costs(tiny: bool) -> dict[str, float]:
    """In a process of its own: the engine of the package wasmtime, and the core's, are two."""
    rounds, repetitions = (2, 3) if tiny else (100, 15)
    module, inside = _sieve(rounds), _sieve(rounds, inside=True)
    kinds = {
        "fuel_vs_plain": module,
        "syscalls_vs_plain": instrument(module, Preempt.SYSCALLS),
        "syscalls_inside_vs_plain": instrument(inside, Preempt.SYSCALLS),
        "anywhere_vs_plain": instrument(module, Preempt.ANYWHERE),
    }
    plain = [_plain(each) for each in (module, inside)]
    with CoreBench({"scheduler.workers": 1}) as bench:
        here = [partial(_time_here_s, bench, bench.load(each)) for each in kinds.values()]
        taken = interleaved(repetitions, *(partial(_time_s, each) for each in plain), *here)
    medians = [statistics.median(column) for column in zip(*taken, strict=True)]
    return {name: median / medians["inside" in name] for name, median in zip(kinds, medians[len(plain) :], strict=True)}
