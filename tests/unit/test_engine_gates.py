"""Rates, breakers, places, retries and the loop guard in the way of runs: what is called, what waits, what survives."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from agentrt.engine.info import EngineLimits
from agentrt.errors import LoopDetectedError
from agentrt.flow.breaker import BreakerLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Action, Control, Scope
from agentrt.flow.limits import BreakerRule, BulkheadRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopLimits
from agentrt.flow.profiles import Profile
from agentrt.flow.retry import RetryLimits
from agentrt.records import OutcomeUnknown, StepAborted, StepCommitted, StepPrepared, Waiting
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk
from agentrt.tools.outcome import ToolOutcome
from tests.unit.engine_kit import MemoryReader, Node, World, run

S = 10**9
QUICK = RetryLimits(base_ns=1_000_000, cap_ns=5_000_000, retry_after_max_ns=20_000_000)


def limits(**given: Any) -> GateLimits:
    return GateLimits(**({"breakers": (), "retry": QUICK} | given))


def failed(code: str, **more: Any) -> ToolOutcome:
    return ToolOutcome(False, msgspec.json.encode({"code": code, "message": code} | more), code, 5, False)


RATE = failed("tool_rate_limited", retry_after_s=0.005)
AWAY = failed("tool_unavailable")
CONFLICT = failed("tool_conflict")


def caller(tool: str = "put", calls: int = 1, **args: Any) -> Any:
    def agent(ctx: Any, input: Any) -> Any:
        answers = []
        for number in range(calls):
            handle = ctx.tool(tool, number=number, **args)
            yield ctx.wait(handle)
            answers.append(ctx.read(handle))
        return answers

    return agent


def at_once(calls: int, tool: str = "put") -> Any:
    def agent(ctx: Any, input: Any) -> Any:
        handles = [ctx.tool(tool, number=number) for number in range(calls)]
        for handle in handles:
            yield ctx.wait(handle)
        return [ctx.read(handle) for handle in handles]

    return agent


class Clock:
    """Wall time that a test may put forward."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def __call__(self) -> int:
        return time.time_ns() + self.ahead_ns


def kinds(node: Node, run_id: str) -> list[str]:
    return [type(record).__name__ for record in node.records(run_id)]


@pytest.mark.parametrize("failure", [RATE, AWAY])
def test_a_failure_worth_another_attempt_is_tried_again_under_the_same_key(failure: ToolOutcome) -> None:
    async def main() -> None:
        world = World()
        world.script["put"] = [failure, failure]
        node = Node(MemoryDisk(), world, gates=limits())
        node.register("a", caller())
        run_id = await node.submit("a")
        result = await node.result(run_id)
        assert result.state is RunState.SUCCEEDED
        ((key, _), *_) = world.attempts
        assert world.attempts == [(key, 1), (key, 2), (key, 3)] and world.asked == {key: 1}
        prepared = [record.attempt for record in node.records(run_id) if isinstance(record, StepPrepared)]
        lost = [record for record in node.records(run_id) if isinstance(record, StepAborted | OutcomeUnknown)]
        assert prepared == [1, 2, 3]
        assert [type(record) for record in lost] == [StepAborted if failure is RATE else OutcomeUnknown] * 2
        retries = [d for d in node.engine.flow.decisions if d.control is Control.RETRY and d.action is Action.RETRY]
        assert [decision.value for decision in retries] == [1, 2] and retries[0].run == run_id
        node.check_disk()
        await node.close()

    run(main())


def test_attempts_are_one_number_and_the_last_failure_is_the_agents() -> None:
    async def main() -> None:
        world = World()
        world.script["put"] = [AWAY] * 100
        world.script["once"] = [AWAY, RATE] * 10
        world.script["fail"] = [CONFLICT] * 10
        node = Node(MemoryDisk(), world, gates=limits(), limits=EngineLimits(attempts_max=3))
        node.register("put", caller())
        node.register("once", caller("once"))
        node.register("fail", caller("fail"))
        answers = [(await node.result(await node.submit(name))).value() for name in ("put", "once", "fail")]
        assert [answer[0]["error"]["code"] for answer in answers] == [
            "tool_unavailable",
            "tool_unavailable",  # at_most_once: nobody knows whether it had its effect
            "tool_conflict",
        ]
        assert [attempt for _, attempt in world.attempts] == [1, 2, 3, 1, 1]
        await node.close()

    run(main())


def test_an_at_most_once_tool_that_was_refused_for_its_rate_is_tried_again() -> None:
    async def main() -> None:
        world = World()
        world.script["once"] = [RATE]
        node = Node(MemoryDisk(), world, gates=limits())
        node.register("a", caller("once"))
        assert (await node.result(await node.submit("a"))).state is RunState.SUCCEEDED
        await node.close()

    run(main())


def test_pure_tools_are_tried_again_without_a_record() -> None:
    async def main() -> None:
        world = World()
        world.script["add"] = [AWAY, RATE]
        node = Node(MemoryDisk(), world, gates=limits())

        def agent(ctx: Any, input: Any) -> Any:
            handle = ctx.tool("add", a=1, b=2)
            yield ctx.wait(handle)
            return ctx.read(handle)

        node.register("a", agent)
        run_id = await node.submit("a")
        assert (await node.result(run_id)).value() == 3
        assert kinds(node, run_id) == ["RunAccepted", "StepCommitted", "RunEnded"]
        await node.close()

    run(main())


def test_places_are_never_exceeded_and_go_to_all_in_turn() -> None:
    async def main() -> None:
        world = World()
        gates = limits(bulkheads=(BulkheadRule(Scope.TOOL, "put", 2, 0),))
        node = Node(MemoryDisk(), world, gates=gates)
        node.tools.hold = True
        node.register("a", at_once(3))
        ids = [await node.submit("a", tenant=tenant) for tenant in "xyz"]
        done = 0
        while done < 9:
            await node.until(lambda: bool(node.tools.held))
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(node.tools.held) == min(2, 9 - done)
            node.tools.answer_one()
            done += 1
        for run_id in ids:
            assert (await node.result(run_id)).state is RunState.SUCCEEDED
        assert len(world.effects) == 9
        await node.close()

    run(main())


def test_a_run_that_waits_for_a_rate_shows_it_leaves_memory_and_goes_on() -> None:
    async def main() -> None:
        world = World()
        gates = limits(rates=(RateRule(Scope.TOOL, "put", RateLimit(10, S, burst=1, kept_pct=0)),))
        node = Node(MemoryDisk(), world, gates=gates, limits=EngineLimits(hot_ns=0))
        node.register("a", caller(calls=3))
        started = node.loop.time()
        run_id = await node.submit("a")
        result = await node.result(run_id)
        assert result.state is RunState.SUCCEEDED and node.loop.time() - started >= 0.19
        waits = [record for record in node.records(run_id) if isinstance(record, Waiting)]
        assert waits and {record.reason for record in waits} == {"rate"}
        assert waits[0].detail == "requests/1s of tool:put" and node.backend.starts > 1
        node.check_disk()
        await node.close()

    run(main())


def test_fault_S34_what_waits_and_what_was_used_survive_a_restart() -> None:
    async def main() -> None:
        clock = Clock()
        world, disk = World(), MemoryDisk()
        gates = limits(rates=(RateRule(Scope.TOOL, "put", RateLimit(1, 3600 * S, kept_pct=0)),))
        node = Node(disk, world, gates=gates, limits=EngineLimits(hot_ns=0), now_ns=clock)
        node.register("a", caller(calls=2))
        run_id = await node.submit("a")

        def parked() -> bool:
            return kinds(node, run_id)[-1] == "Waiting"

        while not parked() or node.engine.statistics().live:
            await asyncio.sleep(0.01)
        assert len(world.effects) == 1
        await node.close()
        clock.ahead_ns += 1800 * S

        again = Node(disk, world, gates=gates, limits=EngineLimits(hot_ns=0), now_ns=clock)
        again.register("a", caller(calls=2))
        again.engine.recover()
        # Another run cannot have what is not there yet, and a new node has not forgotten that.
        late = await again.submit("a")
        while kinds(again, late)[-1] != "Waiting":
            await asyncio.sleep(0.01)
        assert len(world.effects) == 1
        await again.cancel(late)
        clock.ahead_ns += 1810 * S
        assert (await again.result(run_id)).state is RunState.SUCCEEDED
        assert len(world.effects) == 2
        again.check_disk()
        await again.close()

    run(main())


def test_an_open_breaker_answers_at_once_and_lets_one_probe_through() -> None:
    async def main() -> None:
        clock = Clock()
        world = World()
        rule = BreakerRule(Scope.TOOL, "*", BreakerLimits(in_row=3, open_ns=3600 * S, open_max_ns=3600 * S))
        node = Node(
            MemoryDisk(), world, gates=limits(breakers=(rule,)), limits=EngineLimits(attempts_max=1), now_ns=clock
        )
        world.script["put"] = [AWAY] * 3
        node.register("a", caller(calls=5))
        answers = (await node.result(await node.submit("a"))).value()
        codes = [answer["error"]["code"] for answer in answers]
        assert codes == ["tool_unavailable"] * 3 + ["breaker_open"] * 2 and len(world.attempts) == 3
        assert "Try again in" in answers[-1]["error"]["hint"] and answers[-1]["error"]["step"] == "1:5"
        clock.ahead_ns += 3601 * S
        answers = (await node.result(await node.submit("a"))).value()
        assert [answer.get("error") for answer in answers] == [None] * 5
        await node.close()

    run(main())


def test_fault_B78_a_run_that_repeats_itself_ends_as_LOOP_DETECTED_and_its_parent_is_told() -> None:
    async def main() -> None:
        world = World()
        node = Node(MemoryDisk(), world, gates=limits(), loops=LoopLimits(repeats=6))

        def child(ctx: Any, input: Any) -> Any:
            while True:
                handle = ctx.tool("put", query="same")
                yield ctx.wait(handle)

        def parent(ctx: Any, input: Any) -> Any:
            spawned = ctx.op(6, agent="child")
            yield ctx.wait(spawned)
            joined = ctx.op(7, run_id=ctx.read(spawned)["run_id"])
            yield ctx.wait(joined)
            return ctx.read(joined)

        node.register("child", child)
        node.register("parent", parent)
        run_id = await node.submit("parent")
        told = (await node.result(run_id)).value()["error"]
        assert told["state"] == "LOOP_DETECTED"
        told = told["error"]
        assert told["code"] == "loop_detected" and told["evidence"]["sign"] == "repetition"
        assert told["evidence"]["count"] == 6
        assert [turn["step"] for turn in told["evidence"]["cycle"]] == ["put"]
        (child_id,) = [child.run_id for child in node.fold(run_id).children.values()]
        result = await node.result(child_id)
        assert result.state is RunState.LOOP_DETECTED and len(world.attempts) == 5
        with pytest.raises(LoopDetectedError):
            result.value()
        ends = [d for d in node.engine.flow.decisions if d.control is Control.LOOP]
        assert [(d.action, d.run) for d in ends] == [(Action.END, child_id)]
        assert not len(node.engine._gates.guard)  # type: ignore[union-attr]
        await node.close()

    run(main())


def test_a_loop_is_counted_on_over_a_restart() -> None:
    async def main() -> None:
        world, disk = World(), MemoryDisk()

        def agent(ctx: Any, input: Any) -> Any:
            while True:
                handle = ctx.tool("put", query="same")
                yield ctx.wait(handle)

        node = Node(disk, world, gates=limits(), loops=LoopLimits(repeats=10))
        node.register("a", agent)
        node.tools.hold = True
        run_id = await node.submit("a")
        for _ in range(5):
            await node.until(lambda: bool(node.tools.held))
            node.tools.answer_one()
        await node.until(lambda: bool(node.tools.held))
        await node.close()
        again = Node(disk, world, gates=limits(), loops=LoopLimits(repeats=10))
        again.register("a", agent)
        again.engine.recover()
        assert (await again.result(run_id)).state is RunState.LOOP_DETECTED
        assert len([record for record in again.records(run_id) if isinstance(record, StepCommitted)]) == 9
        await again.close()

    run(main())


@pytest.mark.parametrize("emits", [False, True])
@pytest.mark.parametrize("how", ["close", "crash"])
def test_steps_without_output_are_counted_on_over_a_restart(how: str, emits: bool) -> None:
    """Of an ensemble, a child's with its parent's; an output begins anew, before the restart as after it."""
    loops = LoopLimits(iterations=20, repeats=0, rallies=0)

    async def main() -> None:
        world, disk = World(), MemoryDisk()

        def parent(ctx: Any, input: Any) -> Any:
            for number in range(3):
                yield ctx.wait(ctx.tool("put", parent=number))
            spawned = ctx.op(6, agent="child", input=None)
            yield ctx.wait(spawned)
            joined = ctx.op(7, run_id=ctx.read(spawned)["run_id"])
            yield ctx.wait(joined)
            return ctx.read(joined)

        def child(ctx: Any, input: Any) -> Any:
            for number in range(1000):
                if emits and number == 6:
                    yield ctx.wait(ctx.op(12, data="here"))
                yield ctx.wait(ctx.tool("put", child=number))

        def start() -> Node:
            node = Node(disk, world, gates=limits(), loops=loops)
            node.register("parent", parent)
            node.register("child", child)
            node.tools.hold = True
            return node

        node = start()
        run_id = await node.submit("parent")
        for _ in range(12):
            await node.until(lambda: bool(node.tools.held))
            node.tools.answer_one()
        await node.until(lambda: bool(node.tools.held))
        if how == "close":
            await node.close()
        else:
            gates = node.engine._gates
            assert gates is not None and gates._loops == {run_id}
            gates._save_some()
            await node.until(
                lambda: any(key.startswith(b"loop/") for key, _ in MemoryReader(disk).scan_rows("node", limit=99))
            )
            node.crash()
        node = start()
        node.tools.hold = False
        node.engine.recover()
        result = await node.result(run_id)
        assert "loop_detected" in str(result.value()) and "20 steps" not in str(result.value())
        # It goes on before its output is durable: the step after it may count with those before.
        assert len(world.effects) in ((19,) if not emits else (29, 30))
        assert not [key for key, _ in MemoryReader(disk).scan_rows("node", limit=99) if key.startswith(b"loop/")]
        await node.close()

    run(main())


def test_two_agents_with_conflicting_instructions_stop_within_the_iteration_limit() -> None:
    async def main() -> None:
        world = World()
        node = Node(MemoryDisk(), world, gates=limits(), loops=LoopLimits(iterations=20, repeats=0, rallies=0))

        def of(other: str) -> Any:
            def agent(ctx: Any, input: Any) -> Any:
                handle = ctx.tool("put", draft=input or 0)
                yield ctx.wait(handle)
                spawned = ctx.op(6, agent=other, input=(input or 0) + 1)
                yield ctx.wait(spawned)
                joined = ctx.op(7, run_id=ctx.read(spawned)["run_id"])
                yield ctx.wait(joined)
                return ctx.read(joined)

            return agent

        node.register("writer", of("critic"))
        node.register("critic", of("writer"))
        result = await node.result(await node.submit("writer"))
        assert result.state is RunState.SUCCEEDED  # it was told, and passes it on
        assert "loop_detected" in str(result.value())
        assert len(world.attempts) == 10
        await node.close()

    run(main())


@pytest.mark.parametrize("by", ["mailbox", "topic"])
def test_agents_that_send_the_same_work_to_and_fro_are_stopped(by: str) -> None:
    """To each other's mailboxes, each time with another id. What goes to a topic is for nobody in particular."""
    rounds = 20

    def referee(ctx: Any, input: Any) -> Any:
        spawns = [ctx.op(6, agent=name, input=name) for name in ("writer", "critic")]
        for spawn in spawns:
            yield ctx.wait(spawn)
        ids = [ctx.read(spawn)["run_id"] for spawn in spawns]
        for run_id, peer in (ids, reversed(ids)):
            yield ctx.wait(ctx.op(10, run_id=run_id, data=peer))
        joins = [ctx.op(7, run_id=run_id) for run_id in ids]
        for join in joins:
            yield ctx.wait(join)
        return [ctx.read(join) for join in joins]

    def talker(ctx: Any, name: Any) -> Any:
        first = ctx.op(4)
        yield ctx.wait(first)
        peer = ctx.read(first)["data"]
        for number in range(rounds):
            if name == "writer" or number:
                to = {"run_id": peer} if by == "mailbox" else {"topic": "talk", "key": name}
                yield ctx.wait(ctx.op(10, data="no, you do it", id=f"{name}{number}", **to))
            if name == "critic" or number < rounds - 1:
                other = "critic" if name == "writer" else "writer"
                yield ctx.wait(ctx.op(4) if by == "mailbox" else ctx.op(4, topic="talk", key=other))
        return "agreed"

    async def main() -> None:
        node = Node(MemoryDisk(), World(), gates=limits(), loops=LoopLimits(repeats=0, rallies=4))
        node.register("referee", referee)
        node.register("writer", talker)
        node.register("critic", talker)
        run_id = await node.submit("referee", budget={"wall_s": 5})
        if by == "topic":
            assert (await node.result(run_id)).value() == ["agreed", "agreed"]
        else:
            told: list[Any] = []
            node.engine.observe(lambda event, data: told.append(data) if event == "ended" else None)
            await node.until(lambda: any(each.state is RunState.LOOP_DETECTED for each in told), 200_000)
            error = next(each for each in told if each.state is RunState.LOOP_DETECTED).exception()
            assert isinstance(error, LoopDetectedError) and error.limit == "loop.ping_pong"
            assert "event.send" in error.message and "writer" in error.message and "critic" in error.message
            await node.cancel(run_id)
        await node.close()

    run(main())


def test_capacity_shows_rates_estimates_and_depth() -> None:
    """What an agent has called lately is what it is told about."""

    async def main() -> None:
        def planner(ctx: Any, input: Any) -> Any:
            for _ in range(3):
                yield ctx.wait(ctx.tool("put", n=1))
            asked = ctx.op(14)
            yield ctx.wait(asked)
            if input:
                return ctx.read(asked)
            spawned = ctx.op(6, agent="planner", input=1)
            yield ctx.wait(spawned)
            joined = ctx.op(7, run_id=ctx.read(spawned)["run_id"])
            yield ctx.wait(joined)
            again = ctx.op(14)
            yield ctx.wait(again)
            return [ctx.read(asked), ctx.read(joined), ctx.read(again)]

        rates = (RateRule(Scope.TOOL, "put", RateLimit(600)), RateRule(Scope.TENANT, "*", RateLimit(6000)))
        node = Node(MemoryDisk(), World(), gates=limits(rates=rates, bulkheads=(BulkheadRule(Scope.TOOL, "put", 9),)))
        node.register("planner", planner)
        first, child, last = (await node.result(await node.submit("planner", budget={"tokens": 1000}))).value()
        rooms = {f"{room['scope']}:{room['name']} {room['limit']}": room["left"] for room in first["rates"]}
        assert set(rooms) == {"tenant:default requests/60s", "tool:put requests/60s", "tool:put at_once"}
        assert rooms["tool:put at_once"] == 9 and rooms["tool:put requests/60s"] <= 60
        assert first["fan_out"] == 9 and first["limited_by"] == "tool:put at_once"
        (put,) = first["estimates"]
        assert (put["what"], put["count"]) == ("tool:put", 3)
        assert (first.get("depth", 0), child["depth"]) == (0, 1)
        assert {each["what"]: each["count"] for each in last["estimates"]} == {"child": 1, "tool:put": 6}
        await node.close()

    run(main())


def test_pure_tools_are_in_the_estimates_and_what_a_replay_executes_is_not() -> None:
    async def main() -> None:
        def planner(ctx: Any, input: Any) -> Any:
            for _ in range(3):
                yield ctx.wait(ctx.tool("add", a=1, b=2))
            yield ctx.wait(ctx.op(4, topic="go"))
            asked = ctx.op(14)
            yield ctx.wait(asked)
            return ctx.read(asked).get("estimates", [])

        disk, world = MemoryDisk(), World()
        for crashes in (False, True):
            node = Node(disk, world, gates=limits())
            node.register("planner", planner)
            run_id = await node.submit("planner")
            await node.until(lambda: node.engine._runs[run_id].idle)  # noqa: B023
            if crashes:
                node.crash()
                node = Node(disk, world, gates=limits())
                node.register("planner", planner)
                node.engine.recover()
            await node.until(lambda: run_id in node.engine._runs and node.engine._runs[run_id].idle)  # noqa: B023
            await node.send(topic="go")
            found = (await node.result(run_id)).value()
            known = {each["what"]: (each["count"], each["wall_ms"]) for each in found}
            assert known == ({} if crashes else {"tool:add": (3, 0)})  # a node that has just started knows nothing
            node.crash()

    run(main())


def test_cancel_takes_a_waiting_step_with_it_and_its_place_goes_to_another() -> None:
    async def main() -> None:
        world = World()
        gates = limits(bulkheads=(BulkheadRule(Scope.TOOL, "put", 1, 0),))
        node = Node(MemoryDisk(), world, gates=gates)
        node.tools.hold = True
        node.register("a", caller())
        first = await node.submit("a")
        await node.until(lambda: len(node.tools.held) == 1)
        waits = await node.submit("a")
        last = await node.submit("a")
        await node.until(lambda: node.engine._gates.gate.waiting == 2)  # type: ignore[union-attr]
        await node.cancel(waits)
        assert (await node.result(waits)).state is RunState.CANCELLED
        node.tools.answer_one()
        await node.until(lambda: len(node.tools.held) == 1)
        node.tools.answer_one()
        for run_id in (first, last):
            assert (await node.result(run_id)).state is RunState.SUCCEEDED
        gates_now = node.engine._gates
        assert gates_now is not None and not gates_now._claims and not gates_now._by_ticket
        node.check_disk()
        await node.close()

    run(main())


def test_a_node_that_stops_leaves_a_failed_attempt_to_the_next() -> None:
    async def main() -> None:
        world, disk = World(), MemoryDisk()
        node = Node(disk, world, gates=limits())
        node.tools.hold = True
        node.register("a", caller())
        run_id = await node.submit("a")
        await node.until(lambda: bool(node.tools.held))
        world.script["put"] = [RATE]
        closing = asyncio.ensure_future(node.close())
        await asyncio.sleep(0)
        node.tools.answer_one()
        await closing
        assert kinds(node, run_id)[-1] == "StepAborted"
        again = Node(disk, world, gates=limits())
        again.register("a", caller())
        again.engine.recover()
        assert (await again.result(run_id)).state is RunState.SUCCEEDED
        assert [attempt for _, attempt in world.attempts] == [1, 2]
        await again.close()

    run(main())


def test_crash_at_every_commit_of_a_step_that_is_tried_again() -> None:
    async def life(disk: MemoryDisk, world: World, run_id: str | None, at: int | None, applied: bool) -> str | None:
        node = Node(disk, world, crash_at=at, applied=applied, gates=limits())
        node.register("a", caller("once", calls=2))
        if run_id is None:
            submitted = asyncio.ensure_future(node.submit("a", idempotency_key="k"))
        else:
            node.engine.recover()
        crashed = asyncio.ensure_future(node.store.crashed.wait())
        if run_id is None:
            await asyncio.wait({crashed, submitted}, return_when=asyncio.FIRST_COMPLETED)
            if not submitted.done():
                submitted.cancel()
                return None
            run_id = submitted.result()
        ended = node.result(run_id)
        await asyncio.wait({crashed, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        crashed.cancel()
        if node.store.crashed.is_set():
            node.crash()
            return run_id
        assert ended.done() and ended.result().state is RunState.SUCCEEDED, node.records(run_id)
        node.check_disk()
        await node.close()
        return run_id

    async def main() -> None:
        for applied in (False, True):
            for at in range(12):
                world, disk = World(), MemoryDisk()
                world.script["once"] = [RATE, RATE]
                run_id = await life(disk, world, None, at, applied)
                again = Node(disk, world, gates=limits())
                again.register("a", caller("once", calls=2))
                again.engine.recover()
                if run_id is None:
                    run_id = await again.submit("a", idempotency_key="k")
                ended = again.result(run_id)
                for _ in range(1000):
                    if ended.done() or again.engine.statistics().parked:
                        break
                    await asyncio.sleep(0.001)
                if not ended.done():
                    # The crash met a call under way: nobody saw its end, and it may not be done twice.
                    assert isinstance(again.records(run_id)[-1], Waiting)
                    ended.cancel()
                else:
                    assert ended.result().state is RunState.SUCCEEDED
                    assert all(count == 1 for count in world.asked.values())
                again.check_disk()
                await again.close()

    run(main())


def test_an_agent_whose_children_fail_is_left_alone_by_the_one_that_starts_them() -> None:
    async def main() -> None:
        world = World()
        rule = BreakerRule(Scope.PAIR, "*", BreakerLimits(in_row=3))
        node = Node(MemoryDisk(), world, gates=limits(breakers=(rule,)))

        def broken(ctx: Any, input: Any) -> Any:
            raise ValueError("never works")
            yield

        def parent(ctx: Any, input: Any) -> Any:
            codes = []
            for name in ["broken"] * 5 + ["fine"]:
                spawned = ctx.op(6, agent=name)
                yield ctx.wait(spawned)
                answer = ctx.read(spawned)
                if "error" in answer:
                    codes.append(answer["error"]["code"])
                    continue
                joined = ctx.op(7, run_id=answer["run_id"])
                yield ctx.wait(joined)
                ended = ctx.read(joined)
                codes.append(ended["error"]["code"] if isinstance(ended, dict) else "fine")
            return codes

        node.register("broken", broken)
        node.register("fine", caller(calls=0))
        node.register("parent", parent)
        codes = (await node.result(await node.submit("parent"))).value()
        assert codes == ["child_failed"] * 3 + ["breaker_open"] * 2 + ["fine"]
        gates = node.engine._gates
        assert gates is not None and not gates._children
        await node.close()

    run(main())


def test_a_profile_says_how_many_calls_may_be_under_way() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World(), gates=limits(), profile=Profile(name="base", concurrency={"tool:put": 1}))
        node.tools.hold = True
        node.register("a", at_once(3))
        run_id = await node.submit("a")
        for _ in range(3):
            await node.until(lambda: bool(node.tools.held))
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(node.tools.held) == 1
            node.tools.answer_one()
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
        await node.close()

    run(main())
