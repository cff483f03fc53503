"""Amounts in the engine: budgets, quotas and bounds of families, through parking, crashes and restarts.

After every crash the rows of the accounts are compared with what the journals say was used and is held.
"""

import asyncio
from functools import partial
from typing import Any

import pytest
from engine_kit import Ctx, MemoryReader, Node, World, run, settle
from test_engine_waits import COLD, HOT, SECOND, Clock

from agentrt.engine.decisionlog import DecisionLog
from agentrt.engine.info import EngineLimits
from agentrt.errors import BudgetExhaustedError, InputError
from agentrt.flow.accounts import decode_base, decode_below, decode_entry, tenant_id
from agentrt.flow.amounts import FUEL, INDEX
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.flow.profiles import Profile, apply, check_profile
from agentrt.ids import child_run_id
from agentrt.records import OutcomeUnknown, RunAccepted, RunEnded, StepAborted, StepCommitted, StepPrepared, Waiting
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import ACCOUNTS
from agentrt.stores.memory import MemoryDisk
from agentrt.tools.outcome import ToolOutcome

SPAWN, JOIN, CAPACITY = 6, 7, 14
CALLS = INDEX["tool_calls"]
TURNS = 1_000_000  # of the loop, some seconds: what is idle is parked by a timer


def caller(ctx: Ctx, input: Any) -> Any:
    """So many calls, one after the other."""
    for number in range(input):
        handle = ctx.tool("put", n=number)
        yield ctx.wait(handle)
        if "error" in ctx.read(handle):
            return ctx.read(handle)["error"]
    return input


def parallel(ctx: Ctx, input: Any) -> Any:
    """So many calls at once."""
    handles = [ctx.tool("put", n=number) for number in range(input)]
    for handle in handles:
        yield ctx.wait(handle)
    return input


def family(ctx: Ctx, input: Any) -> Any:
    """Spawns callers and joins them; what came of each."""
    spawns = [ctx.op(SPAWN, agent="caller", input=calls, **input.get("how", {})) for calls in input["calls"]]
    answers = []
    for spawn in spawns:
        yield ctx.wait(spawn)
        answer = ctx.read(spawn)
        if "error" not in answer:
            join = ctx.op(JOIN, run_id=answer["run_id"])
            yield ctx.wait(join)
            answer = ctx.read(join)
        answers.append(answer)
    return answers


def profile(**said: Any) -> Profile:
    return check_profile("base", said)


def make(
    disk: MemoryDisk,
    world: World,
    clock: Clock,
    base: Profile | None = None,
    *,
    limits: EngineLimits | None = None,
    **how: Any,
) -> Node:
    node = Node(disk, world, limits=limits, now_ns=clock, profile=base, **how)
    for agent in (caller, parallel, family):
        node.register(agent.__name__, agent)
    return node


def used_by_journal(node: Node, run_id: str) -> tuple[int, int]:
    """Tool calls that the run has used, and those that it holds."""
    open_paths: set[str] = set()
    used = 0
    ended = False
    for record in node.records(run_id):
        if isinstance(record, StepPrepared) and record.op == "tool.call":
            open_paths.add(record.path)
        elif isinstance(record, StepCommitted) and record.op == "tool.call":
            if record.path in open_paths:
                open_paths.remove(record.path)
                used += 1
            elif record.result is None:  # pure
                used += 1
        elif isinstance(record, StepAborted) and record.path in open_paths and ended:
            open_paths.remove(record.path)
        elif isinstance(record, RunEnded):
            ended = True
    return (used + len(open_paths), 0) if ended else (used, len(open_paths))


def check_accounts(node: Node) -> None:
    """The rows of tenants, budgets and runs are what the journals add up to."""
    reader = MemoryReader(node.disk)
    heads = {head.run_id: head for head in reader.scan_heads()}
    accepted = {run_id: node.records(run_id)[0] for run_id in heads}
    rows = reader.scan_rows(ACCOUNTS, limit=100_000)
    entries = {row.run_id: row for row in (decode_entry(value) for key, value in rows if key[:1] == b"e")}
    below = {row.run_id: row for row in (decode_below(value) for key, value in rows if key[:1] == b"s")}
    bases = {row.id: row for row in (decode_base(value) for key, value in rows if key[:1] == b"a")}
    for run_id, row in entries.items():
        assert heads[run_id].state not in TERMINAL
        assert (row.used.total[CALLS], row.held[CALLS]) == used_by_journal(node, run_id)
    for tenant in {head.tenant for head in heads.values()}:
        if tenant_id(tenant) in bases:
            ended = [run_id for run_id, head in heads.items() if head.tenant == tenant and head.state in TERMINAL]
            total = sum(used_by_journal(node, run_id)[0] for run_id in ended)
            assert bases[tenant_id(tenant)].used.total[CALLS] == total
    for run_id, row in below.items():
        family_of = [other for other in heads if other == run_id or descends(accepted, other, run_id)]
        assert any(heads[other].state not in TERMINAL for other in heads if root_of(accepted, other) == row.root)
        ended = [other for other in family_of if heads[other].state in TERMINAL]
        assert row.used.total[CALLS] == sum(used_by_journal(node, other)[0] for other in ended)


def root_of(accepted: dict[str, Any], run_id: str) -> str:
    return accepted[run_id].root or run_id


def descends(accepted: dict[str, Any], run_id: str, ancestor: str) -> bool:
    parent = accepted[run_id].parent
    while parent is not None:
        if parent.partition("/")[0] == ancestor:
            return True
        parent = accepted[parent.partition("/")[0]].parent
    return False


HOURLY = profile(limits={"tenant:default": {"tool_calls/hour": 3}})


@pytest.mark.parametrize("limits", [HOT, COLD])
@pytest.mark.parametrize("restart", [False, True])
def test_a_spent_tenant_parks_its_runs_until_its_window_begins_again(limits: EngineLimits, restart: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, HOURLY, limits=limits)
        run_id = await node.submit("caller", 5)
        await node.until(lambda: (len(world.effects) == 3 and bool(node.engine.flow._waiting)) or is_cold(node, run_id))
        info = await node.engine.queries.describe(run_id)
        assert len(world.effects) == 3
        assert info.wait_reason == "quota"
        if limits is COLD:
            await node.until(lambda: is_cold(node, run_id), TURNS)
            (wait,) = [record for record in node.records(run_id) if isinstance(record, Waiting)]
            assert wait.until_ns and wait.detail and "tool_calls/hour of tenant default" in wait.detail
            assert run_id not in node.engine._runs  # nor a slot, nor a guest, nor memory
        node.check_disk()
        if restart:
            node.crash()
            node = make(disk, world, clock, HOURLY, limits=limits)
            node.engine.recover()
            await asyncio.sleep(0.05)
            assert len(world.effects) == 3
        clock.forward(3600)
        assert (await node.result(run_id)).value() == 5
        assert len(world.effects) == 5
        node.check_disk()
        check_accounts(node)
        await node.close()

    run(main())


@pytest.mark.parametrize(
    ("limit", "seconds"), [("tool_calls/hour", 3600), ("tool_calls/day", 86_400), ("tool_calls/month", 32 * 86_400)]
)
def test_so_does_an_agent_whose_window_is_used_up_and_other_agents_go_on(limit: str, seconds: int) -> None:
    """Over a restart, until the window begins again, whichever it is."""

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        base = profile(limits={"agent:default/caller": {limit: 2}})
        node = make(disk, world, clock, base, limits=COLD)
        run_id = await node.submit("caller", 3)
        await node.until(lambda: is_cold(node, run_id), TURNS)
        assert f"{limit} of agent default/caller" in (node.fold(run_id).wait.detail or "")  # type: ignore[union-attr]
        assert (await node.result(await node.submit("parallel", 3))).value() == 3
        node.crash()
        node = make(disk, world, clock, base, limits=COLD)
        node.engine.recover()
        again = await node.submit("caller", 1)
        await node.until(lambda: is_cold(node, again) and is_cold(node, run_id), TURNS)
        assert len(world.effects) == 5
        clock.forward(seconds)
        assert (await node.result(run_id)).value() == 3
        assert (await node.result(again)).value() == 1
        check_accounts(node)
        await node.close()

    run(main())


def is_cold(node: Node, run_id: str) -> bool:
    return run_id not in node.engine._runs and bool(node.records(run_id)) and node.fold(run_id).wait is not None


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_what_others_hold_is_waited_for_and_the_most_urgent_goes_first(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, profile(limits={"tenant:default": {"tool_calls": 4}}), limits=limits)
        node.tools.hold = True
        first = await node.submit("parallel", 2)
        await node.until(lambda: len(node.tools.held) == 2)
        # One call is left to be used: the others hold theirs.
        third = await node.submit("caller", 1, tier=0)
        fourth = await node.submit("caller", 1, tier=2)
        await node.until(lambda: len(node.tools.held) == 4)
        late = await node.submit("caller", 1, tier=2)
        urgent = await node.submit("caller", 1, tier=0)
        await node.until(lambda: sum(len(each) for each in node.engine.flow._waiting.values()) == 2)
        if limits is COLD:
            await node.until(lambda: is_cold(node, late) and is_cold(node, urgent), TURNS)
        assert len(node.tools.held) == 4
        # Whoever held is cancelled before his effect: his reservation counts as used only if nobody saw the end.
        assert [decision.action for decision in node.engine.flow.decisions][:2] == [Action.WAIT, Action.WAIT]
        node.tools.hold = False
        while node.tools.held:
            node.tools.answer_one()
        for run_id in (first, third, fourth):
            assert (await node.result(run_id)).state is RunState.SUCCEEDED
        # All four are used for good now: a tenant without a window waits for other limits.
        await asyncio.sleep(0.05)
        assert len(world.effects) == 4
        more = check_profile("more", {"limits": {"tenant:default": {"tool_calls": 5}}})
        force, _ = apply(node.engine.flow.force, more, "test", 1)
        node.engine.flow.switch(force, node.engine._runs.values(), clock())
        assert (await node.result(urgent)).state is RunState.SUCCEEDED
        assert len(world.effects) == 5
        check_accounts(node)
        await node.close()

    run(main())


def test_a_reservation_that_is_given_back_goes_to_who_waits() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, profile(limits={"tenant:default": {"fuel": 2 * 10**12}}), limits=HOT)
        node.tools.hold = True
        first = await node.submit("caller", 1)
        second = await node.submit("caller", 1)
        with pytest.raises(BudgetExhaustedError, match="fuel of tenant default would pass"):
            await node.submit("caller", 1)
        await node.until(lambda: len(node.tools.held) == 2)
        node.tools.hold = False
        while node.tools.held:
            node.tools.answer_one()
        for run_id in (first, second):
            await node.result(run_id)
        account = node.engine.flow.ledger.accounts()[0]
        assert (account.used[FUEL], account.held[FUEL]) == (2_000, 0)  # what their guests say they have used
        assert (await node.result(await node.submit("caller", 1, fuel_max=10**12))).state is RunState.SUCCEEDED
        check_accounts(node)
        await node.close()

    run(main())


def test_fuel_of_tool_calls_is_taken_from_what_their_run_holds() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        world.script["put"] = [ToolOutcome(True, b"1", None, 5, False, fuel=500)]
        node = make(disk, world, clock, profile(limits={"tenant:default": {"fuel": 2 * 10**12}}), limits=HOT)
        await node.result(await node.submit("caller", 1))
        account = node.engine.flow.ledger.accounts()[0]
        assert (account.used[FUEL], account.held[FUEL]) == (1_500, 0)
        check_accounts(node)
        await node.close()

    run(main())


def test_a_budget_holds_for_all_that_a_run_starts() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        run_id = await node.submit("family", {"calls": [2, 2, 2]}, budget={"tool_calls": 5})
        answers = (await node.result(run_id)).value()
        assert len(world.effects) == 5
        assert sorted(isinstance(answer, int) for answer in answers) == [False, True, True]
        (failed,) = [answer["error"] for answer in answers if not isinstance(answer, int)]
        assert (failed["code"], failed["state"]) == ("child_failed", "BUDGET_EXHAUSTED")
        assert failed["error"]["limit"] == "tool_calls"
        assert not MemoryReader(disk).scan_rows(ACCOUNTS)  # nothing is left of an ensemble that has ended
        await node.close()

    run(main())


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("limits", [HOT, COLD], ids=["hot", "cold"])
def test_no_crash_loses_or_doubles_what_is_counted(applied: bool, limits: EngineLimits) -> None:
    """A node that dies at its n-th commit, for every n, and is started again: nobody ever passes a limit, and the
    accounts are what the journals say."""

    base = profile(limits={"tenant:default": {"tool_calls/day": 9}, "node": {"tool_calls": 11}})

    async def life(crash_at: int | None) -> int:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, base, limits=limits, crash_at=crash_at, applied=applied)
        runs: list[str] = []

        async def submit() -> None:
            for agent, input, how in (
                ("family", {"calls": [2, 1]}, {"budget": {"tool_calls": 4}}),
                ("parallel", 3, {}),
                ("caller", 6, {}),
            ):
                runs.append(await node.submit(agent, input, **how))

        submitting = asyncio.ensure_future(submit())
        over = asyncio.ensure_future(node.store.crashed.wait())

        async def rests() -> None:
            await submitting
            for run_id in runs[:2]:
                await node.result(run_id)
            await node.until(lambda: len(world.effects) == 9)
            for _ in range(50):
                await asyncio.sleep(0)

        resting = asyncio.ensure_future(rests())
        await asyncio.wait([over, resting], return_when=asyncio.FIRST_COMPLETED)
        crashed = over.done()
        for task in (submitting, over, resting):
            task.cancel()
        commits = node.store.commits
        node.crash()
        check_accounts(node)
        node = make(disk, world, clock, base, limits=limits)
        check_accounts(node)
        node.engine.recover()
        reader = MemoryReader(disk)
        known = [head.run_id for head in reader.scan_heads()]
        await node.until(lambda: quiet(node, known), TURNS)
        assert len(world.effects) <= 9
        clock.forward(24 * 3600)
        for _ in range(30):
            await asyncio.sleep(0.005)
        await node.until(lambda: quiet(node, known), TURNS)
        assert len(world.effects) <= 11
        node.check_disk()
        check_accounts(node)
        for account in node.engine.flow.ledger.accounts():
            assert account.used[CALLS] + account.held[CALLS] <= 11
        await node.close()
        return commits if not crashed else -1

    def quiet(node: Node, runs: list[str]) -> bool:
        busy = [
            machine
            for machine in node.engine._runs.values()
            if machine._calls or machine._inflight or machine.waits or not (machine.idle or machine.holds)
        ]
        return not (busy or node.engine._places.loading or node.engine._plan.ready)

    for crash_at in range(1000):
        if run(life(crash_at)) != -1:
            break
    assert crash_at > 14  # and each of these has been tried


def test_what_nobody_saw_the_end_of_keeps_its_reservation() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        base = profile(limits={"tenant:default": {"tool_calls": 2}})
        node = make(disk, world, clock, base)

        def once(ctx: Ctx, input: Any) -> Any:
            handle = ctx.tool("once", n=1)
            yield ctx.wait(handle)
            return ctx.read(handle)

        node.register("once", once)
        node.tools.hold = True
        run_id = await node.submit("once")
        await node.until(lambda: bool(node.tools.held))
        node.crash()
        node = make(disk, world, clock, base)
        node.register("once", once)
        node.engine.recover()
        await node.until(lambda: run_id in node.engine._places.parked)  # an operator must say what became of it
        assert any(isinstance(record, OutcomeUnknown) for record in node.records(run_id))
        (account,) = node.engine.flow.ledger.accounts()
        assert (account.used[CALLS], account.held[CALLS]) == (0, 1)
        other = await node.submit("caller", 2)
        await node.until(lambda: bool(node.engine.flow._waiting))
        assert len(world.effects) == 1
        await node.decide(run_id, "1:1", True, "done")
        assert (await node.result(run_id)).value() == "done"
        assert (account.used[CALLS], account.held[CALLS]) == (2, 0)
        await node.cancel(other)
        check_accounts(node)
        await node.close()

    run(main())


def test_a_quota_schedules_the_calls_that_find_no_place() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        base = profile(quotas={"tool:put/day": {"count": 2, "reset_s": 9 * 3600}})
        node = make(disk, world, clock, base, limits=COLD)
        runs = [await node.submit("caller", 1) for _ in range(5)]
        await node.until(lambda: sum(is_cold(node, run_id) for run_id in runs) == 3, TURNS)
        waits = [node.fold(run_id).wait for run_id in runs if is_cold(node, run_id)]
        days = sorted({(wait.until_ns - clock.now) // (24 * 3600 * SECOND) for wait in waits if wait is not None})
        assert days == [0, 1]  # two have a place tomorrow, the third the day after
        node.crash()
        node = make(disk, world, clock, base, limits=COLD)
        node.engine.recover()
        for expected in (4, 5):
            assert len(world.effects) == expected - 2 + (expected == 5)
            clock.forward(24 * 3600)
            await node.until(lambda: len(world.effects) == expected, TURNS)  # noqa: B023
            await asyncio.sleep(0.05)
        for run_id in runs:
            assert (await node.result(run_id)).state is RunState.SUCCEEDED
        await node.close()

    run(main())


def test_what_is_left_is_told_and_remembered() -> None:
    def planner(ctx: Ctx, input: Any) -> Any:
        seen = []
        for number in range(2):
            asked = ctx.submit(CAPACITY, b"{}")
            yield ctx.wait(asked)
            seen.append(ctx.read(asked))
            call = ctx.tool("put", n=number)
            yield ctx.wait(call)
        return seen

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        node.register("planner", planner)
        node.tools.hold = True
        budget = {"tool_calls": 3, "tokens": 10, "depth": 2, "fan_out": 7, "wall_s": 100}
        run_id = await node.submit("planner", None, budget=budget)
        await node.until(lambda: bool(node.tools.held))
        node.crash()
        node = make(disk, world, clock)
        node.register("planner", planner)
        node.engine.recover()
        first, second = (await node.result(run_id)).value()
        assert (first["tool_calls"], second["tool_calls"]) == (3, 2)
        assert (first["tokens"], first["depth_left"], first["children_left"]) == (10, 2, 7)
        assert (first["fan_out"], first["limited_by"]) == (3, "tool_calls")
        assert 90 < second["wall_s"] < first["wall_s"] <= 100
        await node.close()

    run(main())


@pytest.mark.parametrize(
    ("budget", "limits", "limit"),
    [
        ({"depth": 0}, None, "depth"),
        ({"fan_out": 2}, None, "fan_out"),
        ({}, EngineLimits(fan_out_max=2), "fan_out"),
        ({}, EngineLimits(depth_max=0), "depth"),
    ],
)
def test_children_beyond_a_bound_are_refused_and_the_run_goes_on(
    budget: dict[str, int], limits: EngineLimits | None, limit: str
) -> None:
    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock(), limits=limits)
        answers = (await node.result(await node.submit("family", {"calls": [0, 0, 0]}, budget=budget))).value()
        errors = [answer["error"] for answer in answers if answer != 0]
        assert {(error["code"], error["limit"]) for error in errors} == {("limit_reached", limit)}
        assert len(errors) == (3 if limit == "depth" else 1)
        await node.close()

    run(main())


def test_depth_counts_from_the_root_and_a_childs_own_is_less() -> None:
    def deep(ctx: Ctx, input: Any) -> Any:
        spawn = ctx.op(SPAWN, agent="deep", input=input + 1, budget={"depth": 99})
        yield ctx.wait(spawn)
        if "error" in ctx.read(spawn):
            return input
        join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
        yield ctx.wait(join)
        return ctx.read(join)

    async def main() -> None:
        for budget, limits, deepest in (({}, EngineLimits(depth_max=4), 4), ({"depth": 2}, None, 2)):
            node = make(MemoryDisk(), World(), Clock(), limits=limits)
            node.register("deep", deep)
            run_id = await node.submit("deep", 0, budget=budget)
            assert (await node.result(run_id)).value() == deepest
            child = child_run_id(run_id, "1:1")
            assert [r.depth for r in node.records(child) if isinstance(r, RunAccepted)] == [1]
            await node.close()

    run(main())


@pytest.mark.parametrize("when_full", ["block", "refuse"])
def test_a_full_ensemble_blocks_its_planner_or_refuses_as_asked(when_full: str) -> None:
    async def main() -> None:
        base = profile(ensemble={"queued_max": 2})
        node = make(MemoryDisk(), World(), Clock(), base, limits=HOT)
        how = {"calls": [1] * 8, "how": {"when_full": when_full}}
        answers = (await node.result(await node.submit("family", how))).value()
        if when_full == "block":
            assert answers == [1] * 8
        else:
            assert answers[:2] == [1, 1] and {a["error"]["limit"] for a in answers[2:]} == {"ensemble.queued_max"}
        assert not node.engine.flow._ensembles and not node.engine.flow._places and not node.engine.flow._waiting
        await node.close()

    run(main())


def test_ensembles_are_bounded_by_the_agent_of_their_root_wherever_it_is() -> None:
    """The root of one waits in the store for a child that spawns; the other's agent has no such bound."""

    def middle(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.op(4, key="go"))
        found = yield from family(ctx, {"calls": [1] * 4, "how": {"when_full": "refuse"}})
        return sum(answer == 1 for answer in found)

    def roots(ctx: Ctx, input: Any) -> Any:
        spawn = ctx.op(SPAWN, agent="middle")
        yield ctx.wait(spawn)
        join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
        yield ctx.wait(join)
        return ctx.read(join)

    async def main() -> None:
        base = profile(ensembles={"agent:*/bounded": {"queued_max": 2}})
        node = make(MemoryDisk(), World(), Clock(), base, limits=COLD)
        node.register("middle", middle)
        for name, answer in (("bounded", 2), ("free", 4)):
            node.register(name, roots)
            run_id = await node.submit(name)
            await node.until(lambda run_id=run_id: is_cold(node, run_id), TURNS)  # type: ignore[misc]
            child = child_run_id(run_id, "1:1")
            await node.until(lambda child=child: is_cold(node, child), TURNS)  # type: ignore[misc]
            await node.send(run_id=child, key="go", data=None)
            assert (await node.result(run_id)).value() == answer
        flow = node.engine.flow
        assert not flow._ensembles and not flow._ensembles_of and not flow._root_agents
        await node.close()

    run(main())


def test_runs_that_all_block_in_spawn_do_not_block_for_ever() -> None:
    """Two may live, both want children, the queue is full of children that may not start: the youngest is refused."""

    def tree(ctx: Ctx, input: Any) -> Any:
        spawns = [ctx.op(SPAWN, agent="tree", input=input - 1) for _ in range(3 if input else 0)]
        refused = 0
        for spawn in spawns:
            yield ctx.wait(spawn)
            if "error" in ctx.read(spawn):
                refused += 1
                continue
            join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
            yield ctx.wait(join)
            refused += ctx.read(join)
        return refused

    async def main() -> None:
        base = profile(ensemble={"queued_max": 1, "live_max": 2})
        node = make(MemoryDisk(), World(), Clock(), base, limits=HOT)
        node.register("tree", tree)
        refused = (await node.result(await node.submit("tree", 3))).value()
        assert refused > 0
        assert not node.engine.flow._ensembles and not node.engine.flow._places
        await node.close()

    run(main())


def test_a_refused_append_leaves_the_accounts_as_they_were() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, profile(limits={"tenant:default": {"tool_calls": 50}}))
        node.store.refuse_share = 0.2
        runs = [await node.submit("caller", 3) for _ in range(8)]
        results = [await node.result(run_id) for run_id in runs]
        assert all(result.state is RunState.SUCCEEDED for result in results)
        node.store.refuse_share = 0.0
        await asyncio.sleep(0.05)
        (account,) = node.engine.flow.ledger.accounts()
        assert (account.used[CALLS], account.held[CALLS]) == (24, 0)
        check_accounts(node)
        await node.close()

    run(main())


def test_what_a_run_may_not_do_is_told_to_observers() -> None:
    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock())
        seen: list[Any] = []
        node.engine.observe(lambda event, data: seen.append(data) if event == "decision" else None)
        await node.result(await node.submit("family", {"calls": [2]}, budget={"tool_calls": 1}))
        (decision,) = seen
        assert (decision.action, decision.limit, decision.bound, decision.value) == (Action.END, "tool_calls", 1, 1)
        assert node.engine.flow.decisions.counted == {("budget", "end", "run"): 1}
        assert decision.run is not None and node.engine.flow.decisions.of_run(decision.run) == [decision]
        await node.close()

    run(main())


def test_decisions_about_runs_are_kept_for_those_decided_about_last() -> None:
    def of(run_id: str | None, number: int) -> Decision:
        how = {"control": Control.RATE, "action": Action.WAIT, "scope": Scope.TOOL}
        return Decision(at_ns=number, run=run_id, **how)  # type: ignore[arg-type]

    log = DecisionLog(runs_max=2, per_run_max=3)
    for number in range(5):
        log.add(of("a", number))
    log.add(of(None, 9))
    assert [each.at_ns for each in log] == [2, 3, 4]
    assert [each.at_ns for each in log.of_run("a")] == [2, 3, 4] and log.of_run("b") == []
    log.add(of("b", 0))
    log.add(of("a", 5))
    log.add(of("c", 0))  # b is the one that nothing was decided about for longest
    assert [bool(log.of_run(run_id)) for run_id in "abc"] == [True, False, True] and len(log) == 4
    assert log.counted == {("rate", "wait", "tool"): 9}


def ask(node: Node, what: Any, *args: Any) -> "asyncio.Future[Any]":
    future: asyncio.Future[Any] = node.loop.create_future()
    what(*args, partial(settle, future))
    return future


def test_profiles_are_applied_and_rolled_back_as_one_and_survive_a_restart() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        base = profile(limits={"tenant:*": {"tool_calls/day": 1}})
        wide = check_profile("wide", {"limits": {"tenant:*": {"tool_calls/day": 3}}, "ensemble": {"queued_max": 1}})
        node = make(disk, world, clock, base, profiles={"wide": wide})
        run_id = await node.submit("caller", 3)
        await node.until(lambda: bool(node.engine.flow._waiting))
        change = await ask(node, node.engine.profiles.apply, "wide", "ann", "more is needed")
        assert (change.action, change.profile, change.by) == ("apply", "wide", "ann")
        assert (await node.result(run_id)).value() == 3  # it waited, and goes on with the new limits
        assert node.engine.flow.force.ensemble().queued_max == 1
        node.crash()
        node = make(disk, world, clock, base, profiles={"wide": wide})
        assert [each.name for each in node.engine.flow.force.applied] == ["wide"]
        (account,) = node.engine.flow.ledger.accounts()
        assert account.windows[0].limits[CALLS] == 3 == account.windows[0].sums[CALLS]
        both = [ask(node, node.engine.profiles.roll_back, None, "bob", "") for _ in range(2)]
        assert (await both[0]).digest_after == change.digest_before
        with pytest.raises(InputError, match="is not applied"):
            await both[1]
        with pytest.raises(InputError, match="no profile 'narrow'"):
            await ask(node, node.engine.profiles.apply, "narrow", "bob", "")
        assert [each.action for each in await ask(node, node.engine.profiles.changes)] == ["apply", "roll_back"]
        assert node.engine.flow.decisions.counted == {("profile", "roll_back", "profile"): 1}
        await node.close()

    run(main())


def test_limits_that_come_while_runs_are_under_way_hold_for_them() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        node.tools.hold = True
        run_id = await node.submit("caller", 5)
        await node.until(lambda: bool(node.tools.held))
        narrow = check_profile("narrow", {"limits": {"tenant:*": {"tool_calls/hour": 2}}})
        await ask(node, node.engine.profiles.apply, narrow, "ann", "")
        node.tools.hold = False
        node.tools.answer_one()
        await node.until(lambda: bool(node.engine.flow._waiting))
        assert len(world.effects) == 3  # the one that was under way was not counted, two more were
        clock.forward(3600)
        assert (await node.result(run_id)).value() == 5
        await node.close()

    run(main())
