"""Locks: one holder, growing tokens, order by tier, dirt, circles, overlong holds, crashes."""

import asyncio
from typing import Any

import pytest
from engine_kit import Ctx, Node, World, run
from test_engine_waits import COLD, HOT, SECOND, Clock, make, parked, timed

from agentrt.engine.info import EngineLimits
from agentrt.records import LockBroken
from agentrt.states import RunState
from agentrt.stores.base import LOCKS, WAITS
from agentrt.stores.memory import MemoryDisk

ACQUIRE, RELEASE, EVENT = 8, 9, 4


def critical(ctx: Ctx, input: Any) -> Any:
    """Take the lock, write with the token, wait for a signal in between if asked to, release."""
    handle = ctx.op(ACQUIRE, name="l", timeout_s=input.get("timeout"))
    yield ctx.wait(handle)
    got = ctx.read(handle)
    if "error" in got:
        return got["error"]["code"]
    if input.get("signal"):
        yield ctx.wait(ctx.op(EVENT, topic=input["signal"]))
    handle = ctx.tool("put", token=got["token"], who=input["who"])
    yield ctx.wait(handle)
    if input.get("crash"):
        raise RuntimeError("it fails with the lock held")
    wrote = ctx.read(handle)
    handle = ctx.op(RELEASE, name="l", token=got["token"])
    yield ctx.wait(handle)
    return {"got": got, "wrote": wrote, "released": ctx.read(handle)}


def twice(ctx: Ctx, input: Any) -> Any:
    """Two locks in the order given, with a signal in between."""
    first = ctx.op(ACQUIRE, name=input[0])
    yield ctx.wait(first)
    yield ctx.wait(ctx.op(EVENT, topic=f"go-{input[0]}"))
    second = ctx.op(ACQUIRE, name=input[1])
    yield ctx.wait(second)
    return ctx.read(second)


def node_on(disk: MemoryDisk, world: World, clock: Clock, **how: Any) -> Node:
    node = make(disk, world, clock, **how)
    node.register("critical", critical)
    node.register("twice", twice)
    return node


def waiting(disk: MemoryDisk) -> int:
    return sum(value == b"lock" for value in disk.tables[WAITS].values())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_one_holds_it_and_the_most_urgent_is_next(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        first = await node.submit("critical", {"who": 0, "signal": "go"})
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        others = [await node.submit("critical", {"who": who}, tier=tier) for who, tier in ((1, 2), (2, 1), (3, 0))]
        await timed(node, lambda: waiting(disk) == 3)
        if limits is COLD:
            for run_id in (first, *others):
                await parked(node, run_id, "event" if run_id == first else "lock")
        assert not world.effects
        await node.send(topic="go")
        values = [(await node.result(run_id)).value() for run_id in (first, *others)]
        assert [args["who"] for args in world.effects.values()] == [0, 3, 2, 1]
        tokens = [args["token"] for args in world.effects.values()]
        assert tokens == sorted(set(tokens)) and all(token < 2**53 for token in tokens)
        assert all(value["released"] is None and not value["got"]["dirty"] for value in values)
        await timed(node, lambda: not disk.tables[LOCKS])
        node.check_disk()
        await node.close()

    run(main())


def test_a_holder_that_ends_leaves_it_dirty_for_one() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock)
        failed = await node.submit("critical", {"who": 0, "crash": True})
        assert (await node.result(failed)).state is RunState.FAILED
        assert len(disk.tables[LOCKS]) == 1
        node.crash()
        node = node_on(disk, world, clock)
        second = (await node.result(await node.submit("critical", {"who": 1}))).value()
        third = (await node.result(await node.submit("critical", {"who": 2}))).value()
        assert second["got"]["dirty"] and not third["got"]["dirty"]
        assert second["got"]["token"] < third["got"]["token"]
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_a_lock_held_too_long_is_broken_only_when_somebody_waits(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        slow = await node.submit("critical", {"who": 0, "signal": "go"})
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        clock.forward(1000)
        await asyncio.sleep(0.6)
        assert not any(isinstance(record, LockBroken) for record in node.records(slow))
        quick = await node.submit("critical", {"who": 1})
        value = (await node.result(quick)).value()
        assert value["got"]["dirty"]
        assert any(isinstance(record, LockBroken) for record in node.records(slow))
        await node.send(topic="go")
        value = (await node.result(slow)).value()
        codes = [part.get("error", {}).get("code") for part in (value["wrote"], value["released"])]
        assert "lock_lost" in codes
        # Whatever it wrote after the loss carries an older token than the new holder's.
        tokens = {args["who"]: args["token"] for args in world.effects.values()}
        assert 0 not in tokens or tokens[0] < tokens[1]
        node.check_disk()
        await node.close()

    run(main())


def test_a_circle_is_refused_to_who_would_close_it() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=COLD)
        first = await node.submit("twice", ["a", "b"])
        second = await node.submit("twice", ["b", "a"])
        await timed(node, lambda: len(disk.tables[LOCKS]) == 2)
        await node.send(topic="go-a")
        await timed(node, lambda: waiting(disk) == 1)
        await node.send(topic="go-b")
        assert (await node.result(second)).value()["error"]["code"] == "deadlock"
        assert (await node.result(first)).value()["dirty"]
        node.check_disk()
        await node.close()

    run(main())


def test_a_wait_for_a_lock_can_time_out() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=COLD)
        holder = await node.submit("critical", {"who": 0, "signal": "go"})
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        impatient = await node.submit("critical", {"who": 1, "timeout": 5})
        await timed(node, lambda: waiting(disk) == 1)
        clock.forward(6)
        assert (await node.result(impatient)).value() == "timeout"
        await node.send(topic="go")
        assert (await node.result(holder)).value()["released"] is None
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("applied", [False, True])
def test_a_crash_at_every_commit_leaves_every_lock_to_one_and_no_waiter_forgotten(applied: bool) -> None:
    async def main() -> None:
        for at in range(100):
            disk, world, clock = MemoryDisk(), World(), Clock()
            node = node_on(disk, world, clock, limits=COLD, crash_at=at, applied=applied)
            inputs = [{"who": who} for who in range(4)]

            async def drive(node: Node) -> list[Any]:
                runs = [
                    await node.submit("critical", input, idempotency_key=str(input["who"]))
                    for input in inputs  # noqa: B023
                ]
                return [(await node.result(run_id)).value() for run_id in runs]

            driving = asyncio.ensure_future(drive(node))
            crashed = asyncio.ensure_future(node.store.crashed.wait())
            await asyncio.wait([driving, crashed], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            if not driving.done():
                node.crash()
                driving.cancel()
                node = node_on(disk, world, clock, limits=COLD, seed=1)
                values = await asyncio.wait_for(drive(node), 20)
            else:
                crashed.cancel()
                values = driving.result()
            tokens = [args["token"] for args in world.effects.values()]
            assert len(tokens) == 4 and tokens == sorted(tokens)
            assert [value["released"] for value in values] == [None] * 4
            await timed(node, lambda: not disk.tables[LOCKS])  # noqa: B023
            node.check_disk()
            await node.close()
            if not node.store.crashed.is_set() and crashed.cancelled():
                assert at > 15
                return
        raise AssertionError("it takes more commits than that")

    run(main())


assert SECOND
