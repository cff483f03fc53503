"""The wasm backend: agents as wasm modules on the C core's workers."""

import asyncio
import hashlib
import logging
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.base import Capture, GuestEvents, Slice, WorkerSlices
from agentrt.backends.cache import ArtifactCache
from agentrt.backends.compiler import Compiler
from agentrt.backends.images import begin_of
from agentrt.backends.slots import CoreSlots, SlotRequest
from agentrt.backends.tenants import TenantIndex
from agentrt.config import Config
from agentrt.errors import ClosedError, EngineError, FrameError, ModuleError, ModuleLimitError, QueueFullError
from agentrt.sizing import CoreParameters, core_parameters, engine_limits
from agentrt.stores.frames import FrameData, Kept

#: Events handed to the engine in one turn of the loop; the rest comes in the next, after other callbacks had theirs.
DRAIN_MAX: Final = 256
#: Modules that may wait for the compiler; each waits with its bytes in memory.
PREPARE_MAX: Final = 64
#: Places of one module that are made ready at once: they are others' meanwhile.
PREWARM_MAX: Final = 64
_WASM_MAGIC: Final = b"\0asm"
#: sha256 of the code alone, hex, and the entry if it is not one of the usual.
_Code = tuple[str, str | None]


class WasmProgram(msgspec.Struct, frozen=True):
    """A compiled module, ready to start. ``version``: sha256 of the wasm, hex. ``wasi``: what it starts with."""

    version: str
    pins: dict[str, str]
    module: Any
    wasi: Any = None
    unwinds: bool = False
    code: str = ""  # sha256 of the code alone, hex


class Resumable(NamedTuple):
    """A frame that a guest can begin with, and what it is a delta to."""

    frame: "_core.Frame"
    base: "_core.Frame | None"


_log: Final = logging.getLogger(__name__)
#: With less room than this a node does not start.
_GUESTS_MIN: Final = 256

#: What is kept to make the next frame in.
_SPARE_BYTES_MAX: Final = 8 << 20

#: How the core begins when a guest cannot go on from its frame (csrc/capture.c).
_REFUSED_FRAME: Final = "the frame cannot be gone on from"

#: What the core gives back with a guest's events: who hears of them, the tenant, whether it is entered by agentrt_run.
_Owner = tuple[GuestEvents, str, bool]


class WasmBackend:
    """Implements agentrt.backends.base.Backend. Everything on the control loop's thread."""

    name = "wasm"
    self_contained = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._core: _core.Core | None = None
        self._tenants = TenantIndex(config.scheduler.tenants_max)
        self._engine_version = _core.engine_version()
        self._preparing: dict[_Code, asyncio.Task[_core.Module]] = {}
        #: Programs may share their code: scripts of one interpreter.
        self._loaded: weakref.WeakValueDictionary[_Code, _core.Module] = weakref.WeakValueDictionary()
        self._warm: weakref.WeakKeyDictionary[_core.Module, int] = weakref.WeakKeyDictionary()
        self._spare: _core.FrameEncoder | None = None  # of `_capture`'s thread
        self._images: weakref.WeakKeyDictionary[_core.Module, _core.FrameImage] = weakref.WeakKeyDictionary()

    async def open(self) -> None:
        """Start the workers. Raises EngineError, ConfigError."""
        parameters = core_parameters(self._config)
        wasm = self._config.wasm
        core = _new_core(parameters, fixed=bool(wasm.guests_max or wasm.stacks_max))
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
            raise ClosedError("the wasm backend is not open")
        return self._core

    @property
    def slots(self) -> CoreSlots:
        """The CPU slots of this backend's core, for backends whose guests run in processes. Only while it is open."""
        return CoreSlots(lambda: self._open_core, self._tenants)

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
        version, code, digest, packed, begin = await asyncio.to_thread(_taken_apart, module)
        key = (digest, packed.entry if packed else None)
        loaded = self._loaded.get(key)
        if loaded is None:
            task = self._preparing.get(key)
            if task is None:
                if len(self._preparing) >= PREPARE_MAX:
                    raise QueueFullError(f"{PREPARE_MAX} modules are being compiled already")
                # A task of its own: the same module may be asked for twice, and one of the two cancelled.
                task = self._preparing[key] = self._loop.create_task(self._load(key, code, begin))
                task.add_done_callback(lambda task: self._prepared(key, task))
            loaded = await asyncio.shield(task)
        image = None if packed is None else await asyncio.to_thread(packed.image)
        pins = {"engine": f"wasmtime {self._engine_version}", "abi": str(_core.abi_version())}
        program = WasmProgram(version, pins, loaded, image, loaded.unwinds, digest)
        if loaded.captures:
            with suppress(EngineError):  # no place for one more guest: then when it is needed
                await asyncio.to_thread(self._image, program)
        return program

    def _prepared(self, key: _Code, task: asyncio.Task[_core.Module]) -> None:
        del self._preparing[key]
        if not task.cancelled() and task.exception() is None:  # seen, even if everyone who asked is gone
            self._loaded[key] = task.result()

    async def _load(self, key: _Code, module: bytes, begin: bytes | None) -> _core.Module:
        digest, entry = key[0], None if key[1] is None else key[1].encode()
        artifact = await asyncio.to_thread(self._cache.get, digest)
        if artifact is not None:
            try:
                return await asyncio.to_thread(self._loaded_from, artifact, entry, begin)
            except (EngineError, ModuleError):
                pass  # whatever it is, a fresh one decides
        artifact = await self._compiler.compile(module)
        loaded = await asyncio.to_thread(self._loaded_from, artifact, entry, begin)  # refuses before it is kept
        await asyncio.to_thread(self._cache.put, digest, artifact)
        return loaded

    def _loaded_from(self, artifact: bytes, entry: bytes | None, begin: bytes | None) -> _core.Module:
        """On a thread. What the engine does for a module's first guest is done here: it takes milliseconds for a large
        memory, in which a worker could not be preempted."""
        loaded = self._open_core.load(artifact, entry, begin)
        loaded.warm()
        return loaded

    def prewarm(self, counts: Iterable[tuple[WasmProgram, int]]) -> None:
        """See Backend. What is kept ready is places for guests, with the program's memory in them."""
        found: dict[_core.Module, int] = {}
        for program, count in counts:
            found[program.module] = max(min(count, PREWARM_MAX), found.get(program.module, 0))
        more = [(module, count) for module, count in found.items() if count > self._warm.get(module, 0)]
        self._warm = weakref.WeakKeyDictionary({module: count for module, count in found.items() if count})
        if more:
            self._loop.run_in_executor(None, _warm_all, more)

    def start(
        self,
        program: WasmProgram,
        events: GuestEvents,
        *,
        tenant: str,
        tier: int,
        input: bytes,
        restored: bytes | None = None,
        fuel: int,
        seed: bytes,
        clock_ns: int,
        admitted: bool,
        replay: bool,
        frame: "Resumable | None" = None,
        memory_bytes_max: int = 0,
    ) -> "_core.Guest":
        """Queue a guest; with a `frame_of` its program, it goes on from there. ``memory_bytes_max``: if it may have
        less than the others. Raises QueueFullError unless ``admitted``."""
        core = self._open_core
        index = self._tenants.acquire(tenant, admitted=admitted)
        module = program.module
        owner: _Owner = (events, tenant, module.is_agent)
        try:
            return core.submit(
                module, owner, index, tier, input, restored, fuel, seed, clock_ns, admitted, replay, True, program.wasi,
                None if frame is None else frame.frame, None if frame is None else frame.base,
                None if frame is None else self._image(program), memory_bytes_max=memory_bytes_max,
            )  # fmt: skip
        except BaseException:
            self._tenants.release(tenant)
            raise

    def started_with(self, program: WasmProgram, packed: wasi.Packed) -> WasmProgram:
        """The program with other arguments, environment and files than its module has. Raises ModuleError: they cannot
        be; ModuleLimitError."""
        return msgspec.structs.replace(program, wasi=packed.image())

    # --- frames (docs/frames.md) ----------------------------------------------------

    def capturing(self, program: WasmProgram, guest: "_core.Guest") -> Capture | None:
        """How a frame of a guest that waits is taken; None: its module cannot be captured."""
        return partial(self._capture, program, guest) if program.module.captures else None

    def _capture(
        self,
        program: WasmProgram,
        guest: "_core.Guest",
        *,
        frame_id: bytes,
        segment: int,
        seq: int,
        base: FrameData | None = None,
    ) -> tuple[FrameData, int]:
        # what a frame was made in has its pages, and to be given them takes longer than to fill them
        spare, self._spare = self._spare, None
        encoder = spare if spare is not None and not spare.looked_at else _core.FrameEncoder()
        digest = bytes.fromhex(program.version)
        image = self._image(program)
        before = None if base is None else self._opened(base)
        guest.capture(encoder, module=digest, id=frame_id, segment=segment, seq=seq, image=image, base=before)
        data = memoryview(encoder)  # no copy: that would take as long again, with the GIL
        if len(encoder) <= _SPARE_BYTES_MAX:
            self._spare = encoder
        return data, self._opened(data).fuel

    def frame_of(self, program: WasmProgram, kept: Kept) -> "Resumable":
        """A frame of the program, to start a guest with. Raises FrameError: it is damaged, or of something else."""
        frame = self._opened(kept.frame)
        found = (frame.module.hex(), frame.engine, frame.abi)
        wanted = (program.version, self._engine_version, _core.abi_version())
        for what, one, other in zip(("module", "engine", "ABI"), found, wanted, strict=True):
            if one != other:
                raise FrameError(f"it is of {what} {one}, not {other}")
        if frame.image != image_digest(program.code):
            raise FrameError("it was made with another image")
        return Resumable(frame, None if kept.base is None else self._opened(kept.base))

    def _opened(self, data: FrameData) -> "_core.Frame":
        return _core.Frame(data, memory_bytes_max=self._config.wasm.memory_bytes_max)

    def _image(self, program: WasmProgram) -> "_core.FrameImage":
        """What guests of the program begin with. Any thread. Raises EngineError when there is no place for a guest."""
        image = self._images.get(program.module)
        if image is None:
            image = self._images[program.module] = program.module.image(image_digest(program.code))
        return image

    def _drain(self) -> None:
        """The core's bell rang: hand its events to their owners. One that raises is reported and harms no other."""
        for owner, kind, requests, detail in self._open_core.drain(DRAIN_MAX):
            try:
                if type(owner) is SlotRequest:  # of another backend's host
                    owner.on_event(kind, detail)
                    continue
                events, tenant, agent = owner
                if kind == "exit":
                    self._tenants.release(tenant)
                    if requests:
                        events.on_syscalls(requests, None)
                    if detail.reason == "engine" and detail.message.startswith(_REFUSED_FRAME):
                        detail = detail._replace(reason="evicted")  # the journal has it all
                    if not agent and detail.output is None and detail.reason == "returned":
                        detail = detail._replace(output=wasi.result_of(detail.stdout))
                    events.on_exit(detail)
                elif kind == "unwinding":
                    events.on_unwinding()
                elif kind == "safe_point":
                    if requests:
                        events.on_syscalls(requests, None)
                    events.on_safe_point()
                elif requests or kind == "syscalls":
                    events.on_syscalls(requests, detail)
            except Exception as error:
                self._loop.call_exception_handler({"message": "a guest's event handler raised", "exception": error})

    def statistics(self) -> dict[str, Any]:
        """Counters of the core; times in ns, lists per tier."""
        return self._open_core.statistics() | {"tenants": len(self._tenants)}

    def slices(self, since_ns: int, most: int) -> tuple[WorkerSlices, ...]:
        """What each CPU slot was used for since that time (monotonic): the longest ``most`` slices. On the loop."""
        workers, owners = self._open_core.slices(since_ns, most)
        run_ids = {number: getattr(events, "run_id", None) for number, (events, *_) in owners.items()}
        return tuple(
            WorkerSlices(
                tuple(
                    Slice(start_ns, end_ns, tier, end, run_ids.get(number), foreign)
                    for start_ns, end_ns, tier, end, number, foreign in slices
                ),
                count,
            )
            for slices, count in workers
        )

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
        self._core = None  # its address space is free once nobody holds its modules either


def _new_core(parameters: CoreParameters, *, fixed: bool) -> "_core.Core":
    """A core for as many guests as there is address space for; exactly as many as configured if that is ``fixed``.
    Raises EngineError."""
    while True:
        try:
            return _core.Core(**parameters)
        except MemoryError as error:
            if fixed or parameters["guests_max"] < 2 * _GUESTS_MIN:
                raise EngineError(str(error)) from None
            parameters["guests_max"] //= 2
            parameters["stacks_max"] = min(parameters["stacks_max"], parameters["guests_max"])
            _log.warning("%s: this node has room for %d", error, parameters["guests_max"])


def _warm_all(modules: list[tuple[_core.Module, int]]) -> None:
    for module, count in modules:
        module.warm(count)


def _taken_apart(module: bytes) -> tuple[str, bytes, str, wasi.Packed | None, bytes | None]:
    """The module's version, its code and its digest, what was packed with it, and where guests of an image begin."""
    code, packed = wasi.unpack(module)
    version = hashlib.sha256(module).hexdigest()
    digest = version if packed is None else hashlib.sha256(code).hexdigest()
    return version, code, digest, packed, begin_of(code, packed)


def image_digest(code: str) -> bytes:
    """Of what guests begin with whose code has that sha256 (hex)."""
    return hashlib.sha256(b"image " + code.encode()).digest()


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
