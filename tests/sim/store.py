"""The model store's disk behind a writer that takes time, groups what it is given, refuses, and dies with its node."""

import random
from collections.abc import Callable
from typing import Any, Protocol

from agentrt.errors import ClosedError, StaleWriteError, StoreError
from agentrt.records import Record, decode_record, encode_record
from agentrt.stores.base import Batch, Done, Head, check_batch
from agentrt.stores.memory import MemoryDisk
from tests.sim.loop import LifeLoop

_GROUP_MAX = 64


class InjectedError(StoreError):
    """A fault of the simulation's."""


class Watch(Protocol):
    """Who hears of everything that becomes durable."""

    def applied(self, batch: Batch) -> None: ...

    def told(self, batch: Batch, error: StoreError | None) -> None: ...


class StoreFaults:
    """Shares of operations that go wrong, and how long others take."""

    def __init__(self) -> None:
        self.stale = 0.0  # commits refused
        self.full = 0.0  # groups refused as a whole
        self.reads = 0.0  # reads that raise
        self.sync_ns = 300_000
        self.tell_ns = 100_000


class _Given:
    __slots__ = ("batch", "done", "error", "number", "records")

    def __init__(self, batch: Batch, done: Done, number: int) -> None:
        self.batch = batch
        self.done = done
        self.number = number
        self.error: StoreError | None = None
        self.records = [encode_record(record) for record in batch.records]


class SimStore:
    """One session. ``crash_at``: (number of a commit, whether it takes effect), at which ``crash()`` is called."""

    def __init__(
        self,
        disk: MemoryDisk,
        life: LifeLoop,
        chance: random.Random,
        faults: StoreFaults,
        watch: Watch,
        crash_at: tuple[int, bool] | None,
        crash: Callable[[], None],
    ) -> None:
        self.disk = disk
        disk.generation += 1
        self.generation = disk.generation
        self.faults = faults
        self._life = life
        self._chance = chance
        self._watch = watch
        self.crash_at, self._crash = crash_at, crash
        self._queue: list[_Given] = []
        self._given = 0
        self._under_way = 0
        self._writing = False
        self._closed = False
        self._tells_at = 0

    # --- writing ---

    def commit(self, batch: Batch, done: Done) -> None:
        check_batch(batch)
        if self._closed:
            raise ClosedError("the store is closed")
        given = _Given(batch, done, self._given)
        self._given += 1
        self._under_way += 1
        if batch.after_version and self._chance.random() < self.faults.stale:
            given.error = StaleWriteError("injected: not yours", run=batch.run_id)
        self._queue.append(given)
        if not self._writing:
            self._writing = True
            scheduler = self._life.scheduler
            scheduler.at(scheduler.now + int(self._chance.random() * 20_000), self._take, life=self._life)

    def _take(self) -> None:
        group, self._queue = self._queue[:_GROUP_MAX], self._queue[_GROUP_MAX:]
        scheduler = self._life.scheduler
        scheduler.at(
            scheduler.now + int((0.2 + self._chance.random() ** 4) * self.faults.sync_ns),
            self._apply,
            group,
            life=self._life,
        )

    def _apply(self, group: list[_Given]) -> None:
        crashes = self.crash_at
        here = crashes is not None and group[0].number <= crashes[0] <= group[-1].number
        if here and crashes is not None and not crashes[1]:
            self._crash()
            return
        full = self._chance.random() < self.faults.full
        for given in group:
            if full:
                given.error = InjectedError("injected: no space", run=given.batch.run_id)
            if given.error is not None:
                continue
            try:
                self.disk.apply(self.generation, given.batch, given.records)
            except StoreError as error:
                given.error = error
            else:
                self._watch.applied(given.batch)
        if here:
            self._crash()
            return
        scheduler = self._life.scheduler
        self._tells_at = max(self._tells_at, scheduler.now + int(self._chance.random() ** 4 * self.faults.tell_ns))
        self._under_way -= len(group)
        scheduler.at(self._tells_at, self._tell, group, life=self._life)
        self._writing = bool(self._queue)
        if self._writing:
            self._take()

    def _tell(self, group: list[_Given]) -> None:
        for given in group:
            given.done(given.error)
            self._watch.told(given.batch, given.error)

    # --- reading ---

    def _look(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
        if self.faults.reads and self._chance.random() < self.faults.reads:
            raise InjectedError("injected: cannot be read")

    def read_head(self, run_id: str) -> Head | None:
        self._look()
        return self.disk.heads.get(run_id)

    def read_records(self, run_id: str, after_version: int = 0, limit: int | None = None) -> list[Record]:
        self._look()
        end = None if limit is None else after_version + limit
        return [decode_record(data) for data in self.disk.journals.get(run_id, ())[after_version:end]]

    def read_row(self, table: str, key: bytes) -> bytes | None:
        self._look()
        return self.disk.tables[table].get(key)

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        self._look()
        rows = self.disk.tables[table]
        return sorted([row for row in rows.items() if row[0].startswith(prefix) and row[0] > after])[:limit]

    def scan_heads(
        self, after: str = "", limit: int = 1000, newest_first: bool = False, tenant: str | None = None
    ) -> list[Head]:
        self._look()
        heads = {run_id: head for run_id, head in self.disk.heads.items() if tenant is None or head.tenant == tenant}
        if newest_first:
            return [heads[run_id] for run_id in sorted(heads, reverse=True) if not after or run_id < after][:limit]
        return [heads[run_id] for run_id in sorted(heads) if run_id > after][:limit]

    def backlog(self) -> tuple[int, int]:
        return self._under_way, 0

    def close(self) -> None:
        self._closed = True


def reader(disk: MemoryDisk) -> Any:
    """Reads of the world's own."""
    store = SimStore.__new__(SimStore)
    store.disk, store.faults, store._closed = disk, StoreFaults(), False
    return store
