"""The wasm backend: agents as wasm modules on the C core's workers."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt import _core
from agentrt.backends.base import Exit, GuestEvents, Request
from agentrt.backends.cache import ArtifactCache
from agentrt.backends.compiler import Compiler
from agentrt.config import Config
from agentrt.errors import InternalError, ModuleError, ModuleLimitError, QueueFullError
from agentrt.sizing import core_parameters, engine_limits

#: Events handed to the engine in one turn of the loop; the rest comes in the next, after other callbacks had theirs.
DRAIN_MAX: Final = 256
_WASM_MAGIC: Final = b"\0asm"


class WasmProgram(msgspec.Struct, frozen=True):
    """A compiled module, ready to start. ``version``: sha256 of the wasm, hex."""

    version: str
    pins: dict[str, str]
    module: Any


class WasmBackend:
    """Implements agentrt.backends.base.Backend. Everything on the control loop's thread."""

    name = "wasm"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._core: _core.Core | None = None
        self._tenants: dict[str, int] = {}
        self._engine_version = _core.engine_version()

    async def open(self) -> None:
        """Start the workers. Raises EngineError, ConfigError."""
        parameters = core_parameters(self._config)
        wasm = self._config.wasm
        self._core = _core.Core(**parameters)
        folder = Path(wasm.cache_path) if wasm.cache_path else _user_cache() / "agentrt" / "modules"
        self._cache = await asyncio.to_thread(ArtifactCache, folder, self._core.artifact_key(), wasm.cache_bytes_max)
        self._compiler = Compiler(
            parameters["engine_lib"],
            engine_limits(parameters),
            timeout_ms=wasm.compile_timeout_ms,
            memory_bytes=wasm.compile_memory_bytes_max,
        )
        asyncio.get_running_loop().add_reader(self._core.fd, self._drain)

    @property
    def _open_core(self) -> "_core.Core":
        if self._core is None:
            raise InternalError("the wasm backend is not open")
        return self._core

    async def prepare(self, module: bytes) -> WasmProgram:
        core = self._open_core
        if not module.startswith(_WASM_MAGIC):
            raise ModuleError("this is not a wasm module: it does not begin with \\0asm")
        if len(module) > self._config.wasm.module_bytes_max:
            raise ModuleLimitError(
                f"the module has {len(module)} bytes, the limit is {self._config.wasm.module_bytes_max}",
                limit="wasm.module_bytes_max",
            )
        version = hashlib.sha256(module).hexdigest()
        artifact = await asyncio.to_thread(self._cache.get, version)
        if artifact is None:
            artifact = await self._compiler.compile(module)
            loaded = await asyncio.to_thread(core.load, artifact)  # refuses before it is kept
            await asyncio.to_thread(self._cache.put, version, artifact)
        else:
            loaded = await asyncio.to_thread(core.load, artifact)
        pins = {"engine": f"wasmtime {self._engine_version}", "abi": str(_core.abi_version())}
        return WasmProgram(version, pins, loaded)

    def start(
        self,
        program: WasmProgram,
        events: GuestEvents,
        *,
        tenant: str,
        tier: int,
        input: bytes,
        fuel: int,
        seed: bytes,
        clock_ns: int,
        admitted: bool,
        replay: bool,
    ) -> "_core.Guest":
        return self._open_core.submit(
            program.module,
            events,
            tenant=self._tenant(tenant),
            tier=tier,
            input=input,
            restored=None,
            fuel=fuel,
            seed=seed,
            clock_ns=clock_ns,
            admitted=admitted,
            replay=replay,
        )

    def _tenant(self, name: str) -> int:
        index = self._tenants.get(name)
        if index is None:
            index = len(self._tenants)
            if index >= self._config.scheduler.tenants_max:
                raise QueueFullError(
                    f"the scheduler knows {index} tenants already and cannot take {name!r}",
                    limit="scheduler.tenants_max",
                    hint="Raise it and restart",
                )
            self._tenants[name] = index
        return index

    def _drain(self) -> None:
        """The core's bell rang: hand its events to their owners."""
        for owner, kind, requests, detail in self._open_core.drain(DRAIN_MAX):
            if requests or kind == "syscalls":
                owner.on_syscalls([Request(*request) for request in requests], detail if kind == "syscalls" else None)
            if kind == "exit":
                owner.on_exit(Exit(*detail))

    def statistics(self) -> dict[str, Any]:
        """Counters of the core; times in ns, lists per tier."""
        return self._open_core.statistics() | {"tenants": len(self._tenants)}

    async def close(self) -> None:
        """Stop the workers; guests that have not ended are gone and no event follows."""
        core = self._core
        if core is None or core.closed:
            return
        asyncio.get_running_loop().remove_reader(core.fd)
        self._compiler.close()
        await asyncio.to_thread(core.close)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
