"""The watch over activations: what makes a host hang or overrun, and what does not."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrt.backends.python.limits import PythonLimits
from agentrt.backends.python.watch import Watch

LIMITS = PythonLimits()


class Loop:
    def __init__(self) -> None:
        self.due: Callable[[], None] | None = None
        self.delay_ns = 0

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        assert self.due is None
        self.due, self.delay_ns = call, round(delay_s * 1e9)


class Pool:
    def __init__(self) -> None:
        self.limits, self.loop, self.closed = LIMITS, Loop(), False
        self.overruns = 0

    def on_overrun(self, host: Any, number: int) -> None:
        self.overruns += 1


class Host:
    """One with an activation under way."""

    def __init__(self, now_ns: int) -> None:
        self.granted, self.inflight, self.ending = True, [1], False
        self.wall_base_ns = self.progress_wall_ns = now_ns
        self.cpu_base_ns = self.progress_cpu_ns = 0
        self.activation, self.activations, self.running, self.noticed = 0, 1, 1, False
        self.guests: dict[int, Any] = {}
        self.cpu, self.runnable, self.condemned = 0, False, False

    def cpu_ns(self) -> int:
        return self.cpu

    def is_runnable(self) -> bool:
        return self.runnable

    def condemn(self) -> None:
        self.condemned = self.ending = True


class World:
    def __init__(self) -> None:
        self.now_ns = 10**12
        self.pool = Pool()
        self.watch = Watch(self.pool, lambda: self.now_ns)  # type: ignore[arg-type]
        self.host = Host(self.now_ns)
        self.watch.add(self.host)  # type: ignore[arg-type]
        self.look()

    def look(self, late_ns: int = 0, cpu_ns: int = 0) -> bool:
        """The next look, so late; False if there is none."""
        loop = self.pool.loop
        if loop.due is None:
            return False
        call, loop.due = loop.due, None
        self.now_ns += loop.delay_ns + late_ns
        self.host.cpu += cpu_ns
        call()
        return True

    def until(self, ns: int, cpu_share: float = 0.0) -> None:
        end = self.now_ns + ns
        while self.now_ns < end and self.look(cpu_ns=round(self.pool.loop.delay_ns * cpu_share)):
            pass


def test_a_host_that_waits_for_ever_is_ended_and_one_that_works_is_not() -> None:
    world = World()
    world.until(LIMITS.hang_ns - 10**8)
    assert not world.host.condemned
    world.until(2 * 10**8)
    assert world.host.condemned and world.pool.overruns == 1
    world = World()
    world.until(3 * LIMITS.hang_ns, cpu_share=0.5)
    assert not world.host.condemned and world.pool.overruns == 1


@pytest.mark.parametrize("running", [0, 1])
def test_a_host_that_gets_no_cpu_hangs_not(running: int) -> None:
    world = World()
    world.host.running, world.host.runnable = running, True
    world.until(3 * LIMITS.hang_ns)
    assert not world.host.condemned and world.pool.overruns == 0


def test_a_host_that_works_between_two_activations_hangs() -> None:
    world = World()
    world.host.running, world.host.runnable = 0, True
    world.until(2 * LIMITS.hang_ns, cpu_share=0.9)
    assert world.host.condemned


@pytest.mark.parametrize("running", [0, 1])
def test_nobody_is_blamed_while_the_machine_or_the_loop_stood_still(running: int) -> None:
    """The host may have answered long ago: the loop reads that after this look."""
    world = World()
    world.host.running = running
    for _ in range(5):
        world.look(late_ns=2 * LIMITS.hang_ns)
        assert not world.host.condemned and world.pool.overruns == 0
    world.until(2 * LIMITS.hang_ns)
    assert world.host.condemned  # it does hang, it turns out
