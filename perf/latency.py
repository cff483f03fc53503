"""How soon does urgent work start while every core is busy with code that never yields?

Measured: CLOCK_MONOTONIC from `Core.submit` of a tier-0 guest to its first instruction (a host call), making its store
and instance included, while tier-3 guests loop on all workers. Baseline: what a user would do without agentrt, an
urgent process at normal priority among looping processes at nice 19, from the write to its pipe to its first
instruction.
"""

import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

import wasmtime

from agentrt import _core
from agentrt.config import Config
from agentrt.sizing import core_parameters, engine_limits
from perf.report import Report, machine, percentile

_HOG = '(module (func (export "agentrt_run") (result i32) (loop $l (br $l)) (i32.const 0)))'
_URGENT = """(module (import "agentrt" "clock_now" (func $now (result i64)))
  (func (export "agentrt_run") (result i32) (drop (call $now)) (i32.const 0)))"""
_SEED = bytes(16)


def _submit(core: _core.Core, module: _core.Module, tier: int) -> _core.Guest:
    return core.submit(
        module, tier, tenant=0, tier=tier, input=b"", restored=None, fuel=2**60, seed=_SEED, clock_ns=0,
        admitted=False, replay=False,
    )  # fmt: skip


def _next_exit(core: _core.Core) -> tuple[int, ...]:
    while True:
        select.select([core.fd], [], [])
        for _, kind, _, detail in core.drain():
            if kind == "exit":
                return tuple(detail)


def core_latencies_us(hogs: int, submits: int, rng: random.Random) -> list[float]:
    """Core submit to first guest instruction, microseconds, one value a submit."""
    parameters = core_parameters(Config())
    limits = engine_limits(parameters)
    core = _core.Core(**parameters)
    try:
        hog, urgent = (
            core.load(_core.compile_module(parameters["engine_lib"], bytes(wasmtime.wat2wasm(text)), **limits))
            for text in (_HOG, _URGENT)
        )
        for _ in range(hogs):
            _submit(core, hog, 3)
        latencies = []
        for _ in range(submits):
            time.sleep(rng.uniform(0, 0.002))
            _submit(core, urgent, 0)
            detail = _next_exit(core)
            submitted_ns, first_ns = detail[6], detail[7]
            latencies.append((first_ns - submitted_ns) / 1000)
        return latencies
    finally:
        core.close()


def nice_latencies_us(hogs: int, submits: int, rng: random.Random) -> list[float]:
    """Pipe write to first instruction of a waiting process at nice 0 among hogs at nice 19, microseconds."""
    spin = [sys.executable, "-c", "import os\nos.nice(19)\nwhile True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(hogs)]
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    urgent = os.fork()
    if urgent == 0:
        while os.read(request_read, 1):
            os.write(reply_write, struct.pack("q", time.monotonic_ns()))
        os._exit(0)
    try:
        time.sleep(1 + hogs / 50)  # until the hogs loop
        latencies = []
        for _ in range(submits):
            time.sleep(rng.uniform(0, 0.002))
            submitted_ns = time.monotonic_ns()
            os.write(request_write, b"x")
            first_ns = struct.unpack("q", os.read(reply_read, 8))[0]
            latencies.append((first_ns - submitted_ns) / 1000)
        return latencies
    finally:
        os.kill(urgent, signal.SIGKILL)
        os.waitpid(urgent, 0)
        for process in processes:
            process.kill()
            process.wait()


def run(tiny: bool) -> Report:
    hogs, submits = (4, 20) if tiny else (200, 3000)
    rng = random.Random(1)
    ours = core_latencies_us(hogs, submits, rng)
    theirs = nice_latencies_us(min(hogs, 16), submits // 3, rng)
    return Report(
        "latency",
        {
            "core_p50_us": percentile(ours, 50),
            "core_p99_us": percentile(ours, 99),
            "core_p999_us": percentile(ours, 99.9),
            "core_max_us": max(ours),
            "hogs": hogs,
        },
        {"nice_p50_us": percentile(theirs, 50), "nice_p99_us": percentile(theirs, 99)},
        machine(),
    )
