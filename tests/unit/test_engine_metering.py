"""What the engine counts: each run and step once, whatever is replayed, and as long as it took, whoever was down."""

from typing import Any

from engine_kit import Ctx, Node, World, run
from test_engine_waits import COLD, Clock, asker, make, parked

from agentrt.observe.meter import Measured
from agentrt.stores.memory import MemoryDisk


def measured(node: Node) -> Measured:
    return node.engine._meter.snapshot()


def steps_of(node: Node) -> dict[tuple[str, str], int]:
    return {key: count for key, count in measured(node).steps.items() if count}


def three(ctx: Ctx, input: Any) -> Any:
    for number in range(3):
        handle = ctx.tool("put", n=number)
        yield ctx.wait(handle)
    return None


def failing(ctx: Ctx, input: Any) -> Any:
    handle = ctx.tool("no_such_tool")
    yield ctx.wait(handle)
    raise RuntimeError("no")


def both(ctx: Ctx, input: Any) -> Any:
    """A step, a person, a step."""
    yield ctx.wait(ctx.tool("put", n=1))
    yield from asker(ctx, None)
    yield ctx.wait(ctx.tool("put", n=2))


def test_runs_and_steps_are_counted_once() -> None:
    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock())
        node.register("three", three)
        node.register("failing", failing)
        runs = [await node.submit("three", tier=tier) for tier in (0, 2, 2)]
        runs.append(await node.submit("failing", tier=1))
        for run_id in runs:
            await node.result(run_id)
        found = measured(node)
        assert {key: count for key, count in found.accepted.items() if count} == {
            ("0", "agent"): 1,
            ("1", "agent"): 1,
            ("2", "agent"): 2,
        }
        assert {key: count for key, count in found.ended.items() if count} == {
            ("0", "agent", "SUCCEEDED"): 1,
            ("1", "agent", "FAILED"): 1,
            ("2", "agent", "SUCCEEDED"): 2,
        }
        assert steps_of(node) == {("tool.call", "ok"): 9, ("tool.call", "failed"): 1}
        assert found.step_ns["tool.call"].count == 9  # what was refused was never prepared
        assert found.run_tool_calls["2", "agent"].total == 6
        await node.close()

    run(main())


def test_what_a_person_took_is_counted_through_a_restart_and_replay_counts_nothing_again() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        node.register("both", both)
        run_id = await node.submit("both")
        await parked(node, run_id, "approval")
        assert steps_of(node) == {("tool.call", "ok"): 1}
        await node.close()
        clock.forward(3_000)
        node = make(disk, world, clock, limits=COLD)
        node.register("both", both)
        await node.approve(run_id)
        assert (await node.result(run_id)).value() is None
        assert steps_of(node) == {("tool.call", "ok"): 1, ("approval.request", "ok"): 1}
        waited, took = measured(node).step_ns["approval.request"], measured(node).run_ns["1", "agent"]
        assert waited.count == took.count == 1
        assert 3_000e9 <= waited.total <= took.total < 3_100e9
        await node.close()

    run(main())
