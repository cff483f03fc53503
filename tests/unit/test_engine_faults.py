"""Kinds of fault of FAULTS (D, C) that are a matter of more than one part of the engine."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from engine_kit import DIED, Ctx, Node, World, run
from test_engine_refusals import new_node, one_parked, parked
from test_engine_waits import HOT, SECOND, Clock, make

from agentrt.engine.info import EngineLimits
from agentrt.errors import AgentrtError
from agentrt.records import StepPrepared
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk

EVENT, SPAWN, JOIN = 4, 6, 7
HOUR_NS = 3600 * SECOND


def nested(ctx: Ctx, input: Any) -> Any:
    """Effects of its own around a child, which has such effects, down to a depth."""
    yield ctx.wait(ctx.tool("put", depth=input, when="before"))
    below = []
    if input:
        spawn = ctx.op(SPAWN, agent="nested", input=input - 1)
        yield ctx.wait(spawn)
        join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
        yield ctx.wait(join)
        below = ctx.read(join)
    yield ctx.wait(ctx.tool("put", depth=input, when="after"))
    return [input, *below]


@pytest.mark.parametrize("applied", [False, True])
def test_fault_D03_what_nested_runs_have_done_is_reused_when_they_go_on(applied: bool) -> None:
    """The node dies at each commit in turn; no effect of any depth is asked for under a second key."""
    depth = 2

    async def life(at: int) -> bool:
        disk, world, clock = MemoryDisk(), World(), Clock()

        def node_on(crash_at: int | None = None) -> Node:
            node = make(disk, world, clock, limits=HOT, recover=False, crash_at=crash_at, applied=applied)
            node.register("nested", nested)
            node.engine.recover()
            return node

        node = node_on(at)
        submitted = asyncio.ensure_future(node.submit("nested", depth, idempotency_key="once"))
        await node.until(lambda: node.store.crashed.is_set() or submitted.done())
        if submitted.done():
            ended = node.result(submitted.result())
            await node.until(lambda: node.store.crashed.is_set() or ended.done())
        if crashed := node.store.crashed.is_set():
            submitted.cancel()
            node.crash()
            node = node_on()
        node.store.at = None
        run_id = await node.submit("nested", depth, idempotency_key="once")
        result = await node.result(run_id)
        assert (result.state, result.value()) == (RunState.SUCCEEDED, [2, 1, 0])
        done = Counter((args["depth"], args["when"]) for args in world.effects.values())
        assert done == {(level, when): 1 for level in range(depth + 1) for when in ("before", "after")}
        assert len(node.store.scan_heads()) == depth + 1  # no copy of any
        node.check_disk()
        await node.close()
        return crashed

    at = 0
    while run(life(at)):
        at += 1
    assert at > 3 * 4  # runs of four records at least


def test_fault_D18_a_step_that_takes_hours_is_started_once() -> None:
    """Nothing that counts time starts it again: not its age, not who looks for stuck runs, not who submits again."""

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=EngineLimits(hot_ns=10**15, stuck_ns=1_000_000))
        node.tools.hold = True
        node.register("long", lambda ctx, input: _one(ctx))
        run_id = await node.submit("long", idempotency_key="once")
        await node.until(lambda: bool(node.tools.held))
        for _ in range(24):
            clock.now += HOUR_NS
            node.engine._stuck._look()
            for _ in range(50):
                await asyncio.sleep(0)
            assert await node.submit("long", idempotency_key="once") == run_id
        assert len(node.tools.held) == 1 and node.backend.starts == 1
        prepared = [record for record in node.records(run_id) if isinstance(record, StepPrepared)]
        assert [record.attempt for record in prepared] == [1]
        await node.close()

    run(main())


def _one(ctx: Ctx) -> Any:
    yield ctx.wait(ctx.tool("put", x=1))
    return 1


@pytest.mark.parametrize("which", [("resume", "resume"), ("resume", "retry"), ("retry", "retry"), ("retry", "settle")])
def test_fault_C25_of_two_who_let_a_run_go_on_at_once_one_does(which: tuple[str, str]) -> None:
    """Both saw it wait for an operator. Its step runs once more, not twice, whatever becomes of that."""

    async def main() -> None:
        node = new_node(MemoryDisk(), World())
        run_id = await one_parked(node)
        acts = {
            "resume": lambda: node.resume(run_id),
            "retry": lambda: node.decide(run_id, "1:1", None),
            "settle": lambda: node.decide(run_id, "1:1", True, 7),
        }
        said = await asyncio.gather(*(acts[name]() for name in which), return_exceptions=True)
        assert said[0] is None and (said[1] is None or isinstance(said[1], AgentrtError))
        await node.until(lambda: bool(node.tools.held))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(node.tools.held) == 1
        node.tools.held.pop()[4](DIED)
        await parked(node, run_id)  # nobody has let it run a third time
        attempts = [record.attempt for record in node.records(run_id) if isinstance(record, StepPrepared)]
        assert attempts == [1, 2] and not node.tools.held
        await node.close()

    run(main())
