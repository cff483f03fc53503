"""The writer: one thread that commits whatever was given in one go, then what came meanwhile, and so on.

Group commit without a timer: while a group is being synced the next one gathers, so a lone batch waits for nobody and
many batches share one sync. The thread needs the GIL for about a microsecond per batch and gives it up in the sync.

Who may call what: `give` from any thread; ``apply`` and ``idle`` run on the writer's thread; each batch's ``done`` on
the loop, in order, with one call into the loop per group.

Closing: no `give` succeeds after `close`; the thread commits what was given before and ends.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from agentrt.errors import ClosedError, StoreError
from agentrt.stores.base import Done

_log: Final = logging.getLogger(__name__)

#: Most that one group takes: what one transaction holds in memory, and what a late batch waits for. At 60,000 batches
#: per second this is 70 ms; the engine's own bound is lower.
GROUP_BATCHES_MAX: Final = 4096
GROUP_BYTES_MAX: Final = 16 * 2**20
#: Most ``done`` calls in one turn of the loop: about 2 ms of the engine's work.
TELL_MAX: Final = 256


class Given:
    """One item on its way; ``error`` is set by ``apply`` if it was refused."""

    __slots__ = ("done", "error", "size_bytes")

    def __init__(self, size_bytes: int, done: Done) -> None:
        self.size_bytes = size_bytes
        self.done = done
        self.error: StoreError | None = None


Item = TypeVar("Item", bound=Given)


class GroupWriter(Generic[Item]):
    """``apply(group)`` makes the group durable and sets ``error`` of the items it refuses; if it raises, the whole
    group is refused. ``idle`` runs when nothing came for ``idle_seconds``."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        apply: Callable[[list[Item]], None],
        idle: Callable[[], None],
        idle_seconds: float = 30.0,
    ) -> None:
        self._loop = loop
        self._apply = apply
        self._idle = idle
        self._idle_seconds = idle_seconds
        # Guards everything down to the bell.
        self._gate = threading.Lock()
        self._closed = False
        self._waiting: list[Item] = []
        self._waiting_bytes = 0
        self._taken = self._taken_bytes = 0  # by the thread, and not yet durable or refused
        self._asleep = False  # whoever clears it owes the bell one ring
        self._bell = threading.Lock()  # taken while nobody has rung
        self._bell.acquire()
        self._untold: deque[Item] = deque()  # on the loop
        self._telling = False
        self.groups = 0  # committed so far; for statistics
        self._thread = threading.Thread(target=self._run, name="agentrt-store", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """The kernel's id of the thread, for its priority."""
        return self._thread.native_id or 0

    def give(self, item: Item) -> None:
        """Queues the item. Raises ClosedError."""
        with self._gate:
            if self._closed:
                raise ClosedError("the store is closed")
            self._waiting.append(item)
            self._waiting_bytes += item.size_bytes
            if not self._asleep:
                return
            self._asleep = False
        self._bell.release()

    def backlog(self) -> tuple[int, int]:
        """(items, bytes) given and not yet durable or refused."""
        with self._gate:
            return len(self._waiting) + self._taken, self._waiting_bytes + self._taken_bytes

    def close(self) -> None:
        """Waits until everything given is settled and the thread has ended. Safe to call twice, from any thread."""
        with self._gate:
            self._closed = True
            ring, self._asleep = self._asleep, False
        if ring:
            self._bell.release()
        self._thread.join()

    def _run(self) -> None:
        while self._something_to_do():
            if group := self._take():
                self._commit(group)
            else:
                try:
                    self._idle()
                except Exception:
                    _log.exception("the store's writer failed while it was idle")

    def _something_to_do(self) -> bool:
        """Waits for items, or for so long that the writer is idle. False: closed, and nothing is left."""
        with self._gate:
            if self._waiting:
                return True
            if self._closed:
                return False
            self._asleep = True
        if self._bell.acquire(timeout=self._idle_seconds):
            return bool(self._waiting) or not self._closed
        with self._gate:
            rung = not self._asleep
            self._asleep = False
        if rung:  # just now, too late for the wait
            self._bell.acquire()
        return True

    def _take(self) -> list[Item]:
        """The next group, [] if there is nothing."""
        with self._gate:
            group, size_bytes = self._waiting, self._waiting_bytes
            if len(group) <= GROUP_BATCHES_MAX and size_bytes <= GROUP_BYTES_MAX:
                self._waiting, self._waiting_bytes = [], 0
            else:
                size_bytes = count = 0
                while count < min(len(group), GROUP_BATCHES_MAX) and size_bytes < GROUP_BYTES_MAX:
                    size_bytes += group[count].size_bytes
                    count += 1
                self._waiting, group = group[count:], group[:count]
                self._waiting_bytes -= size_bytes
            self._taken, self._taken_bytes = len(group), size_bytes
        return group

    def _commit(self, group: list[Item]) -> None:
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
        with self._gate:
            self._taken = self._taken_bytes = 0
        try:
            self._loop.call_soon_threadsafe(self._tell, group)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _log.debug("%d commits were acknowledged to a closed loop", len(group))

    def _tell(self, group: list[Item]) -> None:
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
