"""Which guests have been suspended for so long, with nothing but waits, that they need not stay in memory; and which of
them leave it early, since there are too many, they take too much memory, or the machine is short of it."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from agentrt.engine.machine import RunMachine

_TICK_S: Final = 0.05
_PARKS_PER_TICK: Final = 50  # at about 60 us each
_PAUSE_S: Final = 0.003  # after a tick that was not enough
_PRESSURE_EVERY: Final = 10  # ticks
_TIERS: Final = 4


def _never() -> bool:
    return False


class Idle:
    """Parks a machine once it has been idle for ``hot_ns``. Earlier, of the least urgent tier first and of that the one
    idle for longest, when more than ``hot_max`` are idle, when their guests' memories have more than ``bytes_max``
    (0: any number of) bytes, or while there is ``pressure``. Loop thread only. ``now_ns`` is monotonic."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        hot_ns: int,
        hot_max: int,
        park: Callable[[RunMachine], bool] = RunMachine.park,
        bytes_max: int = 0,
        pressure: Callable[[], bool] = _never,
    ) -> None:
        """``park``: has it parked, now or soon; false if that cannot be. ``pressure``: asked now and then, while any is
        idle: whether the machine is short of memory."""
        self._loop = loop
        self._park = park
        self._now_ns = now_ns
        self._hot_ns = hot_ns
        self._hot_max = hot_max
        self._bytes_max = bytes_max
        self._pressure = pressure
        #: By tier, the longest idle first: since when, and bytes.
        self._since: tuple[OrderedDict[RunMachine, tuple[int, int]], ...] = tuple(OrderedDict() for _ in range(_TIERS))
        self._tier: dict[RunMachine, int] = {}
        self._bytes = 0
        self._ticks = 0
        self._pressed = False
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self.pressed = 0  # ticks under pressure

    def __len__(self) -> int:
        return len(self._tier)

    @property
    def bytes(self) -> int:
        """Of the memories of those that are idle."""
        return self._bytes

    def add(self, machine: RunMachine) -> None:
        """It is idle now; if it was before, it has done something meanwhile."""
        if self._closed:
            return
        self._put(machine, self._now_ns())
        if self._handle is None:
            self._handle = self._loop.call_later(_TICK_S, self._tick)

    def forget(self, machine: RunMachine) -> None:
        """It is gone."""
        tier = self._tier.pop(machine, None)
        if tier is not None:
            self._bytes -= self._since[tier].pop(machine)[1]

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        for machine in [*self._tier]:
            self.forget(machine)

    def _put(self, machine: RunMachine, since_ns: int) -> None:
        self.forget(machine)
        size_bytes: int = getattr(machine.guest, "memory_bytes", 0)
        self._since[machine.tier][machine] = (since_ns, size_bytes)
        self._tier[machine] = machine.tier
        self._bytes += size_bytes

    def _next(self, before_ns: int) -> RunMachine | None:
        """Who leaves next."""
        early = (
            self._pressed or len(self._tier) > self._hot_max or (self._bytes_max > 0 and self._bytes > self._bytes_max)
        )
        for machines in reversed(self._since):
            machine = next(iter(machines), None)
            if machine is not None and (early or machines[machine][0] <= before_ns):
                return machine
        return None

    def _tick(self) -> None:
        self._handle = None
        now = self._now_ns()
        if self._ticks % _PRESSURE_EVERY == 0:
            self._pressed = self._pressure()
        self._ticks += 1
        self.pressed += self._pressed
        pause_s = _PAUSE_S
        stay: list[RunMachine] = []
        for _ in range(min(_PARKS_PER_TICK, len(self._tier))):
            machine = self._next(now - self._hot_ns)
            if machine is None:
                pause_s = _TICK_S
                break
            self.forget(machine)
            if not self._park(machine) and machine.may_be_parked:
                stay.append(machine)  # its last record is on its way to the store, a tool is at work, or it is pinned
        for machine in stay:
            self._put(machine, now)
        if len(stay) == _PARKS_PER_TICK:
            pause_s = _TICK_S  # nothing is won by asking them again at once
        if self._tier:
            self._handle = self._loop.call_later(pause_s, self._tick)
