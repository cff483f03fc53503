"""Runs by the clock: each time once, through crashes; after a downtime what `catch_up` says."""

import asyncio
from functools import partial
from typing import Any

import pytest
from engine_kit import Node, World, run, settle
from hypothesis import given
from hypothesis import strategies as st
from test_engine_waits import SECOND, Clock, make, timed

from agentrt.engine.schedules import Schedule, due_times, next_time
from agentrt.errors import InputError
from agentrt.stores.base import SCHEDULES, TIMERS
from agentrt.stores.memory import MemoryDisk

HOUR = 3600 * SECOND
HOURLY = "0 * * * *"


async def put(node: Node, cron: str = HOURLY, catch_up: Any = "once", agent: str = "double") -> None:
    future: asyncio.Future[None] = node.loop.create_future()
    done = partial(settle, future, None)
    node.engine.schedules.put("default", "s", cron, agent, b"1", 2, catch_up, done)
    await future


@given(
    start=st.integers(0, 10**9),
    down=st.integers(0, 100 * 3600),
    cron=st.sampled_from([HOURLY, "*/5 * * * *", "30 4 * * *"]),
)
def test_after_any_downtime_at_most_one_missed_time_is_made_up(start: int, down: int, cron: str) -> None:
    first = next_time(cron, start * SECOND)
    now = first + down * SECOND
    schedule = Schedule("", "", "", cron, "", b"", None, "once", first)
    due, following = due_times(schedule, now)
    assert due is not None and first <= due <= now < following
    assert next_time(cron, due) == following
    skipped, same = due_times(Schedule("", "", "", cron, "", b"", None, "skip", first), now)
    assert same == following
    assert skipped == (due if now - due <= 60 * SECOND else None)


@pytest.mark.parametrize("cron", ["", "* * *", "61 * * * *", "0 0 31 2 *", "never"])
def test_nonsense_is_no_cron_expression(cron: str) -> None:
    with pytest.raises(InputError):
        next_time(cron, 0)


@pytest.mark.parametrize("catch_up", ["once", "skip"])
def test_each_time_starts_one_run(catch_up: str) -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        await put(node, catch_up=catch_up)
        for number in (1, 2):
            clock.now = next_time(HOURLY, clock.now)
            await timed(node, lambda: len(world.effects) == number)  # noqa: B023
            await timed(node, lambda: len(disk.tables[TIMERS]) == 1)
        node.crash()
        clock.now += 5 * HOUR + 120 * SECOND
        node = make(disk, world, clock)
        if catch_up == "once":
            await timed(node, lambda: len(world.effects) == 3)
        clock.now = next_time(HOURLY, clock.now)
        await timed(node, lambda: len(world.effects) == (4 if catch_up == "once" else 3))
        await node.close()

    run(main())


def test_a_crash_at_every_commit_of_a_due_time_starts_it_once() -> None:
    async def main() -> None:
        for applied in (False, True):
            for at in range(8):
                disk, world, clock = MemoryDisk(), World(), Clock()
                node = make(disk, world, clock)
                await put(node)
                node.store.at, node.store.applied = node.store.commits + at, applied
                clock.now = next_time(HOURLY, clock.now)
                await asyncio.wait([asyncio.ensure_future(node.store.crashed.wait())], timeout=0.3)
                node.crash()
                node = make(disk, world, clock)
                await timed(node, lambda: len(world.effects) == 1)  # noqa: B023
                await timed(node, lambda: all(key[:8] > clock.now.to_bytes(8, "big") for key in disk.tables[TIMERS]))  # noqa: B023
                await asyncio.sleep(0.05)
                assert len(world.effects) == 1 and len(disk.tables[SCHEDULES]) == 1
                await node.close()

    run(main())


def test_changing_and_dropping() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock)
        await put(node)
        await put(node, "30 * * * *")
        assert len(disk.tables[TIMERS]) == len(disk.tables[SCHEDULES]) == 1
        with pytest.raises(InputError):
            await put(node, "nonsense")
        found: asyncio.Future[Any] = node.loop.create_future()
        node.engine.schedules.list("default", partial(settle, found))
        assert [schedule.cron for schedule in await found] == ["30 * * * *"]
        dropped: asyncio.Future[None] = node.loop.create_future()
        node.engine.schedules.drop("default", "s", partial(settle, dropped, None))
        await dropped
        assert not disk.tables[TIMERS] and not disk.tables[SCHEDULES]
        again: asyncio.Future[None] = node.loop.create_future()
        node.engine.schedules.drop("default", "s", partial(settle, again, None))
        with pytest.raises(InputError):
            await again
        await node.close()

    run(main())
