"""A tool provider whose calls are guests of the node's own backend, which it is given (`attach`)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrt import RunState, agent
from agentrt.backends.base import Exit, Request
from agentrt.doctor import selftest
from agentrt.hooks import HOOKS_VERSION, hookimpl
from agentrt.records import StepCommitted
from agentrt.tools.outcome import Done, ToolOutcome
from agentrt.tools.spec import ToolRegistry, ToolSpec


@agent
async def asks(ctx, count):
    return [await ctx.tool("guest", n=n) for n in range(count)]


#: What a call is said to have used: more than the agent itself will.
FUEL = 10**12


class Call:
    """What its guest's events go to."""

    def __init__(self, done: Done) -> None:
        self.done = done

    def on_syscalls(self, requests: Sequence[Request], waiting: tuple[int, ...] | None) -> None: ...

    def on_exit(self, exit: Exit) -> None:
        assert exit.reason == "returned" and exit.fuel, exit
        self.done(ToolOutcome(True, b"1", None, exit.slot_ns, False, fuel=FUEL))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


class Guests:
    def __init__(self, registry: ToolRegistry, told: list[str]) -> None:
        self.registry, self.told = registry, told
        registry.add(ToolSpec("guest", "keyed", 60 * 10**9, True, "", provider="guests"))

    def attach(self, backend: Any) -> None:
        self.told.append(f"attach {backend.name}")
        self.backend = backend

    def start(self) -> None:
        self.told.append("start")
        self.prepared = asyncio.ensure_future(self.backend.prepare(selftest.module(selftest.RETURNS)))

    def call(self, name: str, args: bytes, *, tenant: str, tier: int, done: Done, **more: Any) -> object:
        self.prepared.add_done_callback(lambda program: self._start(program.result(), args, tenant, tier, done))
        return None

    def _start(self, program: Any, args: bytes, tenant: str, tier: int, done: Done) -> None:
        self.backend.start(
            program, Call(done), tenant=tenant, tier=tier, input=args, fuel=10**6, seed=bytes(16), clock_ns=0,
            admitted=False, replay=False,
        )  # fmt: skip

    def statistics(self) -> None: ...

    def cancel(self, call: Any) -> None: ...

    def stop(self) -> None: ...

    def evict(self) -> None: ...

    async def close(self) -> None:
        self.told.append("close")


class Plugin:
    AGENTRT_HOOKS = HOOKS_VERSION

    def __init__(self) -> None:
        self.told: list[str] = []

    @hookimpl
    def agentrt_tool_providers(self) -> Any:
        return {"guests": lambda config, registry, loop: Guests(registry, self.told)}


@pytest.mark.timeout(120)
def test_calls_are_guests_of_the_nodes_backend(agentrt_runtime: Any, tmp_path: Path) -> None:
    plugin = Plugin()
    runtime = agentrt_runtime(asks, plugins={"guests": plugin}, tools__providers=["guests"])
    run = runtime.submit_sync("asks", 3)
    assert run.result_sync(60) == [1, 1, 1]
    records = runtime.read_store_sync(lambda store: store.read_records(run.run_id))
    costs = [record.cost for record in records if isinstance(record, StepCommitted)]
    assert [cost.fuel for cost in costs] == [FUEL] * 3 and all(cost.slot_ns for cost in costs)
    spent = runtime.submit_sync("asks", 9, fuel=2 * FUEL).wait_sync(60)
    assert spent.state is RunState.BUDGET_EXHAUSTED and b"in tool calls" in spent.error
    runtime.close_sync()
    assert plugin.told == ["attach wasm", "start", "close"]
