"""Runs of older versions: they stay with theirs, go on with the new one, migrate, or end; never silently."""

import asyncio
from functools import partial
from typing import Any

import pytest
from engine_kit import Ctx, Node, World, run, settle

from agentrt.engine.info import EngineLimits
from agentrt.errors import ModuleError, StoreError
from agentrt.flow.profiles import check_profile
from agentrt.records import Checkpoint, RunAccepted, Upgraded
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk

EVENT, CHECKPOINT = 4, 11


def steps(name: str, count: int = 4) -> Any:
    """An agent that waits for an event after its second step."""

    def agent(ctx: Ctx, input: Any) -> Any:
        for number in range(count):
            handle = ctx.tool("put", n=number)
            yield ctx.wait(handle)
            if number == 1:
                yield ctx.wait(ctx.op(EVENT, topic="t"))
        return name

    return agent


def segments(name: str) -> Any:
    """An agent that makes a checkpoint, waits for an event, makes another, and ends with its state."""

    def agent(ctx: Ctx, input: Any) -> Any:
        state = ctx.restored or {"part": 0} | (input or {})
        handle = ctx.tool("put", part=state["part"])
        yield ctx.wait(handle)
        if state["part"] == 1:
            yield ctx.wait(ctx.op(EVENT, topic="t"))
        if state["part"] < 3:
            state["part"] += 1
            state.setdefault("by", []).append(name)
            yield ctx.wait(ctx.op(CHECKPOINT, state=state))
        return state

    return agent


class Bringer:
    """Kept modules, as an engine is given them."""

    def __init__(self, node: Node, kept: dict[str, Any]) -> None:
        self.node, self.kept, self.asked = node, kept, []  # type: ignore[var-annotated]
        self.errors: list[BaseException] = []
        node.engine.keep_versions(self)

    def __call__(self, version: str, name: str, done: Any) -> None:
        self.asked.append(version)
        found = self.kept.get(version)
        agent = None if found is None else self.node.agent(name, found, version)
        error = self.errors.pop() if self.errors else None
        self.node.loop.call_later(0.001, done, None if error else agent, error)


def upgraded(node: Node, run_id: str) -> list[dict[str, str]]:
    return [record.pins for record in node.records(run_id) if isinstance(record, Upgraded)]


async def waits_for_event(node: Node, run_id: str) -> None:
    for _ in range(1000):
        fold = node.fold(run_id)
        if any(step.op == "event.wait" for step in fold.open.values()):
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it does not wait for an event")


async def detail(node: Node, run_id: str) -> str:
    for _ in range(1000):
        if run_id in node.engine._places.parked:
            return (await node.engine.queries.describe(run_id)).detail or ""
        await asyncio.sleep(0.002)
    raise AssertionError("it does not wait for an operator")


async def begun(disk: MemoryDisk, world: World, agent: Any = None, input: Any = None) -> tuple[Node, str]:
    """A node with a run of version 1 that waits for an event."""
    node = Node(disk, world)
    node.register("a", agent or steps("one"), version="v1", pins={"engine": "1"})
    node.engine.recover()
    run_id = await node.submit("a", input)
    await waits_for_event(node, run_id)
    return node, run_id


def test_a_live_run_stays_with_its_version_and_new_runs_get_the_new_one() -> None:
    async def main() -> None:
        node, old = await begun(MemoryDisk(), World())
        node.register("a", steps("two"), version="v2")
        new = await node.submit("a")
        await waits_for_event(node, new)
        await node.send(topic="t")
        await node.send(topic="t")
        assert (await node.result(old)).value() == "one" and (await node.result(new)).value() == "two"
        first = node.records(new)[0]
        assert isinstance(first, RunAccepted) and first.pins["agent"] == "v2"
        assert upgraded(node, old) == []
        await node.close()

    run(main())


@pytest.mark.parametrize("cold", [False, True])
def test_after_a_restart_a_pinned_run_goes_on_with_its_kept_module(cold: bool) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world)
        if cold:
            while node.fold(run_id).state is not RunState.WAITING or run_id in node.engine._runs:
                await asyncio.sleep(0.01)
        node.crash()
        node = Node(disk, world, limits=EngineLimits(hot_ns=10**15))
        bringer = Bringer(node, {"v1": steps("one")})
        bringer.errors = [StoreError("cannot be read")]  # once
        node.register("a", steps("two"), version="v2")
        node.engine.recover()
        await node.send(topic="t")
        assert (await node.result(run_id)).value() == "one"
        assert upgraded(node, run_id) == [] and bringer.asked == ["v1", "v1"]
        assert len(world.effects) == 4
        node.check_disk()
        await node.close()

    run(main())


def test_a_gone_version_waits_says_what_to_do_and_either_way_lets_it_go_on() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, first = await begun(disk, world)
        second = await node.submit("a")
        await waits_for_event(node, second)
        node.crash()
        node = Node(disk, world)
        bringer = Bringer(node, {})
        bringer.errors = [ModuleError("damaged")]
        node.register("a", steps("two"), version="v2")
        node.engine.recover()
        for run_id in (first, second):
            told = await detail(node, run_id)
            assert "v1" in told and "on_upgrade='continue'" in told
        assert bringer.asked == ["v1"]  # once for all runs
        before = node.fold(first).version
        await node.resume(first)  # changes nothing
        assert "v1" in await detail(node, first)
        assert node.fold(first).version == before + 2 and upgraded(node, first) == []
        node.register("a", steps("one"), version="v1")  # the old one again: its runs go on
        await node.send(topic="t")
        await node.send(topic="t")
        assert (await node.result(first)).value() == "one" and (await node.result(second)).value() == "one"
        node.check_disk()
        await node.close()

    run(main())


def test_a_run_that_waits_for_a_gone_version_goes_on_when_the_new_one_takes_it() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world)
        node.crash()
        node = Node(disk, world)
        node.register("a", steps("two"), version="v2")
        node.engine.recover()
        await detail(node, run_id)
        node.register("a", steps("two"), version="v2", on_upgrade="continue")
        await node.send(topic="t")
        assert (await node.result(run_id)).value() == "two"
        assert upgraded(node, run_id) == [{"agent": "v2"}]
        node.check_disk()
        await node.close()

    run(main())


def test_continue_survives_a_crash_at_every_commit_and_is_journaled_once() -> None:
    async def attempt(at: int, applied: bool) -> bool:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world)
        node.crash()
        node = Node(disk, world, crash_at=at, applied=applied)
        node.register("a", steps("two"), version="v2", pins={"engine": "2"}, on_upgrade="continue")
        node.engine.recover()
        sent = asyncio.ensure_future(node.send(topic="t", id="once"))
        crashed = asyncio.ensure_future(node.store.crashed.wait())
        result: Any = asyncio.ensure_future(node.result(run_id))
        await asyncio.wait([crashed, result], return_when=asyncio.FIRST_COMPLETED)
        if reached := node.store.crashed.is_set():
            node.crash()
            node = Node(disk, world)
            node.register("a", steps("two"), version="v2", pins={"engine": "2"}, on_upgrade="continue")
            node.engine.recover()
            await node.send(topic="t", id="once")
            result = node.result(run_id)
        sent.cancel()
        assert (await result).value() == "two"
        assert upgraded(node, run_id) == [{"engine": "2", "agent": "v2"}]
        head = node.store.read_head(run_id)
        assert head.agent_version == "v2" and len(world.effects) == 4
        node.check_disk()
        await node.close()
        return reached

    async def main() -> None:
        for applied in (False, True):
            at = 0
            while await attempt(at, applied):
                at += 1
            assert at > 5

    run(main())


def test_a_new_version_that_does_not_follow_the_journal_fails_and_names_the_step() -> None:
    def other(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.tool("put", n=0))
        yield ctx.wait(ctx.tool("put", n="another"))

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world)
        node.crash()
        node = Node(disk, world)
        node.register("a", other, version="v2", on_upgrade="continue")
        node.engine.recover()
        error = (await node.result(run_id)).exception()
        assert error.code == "non_determinism" and error.step == "1:2"
        assert upgraded(node, run_id) == [{"agent": "v2"}]
        await node.close()

    run(main())


def test_fail_ends_runs_of_older_versions_when_they_would_go_on() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world)
        node.crash()
        node = Node(disk, world)
        node.register("a", steps("two"), version="v2", on_upgrade="fail")
        node.engine.recover()
        await node.send(topic="t")
        result = await node.result(run_id)
        assert result.state is RunState.FAILED and result.exception().code == "upgraded"
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("restarts", [False, True])
def test_migrate_takes_over_at_the_next_checkpoint(restarts: bool) -> None:
    """Between two checkpoints the run stays with its own code; at the next one the state is made anew."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world, segments("one"))
        if restarts:
            node.crash()
            node = Node(disk, world)
            Bringer(node, {"v1": segments("one")})
        node.register("a", segments("two"), version="v2", on_upgrade="migrate", migrate="moved")
        if restarts:
            node.engine.recover()
        await node.send(topic="t")
        value = (await node.result(run_id)).value()
        assert value == {"part": 3, "by": ["one", "one", "two"], "from": "v1"}
        records = node.records(run_id)
        at = next(index for index, record in enumerate(records) if isinstance(record, Upgraded))
        assert upgraded(node, run_id) == [{"agent": "v2"}]
        assert isinstance(records[at - 1], Checkpoint) and isinstance(records[at + 1], Checkpoint)
        assert len(world.effects) == 4
        node.check_disk()
        await node.close()

    run(main())


def test_migration_survives_a_crash_at_every_commit() -> None:
    async def attempt(at: int, applied: bool) -> bool:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world, segments("one"))
        node.crash()

        def new_node(**how: Any) -> Node:
            node = Node(disk, world, **how)
            Bringer(node, {"v1": segments("one")})
            node.register("a", segments("two"), version="v2", on_upgrade="migrate", migrate="moved")
            node.engine.recover()
            return node

        node = new_node(crash_at=at, applied=applied)
        sent = asyncio.ensure_future(node.send(topic="t", id="once"))
        crashed = asyncio.ensure_future(node.store.crashed.wait())
        result: Any = asyncio.ensure_future(node.result(run_id))
        await asyncio.wait([crashed, result], return_when=asyncio.FIRST_COMPLETED)
        if reached := node.store.crashed.is_set():
            node.crash()
            node = new_node()
            await node.send(topic="t", id="once")
            result = node.result(run_id)
        sent.cancel()
        assert (await result).value() == {"part": 3, "by": ["one", "one", "two"], "from": "v1"}
        assert upgraded(node, run_id) == [{"agent": "v2"}] and len(world.effects) == 4
        node.check_disk()
        await node.close()
        return reached

    async def main() -> None:
        for applied in (False, True):
            at = 0
            while await attempt(at, applied):
                at += 1
            assert at > 5

    run(main())


def test_a_run_that_has_not_begun_needs_no_migration() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", segments("one"), version="v1")
        start_ns = node.engine.now_ns() + 200_000_000
        run_id = await node.submit("a", start_ns=start_ns)
        node.register("a", segments("two"), version="v2", on_upgrade="migrate", migrate="moved")
        await waits_for_event(node, run_id)
        await node.send(topic="t")
        assert (await node.result(run_id)).value() == {"part": 3, "by": ["two", "two", "two"]}
        assert upgraded(node, run_id) == [{"agent": "v2"}]
        await node.close()

    run(main())


@pytest.mark.parametrize("way", ["same node", "kept", "gone"])
def test_fault_D17_a_failed_migration_leaves_the_run_as_it_was(way: str) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world, segments("one"), {"ok": False})
        told: list[Any] = []
        if way != "same node":
            node.crash()
            node = Node(disk, world, limits=EngineLimits(hot_ns=10**15))
            Bringer(node, {"v1": segments("one")} if way == "kept" else {})
            if way == "gone":  # until the checkpoint somebody has it
                node.register("a", segments("one"), version="v1")
        node.engine.observe(lambda event, data: told.append(data) if event == "migration_failed" else None)
        node.register("a", segments("two"), version="v2", on_upgrade="migrate", migrate="moved")
        if way != "same node":
            node.engine.recover()
        if way == "gone":
            await node.until(lambda: getattr(node.engine._runs.get(run_id), "guest", None) is not None, 200_000)
            node.engine._versions._versions.pop("v1")
        await node.send(topic="t")
        if way == "gone":
            assert "migration to v2 failed" in await detail(node, run_id)
            before = node.fold(run_id)  # behind the checkpoint of its own version, and no further
            assert before.segment == 3 and before.pins["agent"] == "v1" and upgraded(node, run_id) == []
            node.register("a", segments("one"), version="v1")
        assert (await node.result(run_id)).value() == {"part": 3, "ok": False, "by": ["one"] * 3}
        assert upgraded(node, run_id) == []
        assert told and (told[0].from_version, told[0].to_version) == ("v1", "v2") and b"boom" in told[0].error
        node.check_disk()
        await node.close()

    run(main())


def test_what_cold_runs_will_need_is_made_ready_where_a_profile_says_so() -> None:
    async def main() -> None:
        disk, world, cold = MemoryDisk(), World(), EngineLimits(hot_ns=0)
        node = Node(disk, world, limits=cold)
        node.register("a", steps("one"), version="v1", pins={"engine": "1"})
        node.register("b", steps("b"), version="b1")
        node.engine.recover()
        run_id = await node.submit("a")
        await waits_for_event(node, run_id)
        await waits_for_event(node, await node.submit("b"))
        ended = await node.submit("a")
        await node.cancel(ended)
        await node.result(ended)
        await node.until(lambda: not node.engine._runs, 2_000_000)  # they have left memory
        node.crash()
        node = Node(disk, world, limits=cold)
        bringer = Bringer(node, {"v1": steps("one"), "b1": steps("b")})
        node.engine.recover()
        node.register("a", steps("two"), version="v2")
        node.register("b", steps("b"), version="b2")
        future: asyncio.Future[Any] = node.loop.create_future()
        profile = check_profile("morning", {"preload": ["a", "nobody"]})
        node.engine.profiles.apply(profile, "ann", "", partial(settle, future))
        await future
        await node.until(lambda: "v1" in node.engine._versions._versions, 2_000_000)
        assert bringer.asked == ["v1"] and run_id not in node.engine._runs
        await node.send(topic="t")
        await node.send(topic="t")
        assert (await node.result(run_id)).value() == "one"
        assert bringer.asked.count("v1") == 1  # the other one's may have been asked for by now
        await node.close()

    run(main())


@pytest.mark.parametrize("what", ["module", "state"])
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_run_may_be_ended_while_its_module_or_state_is_on_its_way(what: str, end: str) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node, run_id = await begun(disk, world, segments("one"))
        node.crash()
        node = Node(disk, world, limits=EngineLimits(hot_ns=10**15))
        bringer = Bringer(node, {"v1": segments("one")})
        never: list[Any] = []
        if what == "module":
            node.engine.keep_versions(lambda version, name, done: never.append(done))
        node.register("a", segments("two"), version="v2", on_upgrade="migrate", migrate="moved")
        node.engine.recover()
        await node.send(topic="t")
        if what == "state":
            node.tools.hold = True
            while not node.tools.held or node.tools.held[0][0] != "moved":
                await asyncio.sleep(0.001)
                if node.tools.held and node.tools.held[0][0] != "moved":
                    node.tools.answer_one()
        else:
            await node.until(lambda: bool(never), 200_000)
            await asyncio.sleep(0.05)
        if end == "cancel":
            await node.cancel(run_id)
            if what == "module":
                never[0](bringer.node.agent("a", segments("one"), "v1"), None)
            else:
                node.tools.answer_one()
            assert (await node.result(run_id)).state is RunState.CANCELLED
            node.check_disk()
            await node.close()
            return
        await node.close()
        node = Node(disk, world)
        Bringer(node, {"v1": segments("one")})
        node.register("a", segments("two"), version="v2", on_upgrade="migrate", migrate="moved")
        node.engine.recover()
        assert (await node.result(run_id)).value()["by"] == ["one", "one", "two"]
        node.check_disk()
        await node.close()

    run(main())
