"""A core as the product configures it, driven from one plain thread; and runtimes for the benchmarks."""

import asyncio
import contextlib
import select
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import uvloop
import wasmtime

from agentrt import Runtime, RuntimeStatistics, _core
from agentrt.backends import wasi
from agentrt.backends.base import Exit
from agentrt.config import load_config
from agentrt.plugins import Plugins
from agentrt.sizing import EngineLimits, core_parameters

T = TypeVar("T")

_SEED = bytes(16)
_FUEL = 2**60
_SILENCE_S = 30.0
_NO_ENV: Mapping[str, str] = {}  # figures of the defaults, whatever the environment says


class Program(NamedTuple):
    """What `CoreBench.submit` takes."""

    module: _core.Module
    image: _core.WasiImage | None


def unpacked(guest: str | bytes) -> tuple[bytes, wasi.Packed | None]:
    """The wasm of a guest (text, or a module), and what is packed with it."""
    return wasi.unpack(bytes(wasmtime.wat2wasm(guest)) if isinstance(guest, str) else guest)


class CoreBench:
    """A core with the default settings, changed by ``settings`` ("scheduler.workers") and, in the core's own terms and
    beyond what settings allow, by ``over`` (its parameters)."""

    def __init__(self, settings: Mapping[str, Any] | None = None, **over: Any) -> None:
        config = load_config(arguments=settings, env=_NO_ENV)
        self.parameters: dict[str, Any] = {**core_parameters(config), **over}
        self._limits = {name: int(self.parameters[name]) for name in EngineLimits.__annotations__}
        self.core = _core.Core(**self.parameters)
        self.exits: list[Exit] = []
        self.waiting: list[_core.Guest] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.clear()
        self.core.close()

    def compile(self, guest: str | bytes) -> bytes:
        """The engine's machine code of a guest."""
        return _core.compile_module(self.parameters["engine_lib"], unpacked(guest)[0], **self._limits)

    def load(self, guest: str | bytes, artifact: bytes | None = None) -> Program:
        """A guest (wasm text, or a module, perhaps packed), compiled unless its machine code is given."""
        packed = unpacked(guest)[1]
        module = self.core.load(self.compile(guest) if artifact is None else artifact)
        return Program(module, None if packed is None else packed.image())

    def submit(self, program: Program, tier: int = 1, tenant: int = 0, **over: Any) -> _core.Guest:
        """Queue a guest; ``over``: further arguments of the core's."""
        owner: list[_core.Guest] = []
        guest = self.core.submit(
            program.module, owner, tenant=tenant, tier=tier, input=b"", restored=None, fuel=_FUEL, seed=_SEED,
            clock_ns=0, admitted=False, replay=False, wasi=program.image, **over,
        )  # fmt: skip
        owner.append(guest)
        return guest

    def take(self) -> None:
        """Wait until something happens and sort it into ``exits`` and ``waiting``."""
        poll = select.poll()  # select knows no descriptor above 1023
        poll.register(self.core.fd, select.POLLIN)
        if not poll.poll(_SILENCE_S * 1000):
            raise TimeoutError("the core says nothing")
        for owner, kind, _, detail in self.core.drain(1024):
            if kind == "exit":
                self.exits.append(Exit(*detail))
            elif detail:
                self.waiting.append(owner[0])

    def take_exits(self, count: int) -> list[Exit]:
        """The next ``count`` exits; no others may be there."""
        while len(self.exits) < count:
            self.take()
        taken, self.exits = self.exits, []
        return taken

    def take_waiting(self, count: int) -> list[_core.Guest]:
        """The next ``count`` guests that wait for an answer."""
        while len(self.waiting) < count:
            self.take()
        taken, self.waiting = self.waiting, []
        return taken

    def kill(self, guests: list[_core.Guest]) -> None:
        """End guests, and wait for it."""
        for guest in guests:
            guest.kill()
        self.take_exits(len(guests))


@contextlib.asynccontextmanager
async def runtime(
    durable: bool, agents: Mapping[str, str], *, tools: tuple[Callable[..., Any], ...] = (),
    settings: Mapping[str, Any] | None = None, plugins: Plugins | None = None,
) -> AsyncIterator[Runtime]:  # fmt: skip
    """A runtime with the default settings and agents of wasm text. ``durable``: on LMDB in a temporary folder, on any
    file system (the report names it); otherwise in memory."""
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        store = {"store.path": str(Path(folder) / "store"), "store.force_place": True}
        cache = {"wasm.cache_path": str(Path(folder) / "cache")}
        kind = store if durable else {"store.kind": "memory"}
        config = load_config(arguments={**cache, **kind, **(settings or {})}, env=_NO_ENV)
        async with Runtime(config=config, tools=tools, plugins=plugins) as made:
            for name, text in agents.items():
                await made.register(name, bytes(wasmtime.wat2wasm(text)))
            yield made


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on a uvloop loop, as an embedding program that cares for speed would."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def until(made: Runtime, condition: Callable[[RuntimeStatistics], bool]) -> RuntimeStatistics:
    """The first statistics that meet the condition."""
    while not condition(now := await made.statistics()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return now


async def run_many(made: Runtime, agent: str, count: int, at_once: int) -> None:
    """``count`` runs from submit to result, ``at_once`` of them at any time."""
    left = count

    async def one_after_the_other() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await (await made.submit(agent)).result()

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
