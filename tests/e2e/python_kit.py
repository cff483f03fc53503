"""The python backend under a scripted engine, with real templates and hosts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrt.backends.base import Exit, Request
from agentrt.backends.python.backend import PythonBackend
from agentrt.backends.python.guest import PythonGuest
from agentrt.backends.python.limits import PythonLimits
from agentrt.backends.python.pool import PythonProgram
from agentrt.backends.slots import CoreSlots, FreeSlots, SlotRequest
from agentrt.backends.tenants import TenantIndex
from agentrt.syscalls import BY_NUMBER

if TYPE_CHECKING:
    from agentrt import _core

SOURCE = Path(__file__).with_name("python_agents.py")
CLOCK_NS = 1_700_000_000 * 10**9
Reply = Callable[["ScriptedRun", Request], Any]


class Hold(Exception):
    """Raised by a reply: not answered now."""


def double_tool(run: "ScriptedRun", request: Request) -> Any:
    """What the tests' engine answers unless told otherwise."""
    op = BY_NUMBER[request.op].op
    asked = msgspec.json.decode(request.payload)
    if op == "tool.call":
        return 2 * asked["args"]["x"]
    if op in ("timer.sleep", "emit"):
        return None
    raise Hold


class ScriptedRun:
    """The engine's side of one run: answers at once, in the order of the requests."""

    def __init__(self, run_id: str = "run_test", reply: Reply = double_tool) -> None:
        self.run_id = run_id
        self.reply = reply
        self.guest: PythonGuest | None = None
        self.requests: list[Request] = []
        self.logs: list[Any] = []
        self.abandoned: list[int] = []
        self.unwinding = False
        self.unwinds = False  # if it ends its host
        self.deaths: list[str] = []
        self.waiting: list[tuple[int, ...] | None] = []
        self.answers: list[tuple[int, int, bytes, int]] = []
        self.exit: Exit | None = None
        self.suspended = asyncio.Event()
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        self.waiting.append(waiting)
        for request in requests:
            if request.handle == 0:
                self.logs.append(msgspec.json.decode(request.payload))
                continue
            self.requests.append(request)
            assert request.handle == len(self.requests)
        self.suspended.set()
        for request in requests:
            if request.handle and self.exit is None:
                try:
                    self.answer(request.handle, self.reply(self, request))
                except Hold:
                    continue

    def on_unwinding(self) -> None:
        assert not self.unwinding and self.exit is None
        self.unwinding = True

    def on_cut_short(self, reason: str, message: str, answers: int) -> bool:
        assert not self.unwinding and self.exit is None and -1 <= answers <= len(self.answers)
        if reason == "unwound":
            return True
        self.deaths.append(message)
        if self.unwinds:
            assert self.guest is not None
            self.guest.unwind("died")
        return self.unwinds

    def on_abandoned(self, handles: tuple[int, ...]) -> None:
        self.abandoned += handles

    def on_exit(self, exit: Exit) -> None:
        assert self.exit is None, "two exits"
        self.exit = exit
        self.suspended.set()
        self.ended.set_result(exit)

    def answer(self, handle: int, value: Any, *, failed: bool = False) -> None:
        clock_ns = CLOCK_NS + 10**6 * (len(self.answers) + 1)
        self.answers.append((handle, int(failed), msgspec.json.encode(value), clock_ns))
        assert self.guest is not None
        self.guest.complete(*self.answers[-1], len(self.answers))

    def asked(self) -> list[tuple[str, Any]]:
        return [(BY_NUMBER[each.op].op, msgspec.json.decode(each.payload)) for each in self.requests]

    async def exited(self, timeout_s: float = 30) -> Exit:
        return await asyncio.wait_for(asyncio.shield(self.ended), timeout_s)

    async def result(self) -> Any:
        exit = await self.exited()
        assert exit.reason == "returned", exit
        assert exit.output is not None
        return msgspec.json.decode(exit.output)

    async def failure(self) -> Any:
        exit = await self.exited()
        assert exit.reason == "failed", exit
        assert exit.output is not None
        return msgspec.json.decode(exit.output)

    async def until(self, met: Callable[[], bool], timeout_s: float = 30) -> None:
        """Wait for suspensions until the condition holds."""
        async with asyncio.timeout(timeout_s):
            while not met():
                assert self.exit is None, self.exit
                self.suspended.clear()
                await self.suspended.wait()


class Node:
    """An open backend."""

    def __init__(self, backend: PythonBackend, core: "_core.Core | None") -> None:
        self.backend = backend
        self.core = core
        self._programs: dict[str, PythonProgram] = {}

    async def program(self, name: str, source: Path = SOURCE) -> PythonProgram:
        key = f"{source}:{name}"
        if key not in self._programs:
            self._programs[key] = await self.backend.prepare(key.encode())
        return self._programs[key]

    async def start(
        self,
        name: str,
        input: Any = None,
        *,
        tenant: str = "acme",
        tier: int = 1,
        fuel: int = 10**15,
        run_id: str = "run_test",
        reply: Reply = double_tool,
        source: Path = SOURCE,
        restored: Any = None,
        replay: bool = False,
    ) -> ScriptedRun:
        program = await self.program(name, source)
        run = ScriptedRun(run_id, reply)
        run.guest = self.backend.start(
            program,
            run,
            tenant=tenant,
            tier=tier,
            input=msgspec.json.encode(input),
            restored=None if restored is None else msgspec.json.encode(restored),
            fuel=fuel,
            seed=b"0123456789abcdef",
            clock_ns=CLOCK_NS,
            admitted=False,
            replay=replay,
        )
        return run

    def statistics(self) -> dict[str, Any]:
        return self.backend.statistics()


@asynccontextmanager
async def free_node(**limits: Any) -> AsyncIterator[Node]:
    """A backend whose slots are always free."""
    backend = PythonBackend(PythonLimits(**limits), FreeSlots(asyncio.get_running_loop()))
    await backend.open()
    try:
        yield Node(backend, None)
    finally:
        await backend.close()


@asynccontextmanager
async def core_node(core: "_core.Core", **limits: Any) -> AsyncIterator[Node]:
    """A backend that shares the core's slots."""
    loop = asyncio.get_running_loop()
    backend = PythonBackend(PythonLimits(**limits), CoreSlots(lambda: core, TenantIndex(16)))

    def drain() -> None:
        for owner, kind, _, detail in core.drain():
            if isinstance(owner, SlotRequest):
                owner.on_event(kind, detail)

    loop.add_reader(core.fd, drain)
    await backend.open()
    try:
        yield Node(backend, core)
    finally:
        await backend.close()
        loop.remove_reader(core.fd)
        core.close()
