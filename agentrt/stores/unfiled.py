"""What is in the log and not in the journal yet.

A group of batches is written as one row of the log: one put and pages side by side, where a put per record would touch
a page per run. The writer *files* a run when it ends, or when the log is full and no run has an older batch in it: all
its batches go to the journal, many to a row, and the head goes to its place; then the rows of the log that nobody needs
are deleted. So a run that does many steps is written twice, in large pieces, and not once in hundreds of small ones.

`Unfiled` is the memory of the log: reads find here what the journal does not have. Its content is durable, always;
only the writer's thread changes it, after its transaction.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import InputError, StoreCorruptError
from agentrt.ids import parse_run_id
from agentrt.stores.base import Head

#: Batches are put together to rows of the journal of about this size: what a read of the last records has to decode.
ROW_BYTES_MAX: Final = 32 * 2**10

_ARRAY32: Final = b"\xdd"  # a msgpack array with its number of items in four bytes
_PAIR: Final = b"\x92"
_NO_RECORDS: Final = b"\x90"

encode_head: Final = msgspec.msgpack.Encoder().encode
decode_head: Final = msgspec.msgpack.Decoder(Head).decode
_decode_group: Final = msgspec.msgpack.Decoder(list[tuple[msgspec.Raw, msgspec.Raw]]).decode
_decode_row: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def join(items: Sequence[bytes]) -> bytes:
    """The msgpack array of items that are encoded already. No other array that a store writes begins with 0xdd."""
    return b"%b%b%b" % (_ARRAY32, len(items).to_bytes(4, "big"), b"".join(items))


def concatenate(rows: Sequence[bytes]) -> bytes:
    """One row of rows that `join` made."""
    count = sum(int.from_bytes(row[1:5], "big") for row in rows)
    return b"%b%b%b" % (_ARRAY32, count.to_bytes(4, "big"), b"".join(row[5:] for row in rows))


def log_entry(head: bytes, batch: bytes) -> bytes:
    """A batch as an item of a log row."""
    return _PAIR + head + batch


def batches_of(row: bytes) -> Sequence[bytes] | None:
    """The batches in a row of the journal; None if it is one record, as stores of schema 1 wrote them. Raises
    StoreCorruptError."""
    if row[:1] != _ARRAY32:
        return None
    try:
        return [bytes(raw) for raw in _decode_row(row)]
    except UNREADABLE as error:
        raise StoreCorruptError(f"a journal row cannot be read: {error}") from error


def heads_of_row(number: int, row: bytes) -> list[Head]:
    """The heads in row ``number`` of the log. Raises StoreCorruptError."""
    return [head for head, _, _ in _group(number, row)]


def _group(number: int, row: bytes) -> Iterator[tuple[Head, int, msgspec.Raw]]:
    """The batches in row ``number`` of the log: the head, how long that is as stored, the records."""
    try:
        for raw_head, raw_batch in _decode_group(row):
            head = decode_head(raw_head)
            parse_run_id(head.run_id)
            yield head, len(raw_head), raw_batch
    except (*UNREADABLE, InputError) as error:
        raise StoreCorruptError(f"row {number} of the log cannot be read: {error}") from error


class Entry(Protocol):
    """A durable batch: the head it made, its records as `encode_batch` gives them (empty if it has none)."""

    @property
    def head(self) -> Head: ...
    @property
    def batch(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...


class _Loaded(NamedTuple):
    head: Head
    batch: bytes
    size_bytes: int


class UnfiledRun:
    """A run's batches in the log."""

    __slots__ = ("batches", "head", "number", "size_bytes")

    def __init__(self, number: int, head: Head) -> None:
        self.number = number  # of the log row with the first of them
        self.head = head
        self.batches: list[tuple[int, bytes]] = []  # each with the seq of its last record
        self.size_bytes = 0

    def add(self, entry: Entry) -> None:
        """One more batch."""
        head = self.head = entry.head
        if entry.batch:
            self.batches.append((head.version, entry.batch))
        self.size_bytes += entry.size_bytes


def journal_rows(batches: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Seq of the last record and value of each row that batches of a run, each with the seq of its last record, become
    in the journal."""
    row: list[bytes] = []
    last = size_bytes = 0
    for version, batch in batches:
        if row and size_bytes + len(batch) > ROW_BYTES_MAX:
            yield last, join(row)
            row, size_bytes = [], 0
        row.append(batch)
        last, size_bytes = version, size_bytes + len(batch)
    if row:
        yield last, join(row)


class Unfiled:
    """Changed by one thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, UnfiledRun] = {}  # in the order of their numbers
        self._numbers: deque[int] = deque()  # of all log rows, ascending
        self.size_bytes = 0

    # --- any thread --------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether the log has no rows and is to have none."""
        return not self._numbers and not self._runs

    def head(self, run_id: str) -> Head | None:
        """The run's head, None if none of its batches is here."""
        run = self._runs.get(run_id)
        return None if run is None else run.head

    def heads(self, after: str, newest_first: bool = False) -> list[Head]:
        """Heads of all runs that `scan_heads` has after that one, in no order."""
        with self._lock:
            if newest_first:
                return [run.head for run_id, run in self._runs.items() if not after or run_id < after]
            return [run.head for run_id, run in self._runs.items() if run_id > after]

    def batch_count(self) -> int:
        """Batches that are here."""
        with self._lock:
            return sum(len(run.batches) for run in self._runs.values())

    def batches(self, run_id: str, after_version: int) -> list[bytes]:
        """The run's batches that have records with seq > after_version, in order."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                return []
            start = bisect_right(run.batches, after_version, key=itemgetter(0))
            return [batch for _, batch in run.batches[start:]]

    # --- the thread that changes it ----------------------------------------------

    def oldest(self, size_bytes: int, count: int) -> list[UnfiledRun]:
        """Runs to file next: those with the oldest batches, at most so large and so many, but one if there is any."""
        runs: list[UnfiledRun] = []
        for run in self._runs.values():
            if runs and (size_bytes < run.size_bytes or len(runs) == count):
                break
            size_bytes -= run.size_bytes
            runs.append(run)
        return runs

    def of(self, run_id: str) -> list[tuple[int, bytes]]:
        """The run's batches; not to be changed."""
        run = self._runs.get(run_id)
        return [] if run is None else run.batches

    def unneeded(self, filed: Container[str], number: int) -> list[int]:
        """Numbers of the log rows before ``number`` that nothing needs once the runs ``filed`` are filed."""
        for run_id, run in self._runs.items():
            if run_id not in filed:
                number = run.number  # the oldest of what stays
                break
        return list(takewhile(lambda old: old < number, self._numbers))

    def add(self, entries: Iterable[Entry], number: int) -> None:
        """The entries are durable, and will be in row ``number`` of the log."""
        with self._lock:
            for entry in entries:
                self._add(entry, number)

    def settle(
        self, filed: Iterable[str], gone: Sequence[int], number: int, entries: Sequence[Entry], *, row: bool
    ) -> None:
        """The transaction is durable: the runs ``filed`` are in the journal, the log rows ``gone`` deleted; ``row``:
        there is a row ``number``, which holds the entries and those that were added for it."""
        runs = self._runs
        with self._lock:
            for run_id in filed:
                run = runs.pop(run_id, None)
                if run is not None:
                    self.size_bytes -= run.size_bytes
            for _ in gone:
                self._numbers.popleft()
            if row:
                self._numbers.append(number)
            for entry in entries:
                self._add(entry, number)

    def load(self, rows: Iterable[tuple[int, bytes]], filed_version: Callable[[str], int]) -> None:
        """Fills an empty one from the log. ``filed_version(run_id)``: the version of the head that is in its place, 0
        without one; what it covers is left out. Raises StoreCorruptError."""
        filed: dict[str, int] = {}
        for number, row in rows:
            for head, head_bytes, raw_batch in _group(number, row):
                run_id = head.run_id
                if run_id not in filed:
                    filed[run_id] = filed_version(run_id)
                if head.version > filed[run_id]:
                    batch = bytes(raw_batch)
                    size_bytes = head_bytes + len(batch) + 1
                    self._add(_Loaded(head, b"" if batch == _NO_RECORDS else batch, size_bytes), number)
            self._numbers.append(number)

    def _add(self, entry: Entry, number: int) -> None:
        run = self._runs.get(entry.head.run_id)
        if run is None:
            run = self._runs[entry.head.run_id] = UnfiledRun(number, entry.head)
        run.add(entry)
        self.size_bytes += entry.size_bytes
