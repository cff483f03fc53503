"""The store contract: what the engine asks of a store plugin.

A store keeps, per run, a head row and an append-only journal, and side tables of opaque rows. It has **one** write
operation, `Store.commit`; a batch is all or nothing, durable before ``done`` is called, and batches take effect in
the order they were given: those of a run, and those of no run. One with a payload of more than 16 KiB (an input, a
request, a result, a state, the value of a row) may be overtaken by batches of other runs, for a store keeps large
payloads apart, as blobs: durable before what names them, read back with it unseen, one for all that are the same, gone
some time after nothing names them any more. Read methods see only what is durable, and what they return never changes
later. The suite in `agentrt.testing.stores` holds every store to this text.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from agentrt.errors import InternalError, StoreError
from agentrt.records import Record

#: Side tables. READY: the work to start again after a restart, key tier | accepted_ns | run_id (see keys.py).
READY = "ready"
#: (tenant, idempotency key) -> the run it made and the digest of its request.
IDEMPOTENCY = "idempotency"
#: Children that have ended, for their parents to fold in: key parent | child -> path of the spawning step.
INBOX = "inbox"
#: Effects of a run that are still to be delivered, key run_id | path.
OUTBOX = "outbox"
#: What falls due, key due_ns | run_id | path -> what it is.
TIMERS = "timers"
#: Events that nobody has taken, key address | sent_ns | number -> event.
EVENTS = "events"
#: Ids of events sent lately, key address | hash of the id -> when.
EVENT_IDS = "event_ids"
#: Runs that wait for an event, key address | since_ns | run_id | path.
WAITS = "waits"
#: Locks that are held, key tenant | name -> holder; and their last tokens.
LOCKS = "locks"
#: Runs by the clock: key tenant | name -> schedule.
SCHEDULES = "schedules"
#: What the node remembers of itself.
NODE = "node"
#: What runs have used and hold, and what ended ones have used: see engine/flow.py.
ACCOUNTS = "accounts"
#: What was decided about a run, the latest, key run_id | place: see engine/decisionlog.py.
DECISIONS = "decisions"
#: What plugins keep: key name of the plugin | 0 | its own key; see plugin_rows.py.
PLUGINS = "plugins"

TABLES = (
    READY, IDEMPOTENCY, INBOX, OUTBOX, TIMERS, EVENTS, EVENT_IDS, WAITS, LOCKS, SCHEDULES, NODE, ACCOUNTS, PLUGINS,
    DECISIONS,
)  # fmt: skip

KEY_BYTES_MAX = 511  # LMDB's limit


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The run at a glance; a cache of ``fold(records)`` written in the same transaction as the records."""

    run_id: str
    version: int  # state_version: seq of the last record
    state: str
    tenant: str
    agent: str
    agent_version: str
    tier: int
    base_tier: int
    accepted_ns: int
    ended_ns: int = 0
    wait_reason: str | None = None
    segment: int = 1
    cancel_requested: bool = False


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One change of a side table: put ``value`` under ``key``, or delete the key if value is None."""

    table: str
    key: bytes
    value: bytes | None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One run's append and the side rows that go with it.

    ``after_version`` is the state_version the records follow; 0 means the run must not exist. ``records`` carry seq
    after_version+1, +2, … ; ``head.version`` is the last of them. ``unique`` rows must not exist yet: if one does, the
    whole batch is refused with DuplicateError carrying the value found. Without records the batch changes side rows
    of an existing run only, and ``head.version`` is ``after_version``. ``unique`` rows are written before ``rows``.

    Without a head (None, 0, no records) the batch changes side rows that belong to no run, and may ``erase`` a run:
    its head and all its records go with the rows, in one transaction; erasing one that is not there changes nothing.
    """

    head: Head | None
    after_version: int
    records: tuple[Record, ...]
    rows: tuple[Row, ...] = ()
    unique: tuple[Row, ...] = ()
    erase: str | None = None

    @property
    def run_id(self) -> str | None:
        """The run it belongs to."""
        return None if self.head is None else self.head.run_id


Done = Callable[[StoreError | None], None]


class Store(Protocol):
    """One node's session on a store. All methods may be called from any thread unless said otherwise."""

    #: Raised by one at every open; a commit of an older session is refused with StaleWriteError.
    generation: int

    def commit(self, batch: Batch, done: Done) -> None:
        """Append durably; never blocks on I/O. ``done(None)`` after it is durable, ``done(error)`` if it was refused
        and changed nothing (StaleWriteError, DuplicateError, StoreFullError, StoreError). ``done`` runs on the loop
        given at open, once, in the order in which batches took effect. A batch that follows a refused batch of the
        same run is refused too. Raises at once, and never calls ``done``: ClosedError after `close`; InternalError for
        a batch that does not fit together (`check_batch`)."""

    def read_head(self, run_id: str) -> Head | None:
        """Only what is durable."""

    def read_records(self, run_id: str, after_version: int = 0, limit: int | None = None) -> list[Record]:
        """The run's durable records with seq > after_version, in order, the first ``limit`` of them; [] if there is no
        such run."""

    def read_row(self, table: str, key: bytes) -> bytes | None:
        """The row's value, None if there is no such row."""

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        """Rows with the prefix and key > after, in key order; one short read transaction per call."""

    def scan_heads(
        self, after: str = "", limit: int = 1000, newest_first: bool = False, tenant: str | None = None
    ) -> list[Head]:
        """Heads in run_id order with run_id > after; ``newest_first``: from the last one backwards, with run_id <
        after, and "" is behind the last. ``tenant``: only the runs of that one, and what this costs must not depend on
        how many others have: that is how tenants would time each other."""

    def backlog(self) -> tuple[int, int]:
        """(batches, bytes) given to commit and not yet durable; the engine bounds it."""

    def blob_count(self) -> int:
        """Payloads that are kept apart, including those that nothing names any more and that are still there."""

    def close(self) -> None:
        """Commit what was given, then let go of the store. Blocks; safe to call twice. The last ``done`` calls may
        still be on their way through the loop. Everything but `close` then raises ClosedError."""


def check_batch(batch: Batch) -> None:
    """Raises InternalError for a batch that no state of the store could accept."""
    if batch.head is None:
        if batch.after_version or batch.records or not (batch.rows or batch.unique or batch.erase):
            raise InternalError("a batch without a run that has records, or nothing at all")
        _check_rows(batch)
        return
    if batch.erase is not None:
        raise InternalError("a run's own batch erases a run", run=batch.head.run_id)
    version = batch.after_version
    for record in batch.records:
        version += 1
        if record.seq != version:
            raise InternalError(f"record {record.seq} stands where {version} belongs", run=batch.head.run_id)
    if batch.head.version != version or version < 1 or batch.after_version < 0:
        raise InternalError(f"a head of {batch.head.version} with records to {version}", run=batch.head.run_id)
    if batch.rows or batch.unique:
        _check_rows(batch)


def _check_rows(batch: Batch) -> None:
    for row in batch.unique:
        if row.table not in TABLES or not 0 < len(row.key) <= KEY_BYTES_MAX or row.value is None:
            raise InternalError(f"a unique row that cannot be: {row.table} {row.key!r}", run=batch.run_id)
    for row in batch.rows:
        if row.table not in TABLES or not 0 < len(row.key) <= KEY_BYTES_MAX:
            raise InternalError(f"a row that cannot be: {row.table} {row.key!r}", run=batch.run_id)


class Scans(Protocol):
    """Whatever has rows: a store, or a reader of one."""

    def scan_rows(
        self, table: str, prefix: bytes = b"", after: bytes = b"", limit: int = 1000
    ) -> list[tuple[bytes, bytes]]: ...


def scan_all(store: Scans, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """All rows of a table, a page at a time."""
    after = b""
    while page := store.scan_rows(table, prefix, after):
        yield from page
        after = page[-1][0]
