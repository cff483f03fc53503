"""The model store: the contract in the plainest words, in memory. Nothing survives the process.

It is what other stores are compared with, and a store for tests and for runs that need not survive. `MemoryDisk` is
what a folder is to a real store: open it again and everything committed is there, under the next generation.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from agentrt.errors import ClosedError, DuplicateError, StaleWriteError, StoreError
from agentrt.records import Record, encode_record
from agentrt.stores.base import TABLES, Batch, Done, Head, Row, check_batch
from agentrt.stores.payloads import (
    INLINE_BYTES_MAX,
    Ref,
    check_blob,
    is_large_value,
    large_payloads,
    parse_row_ref,
    read_record,
    read_value,
    ref_of,
    refs_of_batch,
    row_ref,
    split_batch,
)

#: Acknowledgements in one turn of the loop; the rest comes in the next.
_TELL_MAX: Final = 512


class MemoryDisk:
    """What is durable: heads, records as stored by run, the side tables' rows as stored, and the blobs that they name.
    ``lock`` guards all of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self.heads: dict[str, Head] = {}
        self.journals: dict[str, list[bytes]] = {}
        self.tables: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
        self.blobs: dict[bytes, bytes] = {}
        self._named_by: dict[bytes, set[object]] = {}  # digest -> runs and rows

    def apply(
        self, generation: int, batch: Batch, records: list[bytes], blobs: Mapping[bytes, bytes] | None = None
    ) -> None:
        """All of the batch, or an exception and nothing. ``blobs``, by digest, are what records and rows may name."""
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
                found = read_value(found, self.load)
                raise DuplicateError(f"the {row.table} row exists", found, run=run_id)
        if batch.head is not None and run_id is not None:
            self.heads[run_id] = batch.head
            journal = self.journals.get(run_id)
            if journal is None:
                self.journals[run_id] = records
            else:
                journal += records
            if blobs:
                for record in records:
                    for ref in refs_of_batch(record):
                        self._name(ref.digest, run_id, blobs)
        if batch.erase is not None:
            self.heads.pop(batch.erase, None)
            for record in self.journals.pop(batch.erase, ()):
                for ref in refs_of_batch(record):
                    self._unname(ref.digest, batch.erase)
        for rows in (batch.unique, batch.rows):
            for row in rows:
                table, owner = self.tables[row.table], (row.table, row.key)
                old = table.pop(row.key, None)
                if row.value is not None:
                    table[row.key] = row.value
                    if blobs and (ref_now := parse_row_ref(row.value)) is not None:
                        self._name(ref_now.digest, owner, blobs)
                if (
                    self.blobs
                    and old not in (None, row.value)
                    and (ref_before := parse_row_ref(old or b"")) is not None
                ):
                    self._unname(ref_before.digest, owner)

    def load(self, ref: Ref) -> bytes:
        """The blob. Raises StoreCorruptError."""
        return check_blob(ref, self.blobs.get(ref.digest))

    def _name(self, digest: bytes, owner: object, blobs: Mapping[bytes, bytes]) -> None:
        self.blobs.setdefault(digest, blobs[digest])
        self._named_by.setdefault(digest, set()).add(owner)

    def _unname(self, digest: bytes, owner: object) -> None:
        owners = self._named_by.get(digest, set())
        owners.discard(owner)
        if not owners:
            self._named_by.pop(digest, None)
            self.blobs.pop(digest, None)


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
        batch, records, blobs = _stored(batch)
        with self._disk.lock:
            if self._closed:
                self._check_open()
            error: StoreError | None = None
            try:
                self._disk.apply(self.generation, batch, records, blobs)
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

    def read_records(self, run_id: str, after_version: int = 0, limit: int | None = None) -> list[Record]:
        end = None if limit is None else after_version + limit
        with self._disk.lock:
            self._check_open()
            stored = self._disk.journals.get(run_id, [])[after_version:end]
            return [read_record(data, self._disk.load) for data in stored]

    def read_row(self, table: str, key: bytes) -> bytes | None:
        with self._disk.lock:
            self._check_open()
            stored = self._disk.tables[table].get(key)
            return None if stored is None else read_value(stored, self._disk.load)

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        with self._disk.lock:
            self._check_open()
            rows = [row for row in self._disk.tables[table].items() if row[0].startswith(prefix) and row[0] > after]
            return [(key, read_value(stored, self._disk.load)) for key, stored in sorted(rows)[:limit]]

    def scan_heads(
        self, after: str = "", limit: int = 1000, newest_first: bool = False, tenant: str | None = None
    ) -> list[Head]:
        with self._disk.lock:
            self._check_open()
            heads = [
                head
                for run_id, head in self._disk.heads.items()
                if (tenant is None or head.tenant == tenant)
                and (run_id > after if not newest_first else not after or run_id < after)
            ]
        return sorted(heads, key=lambda head: head.run_id, reverse=newest_first)[:limit]

    def backlog(self) -> tuple[int, int]:
        if self._closed:
            self._check_open()
        return 0, 0  # what is given is committed before commit returns

    def blob_count(self) -> int:
        with self._disk.lock:
            self._check_open()
            return len(self._disk.blobs)

    def close(self) -> None:
        with self._disk.lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")


def _stored(batch: Batch) -> tuple[Batch, list[bytes], dict[bytes, bytes]]:
    """The batch with its rows as stored, its records as stored, and the blobs that they name."""
    blobs: dict[bytes, bytes] = {}
    records: list[bytes] = []
    for record in batch.records:
        encoded = encode_record(record)
        if len(encoded) > INLINE_BYTES_MAX and (large := large_payloads((record,))):
            refs = [ref_of(payload.data) for payload in large]
            blobs |= {ref.digest: payload.data for ref, payload in zip(refs, large, strict=True)}
            encoded = split_batch((record,), large, refs)
        records.append(encoded)

    def apart(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        if not any(is_large_value(row.value) for row in rows):
            return rows
        changed: list[Row] = []
        for row in rows:
            if row.value is not None and is_large_value(row.value):
                ref = ref_of(row.value)
                blobs[ref.digest] = row.value
                row = Row(row.table, row.key, row_ref(ref))
            changed.append(row)
        return tuple(changed)

    rows, unique = apart(batch.rows), apart(batch.unique)
    if rows is not batch.rows or unique is not batch.unique:
        batch = msgspec.structs.replace(batch, rows=rows, unique=unique)
    return batch, records, blobs
