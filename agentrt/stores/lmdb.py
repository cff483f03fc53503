"""The default store: LMDB, one writer thread, one sync per group of batches.

Layout (docs/journal-format.md): database ``log`` n (8) -> a group of batches, ``journal`` run (16) | seq (8) -> batches
of a run, ``heads`` run (16) -> head, ``tenant_runs`` whose runs are whose (stores/lmdb_tenants.py), one database per
side table, ``meta`` with schema and generation, and who names which blob. A group is one LMDB transaction, so a run's
records, its head and its side rows appear together or not at all. Batches go to the log and are filed in journal and
heads later (stores/unfiled.py says why), in the transaction of a later group. A group without side rows is appended to
the tail (stores/tail.py), whose content the next transaction takes into the log.

The version check needs no lock: the writer alone decides, in order, against the heads of the durable state and of
the group so far. When a group fails its heads are forgotten, so whatever was given on top of it is refused too.

A batch with a large payload goes by way of the blobs' thread (stores/lmdb_blobs.py) and comes to the writer when its
blobs are durable; later batches of its run wait behind it, those of other runs do not.
"""

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import lmdb

from agentrt.errors import (
    ClosedError,
    DuplicateError,
    InternalError,
    StaleWriteError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from agentrt.ids import run_id_to_bytes
from agentrt.stores.base import Batch, Done, Head, check_batch
from agentrt.stores.lmdb_blobs import BlobFiles, BlobWriter, Put
from agentrt.stores.lmdb_entry import Entry
from agentrt.stores.lmdb_env import get
from agentrt.stores.lmdb_files import Files
from agentrt.stores.lmdb_reads import LmdbReader, Reads, filed_head, load_unfiled
from agentrt.stores.lmdb_tenants import tenant_run_key
from agentrt.stores.lock import FolderLock
from agentrt.stores.payloads import (
    ROW_MARK,
    Large,
    owner_of_row,
    parse_row_ref,
    read_value,
)
from agentrt.stores.place import check_place, free_bytes
from agentrt.stores.tail import Tail
from agentrt.stores.unfiled import Unfiled, UnfiledRun, encode_head, join, journal_rows
from agentrt.stores.writer import GroupWriter

__all__ = ["LmdbReader", "LmdbStore"]

_log: Final = logging.getLogger(__name__)

#: Heads kept decoded; a run that is not among them costs one look into the file.
HEADS_CACHED_MAX: Final = 100_000
#: Filed beside one group: what makes it a few milliseconds longer.
FILE_RUNS_MAX: Final = 128
FILE_BYTES_MAX: Final = 2**20
#: How old the measure of free space may be.
FREE_CHECK_NS: Final = 200_000_000
#: How often the table of readers is looked at, and how many transactions a read may fall behind before it is said: a
#: read takes milliseconds, and while it lasts no page that was freed since can be used again.
READERS_CHECK_NS: Final = 10_000_000_000
READER_LAG_MAX: Final = 1_000


#: Runs to be filed: the head, and the batches that are not in the journal, each with the seq of its last record.
_Filing = dict[str, tuple[Head, list[tuple[int, bytes]]]]


class LmdbStore(Reads):
    """A node's session on the store in ``folder``, made if it is missing.

    ``loop`` is where ``done`` runs. ``map_bytes`` grows by doubling to ``map_bytes_max``. With less than
    ``free_bytes_min`` bytes free on the disk, or less than a sixteenth of ``map_bytes_max`` left, new runs are refused
    (StoreFullError) while those accepted go on until there is nothing left at all. About ``log_bytes_max`` bytes of
    batches stay in the log and in memory until they are filed. The file of the blobs grows to ``blob_bytes_max``.
    ``held``: the caller has the folder's lock.
    Raises StoreInUseError, StorePlaceError (unless ``force_place``), StoreCorruptError, StoreVersionError, StoreError.
    """

    #: What tests change to show that durability comes from somewhere.
    _flags: ClassVar[dict[str, Any]] = {}
    _blob_flags: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loop: asyncio.AbstractEventLoop,
        *,
        map_bytes: int = 256 * 2**20,
        map_bytes_max: int = 64 * 2**30,
        free_bytes_min: int = 64 * 2**20,
        force_place: bool = False,
        log_bytes_max: int = 8 * 2**20,
        blob_bytes_max: int = 64 * 2**30,
        held: bool = False,
    ) -> None:
        folder = Path(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            hint = "store.path is a folder that this user may make or write"
            raise StoreError(f"{folder} cannot be made: {error.strerror}", hint=hint) from error
        if not force_place:
            check_place(folder)
        self._lock: FolderLock | None = None
        try:
            if not held:
                self._lock = FolderLock(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be locked: {error.strerror}") from error
        try:
            self._files = Files(
                folder, map_bytes=map_bytes, map_bytes_max=map_bytes_max, create=True, flags=self._flags
            )
            try:
                self._blobs = BlobFiles(folder, map_bytes_max=blob_bytes_max, create=True, flags=self._blob_flags)
                try:
                    self.generation, number = self._files.begin_session()
                    self._unfiled = self._files.read(lambda txn: load_unfiled(txn, self._files))
                    self._row_blobs: int = self._files.read(lambda txn: txn.stat(self._files.blob_rows)["entries"])
                    try:
                        self._tail = Tail(folder, self.generation, number)
                    except OSError as error:
                        raise StoreError(f"the store's tail cannot be written: {error.strerror}") from error
                except BaseException:
                    self._blobs.close()
                    raise
            except BaseException:
                self._files.close()
                raise
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self._generation_value = self.generation.to_bytes(8, "big")
        self._free_bytes_min = free_bytes_min
        self._map_low = map_bytes_max - map_bytes_max // 16
        self._low: str | None = None  # why new runs are refused
        self._low_checked_ns = 0
        self._readers_checked_ns = time.monotonic_ns()
        self._lagging: set[tuple[int, str]] = set()  # readers that were named already
        self._log_bytes_max = min(log_bytes_max, map_bytes_max // 16)
        self._filing = False  # until the log is half as large as it may be
        self._filing_not_before_ns = 0
        self._failed: StoreError | None = None  # set for good once LMDB gave the environment up
        self._in_tail: list[Entry] = []
        self._log_number = number + 1  # of the row they will be in
        self._cached = {}
        self._closing = threading.Lock()
        self._is_closed = False
        self._behind: dict[str, deque[Entry]] = {}  # batches of runs, one of whose blobs is on its way; "": of none
        self._behind_lock = threading.Lock()
        self._writer: GroupWriter[Entry] = GroupWriter(loop, self._apply, self._idle)
        self._blob_writer = BlobWriter(self._blobs, self._files.names_blob, lambda: self._writer.backlog()[0] > 0)

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
        entry = Entry(batch, done)
        if self._behind or entry.given is not None:
            self._give_apart(entry)
        else:
            self._writer.give(entry)

    def backlog(self) -> tuple[int, int]:
        self._files.check_process()
        if self._is_closed:
            raise ClosedError("the store is closed")
        batches, size_bytes = self._writer.backlog()
        if self._behind:
            with self._behind_lock:
                batches += sum(map(len, self._behind.values()))
            size_bytes += self._blob_writer.backlog()[1]
        return batches, size_bytes

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._files.check_process()
            except InternalError:  # a forked child: everything is the parent's
                return
            self._blob_writer.close()
            self._writer.close()
            try:
                self._file_all()
            finally:
                self._tail.close()
                self._files.close()
                self._blobs.close()
                if self._lock is not None:
                    self._lock.release()

    def _unfiled_now(self) -> Unfiled:
        return self._unfiled

    def _blobs_now(self) -> BlobFiles:
        return self._blobs

    def _closed(self) -> bool:
        return self._is_closed

    # --- batches with blobs -------------------------------------------------------

    def _give_apart(self, entry: Entry) -> None:
        """For a batch that may have large payloads, or may have to wait for one before it."""
        large, values = entry.large()
        with self._behind_lock:
            before = self._behind.get(entry.run_id)
            if not large and not values:
                entry.keep()
                if before is None:
                    self._writer.give(entry)
                else:
                    before.append(entry)
                return
            datas = [payload.data for payload in large] + values
            tier = entry.head.tier if entry.run_id else 0
            put = Put(datas, tier, lambda put: self._blobs_durable(entry, large, put))
            self._blob_writer.give(put)
            if before is None:
                self._behind[entry.run_id] = deque((entry,))
            else:
                before.append(entry)

    def _blobs_durable(self, entry: Entry, large: list[Large], put: Put) -> None:
        """On the blobs' thread: the entry has its blobs, or is refused; what waited for it goes on."""
        if put.error is not None:
            entry.refused = put.error
            entry.tails = False
            entry.given = None
        else:
            entry.split(large, put.refs)
        entry.pins = tuple(ref.digest for ref in put.refs)
        with self._behind_lock:
            waiting = self._behind[entry.run_id]
            while waiting and waiting[0].given is None:
                self._writer.give(waiting.popleft())
            if not waiting:
                del self._behind[entry.run_id]

    # --- the writer's thread ------------------------------------------------------

    def _apply(self, group: list[Entry]) -> None:
        try:
            self._apply_group(group)
        finally:
            for entry in group:
                if entry.pins:
                    self._blob_writer.settle(entry.pins)

    def _apply_group(self, group: list[Entry]) -> None:
        if self._failed is not None:
            raise self._failed
        self._look_at_space()
        if any(entry.erase for entry in group):
            self._file_all()  # or the log would bring the run back
        if not self._append(group):
            self._settle(group)

    def _append(self, group: Sequence[Entry]) -> bool:
        """Puts a group that only adds to journals into the tail, if there is room and nothing has to be filed or
        refused."""
        if self._unfiled.size_bytes > self._log_bytes_max:
            return False
        cached = self._cached
        heads: dict[str, Head] = {}
        for entry in group:
            if not entry.tails:
                return False
            head = heads.get(entry.run_id) or cached.get(entry.run_id)
            if head is None or head.version != entry.after:
                return False
            heads[entry.run_id] = entry.head
        # Whoever opens the store after us begins with a transaction.
        if self._files.last_transaction() != self._log_number - 1:
            return False
        try:
            if not self._tail.append(join([entry.logged for entry in group])):
                return False
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            # What is on the disk now is unknown; only a fresh open finds out.
            self._failed = StoreError(f"the store's tail cannot be written: {error.strerror}")
            raise self._failed from error
        self._in_tail.extend(group)
        self._unfiled.add(group, self._log_number)
        self._remember(heads)
        return True

    def _remember(self, heads: dict[str, Head]) -> None:
        if len(self._cached) + len(heads) > HEADS_CACHED_MAX:
            self._cached.clear()
        self._cached.update(heads)

    def _settle(self, group: list[Entry]) -> None:
        try:
            self._write_growing(group)
        except StoreFullError as error:
            self._low_checked_ns = 0
            if len(group) == 1:
                group[0].error = error
                return
            # One that is too large must not take the others with it.
            middle = len(group) // 2
            self._settle(group[:middle])
            self._settle(group[middle:])

    def _write_growing(self, group: list[Entry]) -> None:
        oldest = self._to_file(group)
        file_ended = time.monotonic_ns() >= self._filing_not_before_ns
        while True:
            for given in group:
                given.error = None
            try:
                try:
                    self._write(group, oldest, file_ended)
                    return
                except lmdb.MapFullError:
                    self._files.grow()
                except lmdb.Error as error:
                    raise self._refusal(error) from error
            except StoreFullError:
                if not file_ended:
                    raise
                # Filing takes room before it gives some back; what was given goes first.
                oldest, file_ended = (), False
                self._filing_not_before_ns = time.monotonic_ns() + FREE_CHECK_NS

    def _refusal(self, error: lmdb.Error) -> StoreError:
        refusal, for_good = self._files.refusal(error)
        if for_good:
            self._failed = refusal
        return refusal

    def _write(self, group: list[Entry], oldest: Sequence[UnfiledRun], file_ended: bool) -> None:
        """One transaction, in which ``oldest`` are filed, and runs that end in it if ``file_ended``. Refused batches
        have their ``error`` set. Raises lmdb.Error, and nothing is changed."""
        files = self._files
        cached = self._cached
        heads: dict[str, Head] = {}
        entries: list[Entry] = []
        rows: dict[str, dict[bytes, bytes | None]] = {}
        erased: list[str] = []
        naming: list[Entry] = []
        unnamed: list[bytes] = []  # digests with a name less
        accepted: list[tuple[bytes, bytes]] = []  # rows of the index by tenant
        row_blobs = self._row_blobs
        with files.writing() as txn:
            if txn.get(b"generation", db=files.meta) != self._generation_value:
                raise StaleWriteError("this session is over: the store was opened again")
            number = txn.id()
            for entry in group:
                run_id = entry.run_id
                if entry.refused is not None:
                    entry.error = entry.refused
                    continue
                if not run_id:
                    if self._plain(txn, entry, rows) and entry.erase is not None:
                        erased.append(entry.erase)
                    continue
                head = heads.get(run_id) or cached.get(run_id) or self._durable_head(txn, run_id)
                version = 0 if head is None else head.version
                if version != entry.after:
                    entry.error = StaleWriteError(f"the run is at version {version}, not {entry.after}", run=run_id)
                    continue
                if version == 0 and self._low is not None:
                    entry.error = StoreFullError(self._low, run=run_id, hint="Running work goes on; make room")
                    continue
                if entry.unique and (error := self._duplicate(txn, entry, rows)) is not None:
                    entry.error = error
                    continue
                entries.append(entry)
                if version == 0:
                    accepted.append((tenant_run_key(entry.head), b""))
                if entry.blobs:
                    naming.append(entry)
                heads[run_id] = entry.head
                for row in entry.unique:
                    rows.setdefault(row.table, {})[row.key] = row.value
                for row in entry.rows:
                    rows.setdefault(row.table, {})[row.key] = row.value
            filing = {run.head.run_id: (run.head, run.batches) for run in oldest}
            if file_ended and (ended := [head for head in heads.values() if head.ended_ns]):
                entries = self._take_ended(ended, entries, filing)
            logged = [entry.logged for entry in self._in_tail if entry.run_id not in filing]
            logged += [entry.logged for entry in entries]
            if logged:
                txn.put(_number_key(number), join(logged), db=files.log)
            for table, changes in rows.items():
                db = files.table(table)
                # Sorted: neighbours share pages.
                for key, value in sorted(changes.items()):
                    if row_blobs or (value and value[0] == ROW_MARK):
                        row_blobs += self._name_in_row(txn, table, key, get(txn, db, key), value, unnamed)
                    if value is None:
                        txn.delete(key, db=db)
                    else:
                        txn.put(key, value, db=db)
            if accepted:
                accepted.sort()
                with txn.cursor(db=files.tenant_runs) as cursor:
                    cursor.putmulti(accepted)
            for entry in naming:
                raw = run_id_to_bytes(entry.run_id)
                for digest in entry.blobs:
                    txn.put(raw + digest, b"", db=files.run_blobs)
                    txn.put(digest + raw, b"", db=files.blob_runs)
            for run_id in erased:
                unnamed += self._erase(txn, run_id)
            gone = self._file(txn, filing, number) if filing else ()
        self._unfiled.settle(filing, gone, number, entries, row=bool(logged))
        # One that changed nothing, as when all was refused, did not count.
        last = files.last_transaction()
        self._tail.begin(last)
        self._in_tail.clear()
        self._log_number = last + 1
        self._row_blobs = row_blobs
        if unnamed:
            self._blob_writer.doubt(unnamed)
        self._remember(heads)
        for run_id in erased:
            cached.pop(run_id, None)

    def _plain(self, txn: lmdb.Transaction, entry: Entry, rows: dict[str, dict[bytes, bytes | None]]) -> bool:
        """A batch of no run: its rows, if it is not refused."""
        if entry.unique and (error := self._duplicate(txn, entry, rows)) is not None:
            entry.error = error
            return False
        if entry.erase is not None and not self._unfiled.empty:
            entry.error = StoreError("the log could not be filed; try again later", run=entry.erase)
            return False
        for row in entry.unique + entry.rows:
            rows.setdefault(row.table, {})[row.key] = row.value
        return True

    def _erase(self, txn: lmdb.Transaction, run_id: str) -> list[bytes]:
        """The digests that it named."""
        files = self._files
        raw = run_id_to_bytes(run_id)
        with contextlib.suppress(StoreCorruptError):  # then nothing says whose it was; reads pass the row over
            if (head := filed_head(raw, get(txn, files.heads, raw))) is not None:
                txn.delete(tenant_run_key(head), db=files.tenant_runs)
        txn.delete(raw, db=files.heads)
        digests: list[bytes] = []
        for db in (files.journal, files.run_blobs):
            with txn.cursor(db=db) as cursor:
                found = cursor.set_range(raw)
                while found and (key := bytes(cursor.key())).startswith(raw):
                    if db is files.run_blobs:
                        digests.append(key[len(raw) :])
                    found = cursor.delete()
        for digest in digests:
            txn.delete(digest + raw, db=files.blob_runs)
        return digests

    def _name_in_row(
        self,
        txn: lmdb.Transaction,
        table: str,
        key: bytes,
        old: bytes | None,
        new: bytes | None,
        unnamed: list[bytes],
    ) -> int:
        """A row changes from one stored value to another: how many more rows name a blob."""
        before = None if old is None else parse_row_ref(old)
        after = None if new is None else parse_row_ref(new)
        if before == after:
            return 0
        db, owner = self._files.blob_rows, owner_of_row(table, key)
        if before is not None:
            txn.delete(before.digest + owner, db=db)
            unnamed.append(before.digest)
        if after is not None:
            txn.put(after.digest + owner, b"", db=db)
        return (after is not None) - (before is not None)

    def _take_ended(self, ended: Sequence[Head], entries: Sequence[Entry], filing: _Filing) -> list[Entry]:
        """Adds runs to ``filing``, with all their batches; the entries that remain for the log."""
        for head in ended:
            filing[head.run_id] = (head, self._unfiled.of(head.run_id).copy())
        remaining: list[Entry] = []
        for entry in entries:
            # One of the oldest that has not ended: what comes now is for the log.
            run = filing.get(entry.run_id)
            if run is None or not run[0].ended_ns:
                remaining.append(entry)
            elif entry.batch:
                run[1].append((entry.head.version, entry.batch))
        return remaining

    def _durable_head(self, txn: lmdb.Transaction, run_id: str) -> Head | None:
        head = self._unfiled.head(run_id)
        if head is not None:
            return head
        raw = run_id_to_bytes(run_id)
        return filed_head(raw, get(txn, self._files.heads, raw))

    def _to_file(self, group: Sequence[Entry]) -> Sequence[UnfiledRun]:
        """The runs to file beside the group."""
        size_bytes, half = self._unfiled.size_bytes, self._log_bytes_max // 2
        self._filing = size_bytes > (half if self._filing else self._log_bytes_max)
        if not self._filing or time.monotonic_ns() < self._filing_not_before_ns:
            return ()
        # A large group adds more than the usual share takes away, so it takes twice what it adds.
        share_bytes = max(FILE_BYTES_MAX, 2 * sum(entry.size_bytes for entry in group))
        return self._unfiled.oldest(min(size_bytes - half, share_bytes), max(FILE_RUNS_MAX, 2 * len(group)))

    def _file(self, txn: lmdb.Transaction, filing: _Filing, number: int) -> Sequence[int]:
        """Puts the runs into journal and heads, and deletes the log rows that are not needed then; their numbers."""
        files = self._files
        heads: list[tuple[bytes, bytes]] = []
        rows: list[tuple[bytes, bytes]] = []
        for run_id, (head, batches) in filing.items():
            raw = run_id_to_bytes(run_id)
            heads.append((raw, encode_head(head)))
            for version, row in journal_rows(batches):
                rows.append((raw + version.to_bytes(8, "big"), row))
        for db, items in ((files.journal, rows), (files.heads, heads)):
            items.sort()
            with txn.cursor(db=db) as cursor:
                cursor.putmulti(items)
        gone = self._unfiled.unneeded(filing, number)
        for old in gone:
            txn.delete(_number_key(old), db=files.log)
        return gone

    def _file_all(self) -> None:
        """Leaves the log empty if that can be done. On the writer's thread, or when it has ended."""
        while self._failed is None and (oldest := self._unfiled.oldest(FILE_BYTES_MAX, FILE_RUNS_MAX)):
            try:
                try:
                    self._write([], oldest, True)
                except lmdb.MapFullError:
                    self._files.grow()
                except lmdb.Error as error:
                    raise self._refusal(error) from error
            except StoreError as error:
                _log.debug("what is in the log stays there: %s", error)
                return

    def _duplicate(
        self, txn: lmdb.Transaction, entry: Entry, rows: dict[str, dict[bytes, bytes | None]]
    ) -> DuplicateError | None:
        for row in entry.unique:
            changes = rows.get(row.table)
            if changes is not None and row.key in changes:
                found = changes[row.key]
            else:
                found = get(txn, self._files.table(row.table), row.key)
            if found is not None:
                value = read_value(found, self._blobs.load)
                return DuplicateError(f"the {row.table} row exists", value, run=entry.run_id)
        return None

    def _look_at_space(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._low_checked_ns < FREE_CHECK_NS and self._low_checked_ns:
            return
        self._low_checked_ns = now_ns
        if now_ns - self._readers_checked_ns >= READERS_CHECK_NS:
            self._readers_checked_ns = now_ns
            self._check_readers()
        free = free_bytes(self._files.folder)
        used = self._files.used_bytes()
        if free < self._free_bytes_min:
            self._low = f"the disk has {free} bytes left, less than {self._free_bytes_min}"
        elif used > self._map_low:
            self._low = f"the store has {used} bytes and may have little more"
        else:
            self._low = None

    def _check_readers(self) -> None:
        """Frees the slots of readers that were killed (M61), and names those that hold pages back (M62)."""
        lagging: set[tuple[int, str]] = set()
        for files in (self._files, self._blobs):
            files.check_readers()
            for reader in files.readers():
                if reader.behind > READER_LAG_MAX:
                    who = (reader.pid, reader.thread)
                    lagging.add(who)
                    if who not in self._lagging:
                        _log.warning(
                            "process %d reads %s and is %d transactions behind: the file grows until it ends",
                            reader.pid,
                            files.data,
                            reader.behind,
                        )
        self._lagging = lagging

    def _idle(self) -> None:
        self._check_readers()
        self._file_all()


def _number_key(number: int) -> bytes:
    return number.to_bytes(8, "big")
