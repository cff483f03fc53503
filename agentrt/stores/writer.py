"""The writer: one thread that commits whatever was given in one go, then what came meanwhile, and so on.

Group commit without a timer: while a group is being synced the next one gathers, so a lone batch waits for nobody and
many batches share one sync. The thread needs the GIL for a few operations per batch and gives it up in the sync.

Who may call what: `give` from any thread; ``apply`` and ``idle`` run on the writer's thread; each batch's ``done`` on
the loop, in order, with one call into the loop per group.

Closing: `close` marks the writer closed (no `give` succeeds after that) and puts the end mark behind everything given;
the thread commits up to the mark and ends.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from agentrt.errors import ClosedError, StoreError
from agentrt.stores.base import Done

_log: Final = logging.getLogger(__name__)

Item = TypeVar("Item")

#: Most that one group takes: what one transaction holds in memory, and what a late batch waits for. At 60,000 batches
#: per second this is 70 ms; the engine's own bound is lower.
GROUP_BATCHES_MAX: Final = 4096
GROUP_BYTES_MAX: Final = 16 * 2**20
#: Most ``done`` calls in one turn of the loop: about 2 ms of the engine's work.
TELL_MAX: Final = 256


class Given(Generic[Item]):
    """One item on its way; ``error`` is set by ``apply`` if it was refused."""

    __slots__ = ("done", "error", "item", "size_bytes")

    def __init__(self, item: Item, size_bytes: int, done: Done) -> None:
        self.item = item
        self.size_bytes = size_bytes
        self.done = done
        self.error: StoreError | None = None


class GroupWriter(Generic[Item]):
    """``apply(group)`` makes the group durable and sets ``error`` of the items it refuses; if it raises, the whole
    group is refused. ``idle`` runs when nothing came for ``idle_seconds``."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        apply: Callable[[list[Given[Item]]], None],
        idle: Callable[[], None],
        idle_seconds: float = 30.0,
    ) -> None:
        self._loop = loop
        self._apply = apply
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._queue: SimpleQueue[Given[Item] | None] = SimpleQueue()
        self._gate = threading.Lock()  # orders `give` against `close`, and guards the two counts of what was given
        self._closed = False
        self._given = self._given_bytes = 0
        self._settled = self._settled_bytes = 0  # written by the thread alone
        self._untold: deque[Given[Item]] = deque()  # on the loop
        self._telling = False
        self.groups = 0  # committed so far; for statistics
        self._thread = threading.Thread(target=self._run, name="agentrt-store", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """The kernel's id of the thread, for its priority."""
        return self._thread.native_id or 0

    def give(self, item: Item, size_bytes: int, done: Done) -> None:
        """Queues the item. Raises ClosedError."""
        given = Given(item, size_bytes, done)
        with self._gate:
            if self._closed:
                raise ClosedError("the store is closed")
            self._given += 1
            self._given_bytes += size_bytes
            self._queue.put(given)

    def backlog(self) -> tuple[int, int]:
        """(items, bytes) given and not yet durable or refused."""
        with self._gate:
            return self._given - self._settled, self._given_bytes - self._settled_bytes

    def close(self) -> None:
        """Waits until everything given is settled and the thread has ended. Safe to call twice, from any thread."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        end = False
        while not end:
            try:
                first = self._queue.get(timeout=self._idle_seconds)
            except Empty:
                self._idle()
                continue
            if first is None:
                return
            group = [first]
            size_bytes = first.size_bytes
            get, add = self._queue.get_nowait, group.append
            try:
                while len(group) < GROUP_BATCHES_MAX and size_bytes < GROUP_BYTES_MAX:
                    given = get()
                    if given is None:
                        end = True
                        break
                    add(given)
                    size_bytes += given.size_bytes
            except Empty:
                pass
            self._commit(group, size_bytes)

    def _commit(self, group: list[Given[Item]], size_bytes: int) -> None:
        try:
            self._apply(group)
        except StoreError as error:
            for given in group:
                given.error = error
        except Exception as error:
            # Not foreseen, so nothing is known about the group but that its transaction did not commit.
            _log.exception("the store's writer failed")
            refusal = StoreError(f"the write failed: {error!r}")
            for given in group:
                given.error = refusal
        self.groups += 1
        self._settled_bytes += size_bytes
        self._settled += len(group)
        try:
            self._loop.call_soon_threadsafe(self._tell, group)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _log.debug("%d commits were acknowledged to a closed loop", len(group))

    def _tell(self, group: list[Given[Item]]) -> None:
        self._untold.extend(group)
        if not self._telling:
            self._tell_some()

    def _tell_some(self) -> None:
        """A large group takes several turns of the loop, so that none of them is long."""
        untold = self._untold
        for _ in range(min(len(untold), TELL_MAX)):
            given = untold.popleft()
            try:
                given.done(given.error)
            except Exception as error:
                self._loop.call_exception_handler({"message": "a commit's done raised", "exception": error})
        self._telling = bool(untold)
        if untold:
            self._loop.call_soon(self._tell_some)
