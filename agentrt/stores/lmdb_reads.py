"""The read half of the LMDB store, and the reader beside a node.

A read takes what it needs of the log first (`Unfiled`) and looks into the file then. What is filed meanwhile is found
twice, the same; nothing can be missed. Blobs are read last: what names them may have gone meanwhile, and then it is not
found, as if the read had come later.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, cast

import lmdb

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.ids import run_id_from_bytes, run_id_to_bytes
from agentrt.records import Record, decode_record
from agentrt.stores.base import Head
from agentrt.stores.lmdb_blobs import DATA_NAME as BLOBS_NAME
from agentrt.stores.lmdb_blobs import BlobFiles
from agentrt.stores.lmdb_env import get
from agentrt.stores.lmdb_files import Files
from agentrt.stores.lmdb_tenants import page_of_tenant
from agentrt.stores.payloads import Load, Ref, check_blob, read_batch, read_value
from agentrt.stores.tail import read_tail
from agentrt.stores.unfiled import Unfiled, batches_of, decode_head

#: Journal rows and bytes read in one transaction; more than one row exceeds the bytes by its own size.
READ_ROWS_MAX: Final = 4096
READ_BYTES_MAX: Final = 4 * 2**20
#: Heads of a store without an index by tenant, looked at in one transaction.
_SCANNED_AT_ONCE: Final = 1000


class Reads:
    """What a store and a reader have in common. ``_cached``: heads that need not be looked up."""

    generation: int
    _files: Files
    _cached: dict[str, Head]

    def read_head(self, run_id: str) -> Head | None:
        self._files.check_process()
        head = self._head_in_memory(run_id, self._unfiled_now())
        if head is not None and not self._closed():
            return head
        raw = run_id_to_bytes(run_id)
        return filed_head(raw, self._files.read(lambda txn: get(txn, self._files.heads, raw)))

    def read_records(self, run_id: str, after_version: int = 0, limit: int | None = None) -> list[Record]:
        try:
            return self._read_records(run_id, after_version, limit)
        except StoreCorruptError:
            if self.read_head(run_id) is None:
                return []  # it was erased meanwhile, and its blobs with it
            raise

    def _read_records(self, run_id: str, after_version: int, limit: int | None) -> list[Record]:
        unfiled = self._unfiled_now().batches(run_id, after_version)
        raw = run_id_to_bytes(run_id)
        records: list[Record] = []
        seq = after_version
        more = True
        while more and (limit is None or len(records) < limit):
            page, more = self._files.read(lambda txn, after=seq: self._journal_page(txn, raw, after))  # type: ignore[misc]
            for key, row in page:
                try:
                    batches = batches_of(row)
                except StoreCorruptError as error:
                    raise StoreCorruptError(f"record {seq + 1}: {error.message}", run=run_id) from error
                if batches is not None:
                    for batch in batches:
                        seq = _add(records, run_id, seq, batch, self._load_blob)
                else:
                    _add_record(records, run_id, seq + 1, row)
                    seq += 1
                if int.from_bytes(key[16:], "big") != seq:
                    raise StoreCorruptError(f"record {seq + 1} is missing", run=run_id)
        for batch in () if more else unfiled:
            seq = _add(records, run_id, seq, batch, self._load_blob)
        return records if limit is None else records[:limit]

    def read_row(self, table: str, key: bytes) -> bytes | None:
        db = self._files.table(table)
        if db is None:
            return None
        return self._value(db, key, self._files.read(lambda txn: get(txn, db, key)))

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        db = self._files.table(table)
        if db is None:
            return []
        page = self._files.read(lambda txn: _page(txn, db, prefix, after, limit))
        values = ((key, self._value(db, key, stored)) for key, stored in page)
        return [(key, value) for key, value in values if value is not None]

    def blob_count(self) -> int:
        blobs = self._blobs_now()
        return 0 if blobs is None else blobs.count()

    def _value(self, db: Any, key: bytes, stored: bytes | None) -> bytes | None:
        """The row's value, whole."""
        while stored is not None:
            try:
                return read_value(stored, self._load_blob)
            except StoreCorruptError:
                now = self._files.read(lambda txn: get(txn, db, key))
                if now == stored:
                    raise
                stored = now  # the row was changed meanwhile, and its blob is gone
        return None

    def _load_blob(self, ref: Ref) -> bytes:
        blobs = self._blobs_now()
        return check_blob(ref, None) if blobs is None else blobs.load(ref)

    def scan_heads(
        self, after: str = "", limit: int = 1000, newest_first: bool = False, tenant: str | None = None
    ) -> list[Head]:
        if tenant is not None:
            return self._heads_of(tenant, after, limit, newest_first)
        unfiled = self._unfiled_now().heads(after, newest_first)
        raw = run_id_to_bytes(after) if after else b""
        page = _page_back if newest_first else _page
        rows = self._files.read(lambda txn: page(txn, self._files.heads, b"", raw, limit))
        heads = {head.run_id: head for key, value in rows if (head := filed_head(key, value)) is not None}
        for head in unfiled:
            filed = heads.get(head.run_id)
            if filed is None or filed.version <= head.version:
                heads[head.run_id] = head
        return [heads[run_id] for run_id in sorted(heads, reverse=newest_first)[:limit]]

    def _heads_of(self, tenant: str, after: str, limit: int, newest_first: bool) -> list[Head]:
        unfiled, db = self._unfiled_now(), self._files.tenant_runs
        heads: list[Head] = []
        raw = run_id_to_bytes(after) if after else b""
        while (missing := limit - len(heads)) > 0:

            def look(txn: lmdb.Transaction, raw: bytes = raw, missing: int = missing) -> list[bytes] | None:
                if db is None or not self._files.indexed(txn):
                    return None
                return page_of_tenant(txn, db, tenant, raw, missing, newest_first)

            page = self._files.read(look)
            if page is None:
                return self._heads_without_index(tenant, after, limit, newest_first)
            heads += self._heads_at(page, unfiled)
            if len(page) < missing:
                break
            raw = page[-1]
        return heads

    def _heads_at(self, page: Sequence[bytes], unfiled: Unfiled) -> list[Head]:
        """Heads of the runs that are still there, in that order."""
        found = {raw: self._head_in_memory(run_id_from_bytes(raw), unfiled) for raw in page}
        filed = [raw for raw, head in found.items() if head is None]
        if filed:
            values = self._files.read(lambda txn: [get(txn, self._files.heads, raw) for raw in filed])
            for raw, value in zip(filed, values, strict=True):
                found[raw] = filed_head(raw, value)
        return [head for head in found.values() if head is not None]

    def _heads_without_index(self, tenant: str, after: str, limit: int, newest_first: bool) -> list[Head]:
        """In a store that no node of this agentrt has had."""
        heads: list[Head] = []
        while page := self.scan_heads(after, _SCANNED_AT_ONCE, newest_first):
            heads += (head for head in page if head.tenant == tenant)
            after = page[-1].run_id
            if len(heads) >= limit:
                break
        return heads[: max(0, limit)]

    def _head_in_memory(self, run_id: str, unfiled: Unfiled) -> Head | None:
        return self._cached.get(run_id) or unfiled.head(run_id)

    def used_bytes(self) -> int:
        """Size of the data in the file, pages free for reuse included."""
        self._files.check_process()
        return self._files.used_bytes()

    def _unfiled_now(self) -> Unfiled:
        raise NotImplementedError

    def _blobs_now(self) -> BlobFiles | None:
        raise NotImplementedError

    def _closed(self) -> bool:
        return False

    def _journal_page(self, txn: lmdb.Transaction, raw: bytes, after: int) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Rows of the run with records after that one, and whether there may be more."""
        rows: list[tuple[bytes, bytes]] = []
        size_bytes = 0
        start = raw + after.to_bytes(8, "big")
        for key, value in _rows(txn, self._files.journal, raw, start):
            rows.append((key, value))
            size_bytes += len(value)
            if len(rows) == READ_ROWS_MAX or size_bytes >= READ_BYTES_MAX:
                return rows, True
        return rows, False


class LmdbReader(Reads):
    """Reads a store beside the node that has it open, or while none has: heads, records and rows as they become
    durable. Takes no lock, raises no generation, writes nothing. Raises InputError if there is no store."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._files = Files(self._folder, map_bytes=2**20, map_bytes_max=2**44, create=False, read_only=True)
        self._blobs: BlobFiles | None = None
        self._cached = {}
        self._loading = threading.Lock()
        self._loaded = Unfiled()
        self._loaded_from: tuple[Any, ...] = ()  # first and last key of the log and length of the tail
        self.generation = self._files.read_generation()

    @property
    def files(self) -> Files:
        """The file of the journal, for those who look at the store itself."""
        return self._files

    @property
    def blobs(self) -> BlobFiles | None:
        """The file of the blobs; None if the store has none yet."""
        return self._blobs_now()

    @property
    def unfiled(self) -> Unfiled:
        """What is in the log and the tail now."""
        return self._unfiled_now()

    def close(self) -> None:
        """Safe to call twice."""
        self._files.close()
        if self._blobs is not None:
            self._blobs.close()

    def _blobs_now(self) -> BlobFiles | None:
        with self._loading:
            # A store of an older schema has none until a node opens it.
            if self._blobs is None and (self._folder / BLOBS_NAME).exists():
                self._blobs = BlobFiles(self._folder, map_bytes_max=2**44, create=False, read_only=True)
            return self._blobs

    def _unfiled_now(self) -> Unfiled:
        with self._loading:
            log = self._files.log
            # Until no transaction came in between: it would have taken the tail away.
            while log is not None and not self._files.read(lambda txn: self._load(txn, log)):
                pass
            return self._loaded

    def _load(self, txn: lmdb.Transaction, log: Any) -> bool:
        last = int(txn.id())
        tail = read_tail(self._files.folder, self._files.generation_in(txn), last)
        if self._files.last_transaction() != last:
            return False
        with txn.cursor(db=log) as cursor:
            first = cast(bytes, cursor.key()) if cursor.first() else b""
            ends = (first, cast(bytes, cursor.key()) if cursor.last() else b"", len(tail), last if tail else 0)
        # Rows come at the end and go at the beginning, and none comes again under the same key.
        if ends != self._loaded_from:
            self._loaded = load_unfiled(txn, self._files, [(last + 1, row) for row in tail])
            self._loaded_from = ends
        return True


def load_unfiled(txn: lmdb.Transaction, files: Files, tail: Sequence[tuple[int, bytes]] = ()) -> Unfiled:
    """What the log has and the journal has not, ``tail`` being rows that follow. Raises StoreCorruptError."""

    def filed_version(run_id: str) -> int:
        raw = run_id_to_bytes(run_id)
        head = filed_head(raw, get(txn, files.heads, raw))
        return 0 if head is None else head.version

    unfiled = Unfiled()
    rows = ((int.from_bytes(key, "big"), row) for key, row in _rows(txn, files.log, b"", b""))
    unfiled.load(chain(rows, tail), filed_version)
    return unfiled


def filed_head(raw: bytes, value: bytes | None) -> Head | None:
    """The head in the row of the run with that key. Raises StoreCorruptError."""
    if value is None:
        return None
    try:
        head = decode_head(value)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a run's head cannot be read: {error}") from error
    if head.run_id != run_id_from_bytes(raw):
        raise StoreCorruptError("a head stands in another run's place", run=head.run_id)
    return head


def _add(records: list[Record], run_id: str, seq: int, batch: bytes, load: Load) -> int:
    """Adds a batch's records with seq > ``seq``, which must go on there; seq of the last record."""
    try:
        found = read_batch(batch, load)
    except StoreCorruptError as error:
        raise StoreCorruptError(f"record {seq + 1}: {error.message}", run=run_id) from error
    for record in found:
        if record.seq > seq:
            seq += 1
            if record.seq != seq:
                raise StoreCorruptError(f"record {seq} is missing", run=run_id)
            records.append(record)
    return seq


def _add_record(records: list[Record], run_id: str, seq: int, row: bytes) -> None:
    try:
        record = decode_record(row)
    except StoreCorruptError as error:
        raise StoreCorruptError(f"record {seq}: {error.message}", run=run_id) from error
    if record.seq != seq:
        raise StoreCorruptError(f"record {seq} is missing", run=run_id)
    records.append(record)


def _rows(txn: lmdb.Transaction, db: Any, prefix: bytes, after: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Rows with the prefix and key > after, in order."""
    start = max(prefix, after)
    with txn.cursor(db=db) as cursor:
        if not (cursor.set_range(start) if start else cursor.first()):
            return
        for key, value in cast(Iterator[tuple[bytes, bytes]], cursor.iternext()):
            if not key.startswith(prefix):
                return
            if key > after:
                yield key, value


def _page(txn: lmdb.Transaction, db: Any, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
    """The first ``limit`` of them."""
    return list(islice(_rows(txn, db, prefix, after), max(0, limit)))


def _page_back(txn: lmdb.Transaction, db: Any, prefix: bytes, before: bytes, limit: int) -> list[tuple[bytes, bytes]]:
    """The last ``limit`` of the whole table with key < before, if that is not empty, the last first."""
    assert not prefix
    with txn.cursor(db=db) as cursor:
        if not (cursor.prev() if before and cursor.set_range(before) else cursor.last()):
            return []
        return list(islice(cast(Iterator[tuple[bytes, bytes]], cursor.iterprev()), max(0, limit)))
