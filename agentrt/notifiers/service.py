"""Runs notifiers and observers on a thread of their own, so that nothing they do holds up a run.

The control thread only appends to a bounded queue. Each plugin has its own: one that is slow makes the others neither
wait nor lose anything.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
import uvloop

from agentrt.engine.info import RunInfo, RunResult
from agentrt.notifiers.port import Notification, Notifier, Observer

QUEUE_ITEMS_MAX: Final = 10_000
NOTIFY_S: Final = 30.0
_CLOSE_S: Final = 5.0
_OBSERVED: Final = frozenset({"accepted", "parked", "emitted", "ended"})
#: What only people can end.
_FOR_PEOPLE: Final = frozenset({"approval", "operator"})

_log: Final = logging.getLogger(__name__)


class NotifierStatistics(msgspec.Struct, frozen=True):
    """``lost``: what came while its queue was full. ``disabled``: why it is told nothing more."""

    told: int
    lost: int
    waiting: int
    disabled: str = ""


class _Told:
    """One notifier or observer and what waits for it."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.waiting: deque[tuple[str, Any]] = deque()
        self.told = self.lost = 0
        self.disabled = ""
        self.rung: asyncio.Event

    def put(self, event: str, data: Any) -> bool:
        if self.disabled:
            return False
        if len(self.waiting) >= QUEUE_ITEMS_MAX:
            self.lost += 1
            return False
        self.waiting.append((event, data))
        return True

    def disable(self, error: BaseException) -> None:
        self.disabled = f"{type(error).__name__}: {error}"[:500]
        self.waiting.clear()
        _log.error("%s %s is disabled: %s", self.kind, self.name, self.disabled)


class NotifierService:
    """``notifiers``, ``observers``: what makes each, by name; called on the service's thread, inside its loop."""

    def __init__(
        self, notifiers: Mapping[str, Callable[[], Notifier]], observers: Mapping[str, Callable[[], Observer]]
    ) -> None:
        self._notifiers = {name: (_Told(name, "notifier"), make) for name, make in notifiers.items()}
        self._observers = {name: (_Told(name, "observer"), make) for name, make in observers.items()}
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agentrt-notifiers", daemon=True)
        self._stop = asyncio.Event()
        self._ringing = False
        self._started = threading.Event()

    def start(self) -> None:
        """Blocks until the loop runs."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """What waits is told for a bounded time. Blocks."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def observe(self, event: str, data: Any) -> None:
        """For `Engine.observe`; on the control thread."""
        if event not in _OBSERVED:
            return
        put = False
        for told, _ in self._observers.values():
            put = told.put(event, data) or put
        if self._notifiers and (notification := notification_of(event, data)) is not None:
            for told, _ in self._notifiers.values():
                put = told.put(event, notification) or put
        if put and not self._ringing:
            self._ringing = True
            self._loop.call_soon_threadsafe(self._ring)

    def statistics(self) -> dict[str, NotifierStatistics]:
        """By "notifier NAME" and "observer NAME"."""
        return {
            f"{told.kind} {name}": NotifierStatistics(told.told, told.lost, len(told.waiting), told.disabled)
            for group in (self._notifiers, self._observers)
            for name, (told, _) in group.items()
        }

    # --- on its thread ------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _serve(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        for told, make in self._observers.values():
            told.rung = asyncio.Event()
            tasks.append(asyncio.create_task(self._tell_observer(told, make)))
        for told, make_notifier in self._notifiers.values():
            told.rung = asyncio.Event()
            tasks.append(asyncio.create_task(self._tell_notifier(told, make_notifier)))
        self._started.set()
        await self._stop.wait()
        self._ring()  # who has nothing more to tell ends
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ring(self) -> None:
        self._ringing = False  # before the look: who puts after it rings again
        for group in (self._notifiers, self._observers):
            for told, _ in group.values():
                told.rung.set()

    async def _next(self, told: _Told) -> tuple[str, Any] | None:
        while not told.waiting:
            if self._stop.is_set():
                return None
            told.rung.clear()
            if not told.waiting and not self._stop.is_set():
                await told.rung.wait()
        return told.waiting.popleft()

    async def _tell_observer(self, told: _Told, make: Callable[[], Observer]) -> None:
        try:
            observer = make()
            while (found := await self._next(told)) is not None:
                observer(*found)
                told.told += 1
                if told.told % 100 == 0:
                    await asyncio.sleep(0)  # the others have their turn
        except Exception as error:
            told.disable(error)

    async def _tell_notifier(self, told: _Told, make: Callable[[], Notifier]) -> None:
        notifier: Notifier | None = None
        try:
            notifier = make()
            while (found := await self._next(told)) is not None:
                async with asyncio.timeout(NOTIFY_S):
                    await notifier.notify(found[1])
                told.told += 1
        except Exception as error:
            told.disable(error)
        finally:
            if notifier is not None:
                await _closed(notifier.close())


async def _closed(closing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(_CLOSE_S):
            await closing
    except Exception as error:
        _log.error("a notifier could not be closed: %r", error)


class _Error(msgspec.Struct):
    code: str = ""


def notification_of(event: str, data: Any) -> Notification | None:
    """What of an observation a person may want to know."""
    if event == "parked" and isinstance(data, RunInfo) and data.wait_reason in _FOR_PEOPLE:
        detail = data.wait_reason if not data.detail else f"{data.wait_reason}: {data.detail}"
        return Notification("waiting", data.run_id, data.tenant, data.agent, str(data.state), detail)
    if event == "ended" and isinstance(data, RunResult):
        code = msgspec.json.decode(data.error, type=_Error).code if data.error else ""
        return Notification("ended", data.run_id, data.tenant, data.agent, str(data.state), code)
    return None
