"""What is LMDB's own: its file, map, readers, lock, and what goes wrong with them."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from agentrt.errors import (
    InputError,
    InternalError,
    StaleWriteError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StorePlaceError,
    StoreVersionError,
)
from agentrt.stores import lmdb as lmdb_module
from agentrt.stores import place
from agentrt.stores.base import INBOX, Row
from agentrt.stores.keys import journal_key
from agentrt.stores.lmdb import LmdbReader, LmdbStore
from agentrt.testing.stores import Script, Session, everything


def opened(folder: Path, **options: Any) -> Session:
    options = {"map_bytes": 2**20, "map_bytes_max": 2**26, "free_bytes_min": 0, "force_place": True} | options
    return Session(lambda loop: LmdbStore(folder, loop, **options))


def lmdb_store(session: Session) -> LmdbStore:
    assert isinstance(session.store, LmdbStore)
    return session.store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    session = opened(folder)
    yield session
    session.close()


def python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- one process ----------------------------------------------------------------------------


def test_fault_M57_a_forked_child_cannot_use_the_store(session: Session) -> None:
    script = Script()
    session.must(script.accept())
    step = script.step()
    uses = (
        lambda: session.store.read_head(script.run_id),
        lambda: session.store.read_records(script.run_id),
        lambda: session.store.scan_heads(),
        lambda: session.store.scan_rows(INBOX),
        lambda: session.store.commit(step, lambda error: None),
        lambda: session.store.backlog(),
    )
    child = os.fork()
    if child == 0:
        refused = 0
        for use in uses:
            try:
                use()
            except InternalError as error:
                refused += "forked" in error.message
        session.store.close()  # touches nothing
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)
    session.must(step)


def test_fault_M58_a_second_node_is_refused(session: Session, folder: Path) -> None:
    session.must(Script().accept())
    program = (
        "import asyncio, sys; from agentrt.stores.lmdb import LmdbStore;"
        "LmdbStore(sys.argv[1], asyncio.new_event_loop(), force_place=True)"
    )
    done = python(program, folder)
    assert "StoreInUseError" in done.stderr and f"process {os.getpid()}" in done.stderr
    with pytest.raises(StoreInUseError):
        opened(folder)
    session.must(Script().accept())


def test_a_session_that_was_overtaken_writes_nothing(session: Session, folder: Path) -> None:
    """Should the lock fail (its file deleted, say), the generation is there."""
    script = Script()
    session.must(script.accept())
    files = lmdb_store(session)._files
    with files.env.begin(write=True) as txn:
        txn.put(b"generation", (session.store.generation + 1).to_bytes(8, "big"), db=files.meta)
    assert isinstance(session.commit(script.step()), StaleWriteError)
    assert isinstance(session.commit(Script().accept()), StaleWriteError)
    assert len(session.store.read_records(script.run_id)) == 1


def test_fault_D21_the_place_is_checked_unless_forced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "file_system_of", lambda path: "overlay")
    with pytest.raises(StorePlaceError):
        opened(folder, force_place=False)
    opened(folder, force_place=True).close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be made"):
        opened(tmp_path / "file" / "store")


def test_the_store_is_private(folder: Path) -> None:
    opened(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


# --- groups -----------------------------------------------------------------------------------


def test_what_gathers_during_a_sync_shares_the_next(session: Session) -> None:
    store = lmdb_store(session)
    before = store.groups
    session.must(*[Script().accept() for _ in range(500)])
    assert store.groups - before < 100


def test_fault_D15_what_is_given_and_not_committed_is_not_read(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script()
    session.must(script.accept(), script.step())
    began, go_on = threading.Event(), threading.Event()
    write = LmdbStore._write

    def slow(self: LmdbStore, group: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return write(self, group)

    monkeypatch.setattr(LmdbStore, "_write", slow)
    given = session.give(script.step())
    assert began.wait(60)
    assert len(session.store.read_records(script.run_id)) == 2
    head = session.store.read_head(script.run_id)
    assert head is not None and head.version == 2
    assert session.store.backlog()[0] == 1
    go_on.set()
    assert given.result(60) is None
    assert len(session.store.read_records(script.run_id)) == 4


def test_more_runs_than_are_cached(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_module, "HEADS_CACHED_MAX", 10)
    scripts = [Script() for _ in range(40)]
    for _ in range(3):
        session.must(*[script.step() if script.fold.version else script.accept() for script in scripts])
    assert len(lmdb_store(session)._cached) <= 40
    everything(session.store)


def test_a_closed_loop_does_not_stop_the_writer(folder: Path) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept())
    session.store.commit(script.step(), lambda error: None)
    session._stop()
    session.store.commit(script.step(), lambda error: None)
    session.store.close()
    again = opened(folder)
    assert len(again.store.read_records(script.run_id)) == 4
    again.close()


def test_after_an_error_nobody_foresaw_nothing_more_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept())
    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "_write", lambda self, group: (_ for _ in ()).throw(lmdb.PanicError("commit", -30795)))
        assert type(session.commit(script.step())) is StoreError
    assert type(session.commit(Script().accept())) is StoreError
    assert len(session.store.read_records(script.run_id)) == 1
    session.close()
    again = opened(folder)
    again.must(Script().accept())
    again.close()


# --- room ----------------------------------------------------------------------------------------


def test_the_map_grows_under_readers(folder: Path) -> None:
    session = opened(folder, map_bytes=65536)
    script = Script()
    session.must(script.accept(), script.step())
    for _ in range(30):
        given = [session.give(script.step(60_000)) for _ in range(4)]
        while not all(outcome.done() for outcome in given):
            session.store.read_records(script.run_id, max(0, script.fold.version - 12))
            session.store.scan_heads()
        assert [outcome.result() for outcome in given] == [None] * 4
    assert lmdb_store(session)._files.env.info()["map_size"] > 2**22
    everything(session.store)
    session.close()


def test_a_batch_larger_than_many_doublings(folder: Path) -> None:
    session = opened(folder, map_bytes=65536)
    script = Script()
    session.must(script.accept(), script.step(), script.step(8 * 2**20))
    session.close()


def test_a_full_map_refuses_and_loses_nothing(folder: Path) -> None:
    session = opened(folder, map_bytes=2**20, map_bytes_max=2**21)
    script = Script()
    session.must(script.accept(), script.step())
    done = 2
    while True:
        error = session.commit(script.step(50_000))
        if error is not None:
            break
        done = script.fold.version
    assert isinstance(error, StoreFullError) and error.limit == "store.map_bytes_max"
    refused = session.commit(Script().accept())
    assert isinstance(refused, StoreFullError)
    assert len(session.store.read_records(script.run_id)) == done
    session.close()
    again = opened(folder, map_bytes_max=2**24)
    resumed = Script.resume(script.run_id, again.store.read_records(script.run_id))
    again.must(Script().accept(), resumed.step(50_000), resumed.end())
    everything(again.store)
    again.close()


def test_one_too_large_does_not_take_its_group_with_it(folder: Path) -> None:
    session = opened(folder, map_bytes=2**20, map_bytes_max=2**22)
    scripts = [Script() for _ in range(20)]
    session.must(*[script.accept() for script in scripts], *[script.step() for script in scripts])
    given = [session.give(script.step(2**23 if number == 7 else 10)) for number, script in enumerate(scripts)]
    given.append(session.give(scripts[7].step()))
    # Of two that want one unique row the first is too large, so the second gets it, whatever an earlier try said.
    row = Row(INBOX, b"one", b"1")
    given.append(session.give(scripts[8].rows(Row(INBOX, b"large", b"x" * 2**23), unique=(row,))))
    given.append(session.give(scripts[9].rows(unique=(row,))))
    errors = [type(outcome.result(60)) for outcome in given]
    assert errors.pop(7) is StoreFullError
    assert errors[-3:] == [StaleWriteError, StoreFullError, type(None)]
    assert errors[:-3] == [type(None)] * 19
    everything(session.store)
    session.close()


def test_new_runs_are_refused_before_old_ones_when_the_map_fills(folder: Path) -> None:
    session = opened(folder, map_bytes=2**20, map_bytes_max=2**22)
    script = Script()
    session.must(script.accept(), script.step())
    while session.store.used_bytes() <= 2**22 - 2**22 // 16:  # type: ignore[attr-defined]
        session.must(script.step(20_000))
    lmdb_store(session)._low_checked_ns = 0  # as if the measure were old
    assert isinstance(session.commit(Script().accept()), StoreFullError)
    session.must(script.step(), script.end())
    session.close()


def test_fault_M60_low_disk_space_stops_admission_first(folder: Path) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept())
    store = lmdb_store(session)
    store._free_bytes_min, store._low_checked_ns = 2**62, 0
    refused = session.commit(Script().accept())
    assert isinstance(refused, StoreFullError) and "bytes left" in refused.message
    session.must(script.step(), script.step())
    store._free_bytes_min, store._low_checked_ns = 0, 0
    session.must(Script().accept(), script.end())
    session.close()


def test_fault_M60_a_full_disk_is_an_error_not_a_signal(tmp_path: Path) -> None:
    """On a file system of 2 MiB, where this process may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting is not permitted")
    try:
        session = opened(small / "store", map_bytes=2**24)
        script = Script()
        session.must(script.accept(), script.step())
        version = script.fold.version
        while (error := session.commit(script.step(100_000))) is None:
            version = script.fold.version
        assert isinstance(error, StoreFullError)
        assert len(session.store.read_records(script.run_id)) == version
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        resumed = Script.resume(script.run_id, session.store.read_records(script.run_id))
        session.must(resumed.step(100_000), resumed.end())
        everything(session.store)
        session.close()
        again = opened(small / "store")
        assert everything(again.store)["heads"][script.run_id].state == "SUCCEEDED"
        again.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


# --- readers ---------------------------------------------------------------------------------------

READER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], subdir=False, readonly=True, max_dbs=10, create=False)
txn = env.begin()
txn.get(b"x")
print("reading", flush=True)
sys.stdin.read()
"""


def test_fault_M61_slots_of_killed_readers_are_freed(session: Session, folder: Path) -> None:
    session.must(Script().accept())
    command = [sys.executable, "-c", READER, str(folder / "journal.mdb")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"reading\n"
        reader.kill()
        reader.wait()
    assert lmdb_store(session)._files.check_readers() == 1
    assert lmdb_store(session)._files.check_readers() == 0


def test_fault_M62_no_read_outlives_its_call(session: Session) -> None:
    script = Script()
    session.must(script.accept(), *[script.step() for _ in range(50)])
    store = lmdb_store(session)
    for _ in range(20):
        store.read_head(script.run_id)
        store.read_records(script.run_id)
        store.scan_heads()
        store.scan_rows(INBOX)
    size = store.used_bytes()
    for number in range(300):
        session.must(script.rows(Row(INBOX, b"k", b"x" * 2000 + b"%d" % number)))
        store.read_row(INBOX, b"k")
    assert store.used_bytes() - size < 2**20  # pages are used again; a reader held open would keep all of them


def test_a_reader_beside_the_node(session: Session, folder: Path) -> None:
    """From another process: what is durable, also after the node has grown the file beyond the reader's map."""
    script = Script()
    session.must(script.accept("k"), script.step())
    program = """
import sys
import threading
from agentrt.stores.lmdb import LmdbReader
reader = LmdbReader(sys.argv[1])
run_id, = [head.run_id for head in reader.scan_heads()]
print(len(reader.read_records(run_id)), reader.generation, flush=True)
sys.stdin.readline()
print(len(reader.read_records(run_id)), reader.read_head(run_id).state, flush=True)
reader.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == "2 1\n"
        session.must(*[script.step(1_000_000) for _ in range(20)], script.end())
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "43 SUCCEEDED\n"


def test_a_reader_where_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        LmdbReader(tmp_path / "nothing")


# --- damage ----------------------------------------------------------------------------------------


def filled(folder: Path) -> dict[str, Any]:
    session = opened(folder)
    for number in range(20):
        script = Script()
        session.must(script.accept(f"k{number}"), *[script.step(500) for _ in range(10)])
    contents = everything(session.store)
    session.close()
    return contents


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"hello", b"\0" * 8192, random.Random(1).randbytes(100_000)],
    ids=["empty", "one byte", "text", "zeros", "noise"],
)
def test_a_file_that_is_no_store(folder: Path, data: bytes) -> None:
    folder.mkdir()
    (folder / "journal.mdb").write_bytes(data)
    with pytest.raises(StoreCorruptError):
        opened(folder)
    assert (folder / "journal.mdb").read_bytes() == data  # left for whoever can save it
    with pytest.raises(StoreCorruptError):  # and the lock was let go
        opened(folder)


def test_a_database_of_another_program(folder: Path) -> None:
    folder.mkdir()
    with lmdb.open(str(folder / "journal.mdb"), subdir=False) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"1")
    with pytest.raises(StoreCorruptError, match="not a store"):
        opened(folder)


def test_a_file_cut_off(folder: Path) -> None:
    filled(folder)
    data = folder / "journal.mdb"
    size = data.stat().st_size
    for share in (0.95, 0.5, 0.1):
        os.truncate(data, int(size * share))
        with pytest.raises(StoreCorruptError):
            opened(folder)


def test_a_newer_schema(folder: Path) -> None:
    opened(folder).close()
    with lmdb.open(str(folder / "journal.mdb"), subdir=False, max_dbs=10) as env, env.begin(write=True) as txn:
        txn.put(b"schema", (2).to_bytes(4, "big"), db=env.open_db(b"meta", txn=txn))
    with pytest.raises(StoreVersionError, match="schema 2"):
        opened(folder)


def test_flipped_bits_are_noticed_or_harmless_never_a_crash(folder: Path) -> None:
    """Anywhere in the file; a crash would end the tests. What is inside a result is only that run's business."""
    before = filled(folder)
    data = folder / "journal.mdb"
    whole = data.read_bytes()
    rng = random.Random(7)
    noticed = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 20))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        data.write_bytes(damaged)
        try:
            session = opened(folder)
        except StoreError:
            noticed += 1
            continue
        try:
            everything(session.store)
        except (StoreError, AssertionError):
            noticed += 1
        session.close()
    assert noticed > 10
    data.write_bytes(whole)
    session = opened(folder)
    assert everything(session.store) == before
    session.close()


def test_a_missing_record_and_a_misplaced_head(folder: Path) -> None:
    session = opened(folder)
    one, two = Script(), Script()
    session.must(one.accept(), one.step(), one.step(), two.accept())
    files = lmdb_store(session)._files
    with files.env.begin(write=True) as txn:
        txn.delete(journal_key(one.run_id, 2), db=files.journal)
    with pytest.raises(StoreCorruptError, match="record 2") as caught:
        session.store.read_records(one.run_id)
    assert caught.value.run == one.run_id
    assert len(session.store.read_records(two.run_id)) == 1
    lmdb_store(session)._cached.clear()
    with files.env.begin(write=True) as txn:
        rows = list(txn.cursor(db=files.heads))
        txn.put(rows[0][0], rows[1][1], db=files.heads)
        txn.put(rows[1][0], b"\xc1", db=files.heads)
    for script in (one, two):
        with pytest.raises(StoreCorruptError):
            session.store.read_head(script.run_id)
    session.close()


def test_a_making_that_was_interrupted_is_made_anew(folder: Path) -> None:
    folder.mkdir()
    (folder / "journal.mdb.new").write_bytes(b"half")
    (folder / "journal.mdb.new-lock").write_bytes(b"half")
    session = opened(folder)
    session.must(Script().accept())
    session.close()
    assert sorted(path.name for path in folder.iterdir()) == ["journal.mdb", "journal.mdb-lock", "lock"]
