"""Making a store smaller: copies without free pages and without blobs that nobody names, in the place of the files.

Each copy is durable, checked, and renamed over its file, so a kill leaves the old file or the new one, both whole and
with the same content; the two files can change places one after the other for the same reason. LMDB's table of readers
belongs to a data file: while the files change places it is locked as LMDB itself locks it, so nobody has the old file
open, and it is emptied for the new one.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from agentrt.errors import StoreCorruptError, StoreError, StoreInUseError
from agentrt.progress import Progress, no_progress
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.lmdb_blobs import DATA_NAME as BLOBS_NAME
from agentrt.stores.lmdb_blobs import BlobFiles, BlobWriter
from agentrt.stores.lmdb_env import sync_folder, verify
from agentrt.stores.lmdb_files import DATA_NAME, Files

_SUFFIX: Final = ".compact"
_MAP_BYTES_MAX: Final = 2**44


class Sizes(NamedTuple):
    """Bytes of both files."""

    before: int
    after: int


def migrate(folder: Path, progress: Progress = no_progress) -> tuple[int, int]:
    """Brings a held store up to this agentrt's schema: (schema before, schema now). Its tail is in the log then. Raises
    StoreVersionError if it is newer."""
    reader = Files(folder, map_bytes=2**20, map_bytes_max=_MAP_BYTES_MAX, create=False, read_only=True)
    before = reader.schema
    reader.close()
    files = Files(
        folder,
        map_bytes=2**20,
        map_bytes_max=_MAP_BYTES_MAX,
        create=False,
        progress=progress,
    )
    try:
        files.begin_session()
        BlobFiles(folder, map_bytes_max=_MAP_BYTES_MAX, create=True).close()
        return before, files.schema
    finally:
        files.close()


def compact(folder: Path, progress: Progress = no_progress) -> Sizes:
    """Of a held store, which is brought up to this agentrt's schema first. Raises StoreCorruptError if a file is
    damaged, StoreInUseError if somebody reads it, StoreError if there is no room: the store is as it was then."""
    paths = [folder / name for name in (DATA_NAME, BLOBS_NAME)]
    _drop_copies(paths)  # of a compaction that was killed
    for path in paths:
        if path.exists():
            progress(f"pages of {path.name}", 0, 0)
            verify(path)
    try:
        return _compact(folder, paths, progress)
    finally:
        _drop_copies(paths)


def _drop_copies(paths: list[Path]) -> None:
    for path in paths:
        path.with_name(path.name + _SUFFIX).unlink(missing_ok=True)


def _compact(folder: Path, paths: list[Path], progress: Progress) -> Sizes:
    _file_all(folder)
    before = sum(path.stat().st_size for path in paths)
    _drop_unnamed_blobs(folder, progress)
    for path in paths:
        progress(f"copying {path.name}", 0, 0)
        _copy(path)
        progress(f"pages of the copy of {path.name}", 0, 0)
        verify(path.with_name(path.name + _SUFFIX))
    for path in paths:
        with _nobody_reads(path):
            path.with_name(path.name + _SUFFIX).rename(path)
            sync_folder(folder)
    return Sizes(before, sum(path.stat().st_size for path in paths))


def _copy(path: Path) -> None:
    copy = path.with_name(path.name + _SUFFIX)
    try:
        with lmdb.open(str(path), subdir=False, create=False, max_dbs=64, map_size=_map_bytes(path)) as env:
            fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                env.copyfd(fd, compact=True)
                os.fsync(fd)
            finally:
                os.close(fd)
            with lmdb.open(str(copy), subdir=False, readonly=True, lock=False, max_dbs=64) as copied:
                if _entries(copied) != _entries(env):
                    raise StoreCorruptError(f"the copy of {path.name} is not what was copied")
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{path.name} cannot be copied: {error}", hint="Make room on the disk") from error


def _map_bytes(path: Path) -> int:
    return -(-path.stat().st_size // 65536) * 65536 + 2**20


def _entries(env: lmdb.Environment) -> dict[bytes, int]:
    """How many rows each database has."""
    with env.begin() as txn:
        with txn.cursor() as cursor:
            names = [bytes(name) for name in cursor.iternext(values=False)]
        return {name: int(txn.stat(env.open_db(name, txn=txn, create=False))["entries"]) for name in names}


@contextlib.contextmanager
def _nobody_reads(path: Path) -> Iterator[None]:
    """While the file may be replaced. LMDB holds a shared lock on the first byte of its table of readers."""
    fd = os.open(path.with_name(path.name + "-lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            hint = "Wait for commands such as `agentrt runs`, then try again"
            raise StoreInUseError(f"somebody reads {path}", hint=hint) from None
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _file_all(folder: Path) -> None:
    """Brings the store up and leaves log and tail empty: both count transactions, whose numbers begin anew in a
    copy."""
    loop = asyncio.new_event_loop()
    try:
        LmdbStore(folder, loop, map_bytes_max=_MAP_BYTES_MAX, free_bytes_min=0, force_place=True, held=True).close()
    finally:
        loop.close()
    files = Files(folder, map_bytes=2**20, map_bytes_max=_MAP_BYTES_MAX, create=False, read_only=True)
    try:
        if files.read(lambda txn: txn.stat(files.log)["entries"]):
            raise StoreError("the store's log could not be filed", hint="Make room on the disk")
    finally:
        files.close()


def _drop_unnamed_blobs(folder: Path, progress: Progress) -> None:
    progress("blobs that nobody names", 0, 0)
    files = Files(folder, map_bytes=2**20, map_bytes_max=_MAP_BYTES_MAX, create=False)
    blobs = BlobFiles(folder, map_bytes_max=_MAP_BYTES_MAX, create=True)
    try:
        writer = BlobWriter(blobs, files.names_blob, lambda: False)
        writer.clean()
        writer.close()
    finally:
        blobs.close()
        files.close()
