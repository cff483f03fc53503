"""A wasm backend with short ways to run guests on it, for the tests of the backend, of the guests and of the manual."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from agentrt.backends.base import Exit, Request, Status
from agentrt.backends.wasm import WasmBackend, WasmProgram
from agentrt.config import Config, load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "guests"
BAD = ROOT / "tests" / "guests"

Tool = Callable[[dict[str, Any]], Any]

FUEL = 10**12
MIB = 1 << 20


class Run:
    """The engine's side of one guest: answers tool calls from plain functions, at once and in order."""

    def __init__(self, tools: dict[str, Tool], clock_ns: int) -> None:
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.logs: list[bytes] = []
        self.waits: list[tuple[int, ...]] = []
        self._tools = tools
        self._clock_ns = clock_ns
        self._seq = 0
        self.guest: Any = None

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        if waiting is not None:
            self.waits.append(waiting)
        for handle, op, payload in requests:
            if op == 13:
                self.logs.append(payload)
                continue
            status, answer = self._answer(op, payload)
            self._seq += 1
            self._clock_ns += 1000
            self.guest.complete(handle, status, answer, self._clock_ns, self._seq)

    def _answer(self, op: int, payload: bytes) -> tuple[int, bytes]:
        try:
            request = msgspec.json.decode(payload)
            assert op == 1, op
            self.calls.append((request["tool"], request["args"]))
            return Status.OK, msgspec.json.encode(self._tools[request["tool"]](request["args"]))
        except Exception as error:
            return Status.FAILED, msgspec.json.encode({"code": "tool_failed", "message": repr(error)})

    def on_exit(self, exit: Exit) -> None:
        self.ended.set_result(exit)


class Bench:
    """A backend with short ways to run modules on it."""

    def __init__(self, backend: WasmBackend) -> None:
        self.backend = backend

    async def prepare(self, name: str) -> WasmProgram:
        folder = EXAMPLES if (EXAMPLES / f"{name}.wasm").exists() else BAD
        return await self.backend.prepare((folder / f"{name}.wasm").read_bytes())

    def begin(
        self,
        program: WasmProgram,
        input: Any = None,
        tools: dict[str, Tool] | None = None,
        *,
        tenant: str = "t",
        tier: int = 1,
        fuel: int = FUEL,
        admitted: bool = False,
        memory_bytes_max: int = 0,
    ) -> Run:
        run = Run(tools or {}, 1_700_000_000 * 10**9)
        run.guest = self.backend.start(
            program,
            run,
            tenant=tenant,
            tier=tier,
            input=msgspec.json.encode(input),
            fuel=fuel,
            seed=bytes(16),
            clock_ns=1_700_000_000 * 10**9,
            admitted=admitted,
            replay=False,
            memory_bytes_max=memory_bytes_max,
        )
        return run

    async def run(self, name: str, input: Any = None, tools: dict[str, Tool] | None = None, **how: Any) -> Exit:
        return await asyncio.wait_for(self.begin(await self.prepare(name), input, tools, **how).ended, 60)


def settings(cache: Path, **changed: Any) -> Config:
    small = {
        "wasm.cache_path": str(cache),
        "wasm.guests_max": 200,
        "wasm.stacks_max": 100,
        "wasm.memory_bytes_max": 128 * MIB,
        "wasm.inflight_max": 64,
        "scheduler.workers": 2,
        "scheduler.worker_nice": 0,
    }
    return load_config(arguments=small | {name.replace("__", "."): value for name, value in changed.items()})


def bench(config: Config, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        backend = WasmBackend(config)
        await backend.open()
        try:
            await test(Bench(backend))
        finally:
            await backend.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
