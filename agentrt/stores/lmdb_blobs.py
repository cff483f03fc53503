"""Blobs in an LMDB file of their own: one thread that writes them in paced chunks, and deletes what nobody names.

A 64 MiB put in the journal's file would hold every commit up for a third of a second; here it is many short
transactions, and a small blob does not wait for a large one. A blob is complete when its row in ``blobs`` is there,
which is written last; what a crash leaves half-written has no such row.

    blobs    digest (32)          -> size (8)
    chunks   digest (32) | n (4)  -> bytes, CHUNK_BYTES of them but for the last
    meta     "schema"             -> u32

Whether a blob is still named is the journal's to say (``named``): what is not named and not on its way (`_pinned`) is
deleted: when its last name goes, and by a walk through all blobs after each open, for a crash may come between the two.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import lmdb

from agentrt.errors import ClosedError, StoreCorruptError, StoreError, StoreFullError, StoreVersionError
from agentrt.stores.lmdb_env import Environment, get, make
from agentrt.stores.payloads import DIGEST_BYTES, Ref, check_blob, ref_of

_log: Final = logging.getLogger(__name__)

DATA_NAME: Final = "blobs.mdb"
#: A chunk fills 64 pages of 4 KiB to the last byte: a value of its own pages has a header of 16 bytes.
CHUNK_BYTES: Final = 64 * 4096 - 16
#: Written in one transaction, and by one blob in it: what a small blob waits for, and a commit beside it.
_WRITE_BYTES_MAX: Final = 2**20
#: Digested in one turn: about as long as a transaction takes.
_DIGEST_BYTES_MAX: Final = 4 * 2**20
#: Chunks deleted, and digests looked at, in one turn.
_DELETE_MAX: Final = 256
_SWEEP_MAX: Final = 64
#: The longest pause between two transactions.
_PAUSE_S_MAX: Final = 0.02

_SCHEMA: Final = 1
_NAMES: Final = ("meta", "blobs", "chunks")
_LIMIT: Final = "store.blob_bytes_max"
_OVER: Final = object()


class BlobFiles(Environment):
    """The open file. Raises what `Environment` raises; ``create`` makes it if there is none."""

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes_max: int,
        create: bool,
        read_only: bool = False,
        flags: dict[str, Any] | None = None,
    ) -> None:
        data = folder / DATA_NAME
        if create and not data.exists():
            make(data, _NAMES, {b"schema": _SCHEMA.to_bytes(4, "big")}, _LIMIT)
        super().__init__(
            data,
            dbs_max=len(_NAMES),
            map_bytes=min(map_bytes_max, 256 * 2**20),
            map_bytes_max=map_bytes_max,
            limit=_LIMIT,
            read_only=read_only,
            flags=flags,
        )
        with self.opening():
            self.meta, self.blobs, self.chunks = (self.env.open_db(name.encode(), create=False) for name in _NAMES)
            with self.env.begin() as txn:
                schema = int.from_bytes(txn.get(b"schema", b"", db=self.meta), "big")
            if schema != _SCHEMA:
                hint = "Use the agentrt that wrote it"
                raise StoreVersionError(f"the blobs have schema {schema}, this agentrt knows {_SCHEMA}", hint=hint)

    def load(self, ref: Ref) -> bytes:
        """The blob's bytes, checked; from any thread. Raises StoreCorruptError."""
        return check_blob(ref, self.read(lambda txn: self._join(txn, ref.digest)))

    def _join(self, txn: lmdb.Transaction, digest: bytes) -> bytes | None:
        if get(txn, self.blobs, digest) is None:
            return None
        with txn.cursor(db=self.chunks) as cursor:
            return b"".join(value for _, value in _chunks_of(cursor, digest))

    def count(self) -> int:
        """Complete blobs."""
        return int(self.read(lambda txn: txn.stat(self.blobs)["entries"]))

    def sizes(self, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        """(digest, size) of the next complete blobs."""

        def look(txn: lmdb.Transaction) -> list[tuple[bytes, int]]:
            with txn.cursor(db=self.blobs) as cursor:
                return [
                    (key, int.from_bytes(value, "big"))
                    for key, value in islice(_items(cursor, after + b"\0" if after else b""), limit)
                ]

        return self.read(look)


class Put:
    """Blobs on their way; ``tier`` orders them, ``done`` is called on the blob thread when all are durable (``error``
    is None then, ``refs`` their names) or refused."""

    __slots__ = ("_at", "_index", "datas", "done", "error", "refs", "size_bytes", "tier")

    def __init__(self, datas: Sequence[bytes], tier: int, done: Callable[["Put"], None]) -> None:
        self.datas = datas
        self.tier = tier
        self.done = done
        self.refs: list[Ref] = []
        self.error: StoreError | None = None
        self.size_bytes = sum(map(len, datas))
        self._index = self._at = 0  # the blob and the place in it that are written next


class BlobWriter:
    """``named(digest)``: whether durable data names the blob. ``busy()``: whether commits wait, which pauses between
    transactions are for."""

    def __init__(self, files: BlobFiles, named: Callable[[bytes], bool], busy: Callable[[], bool]) -> None:
        self._files = files
        self._named = named
        self._busy = busy
        lock = threading.Lock()
        self._bell = threading.Condition(lock)
        self._cleaned = threading.Condition(lock)  # the walk is over
        # Guarded by the bell's lock:
        self._given: list[Put] = []
        self._settled: list[bytes] = []
        self._closed = False
        self._size = [0, 0]  # puts and bytes that are not settled
        # The thread's own:
        self._puts: list[Put] = []
        self._pinned: dict[bytes, int] = {}
        self._doubtful: deque[bytes] = deque()  # digests that nobody may name any more
        self._sweep: Iterator[object] | None = self._walk()
        self._failed: StoreError | None = None
        self._freed = False  # something was deleted, and nothing written since
        self._thread = threading.Thread(target=self._run, name="agentrt-blobs", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------

    def give(self, put: Put) -> None:
        """Queues it. Its blobs stay until `settle` was called with each of ``put.refs``, and then while something names
        them. Raises ClosedError."""
        with self._bell:
            if self._closed:
                raise ClosedError("the store is closed")
            self._given.append(put)
            self._size[0] += 1
            self._size[1] += put.size_bytes
            self._bell.notify()

    def settle(self, digests: Sequence[bytes]) -> None:
        """What was put is named now, or never will be."""
        with self._bell:
            self._settled += digests
            self._bell.notify()

    def doubt(self, digests: Sequence[bytes]) -> None:
        """A name of these blobs is gone."""
        with self._bell:
            self._doubtful.extend(digests)
            self._bell.notify()

    def clean(self) -> None:
        """Waits until nothing is left that nobody names."""
        with self._bell:
            while (self._sweep is not None or self._doubtful) and not self._closed:
                self._cleaned.wait(0.1)

    def backlog(self) -> tuple[int, int]:
        """(puts, bytes) given and not settled."""
        with self._bell:
            return self._size[0], self._size[1]

    def close(self) -> None:
        """Waits until everything given is settled. Blobs that nobody names may stay until the next open."""
        with self._bell:
            self._closed = True
            self._bell.notify()
        self._thread.join()

    # --- the thread ----------------------------------------------------------------

    def _run(self) -> None:
        while self._next():
            try:
                took_s = self._write_some() if self._puts else 0.0
                if not self._closed:
                    self._clean_some()
                    if took_s and self._busy():
                        time.sleep(min(took_s, _PAUSE_S_MAX))
            except Exception as error:
                _log.exception("the blobs' writer failed")
                self._failed = error if isinstance(error, StoreError) else StoreError(f"the write failed: {error!r}")
                self._refuse(self._puts, self._failed)

    def _next(self) -> bool:
        """Waits for something to do; false: closed, and nothing is left."""
        with self._bell:
            while not (
                self._given or self._settled or self._puts or self._doubtful or self._closed or self._sweep is not None
            ):
                self._bell.wait()
            given, self._given = self._given, []
            settled, self._settled = self._settled, []
            over = self._closed
        for digest in settled:
            self._unpin(digest)
        self._puts += given
        if len(self._puts) > 1:
            self._puts.sort(key=lambda put: put.tier)  # stable: in a tier the oldest first
        return bool(self._puts) or not over

    def _unpin(self, digest: bytes) -> None:
        left = self._pinned.get(digest, 1) - 1
        if left:
            self._pinned[digest] = left
        else:
            self._pinned.pop(digest, None)
            self._doubtful.append(digest)

    def _write_some(self) -> float:
        """One turn; how long its transaction took, in seconds."""
        if self._failed is not None:
            self._refuse(self._puts, self._failed)
            return 0.0
        room = _DIGEST_BYTES_MAX
        ready: list[Put] = []
        for put in self._puts:
            while len(put.refs) < len(put.datas) and room > 0:
                data = put.datas[len(put.refs)]
                put.refs.append(ref := ref_of(data))
                self._pinned[ref.digest] = self._pinned.get(ref.digest, 0) + 1
                room -= len(data)
            if len(put.refs) == len(put.datas):
                ready.append(put)
        started = time.monotonic()
        try:
            self._write(ready)
        except StoreFullError as error:
            if self._doubtful and not self._closed:
                return time.monotonic() - started  # there may be room when what nobody names is gone
            if self._freed:
                self._freed = False
                self._turn_pages()
                return time.monotonic() - started
            # One that is too large must not take the others with it.
            for put in ready:
                if len(ready) == 1:
                    self._refuse([put], error)
                else:
                    try:
                        self._write([put])
                    except StoreFullError as refusal:
                        self._refuse([put], refusal)
        took_s = time.monotonic() - started
        finished = [put for put in self._puts if put.error is None and put._index == len(put.datas)]
        self._finish(finished)
        return took_s

    def _write(self, puts: Sequence[Put]) -> None:
        """A share of each put in one transaction; their places move on if it is durable. Raises StoreError kinds."""
        while True:
            moved: list[tuple[Put, int, int]] = []
            try:
                with self._files.writing() as txn:
                    room = _WRITE_BYTES_MAX
                    for put in puts:
                        share = min(room, max(CHUNK_BYTES, _WRITE_BYTES_MAX // len(puts)))
                        index, at, written = self._write_share(txn, put, share)
                        moved.append((put, index, at))
                        room -= written
                        if room <= 0:
                            break
            except lmdb.MapFullError:
                self._files.grow()
            except lmdb.Error as error:
                refusal, for_good = self._files.refusal(error)
                if for_good:
                    self._failed = refusal
                raise refusal from error
            else:
                break
        self._freed = False
        for put, index, at in moved:
            put._index, put._at = index, at

    def _write_share(self, txn: lmdb.Transaction, put: Put, share: int) -> tuple[int, int, int]:
        """About ``share`` bytes of the put: the place after them, and how many they were."""
        files = self._files
        index, at, written = put._index, put._at, 0
        while index < len(put.datas) and written < share:
            data, (digest, size_bytes) = put.datas[index], put.refs[index]
            if at == 0 and txn.get(digest, db=files.blobs) is not None:
                index += 1  # somebody has put it already
                continue
            while at < size_bytes and written < share:
                number = at // CHUNK_BYTES
                chunk = memoryview(data)[at : at + CHUNK_BYTES]
                txn.put(digest + number.to_bytes(4, "big"), chunk, db=files.chunks)
                at += len(chunk)
                written += len(chunk)
            if at < size_bytes:
                break
            txn.put(digest, size_bytes.to_bytes(8, "big"), db=files.blobs)
            index, at = index + 1, 0
        return index, at, written

    def _refuse(self, puts: Sequence[Put], error: StoreError) -> None:
        for put in puts:
            put.error = error
        self._finish([*puts])

    def _finish(self, puts: Sequence[Put]) -> None:
        for put in puts:
            self._puts.remove(put)
            with self._bell:
                self._size[0] -= 1
                self._size[1] -= put.size_bytes
            put.done(put)

    # --- what nobody names ------------------------------------------------------------

    def _clean_some(self) -> None:
        if self._failed is not None:
            self._doubtful.clear()
            self._sweep = None
        elif self._doubtful:
            digest = self._doubtful[0]
            if digest in self._pinned or self._named(digest) or self._delete(digest):
                self._doubtful.popleft()
        elif self._sweep is not None and next(self._sweep, _OVER) is _OVER:
            self._sweep = None
            with self._bell:
                self._cleaned.notify_all()

    def _turn_pages(self) -> None:
        """LMDB gives out freed pages two transactions after the one that freed them, and when the file is full no
        other transaction comes."""
        files = self._files
        try:
            with files.writing() as txn:
                txn.put(b"turned", txn.id().to_bytes(8, "big"), db=files.meta)
        except lmdb.MapFullError:
            _log.warning("the file of the blobs is full to the last page")
        except lmdb.Error as error:
            raise files.refusal(error)[0] from error

    def _delete(self, digest: bytes) -> bool:
        """Deletes some of it; whether nothing is left."""
        files = self._files
        self._freed = True
        try:
            with files.writing() as txn:
                txn.delete(digest, db=files.blobs)
                with txn.cursor(db=files.chunks) as cursor:
                    for _ in range(_DELETE_MAX):
                        if not cursor.set_range(digest) or not bytes(cursor.key()).startswith(digest):
                            return True
                        cursor.delete()
            return False
        except lmdb.MapFullError:  # freeing takes a page or two
            try:
                files.grow()
            except StoreFullError:
                return True  # the next open tries again
            return False
        except lmdb.Error as error:
            raise files.refusal(error)[0] from error

    def _walk(self) -> Iterator[object]:
        """Puts every blob, and whatever is left of one, among the doubtful, a page at a time."""
        after = b""
        while page := self._files.sizes(after, _SWEEP_MAX):
            after = page[-1][0]
            self._doubtful.extend(digest for digest, _ in page)
            yield None
        after = b""
        while page_of_chunks := self._chunk_digests(after):
            after = page_of_chunks[-1]
            self._doubtful.extend(page_of_chunks)
            yield None

    def _chunk_digests(self, after: bytes) -> list[bytes]:
        """The next digests that have chunks."""

        def look(txn: lmdb.Transaction) -> list[bytes]:
            found: list[bytes] = []
            with txn.cursor(db=self._files.chunks) as cursor:
                key = after + b"\xff" * 5 if after else b"\0"
                while len(found) < _SWEEP_MAX and cursor.set_range(key):
                    found.append(bytes(cursor.key())[:DIGEST_BYTES])
                    key = found[-1] + b"\xff" * 5
            return found

        return self._files.read(look)


def _items(cursor: lmdb.Cursor, start: bytes) -> Iterator[tuple[bytes, bytes]]:
    if cursor.set_range(start) if start else cursor.first():
        yield from cast("Iterator[tuple[bytes, bytes]]", cursor.iternext())


def _chunks_of(cursor: lmdb.Cursor, digest: bytes) -> Iterator[tuple[bytes, bytes]]:
    for number, (key, value) in enumerate(_items(cursor, digest)):
        if not key.startswith(digest):
            return
        if key[DIGEST_BYTES:] != number.to_bytes(4, "big"):
            raise StoreCorruptError(f"chunk {number} of blob {digest.hex()} is missing")
        yield key, value
