"""Which guests have been suspended for so long, with nothing but waits, that they need not stay in memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from agentrt.engine.machine import RunMachine

_TICK_S: Final = 0.05
_PARKS_PER_TICK: Final = 50  # at about 60 us each
_PAUSE_S: Final = 0.003  # after a tick that was not enough


class Idle:
    """Parks a machine once it has been idle for ``hot_ns``, and the one idle for longest when more than ``hot_max``
    are. Loop thread only. ``now_ns`` is monotonic."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        hot_ns: int,
        hot_max: int,
        park: Callable[[RunMachine], bool] = RunMachine.park,
    ) -> None:
        """``park``: has it parked, now or soon; false if that cannot be."""
        self._loop = loop
        self._park = park
        self._now_ns = now_ns
        self._hot_ns = hot_ns
        self._hot_max = hot_max
        self._since: OrderedDict[RunMachine, int] = OrderedDict()  # the longest idle first
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, machine: RunMachine) -> None:
        """It is idle now; if it was before, it has done something meanwhile."""
        if self._closed:
            return
        self._since[machine] = self._now_ns()
        self._since.move_to_end(machine)
        if self._handle is None:
            self._handle = self._loop.call_later(_TICK_S, self._tick)

    def forget(self, machine: RunMachine) -> None:
        """It is gone."""
        self._since.pop(machine, None)

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        self._since.clear()

    def _tick(self) -> None:
        self._handle = None
        now = self._now_ns()
        before = now - self._hot_ns
        pause_s = _PAUSE_S
        for _ in range(min(_PARKS_PER_TICK, len(self._since))):
            machine = next(iter(self._since))
            if self._since[machine] > before and len(self._since) <= self._hot_max:
                pause_s = _TICK_S
                break
            del self._since[machine]
            if not self._park(machine) and machine.may_be_parked:
                self._since[machine] = now  # its last record is on its way to the store, or a tool at work
        if self._since:
            self._handle = self._loop.call_later(pause_s, self._tick)
