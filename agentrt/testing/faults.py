"""Faults on demand for tests of what stands on a store."""

import asyncio
import threading
from collections.abc import Callable

from agentrt.errors import StaleWriteError, StoreError
from agentrt.records import Record
from agentrt.stores.base import Batch, Done, Head, Store


class FaultStore:
    """A store that can hold commits back or refuse them; everything else goes to the store inside.

    - `hold`: from now on commits wait, unseen by readers, until `release` lets the oldest of them through.
    - `refuse_when`: a commit for which the function returns an error is refused with it; as the contract says, what
      follows it for the same run is then refused too, until the run is read again at its durable version.
    - `given` is every batch that came, in order, refused or not.

    ``loop`` is where ``done`` of refused commits runs. Use from any thread.
    """

    def __init__(self, inner: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self.generation = inner.generation
        self.given: list[Batch] = []
        self._loop = loop
        self._lock = threading.RLock()
        self._held: list[tuple[Batch, Done]] | None = None
        self._refuse: Callable[[Batch], StoreError | None] = lambda batch: None
        self._refused: dict[str, int] = {}  # run -> the version that was never reached

    def hold(self) -> None:
        """Commits wait from now on."""
        with self._lock:
            if self._held is None:
                self._held = []

    def held(self) -> int:
        """How many commits wait."""
        with self._lock:
            return len(self._held or ())

    def release(self, count: int | None = None) -> None:
        """Lets the ``count`` oldest through; by default all, and commits wait no more."""
        with self._lock:
            waiting = self._held or []
            first = waiting if count is None else waiting[:count]
            self._held = None if count is None else waiting[count:]
            for batch, done in first:
                self._pass(batch, done)

    def refuse_when(self, refuse: Callable[[Batch], StoreError | None]) -> None:
        """The rule from now on."""
        with self._lock:
            self._refuse = refuse

    def commit(self, batch: Batch, done: Done) -> None:
        with self._lock:
            self.given.append(batch)
            if self._held is not None:
                self._held.append((batch, done))
            else:
                self._pass(batch, done)

    def _pass(self, batch: Batch, done: Done) -> None:
        error = self._refuse(batch)
        if batch.head is None:
            if error is None:
                self.inner.commit(batch, done)
            else:
                self._loop.call_soon_threadsafe(done, error)
            return
        run_id = batch.head.run_id
        lost = self._refused.get(run_id)
        if error is None and lost is not None:
            if batch.after_version >= lost:
                error = StaleWriteError("the run is not at that version", run=run_id)
            else:
                del self._refused[run_id]
        if error is None:
            self.inner.commit(batch, done)
            return
        self._refused[run_id] = min(batch.head.version, lost if lost is not None else batch.head.version)
        self._loop.call_soon_threadsafe(done, error)

    def read_head(self, run_id: str) -> Head | None:
        return self.inner.read_head(run_id)

    def read_records(self, run_id: str, after_version: int = 0, limit: int | None = None) -> list[Record]:
        return self.inner.read_records(run_id, after_version, limit)

    def read_row(self, table: str, key: bytes) -> bytes | None:
        return self.inner.read_row(table, key)

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        return self.inner.scan_rows(table, prefix, after, limit)

    def scan_heads(
        self, after: str = "", limit: int = 1000, newest_first: bool = False, tenant: str | None = None
    ) -> list[Head]:
        return self.inner.scan_heads(after, limit, newest_first, tenant)

    def backlog(self) -> tuple[int, int]:
        """What is held counts as not yet durable; its bytes are not counted."""
        items, size_bytes = self.inner.backlog()
        return items + self.held(), size_bytes

    def blob_count(self) -> int:
        return self.inner.blob_count()

    def close(self) -> None:
        """What is held goes through first."""
        self.release()
        self.inner.close()
