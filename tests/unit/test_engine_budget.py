"""Budgets: what a run may use, what its children may get, and how it ends when it is used up."""

from functools import partial

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from hypothesis import given
from hypothesis import strategies as st
from test_engine_waits import APPROVAL, COLD, JOIN, SECOND, SLEEP, SPAWN, Clock

from agentrt.engine.budget import BUDGETS, Budget, check_budget, child_budget, deadline_limit, deadline_of, wall_end_ns
from agentrt.engine.info import RunResult
from agentrt.errors import InputError
from agentrt.records import Cost, Ending, RunAccepted, StepCommitted
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk
from agentrt.tools.outcome import ToolOutcome

AMOUNTS = st.fixed_dictionaries(
    {},
    optional={
        "tool_calls": st.integers(0, 2**53 - 1),
        "wall_s": st.floats(1e-6, 3 * 10**8) | st.integers(1, 3 * 10**8),
        "result_bytes": st.integers(0, 2**40),
    },
)


def accepted(
    budget: Budget, at_ns: int = 1_700_000_000 * SECOND, start_ns: int = 0, deadline_ns: int = 0
) -> RunAccepted:
    return RunAccepted(
        1, at_ns, "t", "a", "v", b"null", 1, b"", 1, budget=budget, start_ns=start_ns, deadline_ns=deadline_ns
    )


@given(asked=AMOUNTS, given_=AMOUNTS, used=st.integers(0, 100), later=st.integers(0, 4 * 10**17))
def test_a_child_never_has_more_than_its_parent_has_left(asked: Budget, given_: Budget, used: int, later: int) -> None:
    parent = accepted(given_)
    now = parent.at_ns + later
    got = child_budget(asked, parent, used, now)
    assert check_budget(got) == got  # so a grandchild's follows from it in the same way
    for name in BUDGETS:
        if name in asked:
            assert got[name] <= asked[name]
        else:
            assert (name in got) is (name in given_)
    if "tool_calls" in given_:
        assert got["tool_calls"] <= max(0, given_["tool_calls"] - used)
    if "result_bytes" in given_:
        assert got["result_bytes"] <= given_["result_bytes"]
    end = wall_end_ns(given_, parent.at_ns)
    if end and now + 2_000 < end:
        assert wall_end_ns(got, now) <= end
    child = accepted(got, now, deadline_ns=deadline_of(got, now, 0))
    assert (deadline_limit(child) == "wall_s") is ("wall_s" in got)


@given(amounts=AMOUNTS, timeout=st.none() | st.integers(1, 10**9))
def test_the_earlier_of_both_deadlines_holds_and_is_named(amounts: Budget, timeout: int | None) -> None:
    begin = 1_700_000_000 * SECOND
    told = 0 if timeout is None else begin + timeout * SECOND
    end = wall_end_ns(amounts, begin)
    deadline = deadline_of(amounts, begin, told)
    assert deadline == min((each for each in (end, told) if each), default=0)
    limit = deadline_limit(accepted(amounts, begin, deadline_ns=deadline))
    assert limit == ("wall_s" if end and deadline == end else "deadline")


def error_of(ended: RunResult) -> dict[str, object]:
    return msgspec.json.decode(ended.error or b"null", type=dict[str, object])


def asker(ctx: Ctx, input: object) -> object:
    yield ctx.wait(ctx.op(APPROVAL, question="?"))
    return 1


def spawner(ctx: Ctx, input: dict[str, object]) -> object:
    """Makes some calls, spawns a child and joins it."""
    for number in range(int(str(input.get("calls", 0)))):
        yield ctx.wait(ctx.tool("put", n=number))
    spawn = ctx.op(
        SPAWN, agent="child", input=input.get("input"), budget=input.get("budget"), detached=bool(input.get("detached"))
    )
    yield ctx.wait(spawn)
    if "error" in ctx.read(spawn):
        return ctx.read(spawn)["error"]
    if input.get("detached"):
        return ctx.read(spawn)["run_id"]
    join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
    yield ctx.wait(join)
    return ctx.read(join)


def caller(ctx: Ctx, input: object) -> object:
    made = 0
    for number in range(int(str(input))):
        handle = ctx.tool("put", n=number)
        yield ctx.wait(handle)
        made += 1
    return made


def careful(ctx: Ctx, input: object) -> object:
    def undo(ctx: Ctx, reason: object) -> object:
        yield ctx.wait(ctx.tool("put", undo=1))

    ctx.on_unwind(undo)
    yield ctx.wait(ctx.op(SLEEP, seconds=1e6))
    return 1


def is_ending(node: Node, run_id: str) -> bool:
    return any(isinstance(record, Ending) for record in node.records(run_id))


def made(node: Node, agent: str, run_id: str) -> RunAccepted:
    (found,) = (record for record in node.records(run_id) if isinstance(record, RunAccepted))
    return found


def test_wall_time_ends_a_run_that_waits_and_names_its_limit() -> None:
    clock = Clock()

    async def main() -> None:
        node = Node(MemoryDisk(), World(), now_ns=clock, limits=COLD)
        node.register("asker", asker)
        run_id = await node.submit("asker", budget={"wall_s": 60})
        other = await node.submit("asker", budget={"wall_s": 90}, timeout_ns=70 * SECOND)
        ended, ended_other = node.result(run_id), node.result(other)
        clock.forward(61)
        assert (await ended).state is RunState.TIMED_OUT
        assert error_of(await ended)["limit"] == "wall_s" and "60 seconds" in str(error_of(await ended)["message"])
        clock.forward(10)
        assert error_of(await ended_other)["limit"] == "deadline"
        node.check_disk()
        await node.close()

    run(main())


def test_a_crash_while_a_run_unwinds_keeps_the_limit() -> None:
    """Both limits that make a run unwind: the error after the restart names them as the one before would have."""
    clock = Clock()

    async def main() -> None:
        for agent, input, how, limit in (
            (careful, None, {"budget": {"wall_s": 60}}, "wall_s"),
            (caller, 9, {"budget": {"tool_calls": 2}}, "tool_calls"),
        ):
            disk, world = MemoryDisk(), World()
            node = Node(disk, world, now_ns=clock, limits=COLD)
            node.register("agent", agent, unwinds=True)
            run_id = await node.submit("agent", input, **how)
            if limit == "wall_s":
                clock.forward(61)
            await node.until(partial(is_ending, node, run_id))
            node.crash()
            node = Node(disk, world, now_ns=clock, limits=COLD)
            node.register("agent", agent, unwinds=True)
            node.engine.recover()
            ended = await node.result(run_id)
            assert error_of(ended)["limit"] == limit
            await node.close()

    run(main())


@pytest.mark.parametrize("detached", [False, True])
def test_a_child_gets_what_is_left(detached: bool) -> None:
    clock = Clock()

    async def main() -> None:
        node = Node(MemoryDisk(), World(), now_ns=clock, limits=COLD)
        node.register("child", asker)
        node.register("parent", spawner)
        budget = {"tool_calls": 5, "wall_s": 100, "result_bytes": 1000}
        asked = {"tool_calls": 50, "result_bytes": 10, "wall_s": 1e6}
        input = {"calls": 2, "budget": asked, "detached": detached}
        parent = await node.submit("parent", input, budget=budget)
        await node.until(lambda: len([*node.disk.heads]) == 2)
        (child,) = (run_id for run_id in node.disk.heads if run_id != parent)
        got, given_ = made(node, "child", child), made(node, "parent", parent)
        assert (got.budget["tool_calls"], got.budget["result_bytes"]) == (3, 10)
        assert given_.deadline_ns - 10_000 < got.deadline_ns <= given_.deadline_ns
        clock.forward(101)
        ended = await node.result(child)
        if detached:
            assert (ended.state, error_of(ended)["limit"]) == (RunState.TIMED_OUT, "wall_s")
        else:
            assert ended.state in (RunState.TIMED_OUT, RunState.CANCELLED)  # its parent's end may come first
        await node.close()

    run(main())


def test_a_child_ends_by_its_own_budget_and_its_parent_is_told() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("child", caller)
        node.register("parent", spawner)
        run_id = await node.submit(
            "parent", {"calls": 3, "input": 5, "budget": {"tool_calls": 9}}, budget={"tool_calls": 5}
        )
        answer = (await node.result(run_id)).value()["error"]
        assert (answer["code"], answer["state"]) == ("child_failed", "BUDGET_EXHAUSTED")
        assert (answer["error"]["limit"], answer["error"]["message"]) == (
            "tool_calls",
            "the run has used its 2 tool calls",
        )
        run_id = await node.submit("parent", {"input": 5, "budget": {"token": 9}})
        assert "no budget 'token'" in (await node.result(run_id)).value()["message"]
        await node.close()

    run(main())


def test_what_a_submit_says_replaces_the_agents_own_by_name() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("caller", caller)
        (agent,) = node.engine.agents()
        node.engine.register(msgspec.structs.replace(agent, budget={"tool_calls": 2, "result_bytes": 100}))
        for how, calls, state in (
            ({}, 2, RunState.SUCCEEDED),
            ({}, 3, RunState.BUDGET_EXHAUSTED),
            ({"budget": {"wall_s": 1000}}, 3, RunState.BUDGET_EXHAUSTED),
            ({"budget": {"tool_calls": 3}}, 3, RunState.SUCCEEDED),
            ({"budget": {"result_bytes": 0}}, 2, RunState.BUDGET_EXHAUSTED),
        ):
            assert (await node.result(await node.submit("caller", calls, **how))).state is state, how
        await node.close()

    run(main())


@pytest.mark.parametrize(
    "budget", [{"token": 1}, {"tokens/day": 1}, {"wall_s": 0}, {"tool_calls": "1"}, {"result_bytes": -1}, [], 5]
)
def test_what_is_no_budget(budget: object) -> None:
    with pytest.raises(InputError):
        check_budget(budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("crash", [False, True])
def test_fuel_of_tool_calls_is_their_cost_and_counts_against_the_runs(crash: bool) -> None:
    """Calls that are guests: they may use together what the run's own guest may, and one more call at most."""
    clock, disk, world = Clock(), MemoryDisk(), World()
    world.script["put"] = [ToolOutcome(True, b"1", None, 7, False, fuel=40)] * 5

    async def main() -> None:
        node = Node(disk, world, now_ns=clock, limits=COLD)
        node.register("agent", caller)
        run_id = await node.submit("agent", 9, fuel_max=100)
        if crash:
            await node.until(lambda: len(commits(node, run_id)) == 2)
            node.crash()
            node = Node(disk, world, now_ns=clock, limits=COLD)
            node.register("agent", caller)
            node.engine.recover()
        ended = await node.result(run_id)
        assert ended.state is RunState.BUDGET_EXHAUSTED
        assert error_of(ended)["limit"] == "fuel_max" and "100 fuel in tool calls" in str(error_of(ended)["message"])
        assert [record.cost for record in commits(node, run_id)] == [Cost(40, 7)] * 3
        assert node.fold(run_id).spent == Cost(120, 21)
        node.check_disk()
        await node.close()

    def commits(node: Node, run_id: str) -> list[StepCommitted]:
        return [record for record in node.records(run_id) if isinstance(record, StepCommitted)]

    run(main())
