"""Outcomes that wait for company: the commit delay.

A step's StepCommitted joins the guest's next StepPrepared, which usually comes within tens of microseconds. What has
waited for the delay goes alone: after the delay and the turn of the loop that is then under way. The loop's own timers
count milliseconds, and coalescing with `call_soon` alone would flush at the end of the very turn in which the guest is
answered; so one timerfd, armed only while something waits, wakes the loop with the kernel's high-resolution timers.

While the store is busy with earlier batches, a commit would only queue behind them: then the delay is ten times as
long, so that a busy node does not commit every outcome alone and become busier by it. A guest that has its answer and
no CPU slot yet cannot have asked for more, and one that has asked for more may not have been heard yet: on full cores,
and behind thousands of others, it is given 250 times as long.
"""

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from agentrt.engine.machine import RunMachine

_CLOCK_MONOTONIC: Final = 1
_BUSY_FACTOR: Final = 10  # picked by feel: 2 ms, the time of a sync on an ordinary disk
_QUEUED_FACTOR: Final = 250  # picked by feel: 50 ms, some turns of workers and loop while others use their cores
#: A look at one that goes on waiting takes half a microsecond to one: thousands are not looked at all the time.
_LOOK_NS: Final = 20_000
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("it_interval", _Timespec), ("it_value", _Timespec)]


# PyDLL keeps the GIL: arming takes less time than handing it over.
_libc: Final = ctypes.PyDLL(None, use_errno=True)


class FineTimer:
    """Calls ``callback`` on the loop once, ``delay_ns`` after `arm`. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._value = _Itimerspec()
        self._address = ctypes.byref(self._value)
        loop.add_reader(self._fd, self._on_readable)

    def arm(self, delay_ns: int) -> None:
        """Replaces what was armed before."""
        delay_ns = max(1, delay_ns)  # 0 would disarm
        self._value.it_value.tv_sec, self._value.it_value.tv_nsec = divmod(delay_ns, 1_000_000_000)
        _libc.timerfd_settime(self._fd, 0, self._address, None)

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # armed again meanwhile
            return
        self._callback()

    def close(self) -> None:
        """Again is harmless."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class Wakes(Protocol):
    """What the flusher needs of a timer; see `FineTimer`."""

    def arm(self, delay_ns: int) -> None: ...

    def close(self) -> None: ...


FineTimerMaker = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Wakes]


class Flusher:
    """Flushes machines whose records have waited for ``delay_ns``, measured on the clock that the machines use. 0: each
    outcome goes alone at once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        delay_ns: int,
        now_ns: Callable[[], int],
        store_busy: Callable[[], bool] = lambda: False,
        fine_timer: FineTimerMaker = FineTimer,
    ) -> None:
        self._store_busy = store_busy
        self._loop = loop
        self._delay_ns = delay_ns
        self._now_ns = now_ns
        self._queue: deque[RunMachine] = deque()
        self._timer = fine_timer(loop, self._on_timer)
        self._armed = False
        self.alone = 0  # commits of outcomes without company

    def add(self, machine: RunMachine) -> None:
        """The machine has records that wait; it is in the queue at most once (``machine.joining``)."""
        if not self._delay_ns:
            self._loop.call_soon(self._flush_one, machine)
            return
        self._queue.append(machine)
        if not self._armed:
            self._armed = True
            self._timer.arm(self._delay_ns)

    def flush_all(self) -> None:
        """Everything that waits, now."""
        queue = self._queue
        while queue:
            machine = queue.popleft()
            machine.joining = False
            machine.flush()

    def close(self) -> None:
        self._timer.close()

    def _flush_one(self, machine: RunMachine) -> None:
        machine.joining = False
        if machine.waits:
            self.alone += 1
            machine.flush()

    def _on_timer(self) -> None:
        # Guests answered in a long turn have had no chance to ask for more: the loop polls once more before the flush.
        # Without this a busy node would commit every outcome alone, and be busier for it.
        self._loop.call_soon(self._loop.call_soon, self._flush_due, self._now_ns())

    def _flush_due(self, now: int) -> None:
        """``now``: when the timer rang. Who has been answered since is not due, however long the loop's turns are."""
        self._armed = False
        latest = max(now, self._now_ns())
        queue = self._queue
        delay = self._delay_ns * (_BUSY_FACTOR if self._store_busy() else 1)
        most = self._delay_ns * _QUEUED_FACTOR
        for _ in range(len(queue)):
            machine = queue[0]
            if machine.waits:
                since = machine.pending_since_ns
                waited = now - since
                # The future is a clock that was set back. Newer than its place is who found company meanwhile.
                if since <= latest and (waited < delay or (waited < most and (machine.unheard or machine.queued))):
                    queue.rotate(-1)
                    continue
            queue.popleft()
            self._flush_one(machine)
        if queue and not self._armed:
            self._armed = True
            self._timer.arm(max(delay, len(queue) * _LOOK_NS))
