"""What is LMDB's own: its file, map, readers, lock, and what goes wrong with them."""

import lzma
import os
import pickle
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
from agentrt.fold import head_of
from agentrt.stores import lmdb as lmdb_module
from agentrt.stores import place
from agentrt.stores.base import INBOX, PLUGINS, READY, Batch, Head, Row
from agentrt.stores.keys import journal_key
from agentrt.stores.lmdb import LmdbReader, LmdbStore
from agentrt.stores.lmdb_files import SCHEMA, Files
from agentrt.stores.lmdb_reads import filed_head
from agentrt.stores.unfiled import encode_head, join, log_entry
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


BESIDE = """
import pickle, sys
from agentrt.stores.lmdb import LmdbReader
from agentrt.testing.stores import everything
reader = LmdbReader(sys.argv[1])
while asked := sys.stdin.readline().strip():
    if asked == "everything":
        found = everything(reader)
    else:
        found = {head.run_id: head.version for head in reader.scan_heads()}
        for run_id, version in found.items():
            assert len(reader.read_records(run_id)) >= version
    pickle.dump(found, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class Beside:
    """A reader in a process of its own: LMDB opens a file once in each."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", BESIDE, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def everything(self) -> dict[str, Any]:
        return self._ask(b"everything\n")

    def versions(self) -> dict[str, int]:
        """Of all runs, whose records have been read, too."""
        return self._ask(b"versions\n")

    def _ask(self, what: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what)
        self._process.stdin.flush()
        found: dict[str, Any] = pickle.load(self._process.stdout)
        return found

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


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
    apply = lmdb_store(session)._writer._apply

    def slow(group: list[Any]) -> None:
        began.set()
        assert go_on.wait(60)
        apply(group)

    monkeypatch.setattr(lmdb_store(session)._writer, "_apply", slow)
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
        patch.setattr(LmdbStore, "_write", lambda self, *_: (_ for _ in ()).throw(lmdb.PanicError("commit", -30795)))
        assert type(session.commit(Script().accept())) is StoreError
    assert type(session.commit(Script().accept())) is StoreError
    assert type(session.commit(script.step())) is StoreError
    assert len(session.store.read_records(script.run_id)) == 1
    session.close()
    again = opened(folder)
    again.must(Script().accept())
    again.close()


# --- the log --------------------------------------------------------------------------------------


def log_rows(store: LmdbStore) -> int:
    files = store._files
    return int(files.read(lambda txn: txn.stat(files.log)["entries"]))


def log_bytes(store: LmdbStore) -> int:
    files = store._files
    return sum(len(row) for _, row in files.read(lambda txn: list(txn.cursor(db=files.log))))


def filed(store: LmdbStore) -> dict[str, int]:
    """Versions of the heads that are in their places."""
    files = store._files
    found: dict[str, int] = {}
    for key, value in files.read(lambda txn: list(txn.cursor(db=files.heads))):
        head = filed_head(key, value)
        assert head is not None
        found[head.run_id] = head.version
    return found


def test_the_log_stays_as_small_as_it_may_be(folder: Path) -> None:
    session = opened(folder, log_bytes_max=20_000)
    store = lmdb_store(session)
    scripts = [Script() for _ in range(20)]
    quiet = Script()
    session.must(quiet.accept(), *[script.accept() for script in scripts])
    assert filed(store) == {}
    most = 0
    for _ in range(100):
        session.must(*[script.step(100) for script in scripts])
        most = max(most, log_bytes(store))
        assert store._unfiled.size_bytes < 60_000
    assert most < 80_000
    assert filed(store)[quiet.run_id] == 1  # it keeps no old rows
    now = everything(store)
    session.close()
    again = opened(folder)
    assert log_rows(lmdb_store(again)) == 0  # close left nothing to do
    assert everything(again.store) == now
    again.close()


def test_large_groups_of_new_runs_do_not_outgrow_the_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_module, "FILE_RUNS_MAX", 2)
    monkeypatch.setattr(lmdb_module, "FILE_BYTES_MAX", 500)
    session = opened(folder, log_bytes_max=50_000)
    store = lmdb_store(session)
    for _ in range(30):
        session.must(*[Script().accept() for _ in range(100)])
        assert store._unfiled.size_bytes < 150_000
    assert len(filed(store)) > 2500
    session.close()


def test_batches_of_a_run_are_filed_together(folder: Path) -> None:
    session = opened(folder)
    script, large = (Script(f"run_01J0000000000000000000000{n}") for n in range(2))
    session.must(script.accept(), *[script.step(10) for _ in range(30)])
    session.must(large.accept(), large.step(), *[large.step(15_900) for _ in range(4)])
    before = everything(session.store)
    session.close()
    again = opened(folder)
    files = lmdb_store(again)._files
    keys = files.read(lambda txn: [key for key, _ in txn.cursor(db=files.journal)])
    assert [int.from_bytes(key[16:], "big") for key in keys] == [60, 6, 10]
    assert everything(again.store) == before
    for after in range(62):
        assert again.store.read_records(script.run_id, after) == before["journals"][script.run_id][after:]
    again.close()


def test_what_is_in_the_log_is_found_after_a_kill(folder: Path) -> None:
    """A process that ended without close, with some of its runs filed: the log knows the rest."""
    program = """
import os, sys, pickle
from pathlib import Path
from agentrt.testing.stores import Script, Session, everything
from agentrt.stores.base import INBOX, Batch, Row
from agentrt.stores.lmdb import LmdbStore
store = lambda loop: LmdbStore(sys.argv[1], loop, force_place=True, free_bytes_min=0, log_bytes_max=8000)
session = Session(store)
scripts = [Script() for _ in range(10)]
for number, script in enumerate(scripts):
    session.must(script.accept(), *[script.step() for _ in range(number)])
head = session.store.read_head(scripts[3].run_id)
session.must(Batch(head, head.version, (), (Row(INBOX, b"m", b"1"),)))
Path(sys.argv[2]).write_bytes(pickle.dumps((everything(session.store), session.store._unfiled.size_bytes)))
os._exit(0)
"""
    note = folder.parent / "note"
    done = python(program, folder, note)
    assert done.returncode == 0, done.stderr
    before, size_bytes = pickle.loads(note.read_bytes())
    beside = Beside(folder)
    assert beside.everything() == before
    session = opened(folder)
    store = lmdb_store(session)
    assert 0 < store._unfiled.size_bytes <= size_bytes
    assert 0 < len(filed(store)) < 10 and log_rows(store) > 1
    assert everything(store) == before == beside.everything()
    store._writer._idle()  # as if nothing had come for a while
    assert log_rows(store) == 0 and everything(store) == before == beside.everything()
    for run_id, records in before["journals"].items():
        script = Script.resume(run_id, records)
        session.must(script.step(), script.end())
    assert {head.state for head in beside.everything()["heads"].values()} == {"SUCCEEDED"}
    beside.close()
    session.close()


def test_pages_of_heads_some_of_which_are_filed(folder: Path) -> None:
    session = opened(folder, log_bytes_max=4000)
    scripts = [Script() for _ in range(30)]
    rng = random.Random(3)
    rng.shuffle(scripts)
    for script in scripts:
        session.must(script.accept())
    rng.shuffle(scripts)
    for script in scripts[:10]:
        session.must(script.step(), *([script.end()] if rng.random() < 0.5 else []))
    store = lmdb_store(session)
    assert 5 < len(filed(store)) < 30 and len(store._unfiled.heads("")) > 5
    expected = sorted((head_of(script.fold, script.run_id) for script in scripts), key=lambda head: head.run_id)
    for limit in (1, 2, 3, 7, 29, 30, 31):
        found: list[Head] = []
        while page := store.scan_heads(found[-1].run_id if found else "", limit):
            assert len(page) <= limit
            found += page
        assert found == expected
        found = []
        while page := store.scan_heads(found[-1].run_id if found else "", limit, newest_first=True):
            assert len(page) <= limit
            found += page
        assert found == expected[::-1]
    session.close()


def test_a_run_is_filed_when_it_ends(folder: Path) -> None:
    """With all it has, also what it did in the same group; a log without running runs is empty."""
    session = opened(folder)
    store = lmdb_store(session)
    scripts = [Script() for _ in range(20)]
    session.must(*[script.accept() for script in scripts])
    session.must(*[batch for script in scripts for batch in (script.step(), script.step(), script.end())])
    once = Script()
    session.must(once.accept(), once.end())
    assert filed(store) == {script.run_id: script.fold.version for script in (*scripts, once)}
    assert store._unfiled.size_bytes == 0 and log_rows(store) <= 1
    late = Batch(head_of(once.fold, once.run_id), once.fold.version, (), (Row(INBOX, b"late", b"1"),))
    session.must(late, Script().accept())
    assert store.read_row(INBOX, b"late") == b"1"
    now = everything(store)
    session.close()
    again = opened(folder)
    assert everything(again.store) == now
    again.close()


def test_reads_while_runs_are_filed(folder: Path) -> None:
    """Whatever the moment, a reader finds all that was acknowledged before it looked, in one piece."""
    session = opened(folder, log_bytes_max=3000)
    scripts = [Script() for _ in range(5)]
    session.must(*[script.accept() for script in scripts])
    acknowledged = {script.run_id: 1 for script in scripts}
    over = threading.Event()
    failures: list[BaseException] = []

    def look(store: Any) -> None:
        try:
            while not over.is_set():
                known = dict(acknowledged)
                heads = {head.run_id: head.version for head in store.scan_heads()}
                assert set(heads) == set(known)
                for run_id, version in known.items():
                    assert heads[run_id] >= version
                    assert len(store.read_records(run_id)) >= heads[run_id]
                    assert len(store.read_records(run_id, version - 1)) >= 1
        except BaseException as error:
            failures.append(error)

    beside = Beside(folder)

    def look_beside() -> None:
        try:
            while not over.is_set():
                known = dict(acknowledged)
                versions = beside.versions()
                assert all(versions[run_id] >= version for run_id, version in known.items())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look, args=(session.store,)) for _ in range(2)]
    threads.append(threading.Thread(target=look_beside))
    for thread in threads:
        thread.start()
    for _ in range(60):
        session.must(*[script.step(50) for script in scripts])
        acknowledged |= {script.run_id: script.fold.version for script in scripts}
    over.set()
    for thread in threads:
        thread.join()
    beside.close()
    assert not failures, failures
    everything(session.store)
    session.close()


def test_filing_waits_while_there_is_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be refused with filing beside it is written without; runs that ended are filed later."""
    session = opened(folder, map_bytes_max=2**22)  # a log of 256 KiB
    store = lmdb_store(session)
    scripts = [Script() for _ in range(30)]
    session.must(*[script.accept() for script in scripts])
    with monkeypatch.context() as patch:

        def no_room(self: LmdbStore, *_: Any) -> None:
            raise lmdb.MapFullError("put", -30792)

        patch.setattr(LmdbStore, "_file", no_room)
        for _ in range(20):
            session.must(*[script.step(1000) for script in scripts])
        session.must(*[script.end() for script in scripts[:5]])
        assert filed(store) == {} and store._unfiled.size_bytes > 2**19
    before = everything(store)
    store._filing_not_before_ns = 0  # as if time had passed
    session.must(scripts[5].step())
    assert len(filed(store)) >= 10 and store._unfiled.size_bytes <= 2**19
    assert everything(store) != before
    before = everything(store)
    session.close()
    again = opened(folder)
    assert everything(again.store) == before
    again.close()


def test_a_full_map_with_runs_in_the_log(folder: Path) -> None:
    session = opened(folder, map_bytes_max=2**21)
    scripts = [Script() for _ in range(30)]
    session.must(*[script.accept() for script in scripts])
    errors: list[StoreError | None] = []
    while not any(errors):
        errors = [session.commit(script.step(3000)) for script in scripts]
    assert all(error is None or isinstance(error, StoreFullError) for error in errors)
    before = everything(session.store)
    assert len(before["heads"]) == len(scripts)
    session.close()
    again = opened(folder, map_bytes_max=2**24)
    assert everything(again.store) == before
    script = Script.resume(scripts[0].run_id, again.store.read_records(scripts[0].run_id))
    again.must(script.step(3000), script.end())
    again.close()


# --- room ----------------------------------------------------------------------------------------


def test_the_map_grows_under_readers(folder: Path) -> None:
    session = opened(folder, map_bytes=65536)
    script = Script()
    session.must(script.accept(), script.step())
    for _ in range(30):
        given = [session.give(script.step(16_000)) for _ in range(16)]
        while not all(outcome.done() for outcome in given):
            session.store.read_records(script.run_id, max(0, script.fold.version - 48))
            session.store.scan_heads()
        assert [outcome.result() for outcome in given] == [None] * 16
    assert lmdb_store(session)._files.env.info()["map_size"] > 2**22
    everything(session.store)
    session.close()


def test_a_batch_larger_than_many_doublings(folder: Path) -> None:
    session = opened(folder, map_bytes=65536)
    script = Script()
    rows = [Row(INBOX, b"%d" % number, b"x" * 16_000) for number in range(500)]
    session.must(script.accept(), script.rows(*rows))
    session.close()


def test_a_full_map_refuses_and_loses_nothing(folder: Path) -> None:
    session = opened(folder, map_bytes=2**20, map_bytes_max=2**21)
    script = Script()
    session.must(script.accept(), script.step())
    done = 2
    while True:
        error = session.commit(script.step(16_000))
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
    again.must(Script().accept(), resumed.step(16_000), resumed.end())
    everything(again.store)
    again.close()


def test_one_too_large_does_not_take_its_group_with_it(folder: Path) -> None:
    session = opened(folder, map_bytes=2**20, map_bytes_max=2**22)
    scripts = [Script() for _ in range(20)]
    session.must(*[script.accept() for script in scripts], *[script.step() for script in scripts])
    large = tuple(Row(INBOX, b"%d" % number, b"x" * 16_000) for number in range(500))
    given = [
        session.give(script.rows(*large) if number == 7 else script.step()) for number, script in enumerate(scripts)
    ]
    given.append(session.give(scripts[7].step()))
    # Of two that want one unique row the first is too large, so the second gets it, whatever an earlier try said.
    row = Row(INBOX, b"one", b"1")
    given.append(session.give(scripts[8].rows(*large, unique=(row,))))
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
        session.must(script.step(16_000))
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
        while (error := session.commit(script.step(16_000))) is None:
            version = script.fold.version
        assert isinstance(error, StoreFullError)
        assert len(session.store.read_records(script.run_id)) == version
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        resumed = Script.resume(script.run_id, session.store.read_records(script.run_id))
        session.must(resumed.step(16_000), resumed.end())
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


def test_fault_M61_M62_a_busy_node_looks_after_its_readers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only when it is idle: one that was killed loses its slot, one that reads on and on is named, once."""
    monkeypatch.setattr(lmdb_module, "READERS_CHECK_NS", 0)
    monkeypatch.setattr(lmdb_module, "READER_LAG_MAX", 20)
    session = opened(folder)
    store = lmdb_store(session)
    script = Script()
    session.must(script.accept())
    command = [sys.executable, "-c", READER, str(folder / "journal.mdb")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"reading\n"
        for number in range(40):
            store._low_checked_ns = 0  # as if time had passed
            session.must(script.rows(Row(INBOX, b"k", b"%d" % number)))
        assert [each.behind > 20 for each in store._files.readers() if each.pid == reader.pid] == [True]
        reader.kill()
        reader.wait()
    store._low_checked_ns = 0
    session.must(script.rows(Row(INBOX, b"k", b"x")))
    assert reader.pid not in [each.pid for each in store._files.readers()]
    named = [record for record in caplog.records if f"process {reader.pid} reads" in record.getMessage()]
    assert len(named) == 1
    session.close()


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
        session.must(
            *[script.step(16_000) for _ in range(10)], *[script.step(1_000_000) for _ in range(10)], script.end()
        )
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "43 SUCCEEDED\n"


def test_a_reader_where_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        LmdbReader(tmp_path / "nothing")


# --- damage ----------------------------------------------------------------------------------------


def filled(folder: Path, *, log: bool = False) -> dict[str, Any]:
    """Leaves a store with runs; ``log``: some of them in the log, as after a kill."""
    session = opened(folder, log_bytes_max=80_000)
    for number in range(20):
        script = Script()
        session.must(script.accept(f"k{number}"), *[script.step(500) for _ in range(10)])
    contents = everything(session.store)
    data = folder / "journal.mdb"
    as_killed = data.read_bytes()
    assert log_rows(lmdb_store(session)) > 1 and filed(lmdb_store(session))
    session.close()
    if log:
        data.write_bytes(as_killed)
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
    with pytest.raises(StoreCorruptError, match="not a file of agentrt"):
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
        txn.put(b"schema", (SCHEMA + 1).to_bytes(4, "big"), db=env.open_db(b"meta", txn=txn))
    with pytest.raises(StoreVersionError, match=f"schema {SCHEMA + 1}"):
        opened(folder)


# Written by the last agentrt of schema 1: four runs, three with steps; one of them ended, one with mail.
SCHEMA_1 = Path(__file__).parent / "data" / "store_schema1.mdb.xz"
SCHEMA_1_RUNS = {f"run_01J0000000000000000000000{n}": version for n, version in enumerate((12, 5, 5, 1))}


def schema_1(folder: Path) -> None:
    folder.mkdir()
    (folder / "journal.mdb").write_bytes(lzma.decompress(SCHEMA_1.read_bytes()))


def test_a_store_of_schema_1_goes_on(folder: Path) -> None:
    schema_1(folder)
    beside = Beside(folder)  # a reader brings nothing up
    before = beside.everything()
    assert {run_id: head.version for run_id, head in before["heads"].items()} == SCHEMA_1_RUNS
    assert before["tables"][INBOX] == {b"mail": b"1"} and len(before["tables"][READY]) == 3
    session = opened(folder, log_bytes_max=2000)
    assert session.store.generation == 2
    assert everything(session.store) == before
    one, two, _, four = (Script.resume(run_id, before["journals"][run_id]) for run_id in SCHEMA_1_RUNS)
    # Old rows and new ones in one journal, in the log and filed.
    session.must(one.step(), one.step(4000), two.step(), four.step())
    assert beside.everything() == everything(session.store) != before
    session.must(one.step(), one.end(), *[four.step() for _ in range(20)])
    assert isinstance(session.commit(Script(two.run_id).accept()), StaleWriteError)
    now = everything(session.store)
    assert beside.everything() == now
    for after in range(one.fold.version + 1):
        assert session.store.read_records(one.run_id, after) == now["journals"][one.run_id][after:]
    beside.close()
    session.close()
    again = opened(folder)
    assert everything(again.store) == now
    again.close()


def test_a_store_of_schema_1_is_brought_up_at_once_or_not_at_all(folder: Path) -> None:
    schema_1(folder)
    data = folder / "journal.mdb"
    files = Files(folder, map_bytes=2**20, map_bytes_max=2**26, create=False)
    assert files.read(lambda txn: txn.get(b"schema", db=files.meta)) == SCHEMA.to_bytes(4, "big")
    assert files.read(lambda txn: txn.stat(files.log)["entries"]) == 0
    files.close()
    # As if the power had gone before the last page, the meta page, was written.
    whole = bytearray(data.read_bytes())
    newer = max((0, 4096), key=lambda at: int.from_bytes(whole[at + 144 : at + 152], "little"))
    whole[newer : newer + 4096] = lzma.decompress(SCHEMA_1.read_bytes())[newer : newer + 4096]
    data.write_bytes(whole)
    reader = LmdbReader(folder)
    assert reader._files.log is None and len(reader.scan_heads()) == 4
    reader.close()
    session = opened(folder)
    assert {head.run_id: head.version for head in session.store.scan_heads()} == SCHEMA_1_RUNS
    session.close()


def test_a_store_of_schema_3_gets_rows_of_plugins(folder: Path) -> None:
    session = opened(folder)
    run = Script()
    session.must(run.accept(), run.step())
    before = everything(session.store)
    session.close()
    files = Files(folder, map_bytes=2**20, map_bytes_max=2**26, create=False)
    with files.writing() as txn:
        txn.drop(files.table(PLUGINS))
        txn.put(b"schema", (3).to_bytes(4, "big"), db=files.meta)
    files.close()
    reader = LmdbReader(folder)
    assert everything(reader) == before  # type: ignore[arg-type]
    reader.close()
    session = opened(folder)
    assert everything(session.store) == before
    session.must(Batch(None, 0, (), (Row(PLUGINS, b"acme\0key", b"value"),)))
    assert session.store.read_row(PLUGINS, b"acme\0key") == b"value"
    session.close()


@pytest.mark.parametrize("log", [False, True], ids=["filed", "log"])
def test_flipped_bits_are_noticed_or_harmless_never_a_crash(folder: Path, log: bool) -> None:
    """Anywhere in the file; a crash would end the tests. What is inside a result is only that run's business."""
    before = filled(folder, log=log)
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
    session = opened(folder, log_bytes_max=0)
    one, two = Script(), Script()
    for batch in (one.accept(), one.step(), one.step(), two.accept(), Script().accept()):
        session.must(batch)  # filed beside the next
    files = lmdb_store(session)._files
    with files.env.begin(write=True) as txn:
        assert txn.delete(journal_key(one.run_id, 2), db=files.journal)
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


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"\xc1",
        b"\x91",
        join([b"\x90"]),
        join([log_entry(b"\x90", b"\x90")]),
        join([log_entry(encode_head(Head("run_x", 1, "ACTIVE", "t", "a", "v", 1, 1, 1)), b"\x90")]),
    ],
    ids=["empty", "noise", "cut off", "no pair", "no head", "no run"],
)
def test_a_damaged_row_of_the_log(folder: Path, row: bytes) -> None:
    opened(folder).close()
    with lmdb.open(str(folder / "journal.mdb"), subdir=False, max_dbs=10) as env, env.begin(write=True) as txn:
        txn.put((10**9).to_bytes(8, "big"), row, db=env.open_db(b"log", txn=txn))
    with pytest.raises(StoreCorruptError, match="row 1000000000 of the log"):
        opened(folder)
    reader = LmdbReader(folder)
    with pytest.raises(StoreCorruptError, match="row 1000000000 of the log"):
        reader.scan_heads()
    reader.close()


def test_a_making_that_was_interrupted_is_made_anew(folder: Path) -> None:
    folder.mkdir()
    (folder / "journal.mdb.new").write_bytes(b"half")
    (folder / "journal.mdb.new-lock").write_bytes(b"half")
    session = opened(folder)
    session.must(Script().accept())
    session.close()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("blobs.mdb", "blobs.mdb-lock", "journal.mdb", "journal.mdb-lock", "journal.tail", "lock")
    ]
