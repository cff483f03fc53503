"""The default store: LMDB, one writer thread, one sync per group of batches.

Layout (docs/journal-format.md): database ``journal`` run (16) | seq (8) -> record, ``heads`` run (16) -> head, one
database per side table, ``meta`` with schema and generation. A group is one LMDB transaction, so a run's records, its
head and its side rows appear together or not at all.

The version check needs no lock: the writer alone decides, in order, against the heads of the durable state and of
the group so far. When a group fails its heads are forgotten, so whatever was given on top of it is refused too.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import lmdb
import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import (
    ClosedError,
    DuplicateError,
    InternalError,
    StaleWriteError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from agentrt.ids import run_id_from_bytes, run_id_to_bytes
from agentrt.records import Record, decode_record, encode_record
from agentrt.stores.base import Batch, Done, Head, check_batch
from agentrt.stores.lmdb_files import Files, get, translate
from agentrt.stores.lock import FolderLock
from agentrt.stores.place import check_place, free_bytes
from agentrt.stores.writer import GROUP_BYTES_MAX, Given, GroupWriter

#: Heads kept decoded; a run that is not among them costs one look into the file.
HEADS_CACHED_MAX: Final = 100_000
#: Records read in one transaction.
READ_RECORDS_MAX: Final = 4096
#: Less than this free, and a write that failed half-way failed for want of space: more than any group takes.
FULL_DISK_BYTES: Final = 2 * GROUP_BYTES_MAX
#: How old the measure of free space may be.
FREE_CHECK_NS: Final = 200_000_000

_encode_head: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(Head).decode


class _Entry:
    """A batch ready to be written: everything that can be done before the writer's turn is done."""

    __slots__ = ("after", "head", "head_value", "items", "raw", "rows", "run_id", "unique", "version")

    def __init__(self, batch: Batch) -> None:
        head = batch.head
        raw = run_id_to_bytes(head.run_id)
        seq = batch.after_version
        self.items = [(raw + (seq := seq + 1).to_bytes(8, "big"), encode_record(record)) for record in batch.records]
        self.run_id = head.run_id
        self.raw = raw
        self.after = batch.after_version
        self.version = seq
        self.head = head
        self.head_value = _encode_head(head)
        self.unique = batch.unique
        self.rows = batch.rows

    def size_bytes(self) -> int:
        size = len(self.head_value) + 40
        for _, value in self.items:
            size += len(value) + 24
        for row in self.unique + self.rows:
            size += len(row.key) + len(row.value or b"")
        return size


class _Reads:
    """The read half of the contract."""

    generation: int
    _files: Files
    _cached: dict[str, Head]

    def read_head(self, run_id: str) -> Head | None:
        self._files.check_process()
        head = self._cached.get(run_id)
        if head is not None and not self._closed():
            return head
        raw = run_id_to_bytes(run_id)
        return _head(raw, self._files.read(lambda txn: get(txn, self._files.heads, raw)))

    def read_records(self, run_id: str, after_version: int = 0) -> list[Record]:
        raw = run_id_to_bytes(run_id)
        records: list[Record] = []
        seq = after_version
        while True:
            page = self._files.read(lambda txn, after=seq: self._journal_page(txn, raw, after))  # type: ignore[misc]
            for key, value in page:
                seq += 1
                try:
                    record = decode_record(value)
                except StoreCorruptError as error:
                    raise StoreCorruptError(f"record {seq}: {error.message}", run=run_id) from error
                if int.from_bytes(key[16:], "big") != seq or record.seq != seq:
                    raise StoreCorruptError(f"record {seq} is missing", run=run_id)
                records.append(record)
            if len(page) < READ_RECORDS_MAX:
                return records

    def read_row(self, table: str, key: bytes) -> bytes | None:
        db = self._files.tables[table]
        return self._files.read(lambda txn: get(txn, db, key))

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        db = self._files.tables[table]
        return self._files.read(lambda txn: _page(txn, db, prefix, after, limit))

    def scan_heads(self, after: str = "", limit: int = 1000) -> list[Head]:
        raw = run_id_to_bytes(after) if after else b""
        rows = self._files.read(lambda txn: _page(txn, self._files.heads, b"", raw, limit))
        return [head for key, value in rows if (head := _head(key, value)) is not None]

    def used_bytes(self) -> int:
        """Size of the data in the file, pages free for reuse included."""
        self._files.check_process()
        return self._files.used_bytes()

    def _closed(self) -> bool:
        return False

    def _journal_page(self, txn: lmdb.Transaction, raw: bytes, after: int) -> list[tuple[bytes, bytes]]:
        start = raw + after.to_bytes(8, "big")
        return _page(txn, self._files.journal, raw, start, READ_RECORDS_MAX)


class LmdbReader(_Reads):
    """Reads a store beside the node that has it open, or while none has: heads, records and rows as they become
    durable. Takes no lock, raises no generation, writes nothing. Raises InputError if there is no store."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = Files(Path(folder), map_bytes=2**20, map_bytes_max=2**44, create=False, read_only=True)
        self._cached = {}
        self.generation = self._files.read_generation()

    def close(self) -> None:
        """Safe to call twice."""
        self._files.close()


class LmdbStore(_Reads):
    """A node's session on the store in ``folder``, made if it is missing.

    ``loop`` is where ``done`` runs. ``map_bytes`` grows by doubling to ``map_bytes_max``. With less than
    ``free_bytes_min`` bytes free on the disk, or less than a sixteenth of ``map_bytes_max`` left, new runs are refused
    (StoreFullError) while those accepted go on until there is nothing left at all. Raises StoreInUseError,
    StorePlaceError (unless ``force_place``), StoreCorruptError, StoreVersionError, StoreError.
    """

    #: What tests change to show that durability comes from somewhere.
    _flags: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loop: asyncio.AbstractEventLoop,
        *,
        map_bytes: int = 256 * 2**20,
        map_bytes_max: int = 64 * 2**30,
        free_bytes_min: int = 64 * 2**20,
        force_place: bool = False,
    ) -> None:
        folder = Path(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} cannot be made: {error.strerror}") from error
        if not force_place:
            check_place(folder)
        try:
            self._lock = FolderLock(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be locked: {error.strerror}") from error
        try:
            self._files = Files(
                folder, map_bytes=map_bytes, map_bytes_max=map_bytes_max, create=True, flags=self._flags
            )
            try:
                self.generation = self._files.raise_generation()
            except BaseException:
                self._files.close()
                raise
        except BaseException:
            self._lock.release()
            raise
        self._generation_value = self.generation.to_bytes(8, "big")
        self._free_bytes_min = free_bytes_min
        self._map_low = map_bytes_max - map_bytes_max // 16
        self._low: str | None = None  # why new runs are refused
        self._low_checked_ns = 0
        self._failed: StoreError | None = None  # set for good once LMDB gave the environment up
        self._cached = {}
        self._closing = threading.Lock()
        self._is_closed = False
        self._writer: GroupWriter[_Entry] = GroupWriter(loop, self._apply, self._idle)

    @property
    def writer_thread_id(self) -> int:
        """The kernel's id of the writer thread, for its priority."""
        return self._writer.thread_id

    @property
    def groups(self) -> int:
        """Transactions written so far."""
        return self._writer.groups

    def commit(self, batch: Batch, done: Done) -> None:
        self._files.check_process()
        check_batch(batch)
        entry = _Entry(batch)
        self._writer.give(entry, entry.size_bytes(), done)

    def backlog(self) -> tuple[int, int]:
        self._files.check_process()
        if self._is_closed:
            raise ClosedError("the store is closed")
        return self._writer.backlog()

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._files.check_process()
            except InternalError:  # a forked child: everything is the parent's
                return
            self._writer.close()
            self._files.close()
            self._lock.release()

    def _closed(self) -> bool:
        return self._is_closed

    # --- the writer's thread ------------------------------------------------------

    def _apply(self, group: list[Given[_Entry]]) -> None:
        if self._failed is not None:
            raise self._failed
        self._look_at_space()
        self._settle(group)

    def _settle(self, group: list[Given[_Entry]]) -> None:
        try:
            heads = self._write_growing(group)
        except StoreFullError as error:
            self._low_checked_ns = 0
            if len(group) == 1:
                group[0].error = error
                return
            # One that is too large must not take the others with it.
            middle = len(group) // 2
            self._settle(group[:middle])
            self._settle(group[middle:])
            return
        if len(self._cached) + len(heads) > HEADS_CACHED_MAX:
            self._cached.clear()
        self._cached.update(heads)

    def _write_growing(self, group: list[Given[_Entry]]) -> dict[str, Head]:
        while True:
            for given in group:
                given.error = None
            try:
                return self._write(group)
            except lmdb.MapFullError:
                self._files.grow()
            except lmdb.Error as error:
                refusal = translate(error)
                if type(error) is lmdb.Error and free_bytes(self._files.folder) < FULL_DISK_BYTES:
                    # LMDB's name for a write that the disk took in part only.
                    refusal = StoreFullError("the disk is full")
                elif not isinstance(error, lmdb.DiskError | lmdb.TxnFullError | lmdb.MemoryError):
                    # What an input/output error left on the disk is unknown; only a fresh open finds out.
                    self._failed = refusal
                raise refusal from error

    def _write(self, group: list[Given[_Entry]]) -> dict[str, Head]:
        """One transaction. The heads it wrote, by run; refused batches have their ``error`` set."""
        files = self._files
        cached = self._cached
        heads: dict[str, Head] = {}
        head_rows: dict[bytes, bytes] = {}
        items: list[tuple[bytes, bytes]] = []
        rows: dict[str, dict[bytes, bytes | None]] = {}
        with files.writing() as txn:
            if txn.get(b"generation", db=files.meta) != self._generation_value:
                raise StaleWriteError("this session is over: the store was opened again")
            for given in group:
                entry = given.item
                run_id = entry.run_id
                head = heads.get(run_id) or cached.get(run_id)
                if head is None:
                    head = _head(entry.raw, get(txn, files.heads, entry.raw))
                version = 0 if head is None else head.version
                if version != entry.after:
                    given.error = StaleWriteError(f"the run is at version {version}, not {entry.after}", run=run_id)
                    continue
                if version == 0 and self._low is not None:
                    given.error = StoreFullError(self._low, run=run_id, hint="Running work goes on; make room")
                    continue
                if entry.unique and (error := self._duplicate(txn, entry, rows)) is not None:
                    given.error = error
                    continue
                items += entry.items
                heads[run_id] = entry.head
                head_rows[entry.raw] = entry.head_value
                for row in entry.unique:
                    rows.setdefault(row.table, {})[row.key] = row.value
                for row in entry.rows:
                    rows.setdefault(row.table, {})[row.key] = row.value
            # Sorted: neighbours share pages, and LMDB appends to the page it stands on.
            items.sort()
            with txn.cursor(db=files.journal) as cursor:
                cursor.putmulti(items)
            with txn.cursor(db=files.heads) as cursor:
                cursor.putmulti(sorted(head_rows.items()))
            for table, changes in rows.items():
                db = files.tables[table]
                for key, value in sorted(changes.items()):
                    if value is None:
                        txn.delete(key, db=db)
                    else:
                        txn.put(key, value, db=db)
        return heads

    def _duplicate(
        self, txn: lmdb.Transaction, entry: _Entry, rows: dict[str, dict[bytes, bytes | None]]
    ) -> DuplicateError | None:
        for row in entry.unique:
            changes = rows.get(row.table)
            if changes is not None and row.key in changes:
                found = changes[row.key]
            else:
                found = get(txn, self._files.tables[row.table], row.key)
            if found is not None:
                return DuplicateError(f"the {row.table} row exists", found, run=entry.run_id)
        return None

    def _look_at_space(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._low_checked_ns < FREE_CHECK_NS and self._low_checked_ns:
            return
        self._low_checked_ns = now_ns
        free = free_bytes(self._files.folder)
        used = self._files.used_bytes()
        if free < self._free_bytes_min:
            self._low = f"the disk has {free} bytes left, less than {self._free_bytes_min}"
        elif used > self._map_low:
            self._low = f"the store has {used} bytes and may have little more"
        else:
            self._low = None

    def _idle(self) -> None:
        self._files.check_readers()


def _page(txn: lmdb.Transaction, db: Any, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
    """Rows with the prefix and key > after, in order, at most ``limit``."""
    rows: list[tuple[bytes, bytes]] = []
    start = max(prefix, after)
    with txn.cursor(db=db) as cursor:
        if limit < 1 or not (cursor.set_range(start) if start else cursor.first()):
            return rows
        for key, value in cast(Iterator[tuple[bytes, bytes]], cursor.iternext()):
            if not key.startswith(prefix):
                break
            if key > after:
                rows.append((key, value))
                if len(rows) == limit:
                    break
    return rows


def _head(raw: bytes, value: bytes | None) -> Head | None:
    if value is None:
        return None
    try:
        head = _decode_head(value)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a run's head cannot be read: {error}") from error
    if head.run_id != run_id_from_bytes(raw):
        raise StoreCorruptError("a head stands in another run's place", run=head.run_id)
    return head
