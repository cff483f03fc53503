"""Downtimes: deadlines of approvals move by them, and what fell due meanwhile comes back in order and at a pace."""

import asyncio
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine import timers
from agentrt.engine.downtime import SPANS_MAX, moved, with_span
from agentrt.engine.info import EngineLimits
from agentrt.engine.mailbox import Event
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.steps import EventSend, Held, asked_at, parse_asked_at, send_address
from agentrt.errors import StoreError
from agentrt.states import RunState
from agentrt.stores.base import EVENTS, LOCKS, NODE
from agentrt.stores.keys import event_key, lock_key, timer_key
from agentrt.stores.memory import MemoryDisk

SLEEP, EVENT, APPROVAL, ACQUIRE = 3, 4, 5, 8
SECOND = 10**9
COLD = EngineLimits(hot_ns=0)
timers._SLEEP_S_MAX = 0.02  # the clock is moved, which no timer of the loop can know

spans_of = st.lists(st.integers(0, 100), max_size=12, unique=True).map(
    lambda ends: [*zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)]
)


@given(spans=spans_of, since=st.integers(0, 100), length=st.integers(0, 60))
def test_a_deadline_gives_a_person_as_much_uptime_as_was_promised(
    spans: list[tuple[int, int]], since: int, length: int
) -> None:
    """Second by second: those in which the node was up are as many as the approval was to wait."""
    found = moved(spans, since, since + length)
    up = sum(not any(begins <= at < ends for begins, ends in spans) for at in range(since, found))
    assert up == length


def test_of_too_many_downtimes_the_shortest_are_forgotten() -> None:
    spans: list[tuple[int, int]] = []
    for number in range(SPANS_MAX + 50):
        spans = with_span(spans, number * 1000, number * 1000 + (5 if number % 2 else 500))
    assert len(spans) == SPANS_MAX and spans == sorted(spans)
    assert sum(ends - begins == 500 for begins, ends in spans) == (SPANS_MAX + 50) // 2
    assert with_span([(1, 2)], 9, 9) == [(1, 2)] and with_span([(1, 2)], 9, 4) == [(1, 2)]  # the clock was set back


@given(asked_ns=st.integers(0, 2**63 - 1))
def test_an_approvals_timer_says_when_it_was_asked(asked_ns: int) -> None:
    assert parse_asked_at(asked_at(asked_ns)) == asked_ns
    for value in (b"approval.request", b"timer.sleep", b"", b"approval.requestshort"):
        assert parse_asked_at(value) is None


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        self.now += 1000
        return self.now


def asker(ctx: Ctx, input: Any) -> Any:
    handle = ctx.op(APPROVAL, question="?", timeout_s=input)
    yield ctx.wait(handle)
    return ctx.read(handle)["approved"]


def sleeper(ctx: Ctx, input: Any) -> Any:
    yield ctx.wait(ctx.op(SLEEP, seconds=input))
    yield ctx.wait(ctx.tool("put", seconds=input))


def listener(ctx: Ctx, input: Any) -> Any:
    yield ctx.wait(ctx.op(EVENT, topic="t"))


def waiter(ctx: Ctx, input: Any) -> Any:
    what, name = input
    yield ctx.wait(ctx.op(EVENT, topic=name) if what == "event" else ctx.op(ACQUIRE, name=name))
    yield ctx.wait(ctx.tool("put", at=name))


def holder(ctx: Ctx, input: Any) -> Any:
    for name in input:
        yield ctx.wait(ctx.op(ACQUIRE, name=name))
    yield ctx.wait(ctx.op(EVENT, topic="never"))


def new_node(disk: MemoryDisk, world: World, clock: Clock, limits: EngineLimits = COLD, *, reads: bool = True) -> Node:
    """``reads`` false: for as long as it lives it cannot read when its predecessors were alive."""
    node = Node(disk, world, now_ns=clock, limits=limits)
    for agent in (asker, sleeper, listener, waiter, holder):
        node.register(agent.__name__, agent)
    if not reads:
        read_row = node.store.read_row

        def cannot(table: str, key: bytes) -> bytes | None:
            if table == NODE and key == b"alive":
                raise StoreError("injected: cannot be read")
            return read_row(table, key)  # type: ignore[no-any-return]

        node.store.read_row = cannot  # type: ignore[attr-defined]
        node.loop.set_exception_handler(lambda loop, context: None)
    node.engine.recover()
    return node


async def cold(node: Node, *run_ids: str) -> None:
    for run_id in run_ids:
        for _ in range(2000):
            if run_id not in node.engine._runs and node.fold(run_id).state is RunState.WAITING:
                break
            await asyncio.sleep(0.002)
        else:
            raise AssertionError("it is not cold")


@pytest.mark.parametrize("closes", [False, True])
def test_an_approval_deadline_moves_by_each_downtime_and_a_sleep_does_not(closes: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = new_node(disk, world, clock)
        run_id = await node.submit("asker", 60.0)
        late = await node.submit("asker", 60.0)
        slept = await node.submit("sleeper", 60.0)
        await cold(node, run_id, late, slept)
        for _ in range(2):  # 20 seconds of its time, then 1,000 of downtime, twice
            clock.now += 20 * SECOND
            if closes:
                await node.close()
                node.crash()
            else:
                await node.until(lambda: b"alive" in disk.tables[NODE])
                disk.tables[NODE][b"alive"] = clock.now.to_bytes(8, "big")  # its last beat
                node.crash()
            clock.now += 1000 * SECOND
            node = new_node(disk, world, clock)
            assert (await node.result(slept)).state is RunState.SUCCEEDED  # once, however late
            await asyncio.sleep(0.1)
            assert node.fold(run_id).ended is None and node.fold(late).ended is None
        assert sum(world.asked.values()) == 1
        clock.now += 15 * SECOND
        await asyncio.sleep(0.05)
        await node.approve(run_id)
        assert (await node.result(run_id)).value() is True
        clock.now += 10 * SECOND
        assert (await node.result(late)).value() is False
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("closes", [False, True])
def test_a_life_that_could_not_read_when_others_were_alive_is_known_all_the_same(closes: bool) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = new_node(disk, world, clock)
        first = await node.submit("asker", 60.0)
        await cold(node, first)
        await node.close()
        node.crash()
        asked: list[str] = []
        for _ in range(2):
            clock.now += 1000 * SECOND
            node = new_node(disk, world, clock, reads=False)
            asked.append(await node.submit("asker", 60.0))
            await cold(node, asked[-1])
            if closes:
                clock.now += 10 * SECOND
                await node.close()
            node.crash()
        clock.now += 1000 * SECOND
        node = new_node(disk, world, clock)
        await node.until(lambda: node.engine._downtime._open)
        spans = [(ends - begins) // SECOND for begins, ends in node.engine._downtime._spans]
        assert spans == [1000] * 3
        assert not [key for key in disk.tables[NODE] if key.startswith(b"early")]
        await asyncio.sleep(0.1)
        for run_id in (first, *asked):
            await node.approve(run_id)
            assert (await node.result(run_id)).value() is True
        node.check_disk()
        await node.close()

    run(main())


def test_an_approval_asked_after_the_last_beat_moves_too() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = new_node(disk, world, clock)
        await node.until(lambda: b"alive" in disk.tables[NODE])
        clock.now += 5 * SECOND
        run_id = await node.submit("asker", 60.0)
        await cold(node, run_id)
        node.crash()
        clock.now += 1000 * SECOND
        node = new_node(disk, world, clock)
        clock.now += 50 * SECOND
        await asyncio.sleep(0.1)
        await node.approve(run_id)
        assert (await node.result(run_id)).value() is True
        await node.close()

    run(main())


async def come_back_in_order_at_a_pace(node: Node, runs: list[tuple[int, int, str]]) -> None:
    """24 runs, each (tier, place within it, id), on a node that brings 200 back a second: all succeed, in order."""
    order: list[str] = []
    start = node.backend.start

    def started(program: Any, events: Any, **given: Any) -> Any:
        order.append(events.run_id)
        return start(program, events, **given)

    node.backend.start = started  # type: ignore[method-assign]
    began = node.loop.time()
    for _, _, run_id in runs:
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
    assert order == [run_id for _, _, run_id in sorted(runs)]
    assert node.loop.time() - began > (24 - 4 - 1) / 200  # but for the burst


def test_fault_S37_what_fell_due_comes_back_by_tier_then_by_time_and_at_a_pace() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = new_node(disk, world, clock)
        runs: list[tuple[int, int, str]] = []
        for number in range(24):
            tier = number % 4
            seconds = 1 + (number * 7) % 24
            runs.append((tier, seconds, await node.submit("sleeper", float(seconds), tier=tier)))
        await cold(node, *(run_id for _, _, run_id in runs))
        node.crash()
        clock.now += 1000 * SECOND
        node = new_node(disk, world, clock, EngineLimits(hot_ns=10**15, rehydrate_per_s=200))
        await come_back_in_order_at_a_pace(node, runs)
        assert all(count == 1 for count in world.asked.values())
        node.check_disk()
        await node.close()

    run(main())


@pytest.mark.parametrize("what", ["event", "lock"])
def test_fault_S37_events_that_met_a_wait_and_free_locks_wake_by_tier_and_at_a_pace(what: str) -> None:
    """The node died between the event, or the end of a lock's holder, and telling who waited."""

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = new_node(disk, world, clock)
        names = [f"n{number}" for number in range(24)]
        held = await node.submit("holder", names) if what == "lock" else None
        if held is not None:
            await cold(node, held)
        runs: list[tuple[int, int, str]] = []
        for number, name in enumerate(names):
            runs.append((number % 4, number, await node.submit("waiter", [what, name], tier=number % 4)))
            await cold(node, runs[-1][2])
        node.crash()
        for name in names:
            if what == "event":
                address = send_address("default", EventSend(msgspec.Raw(b"1"), topic=name))
                event = Event(f"e-{name}", clock.now, b"1")
                disk.tables[EVENTS][event_key(address, clock.now, event.id)] = msgspec.msgpack.encode(event)
            else:
                key = lock_key("default", name)
                row = msgspec.msgpack.decode(disk.tables[LOCKS][key], type=Held)
                disk.tables[LOCKS][key] = msgspec.msgpack.encode(msgspec.structs.replace(row, run_id=None))
        node = new_node(disk, world, clock, EngineLimits(hot_ns=10**15, rehydrate_per_s=200))
        await come_back_in_order_at_a_pace(node, runs)
        assert len(world.asked) == 24 and all(count == 1 for count in world.asked.values())
        if held is not None:
            await node.cancel(held)
            await node.result(held)
        node.check_disk()
        await node.close()

    run(main())


def test_ready_runs_and_wakes_share_one_order_and_one_pace() -> None:
    plan = RecoveryPlan(100)
    plan.register("v")
    woken: list[str] = []
    for tier, at, name in ((2, 5, "c"), (0, 9, "a"), (2, 1, "b")):
        plan.wake(tier, at, lambda name=name: woken.append(name))  # type: ignore[misc]
    plan.add(0, 8, "first", "v")
    plan.add(2, 3, "second", "v")
    assert plan.ready == 5 and plan.wakes == 3
    now, taken = 1, []
    while plan.ready:
        some = plan.take(now, 10)
        assert len(some) <= 2  # the burst of 20 ms
        for each in some:
            taken.append(each if isinstance(each, str) else each() or woken[-1])
        now += 10_000_000
    assert taken == ["first", "a", "b", "second", "c"]


def test_moved_timers_fire_at_their_new_time_and_windows_are_read_past_them() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        window, timers.WINDOW = timers.WINDOW, 4
        try:
            now = 100
            run_id = "run_01HF7YAT00F6V07VG0QK2ZZZZZ"
            rows = sorted((timer_key(at, run_id, f"1:{at}"), (at, run_id, f"1:{at}")) for at in range(1, 40, 3))
            rows = [(key, (500 + due, run, path) if due < 20 else (due, run, path)) for key, (due, run, path) in rows]
            fired: list[tuple[str, int]] = []

            def scan(after: bytes, limit: int, done: Any) -> None:
                loop.call_soon(done, [row for row in rows if row[0] > after][:limit])

            index = timers.Timers(loop, lambda: now, scan, lambda _, path, due: fired.append((path, due)), lambda: True)
            index.open()
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert {due for _, due in fired} == set(range(22, 40, 3))  # those that did not move, from later windows
            now = 1000
            for _ in range(50):
                await asyncio.sleep(0.002)
            assert {due for _, due in fired} == set(range(22, 40, 3)) | {500 + at for at in range(1, 20, 3)}
            index.close()
        finally:
            timers.WINDOW = window

    run(main())
