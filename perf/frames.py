"""What does taking a frame cost?

``capture_vs_memcpy``: the rate at which a memory without zeros becomes a full frame, in parts of the rate at which it
is copied; both into memory that is there. ``delta_vs_compare``: the time of a second frame, one page in a hundred
having changed, in times of one comparison of two such memories. ``delta_bytes_ratio``: its length in parts of the
first one's. ``restore_vs_memcpy``: the way back, into new memory, which the kernel has to give first. The pairs take
turns; each figure is the ratio of the medians.

``resume_warm_ms``: a guest that waits and has written 2 MiB is captured, ends, and waits again, gone on from its frame.
``resume_cold_ms``: the same with the frame read from its file, which has just been written (without the writing).
The clones are in `perf.images`, what capture costs while it is not used in `perf.capture_cost`.

``urgent_submit_p99_ms``, ``other_submit_p99_ms``: durable submits at tier 0 and tier 2, one after the other, to a node
that writes frames of 8 MiB all the time; baselines: the same to one that writes none.
"""

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import wasmtime

from agentrt import Runtime
from agentrt._core import Frame, FrameEncoder
from agentrt.capture.instrument import Preempt, instrument
from agentrt.config import load_config
from agentrt.ids import new_run_id
from agentrt.stores.frames import FolderFrames
from perf.bench import CoreBench
from perf.capture_cost import costs
from perf.guests import NOOP, waiter
from perf.images import clones
from perf.report import Report, machine
from perf.timing import interleaved, isolated

_MIB = 2**20
_PAGE = 4096
_BASELINES = ("memcpy_ms", "compare_ms", "urgent_submit_alone_p99_ms", "other_submit_alone_p99_ms")
_ID = bytes(16).hex()
_HEAD = {"module": b"m" * 32, "engine": "50", "segment": 1, "seq": 1, "fuel": 1, "clock_ns": 1, "sections": {}}


def _ms(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def _codec(size_bytes: int, rounds: int) -> dict[str, float]:
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    memory = os.urandom(size_bytes)
    changed = bytearray(memory)
    for at in range(0, size_bytes, 100 * _PAGE):
        changed[at] ^= 1
        changed[at + 2000] ^= 1
    later, same = bytes(changed), bytes(bytearray(memory))
    target = (ctypes.c_char * size_bytes)()
    encoder, second = FrameEncoder(), FrameEncoder()
    encode = partial(encoder.encode, memory, id=b"1" * 16, **_HEAD)
    encode()
    base = Frame(bytes(memoryview(encoder)), memory_bytes_max=size_bytes)
    delta = partial(second.encode, later, id=b"2" * 16, base=base, **_HEAD)
    delta()
    taken = interleaved(
        rounds,
        lambda: _ms(lambda: ctypes.memmove(target, memory, size_bytes)),
        lambda: _ms(encode),
        lambda: _ms(lambda: libc.memcmp(memory, same, size_bytes)),
        lambda: _ms(delta),
        lambda: _ms(base.memory),
        lambda: _ms(lambda: bytes(memoryview(target))),
    )
    copy, whole, compare, less, back, fresh = (statistics.median(column) for column in zip(*taken, strict=True))
    return {
        "capture_vs_memcpy": copy / whole,
        "capture_ms": whole,
        "delta_vs_compare": less / compare,
        "delta_ms": less,
        "delta_bytes_ratio": len(second) / len(encoder),
        "restore_vs_memcpy": fresh / back,
        "memcpy_ms": copy,
        "compare_ms": compare,
    }


def _resume(rounds: int) -> dict[str, float]:
    """Medians, in ms."""
    module = instrument(bytes(wasmtime.wat2wasm(waiter(2 * _MIB))), Preempt.SYSCALLS)
    encoder, run_id, taken = FrameEncoder(), new_run_id(), []  # one: so it is in the product
    with CoreBench({"scheduler.workers": 1}) as bench, tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        program = bench.load(module)
        image = program.module.image(b"i" * 32)
        files = FolderFrames(Path(folder), 1 << 30)
        bench.submit(program)
        for _ in range(rounds):
            (guest,) = bench.take_waiting(1)
            started = time.perf_counter()
            guest.capture(encoder, module=b"m" * 32, id=bytes(16), segment=0, seq=0, keep=False, image=image)
            data = memoryview(encoder)
            bench.take_exits(1)
            captured_ms = (time.perf_counter() - started) * 1e3
            files.put(run_id, _ID, data)
            read_ms = _ms(lambda: files.get(run_id, _ID))
            files.drop(run_id)
            started = time.perf_counter()
            bench.submit(program, frame=Frame(data, memory_bytes_max=1 << 32), frame_image=image)
            waiting = bench.take_waiting(1)
            warm_ms = captured_ms + (time.perf_counter() - started) * 1e3
            del data  # or the encoder could not be used again
            bench.waiting += waiting
            taken.append((warm_ms, warm_ms + read_ms))
    warm, cold = (statistics.median(column) for column in zip(*taken, strict=True))
    return {"resume_warm_ms": warm, "resume_cold_ms": cold}


_EVENT_WAIT = 4
_EVENT = '{"topic":null,"key":"go"}'


def _mailed(size_bytes: int) -> bytes:
    """Writes to so much of its memory, waits for an event, and so on."""
    data = _EVENT.replace('"', '\\"')
    return bytes(
        wasmtime.wat2wasm(f"""(module
  (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") {2 + size_bytes // 65536})
  (data (i32.const 16) "{data}")
  (func (export "agentrt_run") (result i32) (local $round i32)
    (loop $again
      (local.set $round (i32.add (local.get $round) (i32.const 1)))
      (memory.fill (i32.const 65536) (local.get $round) (i32.const {size_bytes}))
      (drop (call $call (i32.const {_EVENT_WAIT}) (i32.const 16) (i32.const {len(_EVENT)}) (i32.const 0) (i32.const 0)))
      (br $again))
    (i32.const 0)))""")
    )


def _beside_frames(size_bytes: int, submits: int, frames: bool) -> tuple[list[float], list[float]]:
    """Times of durable submits at tier 0 and tier 2, in ms."""
    module, nothing = instrument(_mailed(size_bytes), Preempt.SYSCALLS), bytes(wasmtime.wat2wasm(NOOP))
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        settings = {"limits.hot_ms": 0, "wasm.frame_after_ms": 0, "wasm.frames_bytes_max": 1 << 30 if frames else 0}
        arguments = settings | {"store.path": folder, "store.force_place": True}
        with Runtime(config=load_config(arguments=arguments, env={})) as made:
            made.register_sync("mailed", module)
            made.register_sync("nothing", nothing)
            runs = [made.submit_sync("mailed", tier=3) for _ in range(8 if frames else 0)]
            taken: tuple[list[float], list[float]] = ([], [])
            for number in range(submits):
                if frames:
                    made.send_sync(run_id=runs[number % len(runs)].run_id, key="go")
                for times, tier in zip(taken, (0, 2), strict=True):
                    times.append(_ms(partial(made.submit_sync, "nothing", tier=tier)))
            counters = made._engine.frames
            assert counters.taken > 0 if frames else not counters.taken
            for each in runs:
                each.cancel_sync()
    return taken


def _submits(size_bytes: int, submits: int) -> dict[str, float]:
    beside = _beside_frames(size_bytes, submits, frames=True)
    alone = _beside_frames(size_bytes, submits, frames=False)
    names = ("urgent_submit_p99_ms", "other_submit_p99_ms", "urgent_submit_alone_p99_ms", "other_submit_alone_p99_ms")
    return {name: _p99(times) for name, times in zip(names, (*beside, *alone), strict=True)}


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * 99 // 100)]


def run(tiny: bool) -> Report:
    size_bytes, rounds = (2 * _MIB, 3) if tiny else (64 * _MIB, 51)
    figures = isolated(_codec, size_bytes, rounds) | isolated(_resume, 3 if tiny else 200)
    figures |= isolated(clones, tiny)
    figures |= isolated(costs, tiny)
    figures |= isolated(_submits, _MIB if tiny else 8 * _MIB, 20 if tiny else 2000)
    baselines = {name: figures.pop(name) for name in _BASELINES}
    return Report("frames", figures, baselines, machine())
