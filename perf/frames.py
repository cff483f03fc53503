"""What does taking a frame cost?

``capture_vs_memcpy``: the rate at which a memory without zeros becomes a full frame, in parts of the rate at which it
is copied; both into memory that is there. ``delta_vs_compare``: the time of a second frame, one page in a hundred
having changed, in times of one comparison of two such memories. ``delta_bytes_ratio``: its length in parts of the
first one's. ``restore_vs_memcpy``: the way back, into new memory, which the kernel has to give first. The pairs take
turns; each figure is the ratio of the medians.

``resume_warm_ms``: a guest that waits and has written 2 MiB is captured, ends, and waits again, gone on from its frame.
``resume_cold_ms``: the same with the frame read from its file, which has just been written (without the writing).
The clones are in `perf.images`.
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

from agentrt._core import Frame, FrameEncoder
from agentrt.capture.instrument import Preempt, instrument
from agentrt.ids import new_run_id
from agentrt.stores.frames import FolderFrames
from perf.bench import CoreBench
from perf.guests import waiter
from perf.images import clones
from perf.report import Report, machine
from perf.timing import interleaved, isolated

_MIB = 2**20
_PAGE = 4096
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
    encoder, run_id, taken = FrameEncoder(), new_run_id(), []
    with CoreBench({"scheduler.workers": 1}) as bench, tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        program = bench.load(module)
        image = program.module.image(b"i" * 32)
        files = FolderFrames(Path(folder), 1 << 30)
        bench.submit(program)
        for _ in range(rounds):
            (guest,) = bench.take_waiting(1)
            started = time.perf_counter()
            guest.capture(encoder, module=b"m" * 32, id=bytes(16), segment=0, seq=0, keep=False, image=image)
            data = bytes(memoryview(encoder))
            bench.take_exits(1)
            captured_ms = (time.perf_counter() - started) * 1e3
            files.put(run_id, _ID, data)
            read_ms = _ms(lambda: files.get(run_id, _ID))
            files.drop(run_id)
            started = time.perf_counter()
            bench.submit(program, frame=Frame(data, memory_bytes_max=1 << 32), frame_image=image)
            waiting = bench.take_waiting(1)
            warm_ms = captured_ms + (time.perf_counter() - started) * 1e3
            bench.waiting += waiting
            taken.append((warm_ms, warm_ms + read_ms))
    warm, cold = (statistics.median(column) for column in zip(*taken, strict=True))
    return {"resume_warm_ms": warm, "resume_cold_ms": cold}


def run(tiny: bool) -> Report:
    size_bytes, rounds = (2 * _MIB, 3) if tiny else (64 * _MIB, 51)
    figures = isolated(_codec, size_bytes, rounds) | isolated(_resume, 3 if tiny else 200)
    figures |= isolated(clones, tiny)
    baselines = {name: figures.pop(name) for name in ("memcpy_ms", "compare_ms")}
    return Report("frames", figures, baselines, machine())
