"""The model store: the contract in the plainest words, in memory. Nothing survives the process.

It is what other stores are compared with, and a store for tests and for runs that need not survive. `MemoryDisk` is
what a folder is to a real store: open it again and everything committed is there, under the next generation.
"""

import asyncio
import threading
from collections import deque
from typing import Final

from agentrt.errors import ClosedError, DuplicateError, StaleWriteError, StoreError
from agentrt.records import Record, decode_record, encode_record
from agentrt.stores.base import TABLES, Batch, Done, Head, check_batch

#: Acknowledgements in one turn of the loop; the rest comes in the next.
_TELL_MAX: Final = 512


class MemoryDisk:
    """What is durable: heads, encoded records by run, and the side tables' rows. ``lock`` guards all of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self.heads: dict[str, Head] = {}
        self.journals: dict[str, list[bytes]] = {}
        self.tables: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}

    def apply(self, generation: int, batch: Batch, records: list[bytes]) -> None:
        """All of the batch, or an exception and nothing."""
        run_id = batch.run_id
        if generation != self.generation:
            raise StaleWriteError("this session is over: the store was opened again", run=run_id)
        if batch.head is not None and run_id is not None:
            head = self.heads.get(run_id)
            version = head.version if head is not None else 0
            if batch.after_version != version:
                raise StaleWriteError(f"the run is at version {version}, not {batch.after_version}", run=run_id)
        for row in batch.unique:
            found = self.tables[row.table].get(row.key)
            if found is not None:
                raise DuplicateError(f"the {row.table} row exists", found, run=run_id)
        if batch.head is not None and run_id is not None:
            self.heads[run_id] = batch.head
            journal = self.journals.get(run_id)
            if journal is None:
                self.journals[run_id] = records
            else:
                journal += records
        if batch.erase is not None:
            self.heads.pop(batch.erase, None)
            self.journals.pop(batch.erase, None)
        for rows in (batch.unique, batch.rows):
            for row in rows:
                if row.value is None:
                    self.tables[row.table].pop(row.key, None)
                else:
                    self.tables[row.table][row.key] = row.value


class MemoryStore:
    """A session on a `MemoryDisk`; ``loop`` is where ``done`` runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, disk: MemoryDisk | None = None) -> None:
        self._disk = MemoryDisk() if disk is None else disk
        self._loop = loop
        self._closed = False
        #: In commit order: added to under the lock, taken from on the loop.
        self._untold: deque[tuple[Done, StoreError | None]] = deque()
        self._telling = False  # written under the lock
        with self._disk.lock:
            self._disk.generation += 1
            self.generation = self._disk.generation

    def commit(self, batch: Batch, done: Done) -> None:
        check_batch(batch)
        records = [*map(encode_record, batch.records)]
        with self._disk.lock:
            if self._closed:
                self._check_open()
            error: StoreError | None = None
            try:
                self._disk.apply(self.generation, batch, records)
            except StoreError as refused:
                error = refused
            self._untold.append((done, error))
            if self._telling:
                return
            self._telling = True
        try:
            # The running loop's own call is seen without a wake-up.
            own = asyncio._get_running_loop() is self._loop
            (self._loop.call_soon if own else self._loop.call_soon_threadsafe)(self._tell)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    def _tell(self) -> None:
        untold = self._untold
        for _ in range(min(len(untold), _TELL_MAX)):
            done, error = untold.popleft()
            try:
                done(error)
            except Exception as raised:
                self._loop.call_exception_handler({"message": "a commit's done raised", "exception": raised})
        with self._disk.lock:
            more = self._telling = bool(untold)
        if more:
            self._loop.call_soon(self._tell)

    def read_head(self, run_id: str) -> Head | None:
        with self._disk.lock:
            self._check_open()
            return self._disk.heads.get(run_id)

    def read_records(self, run_id: str, after_version: int = 0) -> list[Record]:
        with self._disk.lock:
            self._check_open()
            stored = self._disk.journals.get(run_id, [])[after_version:]
        return [decode_record(data) for data in stored]

    def read_row(self, table: str, key: bytes) -> bytes | None:
        with self._disk.lock:
            self._check_open()
            return self._disk.tables[table].get(key)

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        with self._disk.lock:
            self._check_open()
            rows = [row for row in self._disk.tables[table].items() if row[0].startswith(prefix) and row[0] > after]
        return sorted(rows)[:limit]

    def scan_heads(self, after: str = "", limit: int = 1000) -> list[Head]:
        with self._disk.lock:
            self._check_open()
            heads = [head for run_id, head in self._disk.heads.items() if run_id > after]
        return sorted(heads, key=lambda head: head.run_id)[:limit]

    def backlog(self) -> tuple[int, int]:
        if self._closed:
            self._check_open()
        return 0, 0  # what is given is committed before commit returns

    def close(self) -> None:
        with self._disk.lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
