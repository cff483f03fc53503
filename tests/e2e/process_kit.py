"""The process backend under a scripted engine, with real processes."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from python_kit import CLOCK_NS, Hold, Reply, ScriptedRun

from agentrt.backends.base import Request
from agentrt.backends.process.agents.backend import ProcessBackend
from agentrt.backends.process.agents.command import Command, ProcessProgram
from agentrt.backends.process.agents.limits import ProcessLimits
from agentrt.backends.process.settings import ProcessConfig
from agentrt.backends.slots import CoreSlots, FreeSlots, SlotRequest, Slots
from agentrt.backends.tenants import TenantIndex

if TYPE_CHECKING:
    from agentrt import _core

SOURCE = Path(__file__).with_name("process_agents.py")
IMPORTS = f"PYTHONPATH={Path(__file__).parents[2]}"


def python(name: str, **options: Any) -> Command:
    """An agent of process_agents.py."""
    return Command((sys.executable, str(SOURCE), name), environment=(IMPORTS,), **options)


def double_tool(run: ScriptedRun, request: Request) -> Any:
    """What the tests' engine answers unless told otherwise."""
    asked = msgspec.json.decode(request.payload)
    match asked:
        case {"tool": "double", "args": {"x": int(x)}}:
            return 2 * x
        case {"tool": "undo", "args": {"what": what}}:
            return what
        case {"tool": "child"}:
            return None
    raise Hold


class ScriptedProcess(ScriptedRun):
    """As `ScriptedRun`. ``history``: answers of an earlier life, which it gets first, in that order."""

    def __init__(self, run_id: str, reply: Reply, history: list[tuple[int, int, bytes, int]] | None) -> None:
        super().__init__(run_id, reply)
        self.snapshots = True
        self.history = list(history or ())
        self.recorded = {handle for handle, *_ in self.history}

    def may_snapshot(self) -> bool:
        return self.snapshots

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        if not self.recorded:
            super().on_syscalls(requests, waiting)
            return
        self.requests += [request for request in requests if request.handle]
        self.waiting.append(waiting)
        assert self.guest is not None
        if waiting is None:
            return
        if self.history:
            entry = self.history.pop(0)
            assert entry[0] in waiting
            self.answers.append(entry)
            self.guest.complete(*entry, len(self.answers))
            return
        left = [request for request in self.requests if request.handle not in self.recorded]
        self.recorded = set()
        self.guest.go_live()
        for request in left:
            try:
                self.answer(request.handle, self.reply(self, request))
            except Hold:
                continue


class ProcessNode:
    """An open backend."""

    def __init__(self, backend: ProcessBackend) -> None:
        self.backend = backend

    async def start(
        self,
        command: Command | ProcessProgram | str,
        input: Any = None,
        *,
        tenant: str = "acme",
        tier: int = 1,
        fuel: int = 10**15,
        run_id: str = "run_test",
        reply: Reply = double_tool,
        restored: Any = None,
        history: list[tuple[int, int, bytes, int]] | None = None,
    ) -> ScriptedProcess:
        if isinstance(command, ProcessProgram):
            program = command
        else:
            program = await self.backend.prepare((python(command) if isinstance(command, str) else command).encode())
        run = ScriptedProcess(run_id, reply, history)
        run.guest = self.backend.start(  # type: ignore[assignment]
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
            replay=bool(history),
        )
        return run


@asynccontextmanager
async def process_node(
    slots: Slots | None = None, config: ProcessConfig | None = None, confined: bool = False, **limits: Any
) -> AsyncIterator[ProcessNode]:
    """A backend; without ``slots`` they are always free."""
    free = slots or FreeSlots(asyncio.get_running_loop())
    backend = ProcessBackend(
        ProcessLimits(confined=confined, **limits), free, config or ProcessConfig(processes_max=32)
    )
    await backend.open()
    try:
        yield ProcessNode(backend)
    finally:
        await backend.close()


@asynccontextmanager
async def core_process_node(core: "_core.Core", **limits: Any) -> AsyncIterator[ProcessNode]:
    """A backend that shares the core's slots."""
    loop = asyncio.get_running_loop()

    def drain() -> None:
        for owner, kind, _, detail in core.drain():
            if isinstance(owner, SlotRequest):
                owner.on_event(kind, detail)

    loop.add_reader(core.fd, drain)
    try:
        async with process_node(CoreSlots(lambda: core, TenantIndex(16)), **limits) as node:
            yield node
    finally:
        loop.remove_reader(core.fd)
        core.close()
