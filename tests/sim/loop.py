"""Virtual time: one queue of events for a whole world, and a loop per life of a node that shares it.

What a real loop guarantees is kept: calls made with `call_soon` run in the order of the calls; a timer runs at its time
or later, after what was ready before; whatever comes from other threads or processes arrives at a time of its own,
between any two callbacks. Every callback takes a little time, so the order in which things from outside come in between
differs from seed to seed. When nothing is ready, time jumps to the next event.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]

SECOND = 10**9
MILLISECOND = 10**6
MICROSECOND = 10**3


class Handle:
    """A callback on its way; also what `call_later` returns."""

    __slots__ = ("args", "call", "life", "when_ns")

    def __init__(self, call: Call | None, args: tuple[Any, ...], life: "LifeLoop | None", when_ns: int) -> None:
        self.call = call
        self.args = args
        self.life = life
        self.when_ns = when_ns

    def cancel(self) -> None:
        self.call = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.call is None

    def when(self) -> float:
        return self.when_ns / SECOND


class Scheduler:
    """The world's clock and queue. ``after_event`` is called after every event."""

    def __init__(self, chance: random.Random) -> None:
        self.now = 0  # ns
        self.events = 0
        self.after_event: Callable[[], None] = lambda: None
        self._chance = chance.random
        self._ready: deque[Handle] = deque()
        self._later: list[tuple[int, int, Handle]] = []
        self._number = 0

    def soon(self, call: Call, args: tuple[Any, ...], life: "LifeLoop | None") -> Handle:
        handle = Handle(call, args, life, self.now)
        self._ready.append(handle)
        return handle

    def at(self, when_ns: int, call: Call, *args: Any, life: "LifeLoop | None" = None) -> Handle:
        """Call it then, unless its life has ended."""
        handle = Handle(call, args, life, when_ns)
        self._number += 1
        heapq.heappush(self._later, (when_ns, self._number, handle))
        return handle

    def run(self, until: Callable[[], bool], events_max: int) -> bool:
        """Whether ``until()`` became true before there was nothing left to do or ``events_max`` were done."""
        ready, later, chance = self._ready, self._later, self._chance
        pop = heapq.heappop
        while not until():
            now = self.now
            while later and later[0][0] <= now:
                ready.append(pop(later)[2])
            if not ready:
                if not later:
                    return False
                self.now = later[0][0]
                continue
            handle = ready.popleft()
            call, life = handle.call, handle.life
            if call is None or (life is not None and life.dead):
                continue
            self.now = now + 200 + int(chance() * 20_000)
            handle.call = None
            self.events += 1
            call(*handle.args)
            self.after_event()
            if self.events >= events_max:
                return False
        return True


class LifeLoop(asyncio.AbstractEventLoop):
    """The loop of one life of a node. Once `dead`, nothing of it runs any more."""

    def __init__(self, scheduler: Scheduler, chance: random.Random, met: Callable[[dict[str, Any]], None]) -> None:
        self.scheduler = scheduler
        self.dead = False
        self.reads_max_ns = MILLISECOND
        self._chance = chance.random
        self._met = met

    # --- what the engine, futures and tasks use ---

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self.scheduler.now / SECOND

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return self.dead

    def call_soon(self, callback: Call, *args: Any, context: Any = None) -> Any:
        return self.scheduler.soon(callback, args, self)

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Call, *args: Any, context: Any = None) -> Any:
        # The real loop's timers count milliseconds.
        due = self.scheduler.now + round(delay * SECOND) + int(self._chance() * MILLISECOND)
        return self.scheduler.at(due, callback, *args, life=self)

    def call_at(self, when: float, callback: Call, *args: Any, context: Any = None) -> Any:
        return self.call_later(when - self.time(), callback, *args)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name)

    def run_in_executor(self, executor: Any, func: Call, *args: Any) -> Any:  # type: ignore[override]
        """The function runs at a time of its own, and what it returned arrives later."""
        future: asyncio.Future[Any] = asyncio.Future(loop=self)
        now, chance = self.scheduler.now, self._chance
        began = now + int(chance() ** 4 * self.reads_max_ns)
        self.scheduler.at(began, self._execute, future, func, args, life=self)
        return future

    def _execute(self, future: "asyncio.Future[Any]", func: Call, args: tuple[Any, ...]) -> None:
        value: Any = None
        error: Exception | None = None
        try:
            value = func(*args)
        except Exception as raised:
            error = raised
        arrives = self.scheduler.now + int(self._chance() ** 4 * self.reads_max_ns)
        self.scheduler.at(arrives, self._arrive, future, value, error, life=self)

    def _arrive(self, future: "asyncio.Future[Any]", value: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._met(context)


class Channel:
    """Messages between two who do not share a thread: in order, each after a delay of its own."""

    __slots__ = ("_chance", "_delay_ns", "_last", "_life", "_scheduler")

    def __init__(self, life: LifeLoop, chance: random.Random, delay_ns: int) -> None:
        self._scheduler = life.scheduler
        self._life = life
        self._chance = chance.random
        self._delay_ns = delay_ns
        self._last = 0

    def post(self, call: Call, *args: Any) -> None:
        when = self._scheduler.now + 1 + int(self._chance() ** 4 * self._delay_ns)
        if when < self._last:
            when = self._last
        self._last = when
        self._scheduler.at(when, call, *args, life=self._life)


class FineTimer:
    """Stands for `agentrt.engine.flusher.FineTimer`."""

    def __init__(self, loop: LifeLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: Handle | None = None

    def arm(self, delay_ns: int) -> None:
        if self._handle is not None:
            self._handle.cancel()
        scheduler = self._loop.scheduler
        self._handle = scheduler.at(scheduler.now + max(1, delay_ns), self._callback, life=self._loop)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
