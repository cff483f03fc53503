"""Timers, events, approvals, children, checkpoints, unwinding: runs that wait, and what wakes them, crashes included.

The scripted guests and the crashing node are those of engine_kit; the clock is a number that the tests move.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.engine import timers
from agentrt.engine.info import EngineLimits
from agentrt.engine.machine import RunMachine
from agentrt.errors import InputError, StepSettledError, UnknownRunError
from agentrt.records import Checkpoint, Ending, Resumed, RunEnded, StepAborted, StepCommitted, Waiting
from agentrt.states import RunState
from agentrt.stores.base import EVENTS, INBOX
from agentrt.stores.memory import MemoryDisk

SLEEP, EVENT, APPROVAL, SPAWN, JOIN, SEND, CHECKPOINT, EMIT = 3, 4, 5, 6, 7, 10, 11, 12
SECOND = 10**9
COLD = EngineLimits(hot_ns=0)  # what waits leaves memory at once
HOT = EngineLimits(hot_ns=10**15)


timers._SLEEP_S_MAX = 0.02  # the clock is moved, which no timer of the loop can know


class Clock:
    """Wall time as the tests want it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        self.now += 1000
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


def sleeper(ctx: Ctx, input: Any) -> Any:
    for seconds in input:
        handle = ctx.op(SLEEP, seconds=seconds)
        yield ctx.wait(handle)
        assert ctx.read(handle) is None
        handle = ctx.tool("put", seconds=seconds)
        yield ctx.wait(handle)
    return ctx.clock_ns


def asker(ctx: Ctx, input: Any) -> Any:
    handle = ctx.op(APPROVAL, question="send?", timeout_s=input)
    yield ctx.wait(handle)
    return ctx.read(handle)


def listener(ctx: Ctx, input: Any) -> Any:
    got = []
    for wait in input:
        handle = ctx.op(EVENT, **wait)
        yield ctx.wait(handle)
        got.append(ctx.read(handle))
    return got


def double(ctx: Ctx, input: Any) -> Any:
    handle = ctx.tool("put", n=input)
    yield ctx.wait(handle)
    return input * 2


def parent(ctx: Ctx, input: Any) -> Any:
    spawns = [ctx.op(SPAWN, agent=name, input=value) for name, value in input]
    children = []
    for spawn in spawns:
        yield ctx.wait(spawn)
        children.append(ctx.read(spawn)["run_id"])
    results = []
    for child in children:
        join = ctx.op(JOIN, run_id=child)
        yield ctx.wait(join)
        results.append(ctx.read(join))
    return results


def orphaner(ctx: Ctx, input: Any) -> Any:
    spawn = ctx.op(SPAWN, agent="asker", input=None, detached=input == "detached")
    yield ctx.wait(spawn)
    if input == "wait":
        yield ctx.wait(ctx.op(EVENT, topic="never"))
    return ctx.read(spawn)["run_id"]


def segments(ctx: Ctx, input: Any) -> Any:
    done = ctx.restored or 0
    handle = ctx.tool("put", part=done)
    yield ctx.wait(handle)
    if done < input:
        yield ctx.wait(ctx.op(CHECKPOINT, state=done + 1))
        raise AssertionError("a checkpoint does not answer")
    return done


def careful(ctx: Ctx, input: Any) -> Any:
    def handler(name: str) -> Callable[[Ctx, Any], Any]:
        def undo(ctx: Ctx, reason: Any) -> Any:
            handle = ctx.tool("put", undo=name, reason=reason)
            yield ctx.wait(handle)

        return undo

    ctx.on_unwind(handler("first"))
    handle = ctx.tool("put", do=1)
    yield ctx.wait(handle)
    ctx.on_unwind(handler("second"))
    yield ctx.wait(ctx.op(EVENT, topic="never"))


def racer(ctx: Ctx, input: Any) -> Any:
    """wait_for: a tool against a timer; the loser is abandoned."""
    tool, timer = ctx.tool("put", race=1), ctx.op(SLEEP, seconds=input)
    yield ctx.wait(tool, timer)
    ctx.abandon(timer)
    handle = ctx.op(EVENT, topic="go")
    yield ctx.wait(handle)
    return ctx.read(handle)["data"]


def chatter(ctx: Ctx, input: Any) -> Any:
    for number in range(input):
        yield ctx.wait(ctx.op(EMIT, data={"n": number}))
        yield ctx.wait(ctx.op(SEND, topic="chat", key="k", data=number))
    return "done"


AGENTS = {
    "sleeper": sleeper,
    "asker": asker,
    "listener": listener,
    "double": double,
    "parent": parent,
    "orphaner": orphaner,
    "segments": segments,
    "racer": racer,
    "chatter": chatter,
}


def make(disk: MemoryDisk, world: World, clock: Clock, *, recover: bool = True, **how: Any) -> Node:
    node = Node(disk, world, now_ns=clock, **how)
    for name, agent in AGENTS.items():
        node.register(name, agent)
    node.register("careful", careful, unwinds=True)
    if recover:
        node.engine.recover()
    return node


async def parked(node: Node, run_id: str, reason: str) -> None:
    """The run waits and nothing of it is in memory."""
    await timed(node, lambda: run_id not in node.engine._runs and not node.engine._places.loading)
    assert (await node.engine.queries.describe(run_id)).wait_reason == reason


async def timed(node: Node, condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_a_sleep_lasts_its_time_and_ends_once(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=limits)
        started = clock.now
        run_id = await node.submit("sleeper", [3600, 60])
        await timed(node, lambda: bool(disk.tables["timers"]))
        if limits is COLD:
            await parked(node, run_id, "timer")
        node.check_disk()
        assert not world.effects
        clock.forward(3599)
        await asyncio.sleep(0.02)
        assert not world.effects
        clock.forward(1.1)
        await timed(node, lambda: len(world.effects) == 1 and bool(disk.tables["timers"]))
        if limits is COLD:
            await parked(node, run_id, "timer")
        clock.forward(60)
        ended = (await node.result(run_id)).value()
        assert 3660 <= (ended - started) / SECOND < 3662
        node.check_disk()
        assert disk.tables["timers"] == {}
        records = node.records(run_id)
        waits = [record for record in records if isinstance(record, Waiting)]
        assert len(waits) == (2 if limits is COLD else 0)
        assert len(waits) == len([record for record in records if isinstance(record, Resumed)])
        await node.close()

    run(main())


def test_fault_C_timers_due_while_the_node_was_down_fire_once_in_due_order() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        runs = [await node.submit("sleeper", [seconds]) for seconds in (300, 100, 200)]
        for run_id in runs:
            await parked(node, run_id, "timer")
        node.crash()
        clock.forward(1000)
        node = make(disk, world, clock, limits=COLD)
        order: list[str] = []
        node.engine.observe(lambda event, data: order.append(data.run_id) if event == "ended" else None)
        for run_id in runs:
            await node.result(run_id)
        assert order == [runs[1], runs[2], runs[0]]
        assert len(world.attempts) == 3
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_an_approval_is_answered_once_and_late_answers_are_told(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=limits)
        run_id = await node.submit("asker", 100)
        if limits is COLD:
            await parked(node, run_id, "approval")
        else:
            await timed(node, lambda: len(node.fold(run_id).open) == 1)
        with pytest.raises(StepSettledError):
            await node.approve(run_id, "1:7")
        assert await node.approve(run_id) == "1:1"
        assert (await node.result(run_id)).value() == {"approved": True, "by": "ann", "comment": None}
        with pytest.raises(StepSettledError):
            await node.approve(run_id, "1:1")
        with pytest.raises(InputError):
            await node.approve("run_nonsense")
        late = await node.submit("asker", 100)
        await timed(node, lambda: len(node.fold(late).open) == 1)
        clock.forward(101)
        assert (await node.result(late)).value() == {"approved": False, "by": None, "comment": "timeout"}
        with pytest.raises(StepSettledError):
            await node.approve(late)
        node.check_disk()
        await node.close()

    run(main())


def test_fault_D04_with_two_approvals_open_an_answer_names_its_step() -> None:
    def two(ctx: Ctx, input: Any) -> Any:
        first, second = ctx.op(APPROVAL, question="a"), ctx.op(APPROVAL, question="b")
        yield ctx.wait(first)
        yield ctx.wait(second)
        return [ctx.read(first)["comment"], ctx.read(second)["comment"]]

    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock(), limits=COLD)
        node.register("two", two)
        run_id = await node.submit("two")
        await parked(node, run_id, "approval")
        with pytest.raises(InputError, match="2 approvals"):
            await node.approve(run_id)
        await node.approve(run_id, "1:2", {"approved": True, "by": None, "comment": "second"})
        await node.approve(run_id, "1:1", {"approved": True, "by": None, "comment": "first"})
        assert (await node.result(run_id)).value() == ["first", "second"]
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
@pytest.mark.parametrize("first", ["event", "wait"])
def test_an_event_meets_its_wait_in_either_order(limits: EngineLimits, first: str) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=limits)
        if first == "event":
            await node.send(topic="t", key="k", data=[1])
        run_id = await node.submit("listener", [{"topic": "t", "key": "k"}, {}])
        if first == "wait":
            await (
                parked(node, run_id, "event")
                if limits is COLD
                else timed(node, lambda: len(node.fold(run_id).open) == 1)
            )
            await node.send(topic="t", key="other", data="not yours")
            await node.send("stranger", topic="t", key="k", data="not yours")
            await node.send(topic="t", key="k", data=[1])
        await node.send(run_id=run_id, data={"to": "you"}, id="mail")
        first_event, second = (await node.result(run_id)).value()
        assert first_event["data"] == [1] and second == {"id": "mail", "data": {"to": "you"}}
        node.check_disk()
        left = list(disk.tables[EVENTS])
        assert len(left) == (2 if first == "wait" else 0)  # those that nobody waited for
        await node.close()

    run(main())


def test_an_event_goes_to_one_and_an_id_counts_once() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        runs = [await node.submit("listener", [{"topic": "t"}]) for _ in range(3)]
        for run_id in runs:
            await parked(node, run_id, "event")
        ids = [await node.send(topic="t", data=data, id=name) for data, name in ((0, "a"), (9, "a"), (1, "b"))]
        assert ids == ["a", "a", "b"]
        assert [(await node.result(run_id)).value()[0]["data"] for run_id in runs[:2]] == [0, 1]  # who waits longest
        assert node.fold(runs[2]).state is RunState.WAITING
        clock.forward(48 * 3600)
        await node.send(topic="t", data=2, id="a")  # nobody remembers the id any more
        assert (await node.result(runs[2])).value()[0]["data"] == 2
        assert (await node.engine.queries.describe(runs[0])).state is RunState.SUCCEEDED
        node.check_disk()
        await node.close()

    run(main())


def test_an_event_too_old_is_not_taken_and_a_wait_can_time_out() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=EngineLimits(hot_ns=0, event_ttl_ns=10 * SECOND))
        await node.send(topic="t", data="old")
        clock.forward(11)
        run_id = await node.submit("listener", [{"topic": "t", "timeout_s": 5}])
        await parked(node, run_id, "event")
        clock.forward(6)
        assert (await node.result(run_id)).value()[0]["error"]["code"] == "timeout"
        await timed(node, lambda: not disk.tables[EVENTS])
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_children_run_and_are_joined_also_when_they_fail(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=limits)
        run_id = await node.submit("parent", [["double", 2], ["double", 3], ["sleeper", 7]], tier=0)
        results = (await node.result(run_id)).value()
        assert results[:2] == [4, 6]
        failed = results[2]["error"]
        assert failed["code"] == "child_failed" and failed["state"] == "FAILED"
        children = [child.run_id for child in node.fold(run_id).children.values()]
        assert [node.fold(child).run().parent for child in children] == [f"{run_id}/1:{n}" for n in (1, 2, 3)]
        assert {node.fold(child).run().root for child in children} == {run_id}
        await timed(node, lambda: not disk.tables[INBOX])
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("how", ["return", "wait", "detached"])
def test_fault_C26_a_parents_end_ends_its_children_first_unless_detached(how: str) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        order: list[str] = []
        node.engine.observe(lambda event, data: order.append(data.run_id) if event == "ended" else None)
        run_id = await node.submit("orphaner", how)
        if how == "wait":
            await parked(node, run_id, "event")
            await node.cancel(run_id)
        result = await node.result(run_id)
        assert result.state is (RunState.CANCELLED if how == "wait" else RunState.SUCCEEDED)
        child = next(iter(node.fold(run_id).children.values())).run_id
        if how == "detached":
            await parked(node, child, "approval")
            await node.approve(child)
            assert (await node.result(child)).state is RunState.SUCCEEDED
        else:
            assert order == [child, run_id]
            assert node.fold(child).state is RunState.CANCELLED
        await timed(node, lambda: not disk.tables[INBOX])
        node.check_disk()
        await node.close()

    run(main())


def test_a_child_is_never_more_urgent_than_its_parent() -> None:
    def urgent(ctx: Ctx, input: Any) -> Any:
        spawn = ctx.op(SPAWN, agent="double", input=1, tier=0)
        yield ctx.wait(spawn)
        return ctx.read(spawn)["run_id"]

    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock())
        node.register("urgent", urgent)
        child = (await node.result(await node.submit("urgent", tier=2))).value()
        assert node.fold(child).run().base_tier == 2
        await node.close()

    run(main())


def test_a_checkpoint_begins_a_segment_and_older_steps_are_not_replayed() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        run_id = await node.submit("segments", 3)
        assert (await node.result(run_id)).value() == 3
        assert [record.segment for record in node.records(run_id) if isinstance(record, Checkpoint)] == [2, 3, 4]
        assert sorted(args["part"] for args in world.effects.values()) == [0, 1, 2, 3]
        assert sorted(key.split("/")[1] for key in world.effects) == ["1:1", "2:1", "3:1", "4:1"]
        node.check_disk()
        await node.close()

    run(main())


def test_a_segment_has_a_seed_and_a_beginning_of_its_own_in_every_life() -> None:
    """Random numbers do not come again in the next segment, and its clock does not go back."""

    def waits(ctx: Ctx, input: Any) -> Any:
        done = ctx.restored or 0
        yield ctx.wait(ctx.op(EVENT, topic="t"))
        yield ctx.wait(ctx.op(CHECKPOINT, state=done + 1))

    async def main() -> None:
        disk, clock = MemoryDisk(), Clock()
        seen: list[tuple[bytes, int]] = []
        run_id = ""

        async def live(node: Node, life: int) -> None:
            await timed(node, lambda: bool(node.backend.given))
            seen.append((node.backend.given[0]["seed"], node.backend.given[0]["clock_ns"]))
            if life % 2:  # two lives of each segment
                clock.forward(1)
                await node.send(topic="t")
                await timed(node, lambda: node.fold(run_id).segment == life // 2 + 2)

        for life in range(6):
            node = make(disk, World(), clock, recover=False)
            node.register("waits", waits)
            node.engine.recover()
            run_id = run_id or await node.submit("waits")
            await live(node, life)
            node.crash()
        assert seen[0::2] == seen[1::2], "the same in both lives"
        seeds, begins = zip(*seen[0::2], strict=True)
        assert len(set(seeds)) == 3 and all(len(seed) == 16 for seed in seeds)
        assert begins[0] < begins[1] < begins[2]
        times = [record.at_ns for record in node.records(run_id) if isinstance(record, Checkpoint)]
        assert begins[1:] == (times[0], times[1])

    run(main())


def test_a_checkpoint_with_open_steps_is_refused() -> None:
    def hasty(ctx: Ctx, input: Any) -> Any:
        ctx.op(SLEEP, seconds=1000)
        handle = ctx.op(CHECKPOINT, state=1)
        yield ctx.wait(handle)
        return ctx.read(handle)["error"]["code"]

    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock())
        node.register("hasty", hasty)
        run_id = await node.submit("hasty")
        assert (await node.result(run_id)).value() == "steps_open"
        assert any(isinstance(record, StepAborted) for record in node.records(run_id))  # the sleep nobody waited for
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_fault_C22_a_cancelled_run_unwinds_before_it_ends(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=limits)
        run_id = await node.submit("careful")
        await (
            parked(node, run_id, "event") if limits is COLD else timed(node, lambda: len(node.fold(run_id).open) == 1)
        )
        await node.cancel(run_id)
        assert (await node.result(run_id)).state is RunState.CANCELLED
        undone = [args for args in world.effects.values() if "undo" in args]
        assert [args["undo"] for args in undone] == ["second", "first"]
        kinds = [type(record) for record in node.records(run_id)]
        assert kinds.index(Ending) < kinds.index(RunEnded)
        node.check_disk()
        await node.close()

    run(main())


def test_a_deadline_ends_a_run_wherever_it_is() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        waiting = await node.submit("asker", None, timeout_ns=50 * SECOND)
        unwinding = await node.submit("careful", None, timeout_ns=50 * SECOND)
        quick = await node.submit("double", 4, timeout_ns=50 * SECOND)
        assert (await node.result(quick)).value() == 8
        await parked(node, waiting, "approval")
        await parked(node, unwinding, "event")
        clock.forward(51)
        for run_id in (waiting, unwinding):
            result = await node.result(run_id)
            assert result.state is RunState.TIMED_OUT
            with pytest.raises(Exception, match="deadline"):
                result.value()
        assert sum("undo" in args for args in world.effects.values()) == 2
        node.check_disk()
        await node.close()

    run(main())


def test_a_run_that_is_to_start_later_does() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        run_id = await node.submit("double", 21, start_ns=clock.now + 3600 * SECOND)
        await parked(node, run_id, "timer")
        node.check_disk()
        node.crash()
        node = make(disk, world, clock, limits=COLD)
        clock.forward(3000)
        await asyncio.sleep(0.05)
        assert not world.effects
        clock.forward(601)
        assert (await node.result(run_id)).value() == 42
        node.check_disk()
        await node.close()

    run(main())


def test_a_budget_of_tool_calls_is_kept_through_restarts_and_segments() -> None:
    async def main() -> None:
        for limit in (1, 2, 5):
            disk, world, clock = MemoryDisk(), World(), Clock()
            node = make(disk, world, clock)
            run_id = await node.submit("segments", 3, budget={"tool_calls": limit})
            result = await node.result(run_id)
            assert result.state is (RunState.SUCCEEDED if limit >= 4 else RunState.BUDGET_EXHAUSTED)
            assert len(world.effects) == min(limit, 4)
            node.check_disk()
            await node.close()
        with pytest.raises(InputError, match="'token'"):
            await make(MemoryDisk(), World(), Clock()).submit("double", 1, budget={"token": 5})

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_an_abandoned_timer_is_gone_and_replay_knows(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=limits)
        run_id = await node.submit("racer", 1000)
        await timed(node, lambda: bool(disk.tables["waits"]) and not disk.tables["timers"])
        node.check_disk()
        node.crash()
        node = make(disk, world, clock, limits=limits)
        await node.send(topic="go", data="went")
        assert (await node.result(run_id)).value() == "went"
        assert len(world.effects) == 1
        node.check_disk()
        await node.close()

    run(main())


def test_what_a_run_emits_is_told_after_it_is_durable() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        told: list[tuple[str, Any]] = []

        def observer(event: str, data: Any) -> None:
            if event == "emitted":
                assert data.data in [
                    record.result
                    for record in node.records(data.run_id)
                    if isinstance(record, StepCommitted) and record.path == data.path
                ]
                told.append((data.path, msgspec.json.decode(data.data)))

        node.engine.observe(observer)
        run_id = await node.submit("chatter", 3)
        await node.result(run_id)
        assert told == [("1:1", {"n": 0}), ("1:3", {"n": 1}), ("1:5", {"n": 2})]
        heard = await node.submit("listener", [{"topic": "chat", "key": "k"}] * 3)
        assert [event["data"] for event in (await node.result(heard)).value()] == [0, 1, 2]
        node.check_disk()
        await node.close()

    run(main())


def test_who_watches_a_run_is_told_of_every_durable_record() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        run_id = await node.submit("listener", [{"topic": "chat", "key": "k"}])
        told: list[int] = []

        def notify(version: int) -> None:
            records = node.records(run_id)
            assert records[-1].seq >= version
            told.append(version)

        stop = node.engine.watches.add(run_id, notify)
        await node.send(topic="chat", key="k", data=1)
        await node.result(run_id)
        assert told[-1] == len(node.records(run_id)) and told == sorted(set(told))
        stop()
        stop()
        assert run_id not in node.engine.watches
        await node.close()

    run(main())


def test_answers_to_runs_that_are_not_there_are_errors() -> None:
    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock())
        with pytest.raises(StepSettledError):
            await node.approve("run_01ARZ3NDEKTSV4RRFFQ69G5FAV")
        with pytest.raises(UnknownRunError):
            await node.cancel("run_01ARZ3NDEKTSV4RRFFQ69G5FAV")
        await node.close()

    run(main())


# --- crashes ------------------------------------------------------------------------


def check_all(world: World, runs: dict[str, Any]) -> None:
    assert runs["sleeper"] is not None
    assert runs["parent"] == [10, {"approved": True, "by": "ann", "comment": None}]
    assert runs["segments"] == 2
    assert runs["racer"] == "went"
    assert runs["listener"] == ["one", "two"]
    assert runs["careful"] is RunState.CANCELLED
    undone = [args["undo"] for args in world.effects.values() if "undo" in args]
    assert sorted(undone) == ["first", "second"]
    assert sum(args.get("n") == 5 for args in world.effects.values()) == 1
    assert sorted(args["part"] for args in world.effects.values() if "part" in args) == [0, 1, 2]


async def live(disk: MemoryDisk, world: World, clock: Clock, ids: dict[str, str], **how: Any) -> bool:
    """One life of a node in which everything that is still to be done is done; true if it came to the end."""
    node = make(disk, world, clock, **how)

    async def drive() -> dict[str, Any]:
        inputs: dict[str, Any] = {
            "sleeper": [30, 20],
            "parent": [["double", 5], ["asker", None]],
            "segments": 2,
            "racer": 500,
            "listener": [{"topic": "a"}, {}],
            "careful": None,
        }
        for name, input in inputs.items():
            ids[name] = await node.submit(name, input, idempotency_key=name)
        await node.send(topic="go", data="went", id="go")
        await node.send(topic="a", data="one", id="a")
        await node.send(run_id=ids["listener"], data="two", id="b")
        done = {name: node.result(run_id) for name, run_id in ids.items()}
        asked = cancelled = False
        while not all(future.done() for future in done.values()):
            await asyncio.sleep(0.005)
            clock.forward(5)
            state = node.fold(ids["careful"])
            if not cancelled and any(step.op == "event.wait" for step in state.open.values()):
                cancelled = True
                await node.cancel(ids["careful"])
            for child in node.fold(ids["parent"]).children.values():
                if asked or child.run_id not in disk.heads:
                    continue
                waits = {step.op for step in node.fold(child.run_id).open.values()}
                if "approval.request" in waits:
                    asked = True
                    try:
                        await node.approve(child.run_id)
                    except StepSettledError:
                        asked = node.fold(child.run_id).ended is not None
        values: dict[str, Any] = {}
        for name, future in done.items():
            result = future.result()
            values[name] = result.value() if result.state is RunState.SUCCEEDED else result.state
        values["listener"] = [event["data"] for event in values["listener"]]
        return values

    driving = asyncio.ensure_future(drive())
    crashed = asyncio.ensure_future(node.store.crashed.wait())
    await asyncio.wait([driving, crashed], return_when=asyncio.FIRST_COMPLETED, timeout=20)
    if driving.done():
        crashed.cancel()
        check_all(world, driving.result())
        await timed(node, lambda: not disk.tables[INBOX])
        node.check_disk()
        await node.close()
        return True
    assert crashed.done(), "neither an end nor a crash"
    node.crash()
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    return False


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.timeout(600)
def test_fault_D02_a_crash_at_every_commit_of_waiting_runs_loses_nothing_and_doubles_nothing(
    applied: bool, hot: bool
) -> None:
    async def main() -> None:
        for at in range(200):
            disk, world, clock = MemoryDisk(), World(), Clock()
            ids: dict[str, str] = {}
            limits = HOT if hot else COLD
            if await live(disk, world, clock, ids, crash_at=at, applied=applied, limits=limits):
                assert at > 30
                return
            assert await live(disk, world, clock, ids, limits=limits)
        raise AssertionError("it takes more commits than that")

    asyncio.run(main())


@pytest.mark.stress
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    crashes=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_any_crashes_and_interleavings_of_waiting_runs_end_the_same(
    seed: int, crashes: list[tuple[int, bool, bool]]
) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        ids: dict[str, str] = {}
        for number, (at, applied, hot) in enumerate(crashes):
            limits = HOT if hot else COLD
            if await live(disk, world, clock, ids, crash_at=at, applied=applied, seed=seed + number, limits=limits):
                return
        assert await live(disk, world, clock, ids, seed=seed + 100, limits=COLD)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(12))
def test_fault_C23_a_cancel_at_any_moment_of_parking_still_unwinds(turns: int) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=HOT)
        run_id = await node.submit("careful")
        await timed(node, lambda: len(node.fold(run_id).open) == 1)
        machine = node.engine._runs[run_id]
        await timed(node, machine.park)  # the record may be on the disk before the machine has been told
        for _ in range(turns):
            await asyncio.sleep(0)
        await node.cancel(run_id)
        assert (await node.result(run_id)).state is RunState.CANCELLED
        assert sum("undo" in args for args in world.effects.values()) == 2
        node.check_disk()
        await node.close()

    run(main())


def test_a_node_that_closes_does_not_wait_for_a_step_that_has_just_become_durable() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World(), limits=HOT)
        node.register("sleeper", sleeper)
        commit, held = node.engine._store_commit, []

        def slow(batch: Any, done: Any) -> None:
            commit(batch, lambda error: held.append(partial(done, error)) if batch.after_version else done(error))

        node.engine._store_commit = slow
        run_id = await node.submit("sleeper", [1000])
        await node.until(lambda: bool(held))  # on the disk, and nobody has been told
        assert len(node.records(run_id)) == 2
        closing = asyncio.ensure_future(node.engine.close(30))
        await node.until(lambda: node.engine._runs[run_id].guest is None)
        held.pop()()
        await asyncio.wait_for(closing, 10)
        assert not node.engine._runs

    run(main())


def test_what_waits_leaves_memory_however_late_its_last_record_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        node = make(MemoryDisk(), World(), Clock(), limits=COLD)
        tried: list[bool] = []
        park = RunMachine.park
        monkeypatch.setattr(RunMachine, "park", lambda machine: tried.append(park(machine)) or tried[-1])
        run_id = await node.submit("listener", [{"topic": "a"}])
        node.store.slow = True
        await timed(node, lambda: len(tried) >= 3)
        assert not any(tried)  # its StepPrepared is not durable
        node.store.speak()
        await parked(node, run_id, "event")
        await node.send(topic="a")
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
        await node.close()

    run(body())


def test_what_waits_leaves_memory_when_a_tool_it_gave_up_is_done() -> None:
    async def body() -> None:
        clock = Clock()
        node = make(MemoryDisk(), World(), clock, limits=COLD)
        node.tools.hold = True
        run_id = await node.submit("racer", 1)
        machine = node.engine._runs[run_id]
        await timed(node, lambda: len(machine.open) == 2)
        clock.forward(2)
        await timed(node, lambda: sorted(machine.open) == [1, 3] and machine.may_be_parked)
        assert not machine.park()  # its tool is still at work
        node.tools.answer_one()
        await parked(node, run_id, "event")
        await node.send(topic="go", data=1)
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
        await node.close()

    run(body())
