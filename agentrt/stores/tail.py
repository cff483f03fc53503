"""The newest batches of the log, in a file of their own.

A commit of LMDB is two waits for the disk, pages and then the meta page. A group that only adds to journals (nearly
every step) needs none of LMDB's powers, so it is appended here with one synced write. The next LMDB transaction takes
what is here into the log, and the file begins anew.

A record belongs to the state of the data that it was written after: its header names the session's generation and the
last transaction, so nothing has to be erased when that transaction is followed by another. Records are numbered from
0 and begin at multiples of 512 bytes, so none shares a sector with another.

What must hold: a record is valid only as a whole (digest); a write begins only when the one before it is durable. So
an invalid record is the end, being one whose write was cut off; if a later one is valid, the file was damaged.

One thread writes; `read_tail` reads beside it.
"""

import os
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Final

from agentrt.errors import StoreCorruptError

TAIL_NAME: Final = "journal.tail"
#: Room for groups between two transactions.
TAIL_BYTES: Final = 2**20

_HEADER: Final = struct.Struct(">8sQQII16s")  # magic, generation, transaction, number, length of the row, digest
_MAGIC: Final = b"agentrt\x01"
_ALIGN: Final = 512


def _digest(header: bytes, row: bytes) -> bytes:
    return blake2b(row, digest_size=16, key=header).digest()


class Tail:
    """The file of a session, open for writing. Raises OSError."""

    #: What tests change to show that durability comes from somewhere.
    flags = os.O_DSYNC

    def __init__(self, folder: Path, generation: int, after: int) -> None:
        self._generation = generation
        self._after = after  # the last transaction
        self._number = self._end = 0
        self._fd = os.open(folder / TAIL_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | self.flags, 0o600)
        try:
            # Written once, so that later writes change no size and no block of the file, which would have to be synced.
            missing_bytes = TAIL_BYTES - os.fstat(self._fd).st_size
            if missing_bytes > 0:
                os.pwrite(self._fd, bytes(missing_bytes), TAIL_BYTES - missing_bytes)
                os.fsync(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, row: bytes) -> bool:
        """Makes the row durable. False: there is no room. Raises OSError: it may or may not be there at the next open,
        and only `begin` makes the file usable again."""
        size_bytes = _HEADER.size + len(row)
        if self._end + size_bytes > TAIL_BYTES:
            return False
        header = _HEADER.pack(_MAGIC, self._generation, self._after, self._number, len(row), bytes(16))
        parts = header[:-16], _digest(header[:-16], row), row
        if os.pwritev(self._fd, parts, self._end) != size_bytes:
            raise OSError("a write to the store's tail was cut short")
        self._end += -(-size_bytes // _ALIGN) * _ALIGN
        self._number += 1
        return True

    def begin(self, after: int) -> None:
        """The transaction is durable and holds what the file holds: the file is empty."""
        self._after = after
        self._number = self._end = 0

    def close(self) -> None:
        """Once."""
        os.close(self._fd)


def read_tail(folder: Path, generation: int, after: int) -> list[bytes]:
    """Rows that were written after that transaction of that session. Raises StoreCorruptError."""
    try:
        data = (folder / TAIL_NAME).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreCorruptError(f"the store's tail cannot be read: {error.strerror}") from error
    rows: list[bytes] = []
    at = 0
    while (row := _row(data, at, generation, after, len(rows))) is not None:
        rows.append(row)
        at += -(-(_HEADER.size + len(row)) // _ALIGN) * _ALIGN
    for later in range(at + _ALIGN, len(data) - _HEADER.size, _ALIGN):
        number = _number(data, later, generation, after)
        if number > len(rows) and _row(data, later, generation, after, number) is not None:
            raise StoreCorruptError(f"record {len(rows)} of the store's tail is damaged, later ones are not")
    return rows


def _number(data: bytes, at: int, generation: int, after: int) -> int:
    """Number of the record there, -1 if there is none of that time."""
    if data[at : at + 8] != _MAGIC:
        return -1
    _, found_generation, found_after, number, _, _ = _HEADER.unpack_from(data, at)
    return number if (found_generation, found_after) == (generation, after) else -1


def _row(data: bytes, at: int, generation: int, after: int, number: int) -> bytes | None:
    if at + _HEADER.size > len(data) or _number(data, at, generation, after) != number:
        return None
    *_, size_bytes, digest = _HEADER.unpack_from(data, at)
    start = at + _HEADER.size
    row = data[start : start + size_bytes]
    return row if len(row) == size_bytes and _digest(data[at : start - 16], row) == digest else None
