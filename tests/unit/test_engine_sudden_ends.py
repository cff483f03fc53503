"""Runs that end by what no replay would bring again: their children are told when that is durable, not before."""

import asyncio
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from test_engine_foreign import guest_of
from test_engine_waits import HOT, Clock, make

from agentrt.records import Ending
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk

EVENT, SPAWN, JOIN = 4, 6, 7
_COMMITS_MAX = 12  # from the death of a parent to its end there are fewer


def parent(ctx: Ctx, input: Any) -> Any:
    spawn = ctx.op(SPAWN, agent="child", input=None)
    yield ctx.wait(spawn)
    child = ctx.read(spawn)["run_id"]
    yield ctx.wait(ctx.op(EVENT, topic="on"))
    join = ctx.op(JOIN, run_id=child)
    yield ctx.wait(join)
    return ctx.read(join)


def child(ctx: Ctx, input: Any) -> Any:
    yield ctx.wait(ctx.op(EVENT, topic="child"))
    return 5


def a_node(disk: MemoryDisk, world: World, clock: Clock, unwinds: bool) -> Node:
    node = make(disk, world, clock, limits=HOT, recover=False)
    node.register("parent", parent, unwinds=unwinds)
    node.register("child", child)
    node.engine.recover()
    return node


async def die(node: Node, run_id: str, unwinds: bool) -> None:
    """The process that its guest lives in has gone."""
    guest = guest_of(node, run_id)
    if not guest.events.on_cut_short("host_died", "status 9", len(guest.delivered)):
        assert not unwinds
        guest.end("host_died", 0, None, "status 9")


@pytest.mark.parametrize("unwinds", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_a_run_that_dies_with_its_node_is_over_or_goes_on_with_its_children(applied: bool, unwinds: bool) -> None:
    async def life(at: int) -> str:
        """The node dies at a commit after the run's death; how the run ends in the next life."""
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = a_node(disk, world, clock, unwinds)
        run_id = await node.submit("parent")
        await node.until(lambda: len(node.engine._runs) == 2 and all(m.suspended for m in node.engine._runs.values()))
        for _ in range(50):
            await asyncio.sleep(0)
        node.store.at, node.store.applied = node.store.commits + at, applied
        await die(node, run_id, unwinds)
        ended = node.result(run_id)
        await node.until(lambda: node.store.crashed.is_set() or ended.done())
        if ended.done():
            assert not node.store.crashed.is_set() and ended.result().state is RunState.FAILED
            await node.close()
            return "over"
        node.crash()
        node = a_node(disk, world, clock, unwinds)
        for topic in ("child", "on"):
            await node.send(topic=topic)
        result = await node.result(run_id)
        children = [head for head in node.store.scan_heads() if head.run_id != run_id]
        await node.until(lambda: not node.engine._runs)
        (child_head,) = [head for head in node.store.scan_heads() if head.run_id == children[0].run_id]
        if result.state is RunState.SUCCEEDED:
            assert (result.value(), child_head.state) == (5, "SUCCEEDED")
            how = "went on"
        else:
            assert result.state is RunState.FAILED
            assert msgspec.json.decode(result.error or b"")["code"] == "host_died"
            assert any(isinstance(record, Ending) for record in node.records(run_id))
            assert child_head.state in ("CANCELLED", "SUCCEEDED")  # what it waits for may have come first
            how = "ended"
        node.check_disk()
        await node.close()
        return how

    async def main() -> None:
        found = [await life(at) for at in range(_COMMITS_MAX)]
        assert found[-1] == "over" and "ended" in found
        assert ("went on" in found) == (not applied)
        assert sorted(found, key=("went on", "ended", "over").index) == found  # once it is over, it stays over

    run(main())
