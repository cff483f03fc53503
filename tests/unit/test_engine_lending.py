"""Tier lending through the engine: holders, whom they wait for, crashes; grace; circles with joins."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from engine_kit import Ctx, FakeGuest, Node, World, run
from test_engine_waits import COLD, HOT, SECOND, Clock, make, timed

from agentrt.engine.info import EngineLimits, RunInfo
from agentrt.records import LockBroken, TierChanged
from agentrt.states import RunState
from agentrt.stores.base import LOCKS, WAITS
from agentrt.stores.memory import MemoryDisk

ACQUIRE, RELEASE, EVENT, SPAWN, JOIN = 8, 9, 4, 6, 7


def steps(ctx: Ctx, input: Any) -> Any:
    """What the input says, one after the other: ["lock", name], ["free", name], ["wait", topic], ["join"], and
    ["child", input, tier]. Ends with the errors that it met."""
    tokens: dict[str, int] = {}
    children: list[str] = []
    met: list[str] = []
    for what, *args in input:
        if what == "lock":
            handle = ctx.op(ACQUIRE, name=args[0], timeout_s=args[1] if args[1:] else None)
        elif what == "free":
            handle = ctx.op(RELEASE, name=args[0], token=tokens.get(args[0], 0))
        elif what == "wait":
            handle = ctx.op(EVENT, topic=args[0])
        elif what == "child":
            handle = ctx.op(SPAWN, agent="steps", input=args[0], tier=args[1])
        else:
            handle = ctx.op(JOIN, run_id=children[-1])
        yield ctx.wait(handle)
        got = ctx.read(handle)
        if isinstance(got, dict) and "error" in got:
            met.append(got["error"]["code"])
        elif what == "lock":
            tokens[args[0]] = got["token"]
        elif what == "child":
            children.append(got["run_id"])
    return met


def node_on(disk: MemoryDisk, world: World, clock: Clock, **how: Any) -> Node:
    node = make(disk, world, clock, **how)
    node.register("steps", steps)
    return node


def waiting(disk: MemoryDisk) -> int:
    return sum(value == b"lock" for value in disk.tables[WAITS].values())


def tiers(node: Node, run_id: str) -> list[int]:
    return [record.tier for record in node.records(run_id) if isinstance(record, TierChanged)]


def guest_of(node: Node, run_id: str) -> FakeGuest:
    guest = node.engine._runs[run_id].guest
    assert isinstance(guest, FakeGuest)
    return guest


async def info(node: Node, run_id: str) -> RunInfo:
    return await node.engine.queries.describe(run_id)


async def cold(node: Node, run_id: str, reason: str) -> None:
    """It waits for that, and nothing of it is in memory."""

    def there() -> bool:
        wait = node.fold(run_id).wait
        return (
            run_id not in node.engine._runs
            and not node.engine._places.loading
            and wait is not None
            and wait.reason == reason
        )

    await timed(node, there)


async def at_tier(node: Node, run_id: str, tier: int) -> None:
    await timed(node, lambda: node.fold(run_id).tier == tier)
    assert (await info(node, run_id)).tier == tier


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_a_holder_runs_at_the_tier_of_whoever_waits_until_it_releases(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"], ["free", "l"], ["wait", "end"]], tier=3)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        if limits is COLD:
            await cold(node, holder, "event")
        waiter = await node.submit("steps", [["lock", "l"], ["wait", "also"]], tier=2)
        await at_tier(node, holder, 2)
        urgent = await node.submit("steps", [["lock", "l"]], tier=0)
        await at_tier(node, holder, 0)
        assert (await info(node, holder)).base_tier == 3
        assert tiers(node, waiter) == []  # it has what it asked for
        if limits is HOT:
            assert guest_of(node, holder).lent == 0
        else:
            await timed(node, lambda: holder not in node.engine._runs)  # read for that, and gone again
        await node.send(topic="go")
        assert (await node.result(urgent)).value() == []
        await at_tier(node, holder, 3)
        assert tiers(node, holder) in ([2, 0, 3], [2, 0, 2, 3])
        if limits is HOT:
            assert guest_of(node, holder).lent is None
        for topic in ("end", "also"):
            await node.send(topic=topic)
        assert [(await node.result(run_id)).value() for run_id in (holder, waiter)] == [[], []]
        assert not len(node.engine._locks._lending)
        node.check_disk()
        await node.close()

    run(main())


def test_it_goes_through_whom_the_holder_waits_for_by_lock_and_join() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        deep = await node.submit("steps", [["lock", "a"], ["wait", "deep"]], tier=3)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        child = [["lock", "a"], ["free", "a"], ["wait", "child"]]
        parent = await node.submit(
            "steps", [["lock", "b"], ["child", child, 3], ["join"], ["free", "b"], ["wait", "parent"]], tier=2
        )
        await timed(node, lambda: waiting(disk) == 1)
        child_id = next(iter(node.fold(parent).children.values())).run_id
        urgent = await node.submit("steps", [["lock", "b"]], tier=0)
        for run_id in (parent, child_id, deep):
            await at_tier(node, run_id, 0)
            assert guest_of(node, run_id).lent == 0
        await node.send(topic="deep")  # ends with the lock held
        await timed(node, lambda: node.fold(child_id).locks == {})
        await node.send(topic="child")
        assert (await node.result(urgent)).value() == []
        await at_tier(node, parent, 2)
        await node.send(topic="parent")
        assert (await node.result(parent)).value() == []
        assert not len(node.engine._locks._lending)
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.parametrize("limits", [HOT, COLD])
def test_it_ends_when_nobody_waits_any_more(limits: EngineLimits, how: str) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"]], tier=2)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        urgent = await node.submit("steps", [["lock", "l", 5]], tier=0)
        await at_tier(node, holder, 0)
        if how == "cancel":
            await node.cancel(urgent)
        else:
            clock.forward(6)
        await node.result(urgent)
        await at_tier(node, holder, 2)
        await node.send(topic="go")
        await node.result(holder)
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_after_a_crash_it_follows_from_the_rows(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"], ["free", "l"], ["wait", "end"]], tier=3)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        urgent = await node.submit("steps", [["lock", "l", 5]], tier=0)
        await at_tier(node, holder, 0)
        node.crash()
        node = node_on(disk, world, clock, limits=limits, seed=1)
        if limits is HOT:
            await timed(node, lambda: holder in node.engine._runs and guest_of(node, holder).lent == 0)
        await node.send(topic="go")
        assert (await node.result(urgent)).value() == []
        await at_tier(node, holder, 3)
        await node.send(topic="end")
        await node.result(holder)

        # and so does that nobody waits, whatever the journal said before
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"]], tier=3)
        await timed(node, lambda: bool(node.fold(holder).locks))
        urgent = await node.submit("steps", [["lock", "l", 5]], tier=0)
        await at_tier(node, holder, 0)
        node.engine.have_tier = lambda machine: None  # type: ignore[method-assign]
        await node.cancel(urgent)
        await node.result(urgent)
        node.crash()
        node = node_on(disk, world, clock, limits=limits, seed=2)
        await node.send(topic="go")
        assert (await node.result(holder)).value() == []
        assert tiers(node, holder)[-1] == 3
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("how", ["granted", "timed out", "refused"])
def test_a_wait_that_ends_while_a_start_reads_it_is_over(how: str) -> None:
    """What the start had read arrives after the outcome: it would be a wait that nobody ends, which lends the holder a
    tier, or takes its lock from it, for nobody."""

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"], ["free", "l"], ["wait", "end"]], tier=3)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        waiter = await node.submit("steps", [["lock", "l", 5], ["wait", "done"]], tier=1)
        await at_tier(node, holder, 1)
        node.crash()

        late: list[Callable[[], None]] = []
        node = node_on(disk, world, clock, limits=HOT, seed=1, recover=False)
        read, find = node.engine._access.read, node.engine._wakes._find_waits

        def slowly(function: Any, done: Any) -> None:
            read(function, lambda found, error: late.append(partial(done, found, error)))

        def find_slowly(after: bytes) -> None:
            node.engine._access.read = slowly  # type: ignore[method-assign]
            find(after)
            node.engine._access.read = read  # type: ignore[method-assign]

        node.engine._wakes._find_waits = find_slowly  # type: ignore[method-assign]
        node.engine.recover()
        await timed(node, lambda: len(late) == 1 and waiter in node.engine._runs and waiting(disk) == 1)
        assert late
        if how == "granted":
            await node.send(topic="go")
            await timed(node, lambda: bool(node.fold(waiter).locks))
        elif how == "timed out":
            clock.forward(6)
            await timed(node, lambda: waiting(disk) == 0)
        else:
            await node.cancel(waiter)
            await node.result(waiter)
        late.pop()()
        await at_tier(node, holder, 3)
        owner = waiter if how == "granted" else holder
        assert guest_of(node, owner).lent is None
        guest_of(node, owner).ran_ns += 10 * SECOND
        await asyncio.sleep(0.05)
        assert "l" in node.fold(owner).locks  # nobody waits: it is not taken from it
        for topic in ("go", "done", "end"):
            await node.send(topic=topic)
        assert (await node.result(holder)).value() == []
        assert not len(node.engine._locks._lending) and not node.engine._locks._over
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("limits", [HOT, COLD])
def test_a_run_that_leaves_waits_for_nobody_here_until_it_is_back(limits: EngineLimits, left: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"]], tier=3)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        waiter = await node.submit("steps", [["lock", "l"]], tier=1)
        await at_tier(node, holder, 1)
        if limits is COLD:
            await cold(node, waiter, "lock")
        gone: list[BaseException | None] = []
        node.engine.moving.release([waiter], gone.append)
        await timed(node, lambda: gone == [None])
        if left:
            node.engine.moving.left({waiter: node.fold(waiter).version})
            await at_tier(node, holder, 3)
            assert not node.engine._locks._waiting
        node.engine.moving.stay([waiter])
        await at_tier(node, holder, 1)
        await node.send(topic="go")
        assert (await node.result(waiter)).value() == []
        await node.result(holder)
        assert not len(node.engine._locks._lending)
        node.check_disk()
        await node.close()

    run(main())


def test_a_guest_that_is_just_being_queued_is_asked_again() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"]], tier=2)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        guest_of(node, holder).busy = 4
        urgent = await node.submit("steps", [["lock", "l"]], tier=0)
        await timed(node, lambda: guest_of(node, holder).lent == 0)
        await node.send(topic="go")
        await node.result(urgent)
        await node.close()

    run(main())


def test_who_is_lent_a_tier_is_served_at_it() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"]], tier=2)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        slow = await node.submit("steps", [["lock", "l"], ["wait", "slow"]], tier=1)
        await timed(node, lambda: waiting(disk) == 1)
        lent = await node.submit("steps", [["lock", "k"], ["lock", "l"]], tier=3)
        await timed(node, lambda: "k" in node.fold(lent).locks and waiting(disk) == 2)
        urgent = await node.submit("steps", [["lock", "k"]], tier=0)
        await at_tier(node, lent, 0)
        await node.send(topic="go")
        assert (await node.result(urgent)).value() == []  # though the other waited for longer, and asked for more
        await node.send(topic="slow")
        await node.result(slow)
        await node.result(holder)
        await node.close()

    run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_a_holder_that_runs_for_longer_than_its_grace_loses_the_lock_if_somebody_waits(waits: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=HOT)
        holder = await node.submit("steps", [["lock", "l"], ["wait", "go"], ["free", "l"]], tier=2)
        await timed(node, lambda: len(disk.tables[LOCKS]) == 1)
        guest_of(node, holder).ran_ns += 10 * SECOND  # nobody waits
        waiter = None
        if waits:
            waiter = await node.submit("steps", [["lock", "l"]], tier=1)
            await timed(node, lambda: waiting(disk) == 1)
        guest_of(node, holder).ran_ns += 100_000_000
        await asyncio.sleep(0.1)
        assert bool(node.fold(holder).locks)
        guest_of(node, holder).ran_ns += 60_000_000
        if waiter is not None:
            assert (await node.result(waiter)).value() == []
            await at_tier(node, holder, 2)
        await node.send(topic="go")
        assert (await node.result(holder)).value() == (["lock_lost"] if waits else [])
        assert any(isinstance(record, LockBroken) for record in node.records(holder)) is waits
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [HOT, COLD])
@pytest.mark.parametrize("joins_first", [False, True])
def test_a_circle_that_a_join_closes_is_broken(joins_first: bool, limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=limits)
        child = [["wait", "child"], ["lock", "l"]]
        parent = await node.submit("steps", [["lock", "l"], ["child", child, 2], ["wait", "parent"], ["join"]], tier=2)
        await timed(node, lambda: bool(node.fold(parent).children))
        child_id = next(iter(node.fold(parent).children.values())).run_id
        await timed(node, lambda: len(disk.tables[WAITS]) == 2)
        if limits is COLD:
            await cold(node, parent, "event")
            await cold(node, child_id, "event")
        topics = ("parent", "child") if joins_first else ("child", "parent")
        await node.send(topic=topics[0])
        await timed(node, lambda: len(disk.tables[WAITS]) == (1 if joins_first else 2))
        if limits is COLD:
            first = ("child", parent) if joins_first else ("lock", child_id)
            await cold(node, first[1], first[0])
        await node.send(topic=topics[1])
        assert (await node.result(child_id)).value() == ["deadlock"]
        assert (await node.result(parent)).value() == []
        assert not len(node.engine._locks._lending)
        node.check_disk()
        await node.close()

    run(main())


def test_a_circle_that_nobody_refused_before_the_crash_is_broken_after_it() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = node_on(disk, world, clock, limits=COLD)
        first = await node.submit("steps", [["lock", "a"], ["wait", "a"], ["lock", "b"]])
        second = await node.submit("steps", [["lock", "b"], ["wait", "b"], ["lock", "a"]])
        await timed(node, lambda: len(disk.tables[LOCKS]) == 2)
        node.engine._locks._break_circle = lambda *args: None  # type: ignore[method-assign]
        await node.send(topic="a")
        await timed(node, lambda: waiting(disk) == 1)
        await node.send(topic="b")
        await timed(node, lambda: waiting(disk) == 2)
        node.crash()
        node = node_on(disk, world, clock, limits=COLD, seed=3)
        assert (await node.result(second)).value() == ["deadlock"]  # the younger of the two waits
        assert (await node.result(first)).value() == []
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("applied", [False, True])
def test_a_crash_at_every_commit_leaves_everyone_at_the_right_tier(applied: bool) -> None:
    async def main() -> None:
        for at in range(100):
            disk, world, clock = MemoryDisk(), World(), Clock()
            node = node_on(disk, world, clock, limits=COLD, crash_at=at, applied=applied)

            async def drive(node: Node) -> list[Any]:
                child = [["lock", "b"], ["free", "b"]]
                inputs = [
                    ([["lock", "a"], ["child", child, 3], ["join"], ["free", "a"]], 3),
                    ([["lock", "b"], ["free", "b"]], 2),
                    ([["lock", "a"], ["lock", "b"], ["free", "b"], ["free", "a"]], 1),
                    ([["lock", "a"], ["free", "a"]], 0),
                ]
                runs = [
                    await node.submit("steps", what, tier=tier, idempotency_key=str(n))
                    for n, (what, tier) in enumerate(inputs)
                ]
                results = [await node.result(run_id) for run_id in runs]
                assert all(result.state is RunState.SUCCEEDED for result in results)
                return [result.value() for result in results]

            driving = asyncio.ensure_future(drive(node))
            crashed = asyncio.ensure_future(node.store.crashed.wait())
            await asyncio.wait([driving, crashed], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            if not driving.done():
                node.crash()
                driving.cancel()
                node = node_on(disk, world, clock, limits=COLD, seed=1)
                values = await asyncio.wait_for(drive(node), 20)
            else:
                crashed.cancel()
                values = driving.result()
            assert all(value in ([], ["deadlock"], ["lock_lost"]) for value in values), values
            await timed(node, lambda: not disk.tables[LOCKS] and not len(node.engine._locks._lending))  # noqa: B023
            node.check_disk()
            await node.close()
            if not node.store.crashed.is_set() and crashed.cancelled():
                assert at > 25
                return
        raise AssertionError("it takes more commits than that")

    run(main())
