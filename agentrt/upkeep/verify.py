"""Is a store sound? Pages, journals, heads, rows and blobs, each against what it follows from. Changes nothing."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import lmdb
import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.engine.callbacks import Callback, is_callback
from agentrt.engine.mailbox import Event
from agentrt.engine.rows import FOLLOWING, idempotency_keys, rows_of
from agentrt.engine.schedules import SCHEDULE_PATH, Schedule
from agentrt.engine.steps import Held
from agentrt.errors import StoreCorruptError
from agentrt.flow.decisions import Decision
from agentrt.fold import RunFold, fold, head_of
from agentrt.ids import run_id_from_bytes, run_id_to_bytes
from agentrt.progress import Progress, no_progress
from agentrt.stores.base import (
    DECISIONS,
    EVENTS,
    IDEMPOTENCY,
    INBOX,
    LOCKS,
    OUTBOX,
    SCHEDULES,
    TABLES,
    TIMERS,
    Head,
    Row,
    scan_all,
)
from agentrt.stores.keys import lock_key, parse_inbox_key, schedule_key, timer_key
from agentrt.stores.lmdb import LmdbReader
from agentrt.stores.lmdb_blobs import DATA_NAME as BLOBS_NAME
from agentrt.stores.lmdb_env import verify as verify_pages
from agentrt.stores.lmdb_files import DATA_NAME
from agentrt.stores.lmdb_tenants import tenant_run_key
from agentrt.stores.payloads import DIGEST_BYTES, Ref

T = TypeVar("T")

#: What is named of a store that is damaged all over.
FINDINGS_MAX: Final = 1000
_PAGE: Final = 500
_DECISION: Final = tuple[int, Decision]


class Finding(msgspec.Struct, frozen=True):
    """``kind``: pages, log, head, journal, row, blob; ``run``: whose, if it is known."""

    kind: str
    what: str
    run: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    """What was looked at and what is wrong; ``unnamed_blobs``: those that nothing names, which the next open deletes.
    ``complete``: false if the damage is such that the rest could not be looked at, or more than FINDINGS_MAX."""

    runs: int
    records: int
    rows: int
    blobs: int
    unnamed_blobs: int
    findings: tuple[Finding, ...]
    complete: bool

    @property
    def sound(self) -> bool:
        return self.complete and not self.findings


class _Known(NamedTuple):
    """What is kept of a run until the rows are looked at."""

    broken: bool  # its journal cannot be read
    rows: tuple[Row, ...]
    locks: dict[str, int]
    keys: tuple[bytes, ...]  # of its idempotency rows


_BROKEN: Final = _Known(True, (), {}, ())


def _known(run_id: str, run: RunFold) -> _Known:
    return _Known(False, rows_of(run_id, run), run.locks, idempotency_keys(run.run()))


class _FullError(Exception):
    """There are findings enough."""


def verify(folder: Path, progress: Progress = no_progress) -> Verdict:
    """Looks at all of a store that nobody has open. Raises StoreVersionError and what else keeps it from being read
    without being damage."""
    checks = _Checks(progress)
    try:
        complete = checks.pages(folder) and checks.contents(folder)
    except _FullError:
        complete = False
    return Verdict(
        checks.runs, checks.records, checks.rows, checks.blobs, checks.unnamed, tuple(checks.findings), complete
    )


class _Checks:
    def __init__(self, progress: Progress) -> None:
        self.findings: list[Finding] = []
        self.runs = self.records = self.rows = self.blobs = self.unnamed = 0
        self._progress = progress
        self._known: dict[str, _Known] = {}
        self._owned: dict[bytes, str] = {}  # rows that the index by tenant must have

    def _add(self, kind: str, what: str, run: str | None = None) -> None:
        self.findings.append(Finding(kind, what, run))
        if len(self.findings) >= FINDINGS_MAX:
            raise _FullError

    def pages(self, folder: Path) -> bool:
        """Every page of both files; whether LMDB may be trusted with them."""
        for name in (DATA_NAME, BLOBS_NAME):
            data = folder / name
            if data.exists():
                self._progress(f"pages of {name}", 0, 0)
                if data.stat().st_size < 2 * 4096:
                    self._add("pages", f"{name} is cut off: it has {data.stat().st_size} bytes")
                    continue
                try:
                    verify_pages(data)
                except StoreCorruptError as error:
                    self._add("pages", error.message)
        return not self.findings

    def contents(self, folder: Path) -> bool:
        """Everything else; false if it cannot be opened."""
        try:
            reader = LmdbReader(folder)
        except StoreCorruptError as error:
            self._add("pages", error.message)
            return False
        try:
            total = self._count(reader)
            try:
                for head in self._heads(reader):
                    self._run(reader, head)
                    self.runs += 1
                    if self.runs % 100 == 0:
                        self._progress("runs", self.runs, total)
            except StoreCorruptError as error:  # of the log, or of a head: which runs there are is not known
                self._add("log", error.message, error.run)
                return False
            self._stray_journals(reader)
            self._tenants(reader)
            self._following(reader)
            self._others(reader)
            self._blobs(reader)
        finally:
            reader.close()
        return True

    @staticmethod
    def _count(reader: LmdbReader) -> int:
        files = reader.files
        return int(files.read(lambda txn: txn.stat(files.heads)["entries"]))

    @staticmethod
    def _heads(reader: LmdbReader) -> Iterator[Head]:
        after = ""
        while page := reader.scan_heads(after, _PAGE):
            yield from page
            after = page[-1].run_id

    def _run(self, reader: LmdbReader, head: Head) -> None:
        run_id = head.run_id
        self._owned[tenant_run_key(head)] = run_id
        try:
            records = reader.read_records(run_id)
            run = fold(records)
            made = head_of(run, run_id)
        except StoreCorruptError as error:
            self._add("journal", error.message, run_id)
            self._known[run_id] = _BROKEN
            return
        self.records += len(records)
        if made != head:
            wrong = [name for name in head.__struct_fields__ if getattr(made, name) != getattr(head, name)]
            self._add("head", f"the head is not the fold of the journal: {', '.join(wrong)}", run_id)
        self._known[run_id] = _known(run_id, run)

    def _stray_journals(self, reader: LmdbReader) -> None:
        """Records of runs that have no head."""
        files = reader.files
        after = b""
        while (raw := files.read(partial(_next_run, files.journal, after))) is not None:
            run_id = run_id_from_bytes(raw)
            if run_id not in self._known:
                self._add("journal", "a run has records and no head", run_id)
            after = raw + b"\xff" * 9

    def _tenants(self, reader: LmdbReader) -> None:
        """Every run is found among its tenant's, and nowhere else."""
        files = reader.files
        if files.tenant_runs is None or not files.read(files.indexed):
            return  # of an older schema, or being brought up
        self._progress("runs by tenant", 0, 0)
        found = _keys(reader, files.tenant_runs)
        self.rows += len(found)
        for key in sorted(self._owned.keys() - found):
            self._add("row", "the run is not among its tenant's: lists of one tenant lack it", self._owned[key])
        for key in sorted(found - self._owned.keys()):
            self._add("row", f"tenant_runs row {key.hex()} is of no run of that tenant")

    def _following(self, reader: LmdbReader) -> None:
        """The rows that follow from journals are there, and no others."""
        missing: dict[tuple[str, bytes], tuple[str, bytes | None]] = {}
        unknown = {run_id for run_id, known in self._known.items() if known.broken}
        for run_id, known in self._known.items():
            missing |= {(row.table, row.key): (run_id, row.value) for row in known.rows}
        timers = {timer_key(item.next_ns, item.id, SCHEDULE_PATH) for item in self._schedules(reader)}
        for table in FOLLOWING:
            for key, value in self._scan(reader, table):
                expected = missing.pop((table, key), None)
                if expected is None:
                    if (table == TIMERS and key in timers) or any(run_id_to_bytes(run_id) in key for run_id in unknown):
                        continue
                    self._add("row", f"{table} row {key.hex()} follows from no journal")
                elif expected[1] != value and not (expected[1] or b"").startswith(value + b"\0"):  # of an older release
                    self._add("row", f"{table} row {key.hex()} has another value than follows", expected[0])
        for (table, key), (run_id, _) in missing.items():
            self._add("row", f"{table} row {key.hex()} is missing", run_id)

    def _schedules(self, reader: LmdbReader) -> list[Schedule]:
        found: list[Schedule] = []
        for key, value in self._scan(reader, SCHEDULES):
            item = self._decoded(SCHEDULES, key, value, Schedule)
            if item is not None:
                found.append(item)
                if schedule_key(item.tenant, item.name) != key:
                    self._add("row", f"schedule {item.name} stands in another's place")
        return found

    def _others(self, reader: LmdbReader) -> None:
        """Rows that say something of runs."""
        for key, value in self._scan(reader, LOCKS):
            held = self._decoded(LOCKS, key, value, Held)
            if held is None:
                continue
            if lock_key(held.tenant, held.name) != key:
                self._add("row", f"lock {held.name!r} stands in another's place")
            known = None if held.run_id is None else self._known.get(held.run_id)
            lost = known is None or not (known.broken or known.locks.get(held.name) == held.token)
            if held.run_id is not None and lost:
                self._add("row", f"lock {held.name!r} is held by a run that does not know of it", held.run_id)
        for key, _ in self._scan(reader, INBOX):
            if len(key) != 32:
                self._add("row", f"inbox row {key.hex()} is none")
                continue
            for run_id in parse_inbox_key(key):
                if run_id not in self._known:
                    self._add("row", f"inbox row {key.hex()} is of a run that is not there", run_id)
        for key, value in self._scan(reader, OUTBOX):
            if len(key) < 16:
                self._add("row", f"outbox row {key.hex()} is none")
                continue
            if is_callback(key):
                self._decoded(OUTBOX, key, value, Callback)
            if (run_id := run_id_from_bytes(key[:16])) not in self._known:
                self._add("row", f"outbox row {key.hex()} is of a run that is not there", run_id)
        for key, value in self._scan(reader, DECISIONS):
            self._decoded(DECISIONS, key, value, _DECISION)
            if len(key) != 17 or run_id_from_bytes(key[:16]) not in self._known:
                self._add("row", f"row {key.hex()} of decisions is of no run that is there")
        for key, value in self._scan(reader, EVENTS):
            self._decoded(EVENTS, key, value, Event)
        idempotency = dict(self._scan(reader, IDEMPOTENCY))
        for run_id, known in self._known.items():
            for key in known.keys:
                found = idempotency.pop(key, None)
                if found is None or run_id.encode() not in found:
                    self._add("row", "the row of the run's idempotency key is missing, or another's", run_id)
        if not any(known.broken for known in self._known.values()):
            for key in idempotency:
                self._add("row", f"idempotency row {key.hex()} names a run that is not there")
        for table in TABLES:
            if table not in (*FOLLOWING, LOCKS, INBOX, OUTBOX, DECISIONS, EVENTS, IDEMPOTENCY, SCHEDULES):
                for _ in self._scan(reader, table):
                    pass

    def _scan(self, reader: LmdbReader, table: str) -> Iterator[tuple[bytes, bytes]]:
        """The table's rows, whole."""
        self._progress(f"rows of {table}", 0, 0)
        try:
            for key, value in scan_all(reader, table):
                self.rows += 1
                yield key, value
        except StoreCorruptError as error:
            self._add("blob", f"a value of the {table} table: {error.message}")

    def _decoded(self, table: str, key: bytes, value: bytes, kind: type[T]) -> T | None:
        try:
            return msgspec.msgpack.decode(value, type=kind)
        except UNREADABLE as error:
            self._add("row", f"{table} row {key.hex()} cannot be read: {error}")
            return None

    def _blobs(self, reader: LmdbReader) -> None:
        """Every blob has the bytes it is named by, every name a blob, and both directions of names agree."""
        files, blobs = reader.files, reader.blobs
        if blobs is None or files.run_blobs is None:
            return
        total = blobs.count()
        by_run = _keys(reader, files.blob_runs)
        named = {key[:DIGEST_BYTES] for key in by_run | _keys(reader, files.blob_rows)}
        for key in by_run ^ {key[16:] + key[:16] for key in _keys(reader, files.run_blobs)}:
            self._add("blob", f"blob {key[:32].hex()} is named in one direction only", run_id_from_bytes(key[32:]))
        after = b""
        while page := blobs.sizes(after, _PAGE):
            for digest, size_bytes in page:
                self.blobs += 1
                if digest not in named:
                    self.unnamed += 1
                named.discard(digest)
                try:
                    blobs.load(Ref(digest, size_bytes))
                except StoreCorruptError as error:
                    self._add("blob", error.message)
            after = page[-1][0]
            self._progress("blobs", self.blobs, total)
        for digest in named:
            self._add("blob", f"blob {digest.hex()} is named and not there")


def _keys(reader: LmdbReader, db: Any) -> set[bytes]:
    return reader.files.read(lambda txn: {cast(bytes, key) for key in txn.cursor(db=db).iternext(values=False)})


def _next_run(db: Any, after: bytes, txn: lmdb.Transaction) -> bytes | None:
    """The run of the first key that is not before ``after``."""
    with txn.cursor(db=db) as cursor:
        return bytes(cursor.key())[:16] if (cursor.set_range(after) if after else cursor.first()) else None
