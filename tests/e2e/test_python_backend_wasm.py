"""Both backends on one core: the wasm backend drains it and hands the slots' events on."""

import asyncio

from python_kit import Hold, Node, ScriptedRun
from test_python_backend_slots import core_fixture

from agentrt.backends.base import Exit, Request
from agentrt.backends.python.backend import PythonBackend
from agentrt.backends.python.limits import PythonLimits
from agentrt.backends.wasm import WasmBackend
from agentrt.config import Config, SchedulerConfig


class Ignored:
    """Events of a guest that nobody looks at, but for its end."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None: ...

    def on_abandoned(self, handles: tuple[int, ...]) -> None: ...

    def on_exit(self, exit: Exit) -> None:
        self.ended.set_result(exit)


def test_python_turns_preempt_a_wasm_hog_of_a_lower_tier() -> None:
    def hold(run: ScriptedRun, request: Request) -> None:
        raise Hold

    async def run() -> None:
        wasm = WasmBackend(Config(scheduler=SchedulerConfig(workers=1)))
        await wasm.open()
        python = PythonBackend(PythonLimits(), wasm.slots)
        await python.open()
        try:
            node = Node(python, None)
            await node.program("steps")
            program = await wasm.prepare(core_fixture.wasm("script"))
            hog = Ignored()
            guest = wasm.start(
                program, hog, tenant="acme", tier=2, input=core_fixture.script(*[("spin", 2**31 - 1)] * 50),
                fuel=10**15, seed=bytes(16), clock_ns=0, admitted=True, replay=False,
            )  # fmt: skip
            for tier in (0, 1):
                urgent = await node.start("steps", 20, tier=tier)
                assert await urgent.result() == 380
            assert not hog.ended.done()
            waiting = await node.start("steps", 1, reply=hold)
            await waiting.until(lambda: bool(waiting.requests))  # a run that waits holds no slot
            guest.kill()
            assert (await asyncio.wait_for(hog.ended, 20)).reason == "killed"
        finally:
            await python.close()
            await wasm.close()

    asyncio.run(run())
