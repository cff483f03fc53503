"""How runs leave a store and come into one. Each step is durable before the next, so that at any moment each run is
owned by one side: the store that it is in, or, once it is fenced there (EXPORTED), the file.

Leaving: everything is written but the end of the file, by which it becomes an export; the runs are fenced, one commit
each; then the file gets its end and its name. A kill in between leaves runs that are fenced and a file that nobody can
import: exporting them again makes the file. Coming: one commit per run, children first; a kill leaves some of them in
the file, and importing it again goes on with those.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from agentrt import records as r
from agentrt.engine.moving import exported
from agentrt.engine.rows import idempotency_keys, rows_of
from agentrt.engine.steps import MAILBOX_TOPIC
from agentrt.errors import (
    AgentrtError,
    DuplicateError,
    ExportFileError,
    IdempotencyConflictError,
    InputError,
    RunExistsError,
    StoreCorruptError,
    StoreError,
    UnknownRunError,
)
from agentrt.flow.accounts import carried, decode_below, decode_entry, encode_row
from agentrt.fold import RunFold, apply, fold, head_of
from agentrt.ids import parse_run_id
from agentrt.progress import Progress, no_progress
from agentrt.states import RunState
from agentrt.stores.base import ACCOUNTS, EVENT_IDS, EVENTS, IDEMPOTENCY, INBOX, Batch, Row, Store, scan_all
from agentrt.stores.frames import Frames, family_of
from agentrt.stores.keys import address_of, below_key, entry_key, inbox_key
from agentrt.stores.lmdb_env import sync_file, sync_folder
from agentrt.stores.lmdb_files import SCHEMA
from agentrt.stores.modules import Modules
from agentrt.transfer.format import ExportReader, ExportWriter, Header, Travelling, open_export

#: Rows that stay where a run has left: requests made again find it, and what it has used is counted.
_STAY: Final = (IDEMPOTENCY, ACCOUNTS)
#: The oldest schema whose exports are like this one's: what came since, an index, does not travel.
_SCHEMA_SAME: Final = 4
#: Raises what the store refuses with.
Commit = Callable[[Batch], Awaitable[None]]


class Place(NamedTuple):
    """One side of a move. ``elsewhere`` runs a blocking function on another thread, which also tells ``progress``."""

    store: Store
    modules: Modules
    commit: Commit
    elsewhere: Callable[[Callable[[], Any]], Awaitable[Any]]
    now_ns: Callable[[], int]
    abi: int
    agentrt: str
    frames: Frames | None = None
    progress: Progress = no_progress


class Member(NamedTuple):
    """A run that moves; ``fence`` is the batch that ends it here, None if it has ended or is fenced already."""

    run_id: str
    records: list[r.Record]
    run: RunFold
    rows: tuple[Row, ...]
    fence: Batch | None


# --- leaving -------------------------------------------------------------------


def ensemble(store: Store, run_ids: Sequence[str]) -> list[str]:
    """The runs and what they started, parents first. Blocks. Raises UnknownRunError, InputError if a run cannot leave:
    it has ended, holds a lock, or its parent waits for it here."""
    found: dict[str, RunFold] = {}
    pending = [parse_run_id(run_id) for run_id in run_ids]
    asked = set(pending)
    while pending:
        run_id = pending.pop(0)
        if run_id in found:
            continue
        records = store.read_records(run_id)
        if not records:
            if run_id in asked:
                raise UnknownRunError(f"there is no run {run_id}", run=run_id)
            continue  # a child that was never accepted, or was erased
        run = found[run_id] = fold(records)
        if run.ended is not None:
            if run_id in asked:
                raise InputError("the run has ended: nothing of it goes on elsewhere", run=run_id)
            continue
        held = [*run.locks, *run.foreign_locks.values()]
        if held:
            raise InputError(f"the run holds lock {held[0]!r}, which stays here", run=run_id, hint="Try again later")
        pending += [child.run_id for child in run.children.values()]
    for run_id, run in found.items():
        parent = (run.run().parent or "").partition("/")[0]
        if parent and parent not in found and run.ended is None:
            head = store.read_head(parent)
            if head is not None and not head.ended_ns and not run.run().detached:
                raise InputError(f"the run belongs to {parent}, which goes on here", run=run_id, hint="Export that one")
    return [*found]


def refuse_exported(store: Store, run_ids: Sequence[str]) -> None:
    """Raises RunExportedError if one of the runs has left already. Blocks."""
    for run_id in run_ids:
        head = store.read_head(run_id)
        if head is not None and head.state == RunState.EXPORTED:
            raise exported(run_id)


def _gather(place: Place, run_ids: Sequence[str], export_id: str) -> list[Member]:
    members: list[Member] = []
    together = set(run_ids)
    accounts = _accounts(place.store, run_ids)
    for run_id in run_ids:
        records = place.store.read_records(run_id)
        run = fold(records)
        rows = (*_travelling(place.store, run_id, run, together), *accounts.get(run_id, ()))
        fence = None
        if run.ended is None and run.exported is None:
            gone = [Row(row.table, row.key, None) for row in rows_of(run_id, run)]
            gone += [Row(row.table, row.key, None) for row in rows if row.table not in _STAY]
            after = run.version
            record = r.Exported(after + 1, max(place.now_ns(), run.at_ns), export_id)
            apply(run, record)
            records = [*records, record]
            fence = Batch(head_of(run, run_id), after, (record,), tuple(gone))
        members.append(Member(run_id, records, run, rows, fence))
        place.progress("runs read", len(members), len(run_ids))
    return members


def _accounts(store: Store, run_ids: Sequence[str]) -> dict[str, list[Row]]:
    """What is counted of the runs, and of the budgets above them, by the run that it travels with."""
    entries, below = {}, {}
    for run_id in run_ids:
        first = store.read_records(run_id, 0, 1)[0]
        root = (first.root if isinstance(first, r.RunAccepted) else None) or run_id
        value = store.read_row(ACCOUNTS, entry_key(root, run_id))
        if value is None:
            continue
        entry = entries[run_id] = decode_entry(value)
        for each in entry.chain:
            if each not in below and (value := store.read_row(ACCOUNTS, below_key(root, each))) is not None:
                below[each] = decode_below(value)
    found: dict[str, list[Row]] = {}
    fresh, sums = carried(entries.values(), below.values())
    for row in fresh:
        found[row.run_id] = [Row(ACCOUNTS, entry_key(row.root, row.run_id), encode_row(row))]
    for passed in sums:
        bearer = passed.run_id if passed.run_id in found else next(iter(found))
        found[bearer].append(Row(ACCOUNTS, below_key(passed.root, passed.run_id), encode_row(passed)))
    return found


def _travelling(store: Store, run_id: str, run: RunFold, together: set[str]) -> tuple[Row, ...]:
    """The rows that go along: they do not follow from the run's own journal."""
    accepted = run.run()
    rows: list[Row] = []
    for key in idempotency_keys(accepted):
        value = store.read_row(IDEMPOTENCY, key)
        if value is not None:
            rows.append(Row(IDEMPOTENCY, key, value))
    for child in run.children.values():
        key = inbox_key(run_id, child.run_id)
        value = store.read_row(INBOX, key)
        if value is not None and child.run_id in together:
            rows.append(Row(INBOX, key, value))
    address = address_of(accepted.tenant, MAILBOX_TOPIC, run_id)
    for table in (EVENTS, EVENT_IDS):
        rows += (Row(table, key, value) for key, value in scan_all(store, table, address))
    return tuple(rows)


async def export_runs(place: Place, run_ids: Sequence[str], path: Path, export_id: str) -> dict[str, int]:
    """Moves runs, which nobody runs meanwhile, into a new file; the version that each has there. Raises InputError,
    StoreError kinds: they are as they were then, unless a run's fence says otherwise."""
    members: list[Member] = await place.elsewhere(lambda: _gather(place, run_ids, export_id))
    part = path.with_name(path.name + ".part")
    file, writer = await place.elsewhere(lambda: _write_body(place, members, path, part, export_id))
    fenced: list[Member] = []
    try:
        for number, member in enumerate(members, 1):
            if member.fence is not None:
                await place.commit(member.fence)
                fenced.append(member)
            place.progress("runs let go", number, len(members))
        await place.elsewhere(lambda: _seal(file, writer, path, part))
    except BaseException:
        if await place.elsewhere(lambda: _given_up(file, path, part)):
            with contextlib.suppress(AgentrtError):
                for member in fenced:
                    await place.commit(back(member.run_id, member.records, member.rows, place.now_ns()))
        raise
    return {member.run_id: member.run.version for member in members}


def back(run_id: str, records: Sequence[r.Record], rows: Sequence[Row], now_ns: int) -> Batch:
    """The batch by which an exported run goes on in the store that it left."""
    run = fold(records)
    after = run.version
    if run.exported is None:
        raise InputError("the run was not exported", run=run_id)
    record = r.Imported(after + 1, max(now_ns, run.at_ns), run.exported.export_id)
    apply(run, record)
    there = tuple(row for row in rows if row.table not in _STAY)
    return Batch(head_of(run, run_id), after, (record,), (*rows_of(run_id, run), *there))


def _write_body(
    place: Place, members: Sequence[Member], path: Path, part: Path, export_id: str
) -> tuple[BinaryIO, ExportWriter]:
    if path.exists():
        raise InputError(f"{path} exists", hint="Choose another name")
    header = Header(SCHEMA, place.abi, place.agentrt, export_id, place.now_ns(), [member.run_id for member in members])
    try:
        file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
    except OSError as error:
        raise InputError(f"{part} cannot be written: {error.strerror}") from error
    try:
        writer = ExportWriter(file, header)
        for version in sorted({member.run.pins.get("agent", member.run.run().version) for member in members}):
            kept = place.modules.get(version)
            if kept is not None:
                writer.module(version, kept)
        for number, member in enumerate(members, 1):
            writer.run(member.run_id, member.records, member.rows)
            place.progress("runs written", number, len(members))
        for member in members:
            if place.frames is not None and member.fence is not None and member.run.frame is not None:
                for frame_id, frame in family_of(place.frames, member.run_id, member.run.frame.frame):
                    writer.state(member.run_id, frame_id, frame)
        file.flush()
        os.fsync(file.fileno())
    except BaseException as error:
        file.close()
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StoreError(f"{part} cannot be written: {error.strerror}", hint="Make room") from error
        raise
    return file, writer


def _seal(file: BinaryIO, writer: ExportWriter, path: Path, part: Path) -> None:
    try:
        writer.seal()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.link(part, path)  # unlike a rename it replaces nothing
        part.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}", hint="Make room, then export again") from error


def _given_up(file: BinaryIO, path: Path, part: Path) -> bool:
    """Makes sure that the file is no export; false if it is one already."""
    if path.exists():
        return False
    with contextlib.suppress(OSError, ValueError):
        file.close()
    part.write_bytes(b"")
    sync_file(part)
    part.unlink()
    return True


# --- coming ----------------------------------------------------------------------


class Arrival(NamedTuple):
    """What importing a run means: ``batch`` None: it is there already, from this export."""

    run_id: str
    batch: Batch | None
    live: bool


async def import_runs(place: Place, path: Path) -> list[str]:
    """Takes the runs of a file over, and returns those that go on here. Raises ExportFileError, RunExistsError,
    IdempotencyConflictError, StoreError kinds: nothing was changed then, unless a commit failed after others."""

    def look() -> tuple[list[Arrival], BinaryIO]:
        file = open_export(path)
        try:
            reader = ExportReader(file)
            _check_header(place, reader.header)
            arrivals: list[Arrival] = []
            for run in reader.runs():
                arrivals.append(_arrival(place, run, reader.header))
                place.progress("runs read", len(arrivals), len(reader.header.runs))
            if not any(arrival.batch is not None for arrival in arrivals):
                raise RunExistsError("the runs of this export are here already", run=arrivals[0].run_id)
            for version, kept in reader.modules():
                place.modules.put(version, kept)
            if place.frames is not None:
                _take_frames(place.frames, reader, {each.run_id for each in arrivals if each.live})
        except BaseException:
            file.close()
            raise
        return arrivals, file

    arrivals, file = await place.elsewhere(look)
    file.close()
    come: list[str] = []
    # Children first: a parent that finds its child missing would take it for a stranger.
    for number, arrival in enumerate(reversed(arrivals), 1):
        if arrival.batch is not None:
            try:
                await place.commit(arrival.batch)
            except DuplicateError as error:
                raise IdempotencyConflictError(
                    "the run's idempotency key is another run's here", run=arrival.run_id
                ) from error
        if arrival.live:
            come.append(arrival.run_id)
        place.progress("runs taken over", number, len(arrivals))
    come.reverse()
    return come


def _take_frames(frames: Frames, reader: ExportReader, run_ids: set[str]) -> None:
    """Keep what there is of frames of the runs. One that cannot be kept is a replay; one that is hostile is found out
    when it is opened, and takes no more room than the node has for them."""
    for run_id, frame_id, frame in reader.states():
        if run_id in run_ids:
            with contextlib.suppress(StoreError):
                frames.put(run_id, frame_id, frame)


def _accounts_here(store: Store, run_id: str, accepted: r.RunAccepted, rows: Sequence[Row]) -> list[Row]:
    """Those of the rows that say what the run and the budgets above it have used. Raises ExportFileError if one is of
    anything else; what is known here of a budget stays."""
    root = accepted.root or run_id
    found: list[Row] = []
    for row in rows:
        if row.table != ACCOUNTS:
            continue
        try:
            if row.key == entry_key(root, run_id):
                entry = decode_entry(row.value or b"")
                same = (entry.run_id, entry.root, entry.tenant, entry.agent)
                right = same == (run_id, root, accepted.tenant, accepted.agent) and not any(entry.used.total)
            else:
                below = decode_below(row.value or b"")
                right = row.key == below_key(root, below.run_id) and below.root == root
                if store.read_row(ACCOUNTS, row.key) is not None:
                    continue
        except (StoreCorruptError, InputError):
            right = False
        if not right:
            raise ExportFileError("a row of the export counts for another run", run=run_id)
        found.append(row)
    return found


def _check_header(place: Place, header: Header) -> None:
    hint = "Import it with the agentrt that wrote it"
    if not _SCHEMA_SAME <= header.schema <= SCHEMA:
        raise ExportFileError(f"the export is of schema {header.schema}, this store of {SCHEMA}", hint=hint)
    if header.abi != place.abi:
        raise ExportFileError(f"the export is of guest ABI {header.abi}, this node of {place.abi}", hint=hint)
    if not header.runs:
        raise ExportFileError("the export has no runs")


def _arrival(place: Place, coming: Travelling, header: Header) -> Arrival:
    run_id, records, run, _ = coming
    ended = run.ended is not None
    if not ended and run.exported is None:
        raise ExportFileError("a run of the export was never fenced where it came from", run=run_id)
    there = place.store.read_records(run_id)
    if there[: len(records)] == records and len(there) >= len(records) and (ended or len(there) > len(records)):
        return Arrival(run_id, None, live=False)
    if there and (records[: len(there)] != there or fold(there).exported is None):
        raise RunExistsError("the store has this run", run=run_id, hint="Each run is in one store only")
    after = len(there)
    rows = [row for row in coming.rows if row.table not in _STAY]
    if not ended:
        rows += _accounts_here(place.store, run_id, run.run(), coming.rows)
    unique = [row for row in coming.rows if row.table == IDEMPOTENCY] if not there else []
    if not ended and run.exported is not None:
        record = r.Imported(run.version + 1, max(place.now_ns(), run.at_ns), run.exported.export_id)
        apply(run, record)
        records = [*records, record]
        rows = [*rows_of(run_id, run), *rows]
    batch = Batch(head_of(run, run_id), after, tuple(records[after:]), tuple(rows), tuple(unique))
    return Arrival(run_id, batch, live=not ended)
