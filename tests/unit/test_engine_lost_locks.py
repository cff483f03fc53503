"""What a run does under a lock goes no further when the lock is broken, and the run is told once, restarts included."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_kit import DIED, SLOW, Ctx, Node, World, run
from test_engine_waits import HOT, Clock, make

from agentrt.flow.profiles import check_profile
from agentrt.records import LockBroken, Spawned, StepCommitted, StepEvicted, StepPrepared
from agentrt.stores.base import LOCKS
from agentrt.stores.memory import MemoryDisk
from agentrt.tools.outcome import ToolOutcome

ACQUIRE, EVENT, SPAWN = 8, 4, 6


async def timed(node: Node, condition: Callable[[], bool]) -> None:
    """Until it holds; long enough for a full machine."""
    for _ in range(8000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def worker(ctx: Ctx, input: Any) -> Any:
    """A lock, a call under it, and a call after it; what each came to."""
    handle = ctx.op(ACQUIRE, name="l")
    yield ctx.wait(handle)
    told = [ctx.read(handle).get("dirty")]
    if input is None:
        return told
    for what in (*input, "put"):
        handle = ctx.tool(what, x=len(told)) if what != "go" else ctx.op(EVENT, topic="go")
        yield ctx.wait(handle)
        got = ctx.read(handle)
        told.append(got["error"]["code"] if isinstance(got, dict) and "error" in got else "done")
    return told


def node_on(disk: MemoryDisk, world: World, clock: Clock, **how: Any) -> Node:
    node = make(disk, world, clock, limits=HOT, **how)
    node.register("worker", worker)
    return node


async def broken(node: Node, disk: MemoryDisk, clock: Clock, run_id: str) -> str:
    """Somebody waits for the lock, for too long. Returns who."""
    waiter = await node.submit("worker", None, tier=1)
    await timed(node, lambda: b"lock" in disk.tables["waits"].values())
    clock.forward(61)
    await timed(node, lambda: any(isinstance(record, LockBroken) for record in node.records(run_id)))
    return waiter


CANCELLED = ToolOutcome(False, b'{"code":"cancelled","message":"stopped"}', "cancelled", 0, False)
FAILED = ToolOutcome(False, b'{"code":"tool_failed","message":"boom"}', "tool_failed", 5, False)


@pytest.mark.parametrize(
    "outcome", [DIED, SLOW, CANCELLED, FAILED, None], ids=["died", "slow", "cancelled", "failed", "ok"]
)
@pytest.mark.parametrize("tool", ["put", "sure", "ask", "once"])
def test_a_call_under_way_is_not_done_again_without_its_lock(tool: str, outcome: ToolOutcome | None) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock)
        node.tools.hold = True
        run_id = await node.submit("worker", [tool], tier=2)
        await timed(node, lambda: bool(node.tools.held))
        waiter = await broken(node, disk, clock, run_id)
        assert node.tools.cancelled == [f"{run_id}/1:2/{tool}"]
        name, args, key, _, done = node.tools.held.pop()
        node.tools.hold = False
        done(node.tools.execute(name, args, key) if outcome is None else outcome)
        value = (await node.result(run_id)).value()
        seen = {None: "done", FAILED: "tool_failed"}.get(outcome, "lock_lost")
        # It is told once: with the call if that had no outcome, else with the next one.
        assert value == [False, seen, "done" if seen == "lock_lost" else "lock_lost"]
        assert (await node.result(waiter)).value() == [True]
        evicted = [record for record in node.records(run_id) if isinstance(record, StepEvicted)]
        assert len(evicted) == (outcome in (DIED, SLOW))
        assert [attempt for call, attempt in world.attempts if call == key] == [1]
        assert not node.tools.reconciled
        node.check_disk()
        await node.close()

    run(main())


def test_a_call_that_has_not_begun_does_not_begin() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock)
        run_id = await node.submit("worker", ["go", "put"], tier=2)
        await timed(node, lambda: bool(disk.tables[LOCKS]) and bool(disk.tables["waits"]))
        waiter = await node.submit("worker", None, tier=1)
        await timed(node, lambda: b"lock" in disk.tables["waits"].values())
        node.store.slow = True  # what is durable is not told
        sent = node.loop.create_task(node.send(topic="go"))
        await timed(node, lambda: bool(disk.tables["events"]))
        node.store.speak()
        node.store.slow = True
        await timed(
            node, lambda: any(isinstance(r, StepPrepared) and r.op == "tool.call" for r in node.records(run_id))
        )
        clock.forward(61)
        await timed(node, lambda: any(isinstance(record, LockBroken) for record in node.records(run_id)))
        node.store.speak()
        await sent
        assert (await node.result(run_id)).value() == [False, "done", "lock_lost", "done"]
        assert (await node.result(waiter)).value() == [True]
        assert [key for key, _ in world.attempts] == [f"{run_id}/1:4/put"]
        node.check_disk()
        await node.close()

    run(main())


def test_a_child_that_had_no_place_yet_is_not_started_without_its_lock() -> None:
    def planner(ctx: Ctx, input: Any) -> Any:
        lock = ctx.op(ACQUIRE, name="l")
        yield ctx.wait(lock)
        spawns = [ctx.op(SPAWN, agent="busy", input=None) for _ in range(3)]
        told = []
        for spawn in spawns:
            yield ctx.wait(spawn)
            told.append(ctx.read(spawn))
        return [answer.get("error", {"code": "started"})["code"] for answer in told]

    def busy(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.tool("put"))

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        full = check_profile("base", {"ensemble": {"queued_max": 1, "live_max": 2}})
        node = node_on(disk, world, clock, profile=full)
        node.register("planner", planner)
        node.register("busy", busy)
        node.tools.hold = True
        run_id = await node.submit("planner", tier=2)
        await timed(node, lambda: any(isinstance(r, StepCommitted) and r.path == "1:3" for r in node.records(run_id)))
        waiter = await broken(node, disk, clock, run_id)
        node.tools.hold = False
        node.tools.answer_one()  # a place is free
        assert (await node.result(run_id)).value() == ["started", "started", "lock_lost"]
        assert [record.path for record in node.records(run_id) if isinstance(record, Spawned)] == ["1:2", "1:3"]
        assert (await node.result(waiter)).value() == [True]
        await node.close()

    run(main())


@pytest.mark.parametrize("tool", ["put", "ask", "once"])
def test_after_a_restart_it_is_told_and_what_was_under_way_is_not_done_again(tool: str) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock)
        node.tools.hold = True
        run_id = await node.submit("worker", [tool], tier=2)
        await timed(node, lambda: bool(node.tools.held))
        waiter = await broken(node, disk, clock, run_id)
        node.crash()
        node = node_on(disk, world, clock, seed=1)
        assert (await node.result(run_id)).value() == [False, "lock_lost", "done"]
        assert (await node.result(waiter)).value() == [True]
        assert [key for key, _ in world.attempts] == [f"{run_id}/1:2/{tool}", f"{run_id}/1:3/put"]
        node.check_disk()
        await node.close()

    run(main())


def test_after_a_restart_nothing_that_was_under_way_is_done_again_however_much_it_was() -> None:
    def pair(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.op(ACQUIRE, name="l"))
        calls = [ctx.tool("put", x=x) for x in range(3)]
        told = []
        for call in calls:
            yield ctx.wait(call)
            told.append(ctx.read(call)["error"]["code"])
        yield ctx.wait(ctx.tool("put", x=3))
        return told

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock)
        node.register("pair", pair)
        node.tools.hold = True
        run_id = await node.submit("pair", tier=2)
        await timed(node, lambda: len(node.tools.held) == 3)
        await broken(node, disk, clock, run_id)
        node.crash()
        node = node_on(disk, world, clock, seed=1)
        node.register("pair", pair)
        assert (await node.result(run_id)).value() == ["lock_lost"] * 3
        assert [key[-5] for key, _ in world.attempts] == ["2", "3", "4", "5"]
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("told", [False, True])
def test_a_restart_tells_who_was_not_told_yet_and_nobody_twice(told: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock)
        run_id = await node.submit("worker", ["go", "put", "go"], tier=2)
        await timed(node, lambda: bool(disk.tables[LOCKS]) and len(disk.tables["waits"]) == 1)
        await broken(node, disk, clock, run_id)
        if told:
            await node.send(topic="go")
            await timed(node, lambda: b"lock_lost" in b"".join(disk.journals[run_id]) and bool(disk.tables["waits"]))
        node.crash()
        node = node_on(disk, world, clock, seed=1)
        for _ in range(1 if told else 2):
            await node.send(topic="go")
        assert (await node.result(run_id)).value() == [False, "done", "lock_lost", "done", "done"]
        node.check_disk()
        await node.close()

    run(main())
