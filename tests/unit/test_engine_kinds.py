"""Steps whose outcome nobody saw: each kind of tool, when its host dies and when the node does."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_kit import DIED, SLOW, Ctx, Node, World, run

from agentrt.engine.info import EngineLimits
from agentrt.errors import StepSettledError
from agentrt.records import OutcomeUnknown, StepEvicted, StepPrepared
from agentrt.states import RunState, StepState
from agentrt.stores.memory import MemoryDisk
from agentrt.tools.outcome import EVICTED_WAITING


def one(ctx: Ctx, input: Any) -> Any:
    handle = ctx.tool(input, x=1)
    yield ctx.wait(handle)
    return ctx.read(handle)


class Life:
    """A node that holds its tools' calls."""

    def __init__(
        self, disk: MemoryDisk, world: World, now_ns: Callable[[], int] | None = None, attempts_max: int = 3
    ) -> None:
        self.node = Node(disk, world, now_ns=now_ns, limits=EngineLimits(attempts_max=attempts_max))
        self.node.register("one", one)
        self.node.engine.recover()
        self.node.tools.hold = True

    async def asked(self) -> None:
        await self.node.until(lambda: bool(self.node.tools.held))

    async def waits_for_operator(self, run_id: str) -> str:
        for _ in range(400):
            info = await self.node.engine.queries.describe(run_id)
            if info.wait_reason == "operator" and info.detail and run_id not in self.node.engine._runs:
                return info.detail
            await asyncio.sleep(0.005)
        raise AssertionError("it does not wait for an operator")

    def lose_host(self, *, with_effect: bool) -> None:
        name, args, key, _, done = self.node.tools.held.pop()
        if with_effect:
            self.node.tools.execute(name, args, key)
        done(DIED)

    def lose_node(self, *, with_effect: bool) -> None:
        if with_effect:
            name, args, key, _, _ = self.node.tools.held.pop()
            self.node.tools.execute(name, args, key)
        self.node.crash()


@pytest.mark.parametrize("with_effect", [False, True])
@pytest.mark.parametrize("lost", ["host", "node"])
@pytest.mark.parametrize("kind", ["put", "ask", "once"])
def test_an_unseen_outcome_is_settled_by_kind(kind: str, lost: str, with_effect: bool) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        run_id = await life.node.submit("one", kind)
        await life.asked()
        if lost == "host":
            life.lose_host(with_effect=with_effect)
        else:
            life.lose_node(with_effect=with_effect)
            life = Life(disk, world)
        if kind == "once":
            detail = await life.waits_for_operator(run_id)
            assert "nobody saw" in detail
            await life.node.decide(run_id, "1:1", True, {"put": "seen"})
            assert (await life.node.result(run_id)).value() == {"put": "seen"}
            assert sum(world.asked.values()) == with_effect  # at most once, whatever happened
        else:
            if kind == "put" or not with_effect:
                await life.asked()
                assert life.node.tools.held[0][3] == 2  # the attempt
                life.node.tools.answer_one()
            value = (await life.node.result(run_id)).value()
            assert value == {"put": {"x": 1}}
            assert len(world.effects) == 1
            assert sum(world.asked.values()) == (2 if kind == "put" and with_effect else 1)
            assert len(life.node.tools.reconciled) == (kind == "ask")
        assert any(isinstance(record, OutcomeUnknown) for record in life.node.records(run_id))
        assert {record.key for record in life.node.records(run_id) if isinstance(record, StepPrepared)} == {
            f"{run_id}/1:1/{kind}"
        }
        life.node.check_disk()
        await life.node.close()

    run(main())


@pytest.mark.parametrize("with_effect", [False, True])
@pytest.mark.parametrize("kind", ["put", "ask", "once"])
def test_a_step_that_a_stopping_node_ended_is_settled_by_its_kind_and_was_no_attempt(
    kind: str, with_effect: bool
) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world, attempts_max=1)
        run_id = await life.node.submit("one", kind)
        await life.asked()
        if with_effect:
            name, args, key, _, _ = life.node.tools.held[0]
            life.node.tools.execute(name, args, key)
        await life.node.engine.close(0)
        assert life.node.tools.stopping
        assert life.node.fold(run_id).steps["1:1"].state is StepState.UNCOMMITTED_EVICTED
        life.node.check_disk()
        life = Life(disk, world, attempts_max=1)
        if kind == "once":
            assert "nobody saw" in await life.waits_for_operator(run_id)
            assert sum(world.asked.values()) == with_effect
            await life.node.decide(run_id, "1:1", True, {"put": "seen"})
            assert (await life.node.result(run_id)).value() == {"put": "seen"}
        else:
            if kind == "put" or not with_effect:
                await life.asked()
                assert life.node.tools.held[0][3] == 1  # the attempt
                life.node.tools.answer_one()
            assert (await life.node.result(run_id)).value() == {"put": {"x": 1}}
            assert len(world.effects) == 1
        evicted = [record for record in life.node.records(run_id) if isinstance(record, StepEvicted)]
        assert [record.path for record in evicted] == ["1:1"]
        life.node.check_disk()
        await life.node.close()

    run(main())


@pytest.mark.parametrize("kind", ["add", "put", "ask", "once"])
def test_a_step_that_had_not_begun_when_the_node_stopped_is_begun_by_the_next(kind: str) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        run_id = await life.node.submit("one", kind)
        await life.asked()
        *_, done = life.node.tools.held.pop()
        life.node.loop.call_soon(done, EVICTED_WAITING)
        await life.node.close()
        life = Life(disk, world)
        await life.asked()
        assert life.node.tools.held[0][3] == 1
        assert not life.node.tools.reconciled and not world.asked
        life.node.check_disk()
        await life.node.cancel(run_id)
        await life.node.close()

    run(main())


def test_an_outcome_that_comes_in_time_is_no_eviction_and_a_finished_program_waits_for_its_steps() -> None:
    def leaves(ctx: Ctx, input: Any) -> Any:
        ctx.tool("put", x=1)
        yield from ()
        return "done"

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        life.node.register("leaves", leaves)
        run_id = await life.node.submit("leaves")
        await life.asked()
        await life.node.engine.close(0)
        assert life.node.fold(run_id).state is RunState.ACTIVE
        life = Life(disk, world)
        life.node.register("leaves", leaves)
        await life.asked()
        life.node.loop.call_later(0.01, life.node.tools.answer_one)
        await life.node.close()
        state = life.node.fold(run_id)
        assert state.steps["1:1"].state is StepState.COMMITTED and state.state is RunState.SUCCEEDED
        life.node.check_disk()

    run(main())


@pytest.mark.parametrize("found", ["unknown", "nonsense"])
def test_a_reconcile_function_that_cannot_tell_leaves_it_to_an_operator(found: str) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        life.node.tools.found = found
        run_id = await life.node.submit("one", "ask")
        await life.asked()
        life.lose_host(with_effect=True)
        await life.waits_for_operator(run_id)
        await life.node.decide(run_id, "1:1", False, {"code": "gave_up", "message": "by hand"})
        assert (await life.node.result(run_id)).value() == {"error": {"code": "gave_up", "message": "by hand"}}
        life.node.check_disk()
        await life.node.close()

    run(main())


@pytest.mark.parametrize("kind", ["ask", "sure"])
@pytest.mark.parametrize("lost", ["host", "node"])
@pytest.mark.parametrize("deaf", [1, 2, 3])
def test_a_host_that_dies_when_it_is_asked_has_not_answered(kind: str, lost: str, deaf: int) -> None:
    """Whoever killed the host of a call may kill the next one, too: the question is put again, at most
    ``attempts_max`` times, and nobody has to decide without need."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        run_id = await life.node.submit("one", kind)
        await life.asked()
        if kind == "sure":  # keyed: asked when its two attempts are used up
            life.lose_host(with_effect=True)
            await life.asked()
        life.node.tools.deaf = deaf
        if lost == "host":
            life.lose_host(with_effect=True)
        else:
            life.lose_node(with_effect=True)
            life = Life(disk, world)
            life.node.tools.deaf = deaf
        if deaf == 3:
            detail = await life.waits_for_operator(run_id)
            assert "cannot say" in detail
            await life.node.decide(run_id, "1:1", True, {"put": {"x": 1}})
        assert (await life.node.result(run_id)).value() == {"put": {"x": 1}}
        assert len(life.node.tools.reconciled) == min(deaf + 1, 3)
        assert sum(world.asked.values()) == (1 if kind == "ask" else 2)
        life.node.check_disk()
        await life.node.close()

    run(main())


def test_an_old_idempotency_key_is_not_trusted() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        now = [1_700_000_000 * 10**9]

        def clock() -> int:
            now[0] += 1000
            return now[0]

        life = Life(disk, world, clock)
        run_id = await life.node.submit("one", "brief")
        await life.asked()
        life.lose_node(with_effect=True)
        now[0] += 2 * 10**9
        life = Life(disk, world, clock)
        assert "key_ttl" in await life.waits_for_operator(run_id)
        assert sum(world.asked.values()) == 1
        await life.node.decide(run_id, "1:1", None)  # the operator knows better
        await life.asked()
        life.node.tools.answer_one()
        assert (await life.node.result(run_id)).state is RunState.SUCCEEDED
        life.node.check_disk()
        await life.node.close()

    run(main())


def test_a_decision_about_nothing_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        run_id = await life.node.submit("one", "once")
        await life.asked()
        with pytest.raises(StepSettledError):
            await life.node.decide(run_id, "1:1", True)  # it is under way
        life.lose_host(with_effect=True)
        await life.waits_for_operator(run_id)
        before = life.node.fold(run_id).version
        with pytest.raises(StepSettledError):
            await life.node.decide(run_id, "1:2", True)
        assert "nobody saw" in await life.waits_for_operator(run_id)
        assert life.node.fold(run_id).version in (before, before + 2)
        await life.node.cancel(run_id)
        assert (await life.node.result(run_id)).state is RunState.CANCELLED
        with pytest.raises(StepSettledError):
            await life.node.decide(run_id, "1:1", True)
        life.node.check_disk()
        await life.node.close()

    run(main())


def test_attempts_end_and_an_operator_may_give_one_more() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        run_id = await life.node.submit("one", "put")
        for attempt in (1, 2, 3):
            await life.asked()
            assert life.node.tools.held[0][3] == attempt
            life.lose_host(with_effect=attempt == 2)
        assert "3 attempts" in await life.waits_for_operator(run_id)
        await life.node.resume(run_id)
        await life.asked()
        life.node.tools.answer_one()
        assert (await life.node.result(run_id)).state is RunState.SUCCEEDED
        assert len(world.effects) == 1
        life.node.check_disk()
        await life.node.close()

    run(main())


@pytest.mark.parametrize(("tool", "most"), [("put", 5), ("thrice", 3), ("never", 1)])
@pytest.mark.parametrize("crash_after", [None, 1])
def test_a_keyed_tool_that_is_too_slow_is_done_again_and_its_agent_told_at_last(
    tool: str, most: int, crash_after: int | None
) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world, attempts_max=5)
        run_id = await life.node.submit("one", tool)
        seen: list[int] = []
        while not seen or seen[-1] < most:
            await life.asked()
            name, args, key, attempt, done = life.node.tools.held.pop()
            assert attempt == (seen[-1] + 1 if seen else 1)
            seen.append(attempt)
            life.node.tools.execute(name, args, key)
            done(SLOW)
            if attempt == crash_after and attempt < most:
                # Its next attempt is durable, and nobody will see how that ended.
                await life.asked()
                seen.append(life.node.tools.held[-1][3])
                life.node.crash()
                life = Life(disk, world, attempts_max=5)
        error = (await life.node.result(run_id)).value()["error"]
        assert (error["code"], error["attempts"]) == ("tool_timeout", most)
        assert len(world.effects) == 1 and seen == [*range(1, most + 1)]
        prepared = [r for r in life.node.records(run_id) if isinstance(r, StepPrepared)]
        unknown = [r for r in life.node.records(run_id) if isinstance(r, OutcomeUnknown)]
        assert len({r.key for r in prepared}) == 1 and len(prepared) == most and len(unknown) == most - 1
        life.node.check_disk()
        await life.node.close()

    run(main())


def test_a_slow_attempt_is_followed_by_a_good_one() -> None:
    async def main() -> None:
        life = Life(MemoryDisk(), World())
        run_id = await life.node.submit("one", "put")
        await life.asked()
        life.node.tools.held.pop()[-1](SLOW)
        await life.asked()
        life.node.tools.answer_one()
        assert (await life.node.result(run_id)).value() == {"put": {"x": 1}}
        await life.node.close()

    run(main())


def test_attempts_that_lost_their_host_wait_for_an_operator_by_the_tools_own_bound() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        run_id = await life.node.submit("one", "never")
        await life.asked()
        life.lose_host(with_effect=True)
        assert "1 attempts" in await life.waits_for_operator(run_id)
        life.node.crash()
        life = Life(disk, world)
        assert "1 attempts" in await life.waits_for_operator(run_id)
        await life.node.close()

    run(main())


def test_a_slow_tool_of_a_cancelled_run_is_not_done_again() -> None:
    async def main() -> None:
        life = Life(MemoryDisk(), World())
        run_id = await life.node.submit("one", "put")
        await life.asked()
        await life.node.cancel(run_id)
        life.node.tools.held.pop()[-1](SLOW)
        assert (await life.node.result(run_id)).state is RunState.CANCELLED
        assert life.node.tools.calls == 1
        assert [r.path for r in life.node.records(run_id) if isinstance(r, OutcomeUnknown)] == ["1:1"]
        await life.node.close()

    run(main())


def test_the_key_of_a_slow_tool_may_be_too_old_to_go_on() -> None:
    times = [10**18]

    async def main() -> None:
        life = Life(MemoryDisk(), World(), lambda: times[0])
        run_id = await life.node.submit("one", "brief")
        await life.asked()
        times[0] += 2 * 10**9  # its key is good for a second
        life.node.tools.held.pop()[-1](SLOW)
        assert "key_ttl" in await life.waits_for_operator(run_id)
        await life.node.close()

    run(main())


@pytest.mark.parametrize("found", ["yes", "no", "unknown", "nonsense"])
@pytest.mark.parametrize("how", ["slow", "host died", "node died"])
def test_what_can_be_asked_is_asked_before_it_is_given_up(how: str, found: str) -> None:
    """Its attempts are used up, and nobody saw the last one's outcome: its reconcile function may know."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        life = Life(disk, world)
        life.node.tools.found = found if found in ("unknown", "nonsense") else None
        run_id = await life.node.submit("one", "sure")
        for attempt in (1, 2):
            await life.asked()
            assert life.node.tools.held[0][3] == attempt
            if attempt == 1 or how == "slow":
                name, args, key, _, done = life.node.tools.held.pop()
                if attempt == 2 and found == "yes":
                    life.node.tools.execute(name, args, key)
                done(SLOW)
            elif how == "host died":
                life.lose_host(with_effect=found == "yes")
            else:
                life.lose_node(with_effect=found == "yes")
                life = Life(disk, world)
                life.node.tools.found = found if found in ("unknown", "nonsense") else None
        if found == "yes":
            assert (await life.node.result(run_id)).value() == {"put": {"x": 1}}
        elif how == "slow":
            error = (await life.node.result(run_id)).value()["error"]
            assert (error["code"], error["attempts"]) == ("tool_timeout", 2)
            assert ("had no effect" in error["message"]) is (found == "no")
        else:
            assert ("2 attempts" if found == "no" else "cannot say") in await life.waits_for_operator(run_id)
            await life.node.decide(run_id, "1:1", True, "by hand")
            assert (await life.node.result(run_id)).value() == "by hand"
        assert life.node.tools.reconciled == [f"{run_id}/1:1/sure"]
        assert life.node.tools.calls == (3 if how != "node died" else 1)
        life.node.check_disk()
        await life.node.close()

    run(main())


@pytest.mark.parametrize("found", ["unknown", "no", "yes"])
@pytest.mark.parametrize("tool", ["ask", "sure"])
def test_a_run_that_is_cancelled_while_a_tool_is_asked_ends(tool: str, found: str) -> None:
    async def main() -> None:
        life = Life(MemoryDisk(), World())
        life.node.tools.found = found
        run_id = await life.node.submit("one", tool)
        for _ in range(2 if tool == "sure" else 1):
            await life.asked()
            life.node.tools.held.pop()[-1](SLOW)
        await life.node.cancel(run_id)
        assert (await life.node.result(run_id)).state is RunState.CANCELLED
        assert len(life.node.tools.reconciled) == 1
        life.node.check_disk()
        await life.node.close()

    run(main())
