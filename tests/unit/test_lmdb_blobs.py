"""Blobs of the LMDB store: kills, room, damage, order."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from agentrt import records as r
from agentrt.errors import ClosedError, StoreCorruptError, StoreError, StoreFullError, StoreVersionError
from agentrt.records import encode_batch
from agentrt.stores.base import EVENTS, Row
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.lmdb_blobs import CHUNK_BYTES, BlobFiles, BlobWriter, Put
from agentrt.stores.payloads import blob_digest
from agentrt.stores.tail import Tail
from agentrt.stores.unfiled import encode_head, join, log_entry
from agentrt.testing.stores import Script, Session, everything


def noise(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def opened(folder: Path, **options: Any) -> Session:
    options = {"map_bytes": 2**20, "map_bytes_max": 2**26, "free_bytes_min": 0, "force_place": True} | options
    return Session(lambda loop: LmdbStore(folder, loop, **options))


def until(condition: Callable[[], bool]) -> None:
    over_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < over_s
        time.sleep(0.002)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Blobs:
    """A writer of blobs on a file, with names in a set."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.named: set[bytes] = set()
        self.files = BlobFiles(folder, **({"map_bytes_max": 2**28, "create": True} | options))
        self.writer = BlobWriter(self.files, self.named.__contains__, lambda: False)

    def put(self, *datas: bytes, tier: int = 1) -> tuple[Put, threading.Event]:
        over = threading.Event()
        put = Put(datas, tier, lambda put: over.set())
        self.writer.give(put)
        return put, over

    def must(self, *datas: bytes) -> Put:
        put, over = self.put(*datas)
        assert over.wait(60) and put.error is None
        return put

    def chunks(self) -> int:
        return int(self.files.read(lambda txn: txn.stat(self.files.chunks)["entries"]))

    def close(self) -> None:
        self.writer.close()
        self.files.close()


@pytest.fixture
def blobs(folder: Path) -> Iterator[Blobs]:
    made = Blobs(folder)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES, 3 * 2**20 + 7])
def test_sizes_around_the_chunks(blobs: Blobs, size: int) -> None:
    data = noise(1, size)
    put = blobs.must(data, noise(2, 100))
    assert put.refs[0] == (blob_digest(data), size)
    assert blobs.files.load(put.refs[0]) == data
    assert blobs.chunks() == -(-size // CHUNK_BYTES) + 1


def test_the_same_bytes_are_kept_once(blobs: Blobs) -> None:
    data = noise(1, 700_000)
    puts = [blobs.put(data, noise(2, 20_000)) for _ in range(5)]
    for put, over in puts:
        assert over.wait(60) and put.error is None
    assert blobs.files.count() == 2 and blobs.chunks() == 4


def test_a_small_blob_does_not_wait_for_a_large_one(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same tier in turns, a more urgent one first."""
    order: list[str] = []
    hold, go_on = threading.Event(), threading.Event()
    write = BlobWriter._write

    def slow(self: BlobWriter, puts: Any) -> None:
        hold.set()
        assert go_on.wait(60)
        write(self, puts)

    monkeypatch.setattr(BlobWriter, "_write", slow)
    ends = []

    def put(name: str, tier: int, size_bytes: int) -> None:
        over = threading.Event()
        ends.append(over)

        def done(put: Put) -> None:
            assert put.error is None
            order.append(name)
            over.set()

        blobs.writer.give(Put([noise(len(ends), size_bytes)], tier, done))

    put("large", 1, 8 * 2**20)
    assert hold.wait(60)  # its first transaction is under way
    put("small", 1, 20_000)
    put("late", 2, 2 * 2**20)
    put("urgent", 0, 900_000)
    go_on.set()
    for over in ends:
        assert over.wait(60)
    assert order.index("urgent") < order.index("large") and order.index("small") < order.index("large")
    assert order.index("large") < order.index("late") or order.index("late") > order.index("small")


def test_what_is_settled_and_not_named_is_deleted(blobs: Blobs) -> None:
    kept, dropped = blobs.must(noise(1, 300_000)), blobs.must(noise(2, 90 * CHUNK_BYTES))
    assert blobs.files.count() == 2
    blobs.named.add(kept.refs[0].digest)
    for put in (kept, dropped):
        blobs.writer.settle([put.refs[0].digest])
    until(lambda: blobs.files.count() == 1 and blobs.chunks() == 2)
    again = blobs.must(noise(1, 300_000))  # named, and on its way once more
    blobs.named.clear()
    blobs.writer.doubt([kept.refs[0].digest])
    blobs.must(noise(3, 20_000))  # the doubt was looked at before this
    assert blobs.files.load(again.refs[0]) == noise(1, 300_000)
    blobs.writer.settle([again.refs[0].digest])
    until(lambda: blobs.files.count() == 1)


def test_a_walk_after_open_finds_whole_and_half_blobs(folder: Path) -> None:
    blobs = Blobs(folder)
    kept, lost = blobs.must(noise(1, 300_000)), blobs.must(noise(2, 300_000))
    with blobs.files.writing() as txn:  # as a kill leaves it in the middle of a put
        for number in range(200):
            txn.put(blob_digest(b"%d" % number) + bytes(4), b"half", db=blobs.files.chunks)
    blobs.close()
    again = Blobs.__new__(Blobs)
    again.named = {kept.refs[0].digest}
    again.files = BlobFiles(folder, map_bytes_max=2**28, create=False)
    again.writer = BlobWriter(again.files, again.named.__contains__, lambda: False)
    until(lambda: again.chunks() == 2)
    assert again.files.load(kept.refs[0]) == noise(1, 300_000)
    with pytest.raises(StoreCorruptError, match="missing"):
        again.files.load(lost.refs[0])
    again.close()


def test_one_that_is_too_large_is_refused_alone(folder: Path) -> None:
    blobs = Blobs(folder, map_bytes_max=8 * 2**20)
    puts = [blobs.put(noise(number, 30 * 2**20 if number == 2 else 50_000)) for number in range(6)]
    for number, (put, over) in enumerate(puts):
        assert over.wait(60)
        assert isinstance(put.error, StoreFullError) if number == 2 else put.error is None
    refused = puts[2][0]
    assert refused.error is not None and refused.error.limit == "store.blob_bytes_max"
    for put, _ in puts:
        blobs.named |= {ref.digest for ref in put.refs} if put is not refused else set()
        blobs.writer.settle([ref.digest for ref in put.refs])
    until(lambda: blobs.chunks() == 5)
    blobs.must(noise(9, 2**20))
    blobs.close()
    with pytest.raises(ClosedError):
        blobs.put(b"x")


def test_after_an_error_nobody_foresaw_no_blob_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(folder)
    script, other = Script(), Script()
    session.must(script.accept(), script.step(), other.accept())

    def broken(*_: Any) -> None:
        raise lmdb.PanicError("commit", -30795)

    with monkeypatch.context() as patch:
        patch.setattr(BlobWriter, "_write_share", broken)
        assert type(session.commit(script.step(result=noise(1, 50_000)))) is StoreError
    assert type(session.commit(other.rows(Row(EVENTS, b"k", noise(1, 50_000))))) is StoreError
    other = Script.resume(other.run_id, session.store.read_records(other.run_id))
    session.must(other.step(), other.end())  # what needs none goes on
    session.close()


def test_a_full_file_of_blobs_refuses_the_batch_and_what_follows(folder: Path) -> None:
    session = opened(folder, blob_bytes_max=4 * 2**20)
    script, other = Script(), Script()
    session.must(script.accept(), script.step(), other.accept())
    given = [session.give(script.step(result=noise(1, 6 * 2**20))), session.give(script.step())]
    refused, followed = (outcome.result(60) for outcome in given)
    assert isinstance(refused, StoreFullError) and isinstance(followed, StoreError)
    session.must(other.step(), other.step(result=noise(2, 100_000)))
    until(lambda: session.store.blob_count() == 1)
    again = Script.resume(script.run_id, session.store.read_records(script.run_id))
    session.must(again.step(result=noise(3, 100_000)), again.end())
    everything(session.store)
    session.close()


def test_commits_go_on_beside_a_large_payload(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its blobs take."""
    session = opened(folder, blob_bytes_max=2**28)
    script, other = Script(), Script()
    session.must(script.accept(), script.step(), other.accept())
    go_on = threading.Event()
    write = BlobWriter._write

    def slow(self: BlobWriter, puts: Any) -> None:
        assert go_on.wait(60)
        write(self, puts)

    monkeypatch.setattr(BlobWriter, "_write", slow)
    large = session.give(script.step(result=noise(1, 64 * 2**20)))
    behind = session.give(script.step())
    for _ in range(100):
        session.must(other.step())
    assert not large.done() and not behind.done()
    assert session.store.backlog()[0] == 2 and session.store.backlog()[1] >= 64 * 2**20
    assert len(session.store.read_records(script.run_id)) == 2
    go_on.set()
    assert large.result(60) is None and behind.result(60) is None
    assert session.store.backlog() == (0, 0)
    session.close()


KILLED = """
import os, random, sys, threading

from agentrt.stores import lmdb_blobs
from agentrt.stores.base import EVENTS, Batch, Row
from agentrt.stores.lmdb import LmdbStore
from agentrt.testing.stores import Script, Session
at = int(sys.argv[2])
passed = 0
write_share = lmdb_blobs.BlobWriter._write_share
def counted(*arguments):
    global passed
    passed += 1
    if passed == at:
        os._exit(9)
    return write_share(*arguments)
session = Session(lambda loop: LmdbStore(sys.argv[1], loop, force_place=True, free_bytes_min=0))
script = Script("run_01J00000000000000000000000")
session.must(script.accept(), script.step())
lmdb_blobs.BlobWriter._write_share = counted
for number in range(4):
    session.must(script.step(result=random.Random(number).randbytes(1_500_000)))
    print(script.fold.version, flush=True)
session.must(Batch(None, 0, (), (Row(EVENTS, b"k", random.Random(9).randbytes(40_000)),)))
print("row", flush=True)
"""


@pytest.mark.parametrize("at", range(1, 10, 2))
def test_killed_in_the_middle_of_a_put(folder: Path, at: int) -> None:
    """What was acknowledged is whole; what was not leaves nothing for ever."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(at)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 9, done.stderr
    acknowledged = done.stdout.split()
    session = opened(folder)
    records = session.store.read_records("run_01J00000000000000000000000")
    assert len(records) >= max([2, *(int(line) for line in acknowledged if line != "row")])
    results = [record.result for record in records if isinstance(record, r.StepCommitted)]
    assert results == [noise(number, 1_500_000) for number in range(len(results))]
    store = session.store
    assert isinstance(store, LmdbStore)
    until(lambda: store.blob_count() == len(results))
    until(lambda: int(store._blobs.read(lambda txn: txn.stat(store._blobs.chunks)["entries"])) == 6 * len(results))
    session.close()


def test_a_store_of_schema_2_gets_its_blobs(folder: Path) -> None:
    """Made here as schema 2 was: without the databases that name blobs."""
    session = opened(folder)
    script = Script()
    session.must(script.accept("k"), script.step())
    before = everything(session.store)
    session.close()
    with lmdb.open(str(folder / "journal.mdb"), subdir=False, max_dbs=40) as env, env.begin(write=True) as txn:
        for name in (b"run_blobs", b"blob_runs", b"blob_rows"):
            txn.drop(env.open_db(name, txn=txn))
        txn.put(b"schema", (2).to_bytes(4, "big"), db=env.open_db(b"meta", txn=txn))
        number = txn.id()
    (folder / "blobs.mdb").unlink()
    step = script.step()  # in the tail, when its node was killed
    assert step.head is not None
    tail = Tail(folder, session.store.generation, number)
    tail.append(join([log_entry(encode_head(step.head), encode_batch(step.records))]))
    tail.close()
    before["heads"][script.run_id] = step.head
    before["journals"][script.run_id] += step.records
    reader = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, check=False)
    assert reader.stdout.split() == ["4", "0"], reader.stderr
    session = opened(folder)
    assert everything(session.store) == before
    session.must(script.step(result=noise(1, 50_000)))
    reader = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, check=False)
    assert reader.stdout.split() == ["6", "1"], reader.stderr
    session.close()


READ = """
import sys
from agentrt.stores.lmdb import LmdbReader
reader = LmdbReader(sys.argv[1])
(head,) = reader.scan_heads()
print(len(reader.read_records(head.run_id)), reader.blob_count())
"""


def test_flipped_bits_in_blobs_are_noticed(folder: Path) -> None:
    """By the run that has them, and by nobody else."""
    session = opened(folder)
    scripts = [Script() for _ in range(4)]
    session.must(*[script.accept() for script in scripts], *[script.step() for script in scripts])
    session.must(*[script.step(result=noise(number, 200_000)) for number, script in enumerate(scripts)])
    before = everything(session.store)
    session.close()
    data = folder / "blobs.mdb"
    whole = data.read_bytes()
    rng = random.Random(5)
    noticed = 0
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        data.write_bytes(damaged)
        try:
            session = opened(folder)
        except StoreError:
            noticed += 1
            continue
        bad = 0
        for script in scripts:
            try:
                assert session.store.read_records(script.run_id) == before["journals"][script.run_id]
            except StoreCorruptError as error:
                assert error.run == script.run_id
                bad += 1
        assert bad <= 1
        noticed += bad
        session.close()
    assert noticed > 10


def test_blobs_of_another_schema(folder: Path) -> None:
    opened(folder).close()
    with lmdb.open(str(folder / "blobs.mdb"), subdir=False, max_dbs=3) as env, env.begin(write=True) as txn:
        txn.put(b"schema", (2).to_bytes(4, "big"), db=env.open_db(b"meta", txn=txn))
    before = {path.name: path.read_bytes() for path in folder.glob("*.mdb")}
    with pytest.raises(StoreVersionError, match="schema 2"):
        opened(folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.mdb")} == before


def test_fault_M57_the_blobs_of_a_forked_child(folder: Path) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept(), script.step(), script.step(result=noise(1, 50_000)))
    child = os.fork()
    if child == 0:
        try:
            session.store.read_records(script.run_id)
        except Exception as error:
            os._exit("forked" in str(error))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    session.close()
