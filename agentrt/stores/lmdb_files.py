"""The LMDB environment of a store: its folder, schema, map and short read transactions.

Folder:

    lock            held by the node that has the store open (stores/lock.py)
    journal.mdb     the data; made under another name and renamed, so it is there whole or not at all
    journal.mdb-lock  LMDB's reader table
    journal.tail    what was written since the last transaction (stores/tail.py)

What must hold: one process has the store open for writing and opened it itself, never its parent (M57, the process id
is checked at every use); no transaction is open in this process while the map changes (the gate below); no write map
(a full disk is an error, not a SIGBUS); no read transaction outlives one call.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import lmdb
import lmdb.verify

from agentrt.errors import (
    ClosedError,
    InputError,
    InternalError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreVersionError,
)
from agentrt.stores.base import IDEMPOTENCY, INBOX, OUTBOX, READY, TABLES
from agentrt.stores.tail import read_tail
from agentrt.stores.unfiled import concatenate

T = TypeVar("T")

#: Raised when older code must not touch the data. 1: a row per record, no log; such stores are brought up at open.
SCHEMA: Final = 2
DATA_NAME: Final = "journal.mdb"

#: A file up to this size is verified page by page at every open; larger ones only if they are shorter than they should
#: be. LMDB trusts its pages: what is wrong with them shows as a crash otherwise. Verifying takes about 0.1 s.
VERIFY_BYTES_MAX: Final = 4 * 2**20

_NAMES: Final = ("meta", "heads", "journal", READY, IDEMPOTENCY, INBOX, OUTBOX)  # databases of every schema
_LOG: Final = "log"
_NEW: Final = (_LOG, *(table for table in TABLES if table not in _NAMES))  # since schema 2
_DBS_MAX: Final = len(_NAMES) + len(_NEW)

_CORRUPT: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
)


def translate(error: lmdb.Error) -> StoreError:
    """LMDB's error as one of ours."""
    if isinstance(error, _CORRUPT):
        return StoreCorruptError(f"the store's file is damaged: {error}")
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError("the store is as large as it may be", limit="store.map_bytes_max")
    if isinstance(error, lmdb.DiskError):
        return StoreFullError("the disk is full")
    if isinstance(error, lmdb.VersionMismatchError):
        return StoreVersionError(f"the store's file is of another LMDB format: {error}")
    return StoreError(f"the store cannot be used: {error}")


class _Gate:
    """Many may be inside, or one may change the map. Who comes while that one waits stands outside."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._barred = False
        self.shut = False

    def enter(self) -> None:
        with self._changed:
            while self._barred:
                self._changed.wait()
            if self.shut:
                raise ClosedError("the store is closed")
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._barred and not self._inside:
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, *, shut: bool = False) -> Iterator[None]:
        with self._changed:
            while self._barred:
                self._changed.wait()
            self._barred = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._barred = False
                self.shut = self.shut or shut
                self._changed.notify_all()


class Files:
    """The open environment. Raises StoreCorruptError, StoreVersionError, StoreFullError or StoreError if it cannot be
    opened; ``create`` makes the store if there is none. ``flags`` go to LMDB (tests take durability away with them)."""

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes: int,
        map_bytes_max: int,
        create: bool,
        read_only: bool = False,
        flags: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.data = folder / DATA_NAME
        self.read_only = read_only
        self._map_bytes_max = map_bytes_max
        self._gate = _Gate()
        self._process = os.getpid()
        if not self.data.exists():
            if not create:
                raise InputError(f"there is no store in {folder}")
            _make(folder, self.data)
        _check_pages(self.data)
        # A map smaller than the data would be refused.
        map_bytes = min(max(map_bytes, self.data.stat().st_size + 2**20), max(map_bytes_max, self.data.stat().st_size))
        try:
            self.env = lmdb.open(
                str(self.data),
                subdir=False,
                map_size=_round_up(map_bytes),
                max_dbs=_DBS_MAX,
                max_readers=256,  # threads in a read at the same moment
                max_spare_txns=4,
                create=False,
                readonly=read_only,
                mode=0o600,
                **(flags or {}),
            )
        except lmdb.Error as error:
            raise translate(error) from error
        try:
            if not read_only:
                self.env.reader_check()  # slots of readers that were killed (M61)
            dbs = {name: self.env.open_db(name.encode(), create=False) for name in _NAMES}
            self.meta, self.heads, self.journal = (dbs.pop(name) for name in _NAMES[:3])
            self.tables: dict[str, Any] = dbs
            self._log: Any = None
            schema = self._open_new()
        except lmdb.Error as error:
            self.env.close()
            if isinstance(error, lmdb.NotFoundError):
                raise StoreCorruptError(f"{self.data} is not a store of agentrt: {error}") from error
            raise translate(error) from error
        if schema != SCHEMA:
            self.env.close()
            if schema > SCHEMA:
                raise StoreVersionError(
                    f"the store has schema {schema}, this agentrt knows {SCHEMA}", hint="Use the agentrt that wrote it"
                )
            raise StoreCorruptError(f"the store has schema {schema}, which never was")

    @property
    def log(self) -> Any:
        """The log's database; None in a store of schema 1, which only readers see."""
        if self._log is None and self.read_only:
            self.read(lambda txn: None)  # the map is as large as the file
            self._gate.enter()
            try:
                self._open_new()
            except lmdb.Error as error:
                raise translate(error) from error
            finally:
                self._gate.leave()
        return self._log

    def table(self, name: str) -> Any:
        """A side table's database; None if a store of schema 1, which only readers see, has none of the name."""
        found = self.tables.get(name)
        return found if found is not None or self.log is None else self.tables[name]

    def _open_new(self) -> int:
        """Opens the databases that a store of schema 1 gets here, unless this is a reader. The schema that the reader
        should know: a store without them is as good as one in which they are empty."""
        with self.env.begin() as txn:
            schema = int.from_bytes(txn.get(b"schema", b"", db=self.meta), "big")
        if schema == 1 and self.read_only:
            return SCHEMA
        if schema == 1:
            with self.env.begin(write=True) as txn:
                dbs = {name: self.env.open_db(name.encode(), txn=txn) for name in _NEW}
                txn.put(b"schema", SCHEMA.to_bytes(4, "big"), db=self.meta)
            schema = SCHEMA
        elif schema == SCHEMA:
            dbs = {name: self.env.open_db(name.encode(), create=False) for name in _NEW}
        else:
            return schema
        self._log = dbs.pop(_LOG)
        self.tables |= dbs
        return schema

    def begin_session(self) -> tuple[int, int]:
        """The new session's generation and the transaction that made it durable; what the last session left in its tail
        is in the log then. Raises StoreCorruptError."""
        try:
            with self.env.begin(write=True) as txn:
                number = int(txn.id())
                generation = self.generation_in(txn)
                if rows := read_tail(self.folder, generation, number - 1):
                    txn.put(number.to_bytes(8, "big"), concatenate(rows), db=self._log)
                txn.put(b"generation", (generation + 1).to_bytes(8, "big"), db=self.meta)
        except lmdb.Error as error:
            raise translate(error) from error
        return generation + 1, number

    def read_generation(self) -> int:
        """The generation of the last session."""
        return self.read(self.generation_in)

    def generation_in(self, txn: lmdb.Transaction) -> int:
        """The generation of the last session, as the transaction sees it."""
        return int.from_bytes(txn.get(b"generation", b"", db=self.meta), "big")

    def last_transaction(self) -> int:
        """Number of the last one that changed something."""
        return int(self.env.info()["last_txnid"])

    def check_process(self) -> None:
        """Raises InternalError in a process that did not open the store itself."""
        if os.getpid() != self._process:
            raise InternalError(
                "the store was opened before this process was forked", hint="Open the store in the process that uses it"
            )

    def read(self, look: Callable[[lmdb.Transaction], T]) -> T:
        """``look`` inside a read transaction of its own; from any thread."""
        self.check_process()
        while True:
            self._gate.enter()
            try:
                with self.env.begin() as txn:
                    return look(txn)
            except lmdb.MapResizedError:
                pass  # read only: the node has grown the file
            except lmdb.Error as error:
                raise translate(error) from error
            finally:
                self._gate.leave()
            with self._gate.alone():
                self.env.set_mapsize(0)  # the size that the file says

    @contextlib.contextmanager
    def writing(self) -> Iterator[lmdb.Transaction]:
        """The write transaction; committed and synced at the end, given up if the block raises. LMDB's own errors come
        through. One thread at a time."""
        self.check_process()
        self._gate.enter()
        try:
            with self.env.begin(write=True) as txn:
                yield txn
        finally:
            self._gate.leave()

    def grow(self) -> None:
        """Doubles the map, between transactions. Raises StoreFullError when it may not grow any more."""
        size = self.env.info()["map_size"]
        if size >= _round_up(self._map_bytes_max):
            raise StoreFullError("the store is as large as it may be", limit="store.map_bytes_max")
        with self._gate.alone():
            try:
                self.env.set_mapsize(_round_up(min(2 * size, self._map_bytes_max)))
            except lmdb.Error as error:
                raise translate(error) from error

    def used_bytes(self) -> int:
        """Size of the data, pages free for reuse included."""
        info = self.env.info()
        return int((info["last_pgno"] + 1) * self.env.stat()["psize"])

    def check_readers(self) -> int:
        """Frees the slots of readers that were killed; how many there were."""
        self._gate.enter()
        try:
            return int(self.env.reader_check())
        finally:
            self._gate.leave()

    def close(self) -> None:
        """Waits for the reads under way. In a forked child nothing is touched: the file is the parent's."""
        if os.getpid() != self._process:
            return
        with self._gate.alone(shut=True):
            self.env.close()


def get(txn: lmdb.Transaction, db: Any, key: bytes) -> bytes | None:
    """The value; bytes, as our transactions have no buffers."""
    return cast("bytes | None", txn.get(key, db=db))


def _make(folder: Path, data: Path) -> None:
    """A store without runs, under its final name only when it is durable."""
    unfinished = folder / (DATA_NAME + ".new")
    for leftover in (unfinished, folder / (unfinished.name + "-lock")):
        leftover.unlink(missing_ok=True)
    try:
        with lmdb.open(str(unfinished), subdir=False, map_size=2**20, max_dbs=_DBS_MAX, mode=0o600) as env:
            for name in (*_NAMES, *_NEW):
                env.open_db(name.encode())
            with env.begin(write=True) as txn:
                txn.put(b"schema", SCHEMA.to_bytes(4, "big"), db=env.open_db(b"meta", txn=txn))
    except lmdb.Error as error:
        raise translate(error) from error
    (folder / (unfinished.name + "-lock")).unlink(missing_ok=True)
    unfinished.rename(data)
    _sync_folder(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_pages(data: Path) -> None:
    """Raises StoreCorruptError for a file that would crash LMDB, as far as that can be told in a moment."""
    size = data.stat().st_size
    if size < 2 * 4096:
        raise StoreCorruptError(f"{data} is cut off: it has {size} bytes")
    if size <= VERIFY_BYTES_MAX or _pages_bytes(data) > size:
        verify(data)


def verify(data: Path) -> None:
    """Checks every page of a store's file that no one has open. Raises StoreCorruptError naming what is wrong."""
    try:
        findings = lmdb.verify.verify(str(data), subdir=False)  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        raise StoreCorruptError(f"{data} is not the file of a store: {error}") from error
    if findings:
        raise StoreCorruptError(f"{data} is damaged: {findings[0]} ({len(findings)} findings)")


def _pages_bytes(data: Path) -> int:
    """Bytes the file should have by its newer meta page. The last pages may be free and never written, so a shorter
    file is suspicious, not wrong."""
    with data.open("rb") as file:
        metas = file.read(4096 + 256)
    # Page header 16 bytes, then MDB_meta: last_pg at 120, txnid at 128; page size is md_pad of the first tree, at 24.
    page = int.from_bytes(metas[16 + 24 : 16 + 28], "little")
    newest = max((0, 4096), key=lambda at: int.from_bytes(metas[at + 16 + 128 : at + 16 + 136], "little"))
    return (int.from_bytes(metas[newest + 16 + 120 : newest + 16 + 128], "little") + 1) * page


def _round_up(size: int) -> int:
    return -(-size // 65536) * 65536  # a multiple of every page size there is
