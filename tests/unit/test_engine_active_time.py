"""How long a run may be at work: what counts, what does not, and that neither a park nor a crash forgets it."""

from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from test_engine_waits import APPROVAL, COLD, EVENT, HOT, SECOND, Clock, parked, timed

from agentrt.engine.budget import child_budget
from agentrt.engine.info import EngineLimits
from agentrt.engine.machine import RunMachine
from agentrt.errors import InputError
from agentrt.flow.amounts import check_limits
from agentrt.flow.profiles import Profile
from agentrt.records import RunAccepted
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk


def worker(ctx: Ctx, input: Any) -> Any:
    """Works, waits for somebody, works again."""
    ctx.on_unwind(undo)
    yield ctx.wait(ctx.tool("put", first=1))
    yield ctx.wait(ctx.op(input, question="?") if input == APPROVAL else ctx.op(input, topic="go"))
    yield ctx.wait(ctx.tool("put", second=2))
    return "done"


def undo(ctx: Ctx, reason: object) -> Any:
    yield ctx.wait(ctx.tool("put", undo=3))


def node_on(disk: MemoryDisk, world: World, clock: Clock, **how: Any) -> Node:
    node = Node(disk, world, now_ns=clock, **how)
    node.register("worker", worker, unwinds=True)
    node.engine.recover()
    return node


async def called(node: Node, run_id: str) -> RunMachine:
    """Its call is with its tool."""
    await timed(node, lambda: bool(node.tools.held))
    return node.engine._runs[run_id]


async def went_on(node: Node, run_id: str, what: int) -> None:
    if what == APPROVAL:
        (path,) = (
            [path for path, *_ in node.engine._runs[run_id].open_steps()] if run_id in node.engine._runs else [None]
        )
        await node.approve(run_id, path, True)
    else:
        await node.send(topic="go")


@pytest.mark.parametrize("limits", [HOT, COLD])
@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("what", [APPROVAL, EVENT])
def test_work_counts_and_waiting_does_not(what: int, crashes: bool, limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        node.tools.hold = True
        run_id = await node.submit("worker", what, budget={"active_s": 100})
        machine = await called(node, run_id)
        assert machine.clock is not None
        clock.forward(60)
        assert machine.clock.spent_ns(clock()) >= 60 * SECOND
        node.tools.answer_one()
        if limits is COLD:
            await parked(node, run_id, "approval" if what == APPROVAL else "event")
        else:
            await timed(node, lambda: machine.idle)
        assert 60 * SECOND <= node.fold(run_id).active_ns < 61 * SECOND
        clock.forward(10_000)  # in front of a person
        if crashes:
            node.crash()
            node = node_on(disk, world, clock, limits=limits)
            node.tools.hold = True
        await timed(node, lambda: limits is COLD or (run_id in node.engine._runs and node.engine._runs[run_id].idle))
        await went_on(node, run_id, what)
        machine = await called(node, run_id)
        assert machine.clock is not None and 60 * SECOND <= machine.clock.spent_ns(clock()) < 61 * SECOND
        machine.clock_due()  # not yet
        assert machine.ending is None
        assert (node.tools.timeouts[-1] or 10**12) > 39 * SECOND or node.tools.timeouts[-1] is None
        clock.forward(40)
        machine.clock_due()
        assert machine.ending is not None and machine.ending.limit == "active_s"
        await timed(node, lambda: machine._handlers)
        node.tools.hold = False
        while node.tools.held:
            node.tools.answer_one()
        result = await node.result(run_id)
        error = msgspec.json.decode(result.error or b"{}")
        assert (result.state, error["limit"]) == (RunState.TIMED_OUT, "active_s") and "100 seconds" in error["message"]
        for rec in node.records(run_id):
            print(rec)
        assert {"undo": 3} in world.effects.values()
        (told,) = [each for each in node.engine.flow.decisions if each.control == "timeout"]
        assert told.limit == "active_s" and told.value >= 100 * SECOND
        node.check_disk()
        await node.close()

    run(main())


def test_a_run_that_is_quick_is_not_bothered() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        run_id = await node.submit("worker", EVENT, budget={"active_s": 3600})
        await timed(node, lambda: run_id in node.engine._runs and node.engine._runs[run_id].idle)
        clock.forward(10**6)
        await node.send(topic="go")
        assert (await node.result(run_id)).value() == "done"
        await node.close()

    run(main())


def test_calls_get_no_more_time_than_their_run_has_left() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        node.tools.hold = True
        run_id = await node.submit("worker", EVENT, budget={"active_s": 0.5})  # its tools have a second
        await called(node, run_id)
        assert 0 < (node.tools.timeouts[0] or 0) < SECOND
        await node.close()

    run(main())


def test_operators_and_authors_bound_it_too() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        base = Profile(name="base", budgets={"agent:*/worker": {"active_s": 50, "tool_calls": 9}})
        node = node_on(disk, world, clock, limits=HOT, profile=base)
        for asked, expected in (
            (None, {"active_s": 50, "tool_calls": 9}),
            ({"active_s": 5}, {"active_s": 5, "tool_calls": 9}),
        ):
            run_id = await node.submit("worker", EVENT, budget=asked)
            assert node.engine._runs[run_id].accepted.budget == expected
        await node.close()

    run(main())


def test_a_child_has_its_own_and_no_more_than_its_parent() -> None:
    parent = RunAccepted(1, 1, "t", "a", "v", b"", 1, b"", 1, budget={"active_s": 5})
    assert child_budget({}, parent, 0, 0)["active_s"] == 5
    assert child_budget({"active_s": 9}, parent, 0, 0)["active_s"] == 5
    assert child_budget({"active_s": 0.5}, parent, 0, 0)["active_s"] == 0.5


def test_times_are_of_runs() -> None:
    for key in ("wall_s", "active_s"):
        assert check_limits("it", {key: 5}) == {key: 5}
        with pytest.raises(InputError, match="of one run"):
            check_limits("it", {key: 5}, windows=True)
