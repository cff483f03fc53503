"""A batch made ready for the writer: everything that can be done before its turn is done, and its blobs are apart."""

from collections import deque
from collections.abc import Sequence

from agentrt.errors import StoreError
from agentrt.records import encode_batch
from agentrt.stores.base import Batch, Done, Head, Row
from agentrt.stores.payloads import (
    INLINE_BYTES_MAX,
    ROW_MARK,
    Large,
    Ref,
    is_large_value,
    large_payloads,
    row_ref,
    split_batch,
)
from agentrt.stores.unfiled import encode_head, log_entry
from agentrt.stores.writer import Given


class Entry(Given):
    """A batch on its way through an LMDB store. ``given`` is set while it may have large payloads in it."""

    __slots__ = (
        "after",
        "batch",
        "blobs",
        "erase",
        "given",
        "head",
        "logged",
        "pins",
        "refused",
        "rows",
        "run_id",
        "tails",
        "unique",
    )

    head: Head  # of a batch without a run, which never comes to the log, it is None

    def __init__(self, batch: Batch, done: Done) -> None:
        self.given: Batch | None = None  # while it has large payloads in it
        self.blobs: tuple[bytes, ...] = ()  # those of its records
        self.pins: tuple[bytes, ...] = ()  # all that the blobs' thread keeps for it
        self.refused: StoreError | None = None  # before it came to the writer
        head = batch.head
        if head is None:
            self.batch = self.logged = b""
            self.run_id = ""
        else:
            encoded = encode_batch(batch.records)
            self.batch = encoded if batch.records else b""
            if len(encoded) > INLINE_BYTES_MAX:
                self.logged = encoded  # until its payloads are apart, or turn out to be many small ones
            else:
                self.logged = log_entry(encode_head(head), encoded)
            self.run_id = head.run_id
        self.after = batch.after_version
        self.head = head  # type: ignore[assignment]
        self.erase = batch.erase
        unique, rows = self.unique, self.rows = batch.unique, batch.rows
        # Whether it only adds to the journal of a run that there is and that goes on, and names no blob.
        self.tails = head is not None and not (rows or unique or head.ended_ns) and batch.after_version > 0
        size_bytes = len(self.logged)
        if rows or unique:
            for row in (*unique, *rows):
                size_bytes += len(row.key)
                if row.value:
                    size_bytes += len(row.value)
                    if row.value[0] == ROW_MARK:
                        self.given = batch
        super().__init__(size_bytes, done)
        if size_bytes > INLINE_BYTES_MAX:
            self.given = batch

    def large(self) -> tuple[list[Large], list[bytes]]:
        """The payloads to be put apart: of its records, and of its rows."""
        batch = self.given
        if batch is None:
            return [], []
        values = [row.value for row in (*batch.unique, *batch.rows) if row.value is not None]
        return large_payloads(batch.records), [value for value in values if is_large_value(value)]

    def keep(self) -> None:
        """It has no large payloads of its records."""
        if len(self.batch) > INLINE_BYTES_MAX:
            self.logged = log_entry(encode_head(self.head), self.batch)
        self.given = None

    def split(self, large: Sequence[Large], refs: Sequence[Ref]) -> None:
        """Its payloads are durable under these names, in the order of `large`."""
        batch = self.given
        assert batch is not None
        if not large:
            self.keep()
        elif batch.head is not None:
            of_records = refs[: len(large)]
            self.batch = split_batch(batch.records, large, of_records)
            self.logged = log_entry(encode_head(batch.head), self.batch)
            self.tails = False
            self.blobs = tuple(dict.fromkeys(ref.digest for ref in of_records))
        left = deque(refs[len(large) :])
        self.unique, self.rows = (
            tuple(
                Row(row.table, row.key, row_ref(left.popleft())) if is_large_value(row.value) else row for row in rows
            )
            for rows in (batch.unique, batch.rows)
        )
        self.given = None
        self.size_bytes = len(self.logged) + sum(
            len(row.key) + len(row.value or b"") for rows in (self.unique, self.rows) for row in rows
        )
