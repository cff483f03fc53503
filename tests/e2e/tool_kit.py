"""What the tests of tool hosts share: a pool on uvloop, as in the control plane, and a few ways to use it."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

import tools_fixture

from agentrt.tools import ToolLimits, ToolOutcome, ToolPool, ToolRegistry, ToolSpec
from agentrt.tools.importing import tools_in

SECOND_NS = 1_000_000_000


class Node:
    """A pool and the few ways in which the tests use it."""

    def __init__(self, pool: ToolPool) -> None:
        self.pool = pool

    def begin(self, name: str, tenant: str = "t", tier: int = 1, **args: Any) -> "asyncio.Future[ToolOutcome]":
        return self.call(name, args, tenant=tenant, tier=tier)[1]

    def call(
        self,
        name: str,
        args: Any,
        *,
        key: str | None = None,
        tenant: str = "t",
        tier: int = 1,
        **more: Any,
    ) -> "tuple[object, asyncio.Future[ToolOutcome]]":
        """The call's handle and its outcome."""
        future: asyncio.Future[ToolOutcome] = self.pool.loop.create_future()
        handle = self.pool.call(
            name,
            msgspec.json.encode(args),
            key=f"key-{name}" if key is None else key,
            tenant=tenant,
            tier=tier,
            attempt=more.pop("attempt", 1),
            done=future.set_result,
            **more,
        )
        return handle, future

    async def value(self, name: str, **args: Any) -> Any:
        outcome = await self.begin(name, **args)
        assert outcome.ok, outcome
        return msgspec.json.decode(outcome.payload)

    async def code(self, name: str, **args: Any) -> str | None:
        outcome = await self.begin(name, **args)
        assert not outcome.ok and msgspec.json.decode(outcome.payload)["code"] == outcome.code
        return outcome.code


def node(
    test: Callable[[Node], Awaitable[None]],
    *,
    specs: list[ToolSpec] | None = None,
    made_with: dict[str, Any] | None = None,
    **limits: Any,
) -> None:
    """Run a test against a pool. ``made_with``: further arguments of the pool."""

    async def run() -> None:
        registry = ToolRegistry(tools_in(tools_fixture) if specs is None else specs)
        # Not at nice 19 as in a node: other load on the machine would then decide how long a test takes.
        pool = ToolPool(
            registry, asyncio.get_running_loop(), ToolLimits(**{"host_nice": 0} | limits), **made_with or {}
        )
        pool.start()
        try:
            await test(Node(pool))
        finally:
            await pool.close()
        assert pool.statistics().hosts == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def hosts_of(pool: ToolPool) -> list[Any]:
    return [host for hosts in pool._pools.values() for host in hosts.hosts]


async def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 seconds: {what}"
        await asyncio.sleep(0.005)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def below(pid: int) -> set[int]:
    """All processes below this one."""
    children = {
        int(child)
        for task in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    }
    return children.union(*map(below, children))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
