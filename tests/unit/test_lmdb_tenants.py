"""The index of runs by tenant: what a list of one tenant's reads, and how older stores get it."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from agentrt.engine.listing import SCANNED_MAX, Wanted, find_heads
from agentrt.errors import StoreFullError
from agentrt.ids import run_id_from_bytes, run_id_to_bytes
from agentrt.stores import lmdb_tenants
from agentrt.stores.base import Batch
from agentrt.stores.lmdb import LmdbReader, LmdbStore
from agentrt.stores.lmdb_files import SCHEMA, Files
from agentrt.stores.unfiled import decode_head, encode_head
from agentrt.testing.stores import Script, Session, everything
from agentrt.upkeep.compact import migrate
from agentrt.upkeep.verify import verify
from tests.unit.store_kit import schema_4

# What `schema_4` leaves.
SCHEMA_4_RUNS = {
    f"run_01J0000000000000000000000{number}": tenant
    for number, tenant in enumerate(("globex", "acme", "acme", "globex", "acme", "acme", "globex", "initech"))
}


def opened(folder: Path, **options: Any) -> Session:
    options = {"map_bytes": 2**20, "map_bytes_max": 2**26, "free_bytes_min": 0, "force_place": True} | options
    return Session(lambda loop: LmdbStore(folder, loop, **options))


def of_tenant(store: Any, tenant: str) -> list[str]:
    return [head.run_id for head in store.scan_heads(tenant=tenant)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


# --- what is read --------------------------------------------------------------------------


class Counted:
    """A transaction or cursor that counts the rows that are looked at."""

    def __init__(self, inner: Any, rows: list[int]) -> None:
        self._inner = inner
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> "Counted":
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def get(self, *arguments: Any, **keywords: Any) -> Any:
        self._rows[0] += 1
        return self._inner.get(*arguments, **keywords)

    def cursor(self, **keywords: Any) -> "Counted":
        return Counted(self._inner.cursor(**keywords), self._rows)

    def _moves(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        self._rows[0] += 1
        return getattr(self._inner, name)(*arguments, **keywords)

    def set_range(self, key: bytes) -> Any:
        return self._moves("set_range", key)

    def first(self) -> Any:
        return self._moves("first")

    def last(self) -> Any:
        return self._moves("last")

    def prev(self) -> Any:
        return self._moves("prev")

    def iternext(self, **keywords: Any) -> Iterator[Any]:
        return self._each(self._inner.iternext(**keywords))

    def iterprev(self, **keywords: Any) -> Iterator[Any]:
        return self._each(self._inner.iterprev(**keywords))

    def _each(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._rows[0] += 1
            yield item


def rows_read(store: Any, act: Callable[[], Any]) -> int:
    """Rows of the file, and heads in memory, that a read looks at."""
    rows = [0]
    files, unfiled = store._files, store._unfiled_now()
    read, heads, head = files.read, unfiled.heads, unfiled.head

    def counted_heads(*arguments: Any) -> Any:
        found = heads(*arguments)
        rows[0] += unfiled.batch_count()
        return found

    def counted_head(run_id: str) -> Any:
        rows[0] += 1
        return head(run_id)

    files.read = lambda look: read(lambda txn: look(Counted(txn, rows)))
    unfiled.heads, unfiled.head = counted_heads, counted_head
    try:
        act()
    finally:
        del files.read, unfiled.heads, unfiled.head
    return rows[0]


@pytest.mark.parametrize("log_bytes_max", [2**24, 1], ids=["log", "filed"])
def test_what_a_list_reads_says_nothing_of_other_tenants(folder: Path, log_bytes_max: int) -> None:
    """By rows, not by a clock: as many, whether others have no runs or hundreds, newer and older ones."""
    session = opened(folder, log_bytes_max=log_bytes_max)

    def add(tenant: str, count: int) -> None:
        scripts = [Script(tenant=tenant) for _ in range(count)]
        session.must(*(script.accept() for script in scripts))
        session.must(*(script.end() for script in scripts[::2]))

    store = session.store
    wishes = [
        Wanted(tenant="acme"),
        Wanted(state="ACTIVE", tenant="acme"),
        Wanted(tenant="acme", text="there is no such thing"),
        Wanted(tenant="newcomer"),
        Wanted(tenant="newcomer", text="nothing"),
    ]

    def reads() -> list[int]:
        store._cached.clear()  # type: ignore[attr-defined]
        return [
            rows_read(store, lambda w=wanted, n=newest: find_heads(store, w, "", 10, n))  # type: ignore[misc]
            for wanted in wishes
            for newest in (False, True)
        ]

    add("acme", 30)
    alone = reads()
    add("globex", 400)
    add("acne", 20)
    # One more or less: the row behind a tenant's last, if there is one.
    assert all(abs(now - before) <= 1 for now, before in zip(reads(), alone, strict=True)), alone
    everyone = rows_read(store, lambda: find_heads(store, Wanted(text="nothing"), "", 10))
    assert everyone > 400 > 4 * max(alone)  # so a look at others' would be counted
    session.close()


def test_a_search_of_one_tenant_is_bounded_by_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrt.engine import listing

    monkeypatch.setattr(listing, "SCANNED_MAX", 20)
    monkeypatch.setattr(listing, "_SCANNED_AT_ONCE", 10)
    assert SCANNED_MAX > 20
    session = opened(folder)
    scripts = [Script(tenant=tenant) for tenant in ("acme",) * 25 + ("globex",) * 100]
    session.must(*(script.accept() for script in scripts))
    store = session.store
    page = find_heads(store, Wanted(tenant="acme", text="nothing"), "", 5)
    assert page == ([], sorted(script.run_id for script in scripts[:25])[19])
    assert page.next is not None
    assert find_heads(store, Wanted(tenant="acme", text="nothing"), page.next, 5) == ([], None)
    found = find_heads(store, Wanted(tenant="globex"), "", 7)
    assert len(found.heads) == 7 and found.next == found.heads[-1].run_id
    session.close()


# --- stores without it -----------------------------------------------------------------------


def test_a_store_of_schema_4_is_brought_up(folder: Path) -> None:
    schema_4(folder)
    reader = LmdbReader(folder)  # brings nothing up, and finds a tenant's all the same
    before = everything(reader)  # type: ignore[arg-type]
    assert {run_id: head.tenant for run_id, head in before["heads"].items()} == SCHEMA_4_RUNS
    acme = [run_id for run_id, tenant in SCHEMA_4_RUNS.items() if tenant == "acme"]
    assert [head.run_id for head in reader.scan_heads(acme[-1], 2, True, "acme")] == acme[1:3][::-1]
    assert reader.scan_heads("", 0, tenant="acme") == [] == reader.scan_heads(tenant="nobody")
    reader.close()
    assert verify(folder).sound
    session = opened(folder)
    assert everything(session.store) == before
    session.must(Script("run_01J00000000000000000000009", "acme").accept())
    assert of_tenant(session.store, "acme") == [*acme, "run_01J00000000000000000000009"]
    session.close()
    verdict = verify(folder)
    assert verdict.sound, verdict.findings


def test_a_reader_looks_on_while_a_store_is_brought_up(folder: Path) -> None:
    """Until the index is whole it is not used."""
    schema_4(folder)
    # LMDB opens a file once in each process.
    command = [sys.executable, "-c", READER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:

        def asked() -> int:
            assert reader.stdin is not None and reader.stdout is not None
            reader.stdin.write("?\n")
            reader.stdin.flush()
            return int(reader.stdout.readline())

        assert asked() == 4
        assert bring_up(folder, step=2, kill_at=3).returncode == -signal.SIGKILL
        assert asked() == 4
        assert bring_up(folder, step=2).returncode == 0
        assert asked() == 4
        session = opened(folder)
        session.must(Script(tenant="acme").accept())
        assert asked() == 5
        session.close()


READER = """
import sys
from agentrt.stores.lmdb import LmdbReader
reader = LmdbReader(sys.argv[1])
for _ in sys.stdin:
    print(len(reader.scan_heads(tenant="acme")), flush=True)
"""

# Kills itself in the middle of the numbered step, all but the commit being done.
BRING_UP = """
import os, signal, sys
from pathlib import Path
from agentrt.stores import lmdb_tenants
from agentrt.upkeep.compact import migrate
folder, step_runs, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
lmdb_tenants.STEP_RUNS = step_runs
step, steps, indexed = lmdb_tenants.Indexing.step, 0, 0
def counted(*arguments):
    global steps, indexed
    steps += 1
    found = step(*arguments)
    if steps == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    indexed += found[0]
    return found
lmdb_tenants.Indexing.step = counted
print(*migrate(folder), end=" ")
print(steps, indexed)
"""


def bring_up(folder: Path, step: int, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BRING_UP, str(folder), str(step), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kill_at", range(1, 5))
def test_fault_D_a_kill_while_a_store_is_brought_up(folder: Path, tmp_path: Path, kill_at: int) -> None:
    """At every step: the store is of the old schema still, nothing is lost, and what was done is not done again."""
    schema_4(folder)
    reader = LmdbReader(folder)
    before = everything(reader)  # type: ignore[arg-type]
    reader.close()
    killed = bring_up(folder, 2, kill_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    beside = tmp_path / "beside"
    shutil.copytree(folder, beside)
    reader = LmdbReader(beside)
    assert reader.files.schema == 4
    assert everything(reader) == before  # type: ignore[arg-type]
    reader.close()
    assert verify(beside).sound
    done = bring_up(folder, 2)
    assert done.returncode == 0, done.stderr
    # Six runs are filed: three full steps and one that finds no more.
    assert done.stdout.split() == ["4", str(SCHEMA), str(5 - kill_at), str(6 - 2 * (kill_at - 1))]
    assert verify(folder).sound
    session = opened(folder)
    assert everything(session.store) == before
    session.close()


def test_an_older_agentrt_had_the_store_while_it_was_being_brought_up(folder: Path) -> None:
    """It knows no index, so what it accepts and erases is in none: all of it is made again."""
    schema_4(folder)
    assert bring_up(folder, 2, kill_at=3).returncode == -signal.SIGKILL
    erased, later = "run_01J00000000000000000000000", "run_01H00000000000000000000000"
    # What it would have done, said in the store's own terms: a generation more, a run erased, one accepted that is
    # older than what was indexed (clocks go back, and children are as old as their parents).
    session = opened(folder)
    session.must(Batch(None, 0, (), (), (), erased), Script(later, "globex").accept())
    session.close()
    bring_down(folder)
    done = bring_up(folder, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", str(SCHEMA), "5", "8"]
    assert not [finding for finding in verify(folder).findings if "tenant" in finding.what]
    session = opened(folder)
    assert later in of_tenant(session.store, "globex") and erased not in of_tenant(session.store, "globex")
    session.close()


def bring_down(folder: Path) -> None:
    """Makes a store of schema 4 whose index was begun under another generation, and left."""
    files = Files(folder, map_bytes=2**20, map_bytes_max=2**26, create=False)
    with files.writing() as txn:
        generation = files.generation_in(txn)
        txn.drop(files.tenant_runs, delete=False)
        for number in range(4):
            raw = bytes([1, number]) * 8
            txn.put(lmdb_tenants.tenant_prefix("globex") + raw, b"", db=files.tenant_runs)
        txn.put(b"indexing", (generation - 1).to_bytes(8, "big") + b"\x7f" * 16, db=files.meta)
        txn.put(b"schema", (4).to_bytes(4, "big"), db=files.meta)
    files.close()


def test_an_index_larger_than_the_map(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map grows on the way; where it may not, the store stays as it was and says why."""
    schema_4(folder)
    files = Files(folder, map_bytes=2**24, map_bytes_max=2**26, create=False)
    with files.writing() as txn:
        with txn.cursor(db=files.heads) as cursor:
            assert cursor.first()
            head = decode_head(cursor.value())
        for number in range(60_000):
            raw = bytes([0x01, 0x98]) + number.to_bytes(14, "big")
            value = encode_head(msgspec.structs.replace(head, run_id=run_id_from_bytes(raw)))
            txn.put(raw, value, db=files.heads)
        txn.drop(files.tenant_runs, delete=False)
        txn.put(b"schema", (4).to_bytes(4, "big"), db=files.meta)
    files.close()
    size = (folder / "journal.mdb").stat().st_size
    with pytest.raises(StoreFullError, match="as large as it may be"):
        opened(folder, map_bytes_max=size)
    reader = LmdbReader(folder)
    assert reader.files.schema == 4
    reader.close()
    told: list[tuple[int, int]] = []
    assert migrate(folder, lambda what, done, total: told.append((done, total))) == (4, SCHEMA)
    assert told[0] == (lmdb_tenants.STEP_RUNS, 60_006) and told[-1] == (60_006, 60_006)
    with lmdb.open(str(folder / "journal.mdb"), subdir=False, max_dbs=64) as env, env.begin() as txn:
        assert txn.stat(env.open_db(b"tenant_runs", txn=txn, create=False))["entries"] == 60_008


def test_a_damaged_head_does_not_keep_a_store_from_being_brought_up(folder: Path) -> None:
    schema_4(folder)
    with lmdb.open(str(folder / "journal.mdb"), subdir=False, max_dbs=32) as env, env.begin(write=True) as txn:
        heads = env.open_db(b"heads", txn=txn, create=False)
        with txn.cursor(db=heads) as cursor:
            assert cursor.set_range(run_id_to_bytes("run_01J00000000000000000000002"))
            txn.put(cursor.key(), b"\xc1", db=heads)
    session = opened(folder)
    assert "run_01J00000000000000000000002" not in of_tenant(session.store, "acme")
    assert len(of_tenant(session.store, "acme")) == 3 and len(of_tenant(session.store, "globex")) == 3
    session.close()


def test_a_row_of_no_run_is_passed_over(folder: Path) -> None:
    """As damage leaves it: lists are whole all the same."""
    session = opened(folder)
    scripts = [Script(tenant="acme") for _ in range(6)]
    session.must(*(script.accept() for script in scripts))
    session.close()
    ids = sorted(script.run_id for script in scripts)
    with lmdb.open(str(folder / "journal.mdb"), subdir=False, max_dbs=32) as env, env.begin(write=True) as txn:
        heads = env.open_db(b"heads", txn=txn, create=False)
        for run_id in ids[1:4]:
            assert txn.delete(run_id_to_bytes(run_id), db=heads)
    session = opened(folder)
    assert [head.run_id for head in session.store.scan_heads("", 2, tenant="acme")] == [ids[0], ids[4]]
    assert [head.run_id for head in session.store.scan_heads("", 3, True, "acme")] == [ids[5], ids[4], ids[0]]
    session.close()


def test_names_of_tenants_are_apart() -> None:
    names = ["", "a", "A", "a\0", "ä", "a" * 1000, "\ud800"]
    assert len({lmdb_tenants.tenant_prefix(name) for name in names}) == len(names)
    assert all(len(lmdb_tenants.tenant_prefix(name)) == lmdb_tenants.TENANT_BYTES for name in names)
