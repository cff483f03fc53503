"""What all LMDB files of a store share: opening, the map, short read transactions, readers, damage.

What must hold: one process has a file open for writing and opened it itself, never its parent (M57, checked at
every use); no transaction is open in this process while the map changes (the gate below); no write map (a
full disk is an error, not a SIGBUS); no read transaction outlives one call.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

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
from agentrt.stores.place import free_bytes

T = TypeVar("T")

#: A file up to this size is verified page by page at every open; larger ones only if they are shorter than they should
#: be. LMDB trusts its pages: what is wrong with them shows as a crash otherwise. Verifying takes about 0.1 s.
VERIFY_BYTES_MAX: Final = 4 * 2**20
#: Less than this free, and a write that failed half-way failed for want of space: more than any transaction takes.
FULL_DISK_BYTES: Final = 32 * 2**20

_CORRUPT: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
)


#: Another object in every forked child: looking at it costs less than asking the kernel for the process id.
_life = object()


def _begin_life() -> None:
    global _life
    _life = object()


os.register_at_fork(after_in_child=_begin_life)


def translate(error: lmdb.Error, limit: str) -> StoreError:
    """LMDB's error as one of ours; ``limit`` is the setting that bounds the file."""
    if isinstance(error, _CORRUPT):
        return StoreCorruptError(f"the store's file is damaged: {error}")
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError("the store is as large as it may be", limit=limit)
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


class Reader(NamedTuple):
    """A slot of the table of readers that is in use: whose it is, and how many transactions its view is behind."""

    pid: int
    thread: str
    behind: int


class Environment:
    """An open LMDB file. Raises StoreCorruptError, StoreVersionError, StoreFullError or StoreError if it cannot be
    opened, InputError if it is not there. ``limit`` names the setting that bounds it; ``flags`` go to LMDB (tests take
    durability away with them)."""

    def __init__(
        self,
        data: Path,
        *,
        dbs_max: int,
        map_bytes: int,
        map_bytes_max: int,
        limit: str,
        read_only: bool = False,
        flags: dict[str, Any] | None = None,
    ) -> None:
        self.data = data
        self.read_only = read_only
        self._limit = limit
        self._map_bytes_max = map_bytes_max
        self._gate = _Gate()
        self._life = _life
        if not data.exists():
            raise InputError(f"there is no {data.name} in {data.parent}")
        _check_pages(data)
        # A map smaller than the data would be refused.
        map_bytes = min(max(map_bytes, data.stat().st_size + 2**20), max(map_bytes_max, data.stat().st_size))
        try:
            self.env = lmdb.open(
                str(data),
                subdir=False,
                map_size=_round_up(map_bytes),
                max_dbs=dbs_max,
                max_readers=256,  # threads in a read at the same moment
                max_spare_txns=4,
                create=False,
                readonly=read_only,
                mode=0o600,
                **(flags or {}),
            )
            if not read_only:
                self.env.reader_check()  # slots of readers that were killed (M61)
        except lmdb.Error as error:
            raise translate(error, limit) from error

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """While the databases of a file just opened are looked for: what fails closes the file."""
        try:
            yield
        except lmdb.Error as error:
            self.env.close()
            if isinstance(error, lmdb.NotFoundError):
                raise StoreCorruptError(f"{self.data} is not a file of agentrt's: {error}") from error
            raise translate(error, self._limit) from error
        except BaseException:
            self.env.close()
            raise

    def check_process(self) -> None:
        """Raises InternalError in a process that did not open the store itself."""
        if self._life is not _life:
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
                raise translate(error, self._limit) from error
            finally:
                self._gate.leave()
            with self._gate.alone():
                self.env.set_mapsize(0)  # the size that the file says

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While the map must not change."""
        self._gate.enter()
        try:
            yield
        finally:
            self._gate.leave()

    @contextlib.contextmanager
    def writing(self) -> Iterator[lmdb.Transaction]:
        """The write transaction; committed and synced at the end, given up if the block raises. LMDB's own errors come
        through. One thread at a time."""
        self.check_process()
        with self.inside(), self.env.begin(write=True) as txn:
            yield txn

    def grow(self) -> None:
        """Doubles the map, between transactions. Raises StoreFullError when it may not grow any more."""
        size = self.env.info()["map_size"]
        if size >= _round_up(self._map_bytes_max):
            raise StoreFullError("the store is as large as it may be", limit=self._limit)
        with self._gate.alone():
            try:
                self.env.set_mapsize(_round_up(min(2 * size, self._map_bytes_max)))
            except lmdb.Error as error:
                raise translate(error, self._limit) from error

    def refusal(self, error: lmdb.Error) -> tuple[StoreError, bool]:
        """What a failed write means, and whether the file must not be written any more: what an input/output error left
        on the disk is unknown, and only a fresh open finds out."""
        if type(error) is lmdb.Error and free_bytes(self.data.parent) < FULL_DISK_BYTES:
            # LMDB's name for a write that the disk took in part only.
            return StoreFullError("the disk is full"), False
        forgiven = isinstance(error, lmdb.DiskError | lmdb.TxnFullError | lmdb.MemoryError | lmdb.MapFullError)
        return translate(error, self._limit), not forgiven

    def used_bytes(self) -> int:
        """Size of the data, pages free for reuse included."""
        info = self.env.info()
        return int((info["last_pgno"] + 1) * self.env.stat()["psize"])

    def check_readers(self) -> int:
        """Frees the slots of readers that were killed; how many there were."""
        with self.inside():
            return int(self.env.reader_check())

    def readers(self) -> list[Reader]:
        """Who is in a read transaction now, in this process or another."""
        with self.inside():
            table = str(self.env.readers())
            last = int(self.env.info()["last_txnid"])
        found: list[Reader] = []
        for line in table.splitlines():
            fields = line.split()  # "pid thread txnid", under a heading; "-" when the slot rests
            if len(fields) == 3 and fields[0].isdecimal() and fields[2].isdecimal():
                found.append(Reader(int(fields[0]), fields[1], max(0, last - int(fields[2]))))
        return found

    def close(self) -> None:
        """Waits for the reads under way. In a forked child nothing is touched: the file is the parent's."""
        if self._life is not _life:
            return
        with self._gate.alone(shut=True):
            self.env.close()


def get(txn: lmdb.Transaction, db: Any, key: bytes) -> bytes | None:
    """The value; bytes, as our transactions have no buffers."""
    return cast("bytes | None", txn.get(key, db=db))


def make(data: Path, dbs: Iterable[str], first: dict[bytes, bytes], limit: str) -> None:
    """A file with empty databases, and ``first`` in the one named meta; under its final name only when it is
    durable. Raises StoreError kinds."""
    folder = data.parent
    unfinished = folder / (data.name + ".new")
    for leftover in (unfinished, folder / (unfinished.name + "-lock")):
        leftover.unlink(missing_ok=True)
    names = tuple(dbs)
    try:
        with lmdb.open(str(unfinished), subdir=False, map_size=2**20, max_dbs=len(names), mode=0o600) as env:
            for name in names:
                env.open_db(name.encode())
            with env.begin(write=True) as txn:
                for key, value in first.items():
                    txn.put(key, value, db=env.open_db(b"meta", txn=txn))
    except lmdb.Error as error:
        raise translate(error, limit) from error
    (folder / (unfinished.name + "-lock")).unlink(missing_ok=True)
    unfinished.rename(data)
    sync_folder(folder)
    sync_folder(folder.parent)


def sync_file(path: Path) -> None:
    """Make the file's content durable."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable."""
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
