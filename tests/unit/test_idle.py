"""Who leaves memory first, and when the machine counts as short of it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine.idle import Idle
from agentrt.memorypressure import MemoryPressure

MIB = 1 << 20


class Machine(SimpleNamespace):
    """As much of one as `Idle` looks at."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def machine(tier: int = 1, size_bytes: int = MIB) -> Any:
    return Machine(tier=tier, guest=SimpleNamespace(memory_bytes=size_bytes), may_be_parked=True)


class World:
    """An `Idle` whose clock and ticks are the test's."""

    def __init__(self, **bounds: Any) -> None:
        self.now_ns = 0
        self.parked: list[Any] = []
        self.stays: set[Any] = set()
        self.loop = asyncio.new_event_loop()
        settings = {"hot_ns": 1000, "hot_max": 1000} | bounds
        self.idle = Idle(self.loop, lambda: self.now_ns, park=self.park, **settings)

    def park(self, each: Any) -> bool:
        if each in self.stays:
            return False
        self.parked.append(each)
        return True

    def tick(self) -> list[Any]:
        self.parked.clear()
        self.idle._tick()
        return [*self.parked]

    def close(self) -> None:
        self.idle.close()
        self.loop.close()


def test_those_that_have_been_idle_for_long_leave() -> None:
    world = World()
    one, two, three = machine(0), machine(3), machine(2)
    for each in (one, two):
        world.idle.add(each)
    world.now_ns = 500
    world.idle.add(three)
    world.now_ns = 1000
    assert world.tick() == [two, one]  # the least urgent first
    assert len(world.idle) == 1 and world.idle.bytes == MIB
    world.idle.forget(three)
    assert world.idle.bytes == 0
    world.close()


def test_beyond_the_budget_the_least_urgent_that_has_waited_for_longest_leaves_until_it_fits() -> None:
    world = World(bytes_max=3 * MIB)
    urgent, old, young, big = machine(0), machine(2), machine(2), machine(3, 2 * MIB)
    for at_ns, each in enumerate((urgent, old, young, big)):
        world.now_ns = at_ns
        world.idle.add(each)
    assert world.tick() == [big]
    more = machine(1)
    world.idle.add(more)
    assert world.tick() == [old]
    world.close()


def test_under_pressure_they_leave_at_once_and_those_that_cannot_stay() -> None:
    short = False
    world = World(pressure=lambda: short)
    each, pinned = machine(1), machine(2)
    world.stays.add(pinned)
    world.idle.add(each)
    world.idle.add(pinned)
    for _ in range(20):
        assert world.tick() == []
    short = True
    seen = [parked for _ in range(11) for parked in world.tick()]
    assert seen == [each]
    assert len(world.idle) == 1 and world.idle.pressed
    world.close()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_after_enough_ticks_all_bounds_hold_and_the_rest_is_more_urgent(
    those: list[tuple[int, int]], mib_max: int, count_max: int
) -> None:
    world = World(bytes_max=mib_max * MIB, hot_max=count_max)
    machines = [machine(tier, size * MIB) for tier, size in those]
    for each in machines:
        world.idle.add(each)
    gone = [each for _ in range(3) for each in world.tick()]
    left = [each for each in machines if each not in gone]
    assert len(left) == len(world.idle) <= count_max
    assert sum(each.guest.memory_bytes for each in left) == world.idle.bytes <= mib_max * MIB
    if gone and left:
        assert min(each.tier for each in gone) >= max(each.tier for each in left)
    if gone:  # and none left that could have stayed: without the last one the bounds held only then
        last = gone[-1]
        assert len(left) + 1 > count_max or world.idle.bytes + last.guest.memory_bytes > mib_max * MIB
    world.close()


@pytest.mark.parametrize(
    ("stalled_us", "high", "short"), [(0, 0, False), (19_000, 0, False), (21_000, 0, True), (0, 1, True)]
)
def test_pressure_is_what_the_kernel_says_of_the_time_since_last_asked(
    tmp_path: Path, stalled_us: int, high: int, short: bool
) -> None:
    group = tmp_path / "sys/fs/cgroup/node"
    for folder in (group, tmp_path / "proc/self", tmp_path / "proc/pressure"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/node\n")
    calm = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    (tmp_path / "proc/pressure/memory").write_text(calm.format(7))
    (group / "memory.pressure").write_text(calm.format(1_000_000))
    (group / "memory.events").write_text("low 0\nhigh 5\nmax 0\noom 0\noom_kill 0\n")
    now_ns = 0
    pressure = MemoryPressure(lambda: now_ns, str(tmp_path))
    now_ns = 10**9
    assert not pressure()
    now_ns = 2 * 10**9
    (group / "memory.pressure").write_text(calm.format(1_000_000 + stalled_us))
    (group / "memory.events").write_text(f"low 0\nhigh {5 + high}\nmax 0\noom 0\noom_kill 0\n")
    assert pressure() is short
    now_ns = 3 * 10**9
    assert not pressure()


def test_a_kernel_that_tells_nothing_has_no_pressure(tmp_path: Path) -> None:
    assert not MemoryPressure(lambda: 0, str(tmp_path))()
