"""The file in which runs travel: written front to back, read only when it is whole (docs/export-format.md).

Reading trusts nothing: lengths are held against the file's before anything is allocated, the digest against the bytes
before anything is decoded, and the journals against `fold` before anything is imported.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import AgentrtError, ExportFileError, InputError
from agentrt.fold import RunFold, fold
from agentrt.ids import parse_run_id
from agentrt.records import Record, decode_batch, encode_batch
from agentrt.stores.base import ACCOUNTS, EVENT_IDS, EVENTS, IDEMPOTENCY, INBOX, KEY_BYTES_MAX, Row
from agentrt.stores.modules import KeptModule

MAGIC: Final = b"agentrtX"
FORMAT: Final = 1
DIGEST_BYTES: Final = 32
#: Rows that travel as they are; the others follow from the journal.
TRAVELLING: Final = frozenset({IDEMPOTENCY, INBOX, EVENTS, EVENT_IDS, ACCOUNTS})

_HEADER, _MODULE, _RUN, _RECORDS, _ROWS, _STATE, _END = 1, 2, 3, 4, 5, 6, 255
_FRAME_HEAD_BYTES: Final = 9  # type (1), length of the payload (8)
#: Records are written in frames of about so many bytes; a larger record has a frame of its own.
_RECORDS_BYTES: Final = 2**20
_READ_BYTES: Final = 2**20


class Header(msgspec.Struct, frozen=True):
    """What the file says of itself. ``schema``: of the store that it comes from; ``abi``: of the guest ABI."""

    schema: int
    abi: int
    agentrt: str
    export_id: str
    created_ns: int
    runs: list[str]


class Travelling(NamedTuple):
    """A run in the file. ``rows``: those of `TRAVELLING`."""

    run_id: str
    records: list[Record]
    run: RunFold
    rows: tuple[Row, ...]


class _RunHead(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    records: int


_encode: Final = msgspec.msgpack.encode
_rows: Final = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]]).decode
_state: Final = msgspec.msgpack.Decoder(tuple[str, str, bytes]).decode
_module: Final = msgspec.msgpack.Decoder(tuple[str, str, bytes]).decode


class ExportWriter:
    """Writes a file that is no export until `seal`. Raises OSError. Blocks."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._write(MAGIC + FORMAT.to_bytes(2, "big"))
        self._frame(_HEADER, _encode(header))

    def module(self, version: str, kept: KeptModule) -> None:
        """A module that runs need."""
        self._frame(_MODULE, _encode((version, kept.backend, kept.module)))

    def state(self, run_id: str, frame_id: str, frame: bytes) -> None:
        """A frame of a run: the state of its guest (docs/frames.md)."""
        self._frame(_STATE, _encode((run_id, frame_id, frame)))

    def run(self, run_id: str, records: Sequence[Record], rows: Sequence[Row]) -> None:
        """A run, with all its records."""
        self._frame(_RUN, _encode(_RunHead(run_id, len(records))))
        group: list[Record] = []
        size_bytes = 0
        for record in records:
            length = len(encode_batch((record,)))
            if group and size_bytes + length > _RECORDS_BYTES:
                self._frame(_RECORDS, encode_batch(group))
                group, size_bytes = [], 0
            group.append(record)
            size_bytes += length
        if group:
            self._frame(_RECORDS, encode_batch(group))
        self._frame(_ROWS, _encode([(row.table, row.key, row.value) for row in rows]))

    def seal(self) -> None:
        """The end, by which the file becomes an export."""
        self._file.write(bytes((_END,)) + DIGEST_BYTES.to_bytes(8, "big") + self._hash.digest())

    def _frame(self, kind: int, payload: bytes) -> None:
        self._write(bytes((kind,)) + len(payload).to_bytes(8, "big"))
        self._write(payload)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


class ExportReader:
    """A whole file: made only if its digest is right. Raises ExportFileError, OSError. Blocks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frames = self._index()
        if not self._frames or self._frames[0][0] != _HEADER:
            raise ExportFileError("the export has no header")
        try:
            self.header = msgspec.msgpack.decode(self._payload(0), type=Header)
            for run_id in self.header.runs:
                parse_run_id(run_id)
        except (*UNREADABLE, InputError) as error:
            raise ExportFileError(f"the header of the export cannot be read: {error}") from error

    def _index(self) -> list[tuple[int, int, int]]:
        """(type, offset of the payload, length) of all frames, once the digest is checked."""
        file = self._file
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(len(MAGIC) + 2)
        if head[: len(MAGIC)] != MAGIC:
            raise ExportFileError("the file is no export of agentrt")
        if int.from_bytes(head[len(MAGIC) :], "big") != FORMAT or len(head) != len(MAGIC) + 2:
            raise ExportFileError("the export is of another format", hint="Use the agentrt that wrote it")
        hashed = blake2b(head, digest_size=DIGEST_BYTES)
        frames: list[tuple[int, int, int]] = []
        at = len(head)
        while True:
            head = file.read(_FRAME_HEAD_BYTES)
            kind, length = head[0] if head else 0, int.from_bytes(head[1:], "big")
            at += _FRAME_HEAD_BYTES
            if len(head) != _FRAME_HEAD_BYTES or length > size - at:
                raise ExportFileError("the export is cut off", hint="Export the run again where it came from")
            if kind == _END:
                if length != DIGEST_BYTES or at + length != size or file.read(length) != hashed.digest():
                    raise ExportFileError("the export was altered: its digest is another")
                return frames
            frames.append((kind, at, length))
            hashed.update(head)
            left = length
            while left:
                data = file.read(min(left, _READ_BYTES))
                if not data:
                    raise ExportFileError("the export is cut off")
                hashed.update(data)
                left -= len(data)
            at += length

    def _payload(self, index: int) -> bytes:
        _, at, length = self._frames[index]
        self._file.seek(at)
        return self._file.read(length)

    def modules(self) -> Iterator[tuple[str, KeptModule]]:
        """(version, module) of those in the file."""
        for index, (kind, _, _) in enumerate(self._frames):
            if kind == _MODULE:
                try:
                    version, backend, module = _module(self._payload(index))
                except UNREADABLE as error:
                    raise ExportFileError(f"a module of the export cannot be read: {error}") from error
                yield version, KeptModule(backend, module)

    def states(self) -> Iterator[tuple[str, str, bytes]]:
        """(run, id, frame) of the frames of runs in the file."""
        for index, (kind, _, _) in enumerate(self._frames):
            if kind == _STATE:
                try:
                    run_id, frame_id, frame = _state(self._payload(index))
                except UNREADABLE as error:
                    raise ExportFileError(f"the frame of a run in the export cannot be read: {error}") from error
                yield run_id, frame_id, frame

    def runs(self) -> Iterator[Travelling]:
        """The runs, in the order of the file, each folded."""
        index = 1
        found: list[str] = []
        while index < len(self._frames):
            if self._frames[index][0] in (_MODULE, _STATE):
                index += 1
                continue
            run, index = self._run(index)
            found.append(run.run_id)
            yield run
        if found != self.header.runs:
            raise ExportFileError("the export has other runs than its header says")

    def _run(self, index: int) -> tuple[Travelling, int]:
        run_id = "?"
        try:
            if self._frames[index][0] != _RUN:
                raise ExportFileError(f"a frame of type {self._frames[index][0]} stands where a run begins")
            head = msgspec.msgpack.decode(self._payload(index), type=_RunHead)
            run_id = parse_run_id(head.run_id)
            records: list[Record] = []
            index += 1
            while index < len(self._frames) and self._frames[index][0] == _RECORDS:
                records += decode_batch(self._payload(index))
                index += 1
            if len(records) != head.records or index == len(self._frames) or self._frames[index][0] != _ROWS:
                raise ExportFileError(f"run {run_id} is not whole")
            rows = tuple(Row(table, key, value) for table, key, value in _rows(self._payload(index)))
            if any(row.table not in TRAVELLING or not 0 < len(row.key) <= KEY_BYTES_MAX for row in rows):
                raise ExportFileError(f"run {run_id} has rows that do not travel")
            folded = fold(records)
            folded.run()
        except ExportFileError:
            raise
        except (*UNREADABLE, AgentrtError) as error:
            raise ExportFileError(f"run {run_id} of the export cannot be read: {error}") from error
        return Travelling(run_id, records, folded, rows), index + 1


def open_export(path: str | os.PathLike[str]) -> BinaryIO:
    """Raises InputError."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
