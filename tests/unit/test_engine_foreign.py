"""Locks held elsewhere: what declares them, what is lent for them, and that undoing comes after doing."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, FakeGuest, Node, World, run
from test_engine_waits import COLD, HOT, Clock, make, timed

from agentrt.engine.info import EngineLimits
from agentrt.records import StepPrepared
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk

EVENT, CHECKPOINT, FOREIGN = 4, 11, 17


def holder(ctx: Ctx, input: Any) -> Any:
    """Declare, take, wait, release, give up; undo if told to end."""
    handle = ctx.op(FOREIGN, name="redis", owner=None)
    yield ctx.wait(handle)
    got = ctx.read(handle)
    if "error" in got:
        return got["error"]["code"]
    owner = got["owner"]

    def undo(ctx: Ctx, reason: Any) -> Any:
        yield ctx.wait(ctx.tool(input.get("undo", "put"), undo=owner))
        yield ctx.wait(ctx.op(FOREIGN, name="redis", owner=owner))

    ctx.on_unwind(undo)
    yield ctx.wait(ctx.tool("put", take=owner))
    if input.get("checkpoint"):
        handle = ctx.op(CHECKPOINT, state=1)
        yield ctx.wait(handle)
        assert ctx.read(handle)["error"]["code"] == "foreign_locks"
    yield ctx.wait(ctx.op(EVENT, topic="go"))
    if input.get("forgets"):
        return owner
    yield ctx.wait(ctx.tool("put", free=owner))
    handle = ctx.op(FOREIGN, name="redis", owner=owner)
    yield ctx.wait(handle)
    assert ctx.read(handle) == {"name": "redis", "owner": owner, "held": False}
    handle = ctx.op(FOREIGN, name="redis", owner=owner)
    yield ctx.wait(handle)
    assert ctx.read(handle)["error"]["code"] == "not_declared"
    return owner


def node_on(disk: MemoryDisk, world: World, clock: Clock, **how: Any) -> Node:
    node = make(disk, world, clock, **how)
    node.register("holder", holder, unwinds=True)
    return node


def guest_of(node: Node, run_id: str) -> FakeGuest:
    guest = node.engine._runs[run_id].guest
    assert isinstance(guest, FakeGuest)
    return guest


def done(world: World, what: str) -> list[Any]:
    return [args[what] for args in world.effects.values() if what in args]


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_its_holder_keeps_its_own_tier_for_a_grace(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        run_id = await node.submit("holder", {}, tier=2)
        if limits is HOT:
            await timed(node, lambda: bool(done(world, "take")) and guest_of(node, run_id).lent == 2)
            guest_of(node, run_id).ran_ns += 200_000_000
            await timed(node, lambda: guest_of(node, run_id).lent is None)
        else:
            await timed(node, lambda: bool(done(world, "take")) and run_id not in node.engine._runs)
            assert not len(node.engine._foreign)  # cold, it costs nothing
        owner = f"{run_id}/1:1"
        assert node.fold(run_id).foreign_locks == {owner: "redis"}
        node.crash()
        node = node_on(disk, world, clock, limits=limits, seed=1)
        if limits is HOT:
            await timed(node, lambda: run_id in node.engine._runs and guest_of(node, run_id).lent == 2)
        await node.send(topic="go")
        assert (await node.result(run_id)).value() == owner
        assert done(world, "free") == [owner] and not len(node.engine._foreign)
        assert node.fold(run_id).foreign_locks == {}
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("crashes", [False, True])
def test_who_loses_its_host_undoes_and_ends(crashes: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        run_id = await node.submit("holder", {}, tier=2)
        await timed(node, lambda: bool(done(world, "take")) and node.engine._runs[run_id].suspended)
        node.tools.hold = crashes
        guest = guest_of(node, run_id)
        died = "host_died", "status 9", len(guest.delivered)
        assert guest.events.on_cut_short(*died)
        assert not guest.events.on_cut_short(*died)  # it unwinds, and if that ends its host too, it ends
        if crashes:
            await timed(node, lambda: bool(node.tools.held))
            node.crash()
            node = node_on(disk, world, clock, limits=HOT, seed=1)
        result = await node.result(run_id)
        assert result.state is RunState.FAILED and msgspec.json.decode(result.error or b"")["code"] == "host_died"
        owner = f"{run_id}/1:1"
        assert done(world, "undo") == [owner] and node.fold(run_id).foreign_locks == {}
        node.check_disk()
        await node.close()

    run(main())


def test_a_host_that_dies_with_nothing_to_unwind_ends_its_run() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=HOT)
        node.register("plain", holder)
        run_id = await node.submit("plain", {})
        await timed(node, lambda: bool(done(world, "take")) and node.engine._runs[run_id].suspended)
        guest = guest_of(node, run_id)
        assert not guest.events.on_cut_short("host_died", "status 9", len(guest.delivered))
        guest.end("host_died", 0, None, "status 9")
        result = await node.result(run_id)
        assert result.state is RunState.FAILED and b"host_died" in (result.error or b"")
        node.check_disk()
        await node.close()

    run(main())


def test_the_bound_of_a_journal_does_not_keep_a_run_from_unwinding() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        run_id = await node.submit("holder", {})
        await timed(node, lambda: bool(done(world, "take")) and node.engine._runs[run_id].suspended)
        node.engine.journal_bytes_max = 1  # it has reached it
        await node.cancel(run_id)
        assert (await node.result(run_id)).state is RunState.CANCELLED
        assert len(done(world, "undo")) == 1 and node.fold(run_id).foreign_locks == {}
        await node.close()

    run(main())


def test_a_checkpoint_would_forget_how_to_release_it() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        run_id = await node.submit("holder", {"checkpoint": True})
        await node.send(topic="go")
        assert (await node.result(run_id)).value() == f"{run_id}/1:1"
        await node.close()

    run(main())


def test_who_ends_without_releasing_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        run_id = await node.submit("holder", {"forgets": True})
        await node.send(topic="go")
        await node.result(run_id)
        assert [record.getMessage() for record in caplog.records if run_id in record.getMessage()] == [
            f"run {run_id} ended without releasing what it held elsewhere: redis"
        ]
        await node.close()

    with caplog.at_level(logging.WARNING, logger="agentrt.engine"):
        run(main())


def test_what_undoes_a_call_begins_after_the_call_has_returned() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        node.tools.hold = True
        run_id = await node.submit("holder", {})
        await timed(node, lambda: len(node.tools.held) == 1)
        cancel = asyncio.ensure_future(node.cancel(run_id))
        await timed(
            node, lambda: sum(isinstance(r, StepPrepared) and r.op == "tool.call" for r in node.records(run_id)) == 2
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert [args for _, args, *_ in node.tools.held] == [{"take": f"{run_id}/1:1"}]  # still at it
        node.tools.hold = False
        node.tools.answer_one()
        assert (await node.result(run_id)).state is RunState.CANCELLED
        await cancel
        assert [next(iter(args)) for args in world.effects.values()] == ["take", "undo"]
        assert node.fold(run_id).foreign_locks == {}
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("undo", ["put", "once"])
def test_a_node_that_stops_meanwhile_undoes_at_its_next_start(undo: str) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        node.tools.hold = True
        run_id = await node.submit("holder", {"undo": undo})
        await timed(node, lambda: len(node.tools.held) == 1)
        cancel = asyncio.ensure_future(node.cancel(run_id))
        await timed(
            node, lambda: sum(isinstance(r, StepPrepared) and r.op == "tool.call" for r in node.records(run_id)) == 2
        )
        await cancel
        closing = asyncio.ensure_future(node.close())
        await node.until(lambda: node.tools.stopping)
        node.tools.hold = False
        node.tools.answer_one()
        await closing
        assert not done(world, "undo")
        node = node_on(disk, world, clock, limits=HOT, seed=1)
        assert (await node.result(run_id)).state is RunState.CANCELLED
        assert done(world, "undo") == [f"{run_id}/1:1"]
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("applied", [False, True])
def test_a_crash_at_every_commit_of_a_cancel_leaves_nothing_taken(applied: bool) -> None:
    async def main() -> None:
        for at in range(60):
            disk, world, clock = MemoryDisk(), World(), Clock()
            node = node_on(disk, world, clock, limits=HOT, crash_at=at, applied=applied)

            async def drive(node: Node) -> str:
                run_id = await node.submit("holder", {}, idempotency_key="one")
                await timed(node, lambda: bool(done(world, "take")) or node.store.crashed.is_set())  # noqa: B023
                await node.cancel(run_id)
                assert (await node.result(run_id)).state is RunState.CANCELLED
                return run_id

            driving = asyncio.ensure_future(drive(node))
            crashed = asyncio.ensure_future(node.store.crashed.wait())
            await asyncio.wait([driving, crashed], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            if not driving.done():
                node.crash()
                driving.cancel()
                node = node_on(disk, world, clock, limits=HOT, seed=1)
                run_id = await asyncio.wait_for(drive(node), 20)
            else:
                crashed.cancel()
                run_id = driving.result()
            if done(world, "take"):
                assert done(world, "undo") == [f"{run_id}/1:1"]
                order = [next(iter(args)) for args in world.effects.values()]
                assert order.index("take") < order.index("undo")
            assert node.fold(run_id).foreign_locks == {}
            node.check_disk()
            await node.close()
            if not node.store.crashed.is_set() and crashed.cancelled():
                assert at > 6
                return
        raise AssertionError("it takes more commits than that")

    run(main())
