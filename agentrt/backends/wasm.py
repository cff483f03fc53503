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
from agentrt.backends.tenants import TenantIndex
from agentrt.config import Config
from agentrt.errors import EngineError, InternalError, ModuleError, ModuleLimitError, QueueFullError
from agentrt.sizing import core_parameters, engine_limits

#: Events handed to the engine in one turn of the loop; the rest comes in the next, after other callbacks had theirs.
DRAIN_MAX: Final = 256
#: Modules that may wait for the compiler; each waits with its bytes in memory.
PREPARE_MAX: Final = 64
_WASM_MAGIC: Final = b"\0asm"


class WasmProgram(msgspec.Struct, frozen=True):
    """A compiled module, ready to start. ``version``: sha256 of the wasm, hex."""

    version: str
    pins: dict[str, str]
    module: Any


class _Owner:
    """What the core gives back with a guest's events."""

    __slots__ = ("events", "tenant")

    def __init__(self, events: GuestEvents, tenant: str) -> None:
        self.events = events
        self.tenant = tenant


class WasmBackend:
    """Implements agentrt.backends.base.Backend. Everything on the control loop's thread."""

    name = "wasm"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._core: _core.Core | None = None
        self._tenants = TenantIndex(config.scheduler.tenants_max)
        self._engine_version = _core.engine_version()
        self._preparing: dict[str, asyncio.Task[WasmProgram]] = {}

    async def open(self) -> None:
        """Start the workers. Raises EngineError, ConfigError."""
        parameters = core_parameters(self._config)
        wasm = self._config.wasm
        core = _core.Core(**parameters)
        try:
            folder = Path(wasm.cache_path) if wasm.cache_path else _user_cache() / "agentrt" / "modules"
            self._cache = await asyncio.to_thread(ArtifactCache, folder, core.artifact_key(), wasm.cache_bytes_max)
        except BaseException:
            core.close()
            raise
        self._compiler = Compiler(
            parameters["engine_lib"],
            engine_limits(parameters),
            timeout_ms=wasm.compile_timeout_ms,
            memory_bytes=wasm.compile_memory_bytes_max,
        )
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(core.fd, self._drain)

    @property
    def _open_core(self) -> "_core.Core":
        if self._core is None:
            raise InternalError("the wasm backend is not open")
        return self._core

    async def prepare(self, module: bytes) -> WasmProgram:
        """Check, compile (in a child) and load. Raises ModuleError and its kinds, QueueFullError when too many are
        being prepared; changes nothing then."""
        if not module.startswith(_WASM_MAGIC):
            raise ModuleError("this is not a wasm module: it does not begin with \\0asm")
        if len(module) > self._config.wasm.module_bytes_max:
            raise ModuleLimitError(
                f"the module has {len(module)} bytes, the limit is {self._config.wasm.module_bytes_max}",
                limit="wasm.module_bytes_max",
            )
        version = await asyncio.to_thread(lambda: hashlib.sha256(module).hexdigest())
        task = self._preparing.get(version)
        if task is None:
            if len(self._preparing) >= PREPARE_MAX:
                raise QueueFullError(f"{PREPARE_MAX} modules are being compiled already")
            # A task of its own: the same module may be asked for twice, and one of the two cancelled.
            task = self._preparing[version] = self._loop.create_task(self._prepare(version, module))
            task.add_done_callback(lambda task: self._prepared(version, task))
        return await asyncio.shield(task)

    def _prepared(self, version: str, task: asyncio.Task[WasmProgram]) -> None:
        del self._preparing[version]
        if not task.cancelled():
            task.exception()  # seen, even if everyone who asked is gone

    async def _prepare(self, version: str, module: bytes) -> WasmProgram:
        artifact = await asyncio.to_thread(self._cache.get, version)
        loaded = None
        if artifact is not None:
            try:
                loaded = await asyncio.to_thread(self._open_core.load, artifact)
            except (EngineError, ModuleError):
                artifact = None  # whatever it is, a fresh one decides
        if loaded is None:
            artifact = await self._compiler.compile(module)
            loaded = await asyncio.to_thread(self._open_core.load, artifact)  # refuses before it is kept
            await asyncio.to_thread(self._cache.put, version, artifact)
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
        """Queue a guest. Raises QueueFullError unless ``admitted``."""
        core = self._open_core
        index = self._tenants.acquire(tenant, admitted=admitted)
        try:
            return core.submit(
                program.module,
                _Owner(events, tenant),
                tenant=index,
                tier=tier,
                input=input,
                restored=None,
                fuel=fuel,
                seed=seed,
                clock_ns=clock_ns,
                admitted=admitted,
                replay=replay,
            )
        except BaseException:
            self._tenants.release(tenant)
            raise

    def _drain(self) -> None:
        """The core's bell rang: hand its events to their owners. One that raises is reported and harms no other."""
        for owner, kind, requests, detail in self._open_core.drain(DRAIN_MAX):
            if kind == "exit":
                self._tenants.release(owner.tenant)
            try:
                if requests or kind == "syscalls":
                    waiting = detail if kind == "syscalls" else None
                    owner.events.on_syscalls([Request(*request) for request in requests], waiting)
                if kind == "exit":
                    owner.events.on_exit(Exit(*detail))
            except Exception as error:
                self._loop.call_exception_handler({"message": "a guest's event handler raised", "exception": error})

    def statistics(self) -> dict[str, Any]:
        """Counters of the core; times in ns, lists per tier."""
        return self._open_core.statistics() | {"tenants": len(self._tenants)}

    async def close(self) -> None:
        """Stop the workers; guests that have not ended are gone and no event follows."""
        core = self._core
        if core is None or core.closed:
            return
        self._loop.remove_reader(core.fd)
        self._compiler.close()
        for task in tuple(self._preparing.values()):
            task.cancel()
        await asyncio.gather(*self._preparing.values(), return_exceptions=True)
        await asyncio.to_thread(core.close)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
