"""`agentrt store`: what is found, what is left alone, and what a kill leaves."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from agentrt.cli import exits
from agentrt.cli.main import run as command_line
from agentrt.errors import InputError, StoreError, StoreInUseError, StoreVersionError
from agentrt.stores.base import (
    ACCOUNTS,
    EVENT_IDS,
    EVENTS,
    IDEMPOTENCY,
    INBOX,
    NODE,
    PLUGINS,
    READY,
    TABLES,
    Batch,
    Row,
)
from agentrt.stores.keys import idempotency_row_key, inbox_key
from agentrt.stores.lmdb import LmdbReader, LmdbStore
from agentrt.stores.lmdb_files import SCHEMA
from agentrt.stores.lmdb_tenants import tenant_prefix
from agentrt.testing.stores import Script, Session, everything
from agentrt.upkeep.compact import compact, migrate
from agentrt.upkeep.dump import dump
from agentrt.upkeep.offline import held
from agentrt.upkeep.stats import stats
from agentrt.upkeep.verify import Verdict, verify

SECRET = b"\x07secret of the node, 32 bytes....."

Change = Callable[[lmdb.Environment, lmdb.Transaction], Any]


def noise(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def opened(folder: Path, **options: Any) -> Session:
    return Session(lambda loop: LmdbStore(folder, loop, map_bytes=2**20, free_bytes_min=0, force_place=True, **options))


def filled(folder: Path) -> dict[str, Any]:
    """Leaves a store with runs that go on and runs that ended, blobs and rows."""
    session = opened(folder)
    for number in range(12):
        script = Script(f"run_01J000000000000000000000{number:02d}")
        session.must(script.accept(f"k{number}"), *[script.step() for _ in range(3)])
        session.must(script.step(result=noise(number, 40_000)))
        if number % 3 == 0:
            session.must(script.end())
    event = Row(EVENTS, b"address", b"\x93\xa1e\x01\xc5\x4e\x20" + noise(99, 20_000))
    session.must(Batch(None, 0, (), (event, Row(NODE, b"secret", SECRET))))
    contents = everything(session.store)
    session.close()
    return contents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def kinds(verdict: Verdict) -> set[str]:
    return {finding.kind for finding in verdict.findings}


def changed(
    folder: Path, change: Callable[[lmdb.Environment, lmdb.Transaction], None], name: str = "journal.mdb"
) -> None:
    with lmdb.open(str(folder / name), subdir=False, max_dbs=64, map_size=2**26) as env, env.begin(write=True) as txn:
        change(env, txn)


def of(env: lmdb.Environment, txn: lmdb.Transaction, name: str) -> Any:
    return env.open_db(name.encode(), txn=txn, create=False)


# --- verify ----------------------------------------------------------------------------------


def test_a_sound_store(folder: Path) -> None:
    filled(folder)
    files = {path.name: path.read_bytes() for path in folder.glob("*.mdb")}
    told: list[str] = []
    with held(folder) as path:
        verdict = verify(path, lambda what, done, total: told.append(what))
    assert verdict.sound and not verdict.findings
    assert (verdict.runs, verdict.blobs, verdict.unnamed_blobs) == (12, 13, 0)
    assert verdict.records == 12 * 8 + 4 and verdict.rows == 8 + 12 + 12 + 2
    assert "pages of journal.mdb" in told and "rows of ready" in told
    assert {path.name: path.read_bytes() for path in folder.glob("*.mdb")} == files


def test_a_store_with_a_log_and_a_tail_is_sound(folder: Path, tmp_path: Path) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept(), Script().accept(), script.step(), script.step())
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)  # as a kill leaves it
    session.close()
    verdict = verify(copy)
    assert verdict.sound and verdict.records == script.fold.version + 1


DAMAGE: dict[str, tuple[str, Change]] = {
    "a row is missing": ("row", lambda env, txn: txn.drop(of(env, txn, READY), delete=False)),
    "a row too many": ("row", lambda env, txn: txn.put(b"\0" * 8 + b"x" * 16 + b"1:1", b"", db=of(env, txn, "timers"))),
    "another value": ("row", lambda env, txn: _replace(env, txn, READY, b"other")),
    "a lock of nobody's": ("row", lambda env, txn: txn.put(b"t\0" + bytes(32), b"\x95", db=of(env, txn, "locks"))),
    "mail of strangers": ("row", lambda env, txn: txn.put(bytes(32), b"", db=of(env, txn, "inbox"))),
    "mail without an address": ("row", lambda env, txn: txn.put(b"k", b"", db=of(env, txn, "inbox"))),
    "a key of nobody's": ("row", lambda env, txn: txn.put(b"t\0" + bytes(32), b"x", db=of(env, txn, "idempotency"))),
    "an event that is none": ("row", lambda env, txn: txn.put(b"a" * 40, b"\xc0", db=of(env, txn, "events"))),
    "a journal is gone": ("journal", lambda env, txn: _first(env, txn, "journal")),
    "a head is gone": ("journal", lambda env, txn: _first(env, txn, "heads")),
    "a journal row is noise": ("journal", lambda env, txn: _replace(env, txn, "journal", b"\xc1")),
    "a name is gone": ("blob", lambda env, txn: _first(env, txn, "run_blobs")),
    "a run is not among its tenant's": ("row", lambda env, txn: _first(env, txn, "tenant_runs")),
    "a run of nobody's": ("row", lambda env, txn: txn.put(bytes(32), b"", db=of(env, txn, "tenant_runs"))),
    "a run of two tenants": ("row", lambda env, txn: _share(env, txn, "globex")),
    "heads are noise": ("log", lambda env, txn: _replace(env, txn, "heads", b"\xc1")),
}


def _first(env: lmdb.Environment, txn: lmdb.Transaction, name: str) -> None:
    with txn.cursor(db=of(env, txn, name)) as cursor:
        assert cursor.first() and cursor.delete()


def _share(env: lmdb.Environment, txn: lmdb.Transaction, tenant: str) -> None:
    with txn.cursor(db=of(env, txn, "heads")) as cursor:
        assert cursor.first()
        raw = bytes(cursor.key())
    assert txn.put(tenant_prefix(tenant) + raw, b"", db=of(env, txn, "tenant_runs"))


def _replace(env: lmdb.Environment, txn: lmdb.Transaction, name: str, value: bytes) -> None:
    with txn.cursor(db=of(env, txn, name)) as cursor:
        assert cursor.first()
        key = bytes(cursor.key())
    assert txn.put(key, value, db=of(env, txn, name))


@pytest.mark.parametrize("what", DAMAGE)
def test_broken_references_are_found(folder: Path, what: str) -> None:
    filled(folder)
    kind, change = DAMAGE[what]
    changed(folder, change)
    verdict = verify(folder)
    assert not verdict.sound and kind in kinds(verdict), verdict


def test_blobs_are_held_against_their_digests(folder: Path) -> None:
    filled(folder)

    def flip(env: lmdb.Environment, txn: lmdb.Transaction) -> None:
        with txn.cursor(db=of(env, txn, "chunks")) as cursor:
            assert cursor.first()
            key, value = bytes(cursor.key()), bytearray(cursor.value())
        value[7] ^= 1
        txn.put(key, bytes(value), db=of(env, txn, "chunks"))

    changed(folder, flip, "blobs.mdb")
    verdict = verify(folder)
    assert {"blob"} <= kinds(verdict) and all("damaged" in finding.what for finding in verdict.findings)
    changed(folder, lambda env, txn: txn.drop(of(env, txn, "blobs"), delete=False), "blobs.mdb")
    verdict = verify(folder)
    assert len([finding for finding in verdict.findings if "is named and not there" in finding.what]) == 13
    (folder / "blobs.mdb").unlink()
    assert not verify(folder).sound


def test_a_blob_that_nobody_names_is_no_damage(folder: Path) -> None:
    filled(folder)

    def forget(env: lmdb.Environment, txn: lmdb.Transaction) -> None:
        txn.put(b"d" * 32, (3).to_bytes(8, "big"), db=of(env, txn, "blobs"))

    from agentrt.stores.payloads import blob_digest

    def add(env: lmdb.Environment, txn: lmdb.Transaction) -> None:
        digest = blob_digest(b"abc")
        txn.put(digest, (3).to_bytes(8, "big"), db=of(env, txn, "blobs"))
        txn.put(digest + bytes(4), b"abc", db=of(env, txn, "chunks"))

    changed(folder, add, "blobs.mdb")
    verdict = verify(folder)
    assert verdict.sound and verdict.unnamed_blobs == 1
    changed(folder, forget, "blobs.mdb")
    assert not verify(folder).sound


def test_fault_M_cut_and_flipped_files_are_damage_and_stay_as_they_are(folder: Path) -> None:
    """Wherever it is: a finding, never a crash, and nothing is changed."""
    filled(folder)
    whole = {name: (folder / name).read_bytes() for name in ("journal.mdb", "blobs.mdb")}
    rng = random.Random(3)
    found = 0
    for name, data in whole.items():
        for share in (0.9, 0.4, 0.0001):
            (folder / name).write_bytes(data[: int(len(data) * share)])
            verdict = verify(folder)
            assert not verdict.sound
        for _ in range(40):
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(damaged)
            try:
                found += not verify(folder).sound
            except StoreVersionError:  # the bit was in a schema's number
                found += 1
            assert (folder / name).read_bytes() == damaged
        (folder / name).write_bytes(data)
    assert found > 30
    assert verify(folder).sound


def test_keys_that_cannot_be_are_findings(folder: Path) -> None:
    """Rows of any table, whatever their keys and values: never a crash."""
    rng = random.Random(5)
    for table in TABLES:
        filled(folder)

        def add(env: lmdb.Environment, txn: lmdb.Transaction, table: str = table) -> None:
            for size in (1, 7, 15, 16, 17, 31, 32, 40):
                txn.put(rng.randbytes(size), rng.randbytes(size), db=of(env, txn, table))

        changed(folder, add)
        verdict = verify(folder)
        assert verdict.complete and not (verdict.sound and table not in (EVENT_IDS, NODE, ACCOUNTS, PLUGINS)), table
        shutil.rmtree(folder)


def test_findings_have_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder)
    monkeypatch.setattr("agentrt.upkeep.verify.FINDINGS_MAX", 5)
    changed(folder, lambda env, txn: txn.drop(of(env, txn, READY), delete=False))
    verdict = verify(folder)
    assert len(verdict.findings) == 5 and not verdict.complete


# --- commands --------------------------------------------------------------------------------


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[exits.ExitCode, str]:
    capsys.readouterr()
    code = command_line(arguments)
    return code, capsys.readouterr().out


@pytest.mark.parametrize("name", ["verify", "dump", "compact", "migrate"])
def test_a_store_in_use_is_refused(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    session = opened(folder)
    session.must(Script().accept())
    program = "from agentrt.cli.main import main; main()"
    command = [sys.executable, "-c", program, "store", name, "--store", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == exits.STORE.code
    assert f"process {os.getpid()}" in done.stderr and "Stop the node" in done.stderr
    session.must(Script().accept())
    session.close()
    code, _ = ask(capsys, "store", name, "--store", str(folder))
    assert code == exits.OK


def test_verify_as_a_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(folder)
    code, out = ask(capsys, "store", "verify", "--store", str(folder), "--json")
    assert code == exits.OK and json.loads(out)["sound"] is True
    changed(folder, DAMAGE["a row is missing"][1])
    code, out = ask(capsys, "store", "verify", "--store", str(folder), "--json")
    found = json.loads(out)
    assert code == exits.FAILED and found["sound"] is False and found["findings"][0]["kind"] == "row"
    code, out = ask(capsys, "store", "verify", "--store", str(folder))
    assert code == exits.FAILED and "ready row" in out
    code, _ = ask(capsys, "store", "verify", "--store", str(folder / "nothing"))
    assert code == exits.INPUT


def test_stats_beside_a_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept("k"), script.step(), script.step(result=noise(1, 50_000)), Script().accept())
    program = "from agentrt.cli.main import main; main()"
    command = [sys.executable, "-c", program, "store", "stats", "--store", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["runs"] == {"ACTIVE": 2} and found["blobs"] == 1 and found["blob_bytes"] == 50_000
    assert found["log_batches"] == 4 and found["log_bytes"] > 0 and found["schema"] == SCHEMA
    rows = {table["name"]: table["rows"] for table in found["tables"]}
    assert rows["ready"] == 2 and rows["idempotency"] == 1 and rows["heads"] == 0
    session.close()
    code, out = ask(capsys, "store", "stats", "--store", str(folder))
    assert code == exits.OK and "ACTIVE 2" in out
    assert stats(folder).log_batches == 0 and stats(folder).free_bytes >= 0


def test_dump_has_everything_but_secrets_and_payloads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = filled(folder)
    lines = list(dump(folder))
    assert sum("head" in line for line in lines) == 12
    assert sum("record" in line for line in lines) == sum(map(len, contents["journals"].values()))
    assert sum("table" in line for line in lines) == sum(map(len, contents["tables"].values()))
    code, out = ask(capsys, "store", "dump", "--store", str(folder))
    assert code == exits.OK and [json.loads(line) for line in out.splitlines()] == lines
    code, full = ask(capsys, "store", "dump", "--store", str(folder), "--payloads")
    assert code == exits.OK and '"n":1' in full and '"n":1' not in out
    for text in (out, full):
        assert "seed" not in text and SECRET.hex() not in text and "secret of the node" not in text
        assert (b"s" * 16).hex() not in text
    import base64

    assert base64.b64encode(SECRET).decode() not in full


# --- compact, migrate ----------------------------------------------------------------------------


def test_compact_keeps_everything_and_frees_what_is_free(folder: Path) -> None:
    filled(folder)
    session = opened(folder)
    head = next(head for head in session.store.scan_heads() if head.ended_ns)
    gone = Row(IDEMPOTENCY, idempotency_row_key("acme", "k" + str(int(head.run_id[-2:]))), None)
    session.must(Batch(None, 0, (), (gone,), (), head.run_id))
    many = [Row(INBOX, inbox_key(head.run_id, head.run_id)[:-2] + b"%02d" % n, b"x" * 10_000) for n in range(99)]
    session.must(Batch(None, 0, (), tuple(many)))
    session.must(Batch(None, 0, (), tuple(Row(row.table, row.key, None) for row in many)))
    before = everything(session.store)
    session.close()
    with held(folder) as path:
        sizes = compact(path)
        assert sizes.after < sizes.before // 2
        assert verify(path).sound
    session = opened(folder)
    assert everything(session.store) == before
    script = Script()
    session.must(script.accept(), script.step(), script.step(result=noise(1, 40_000)), script.end())
    session.close()
    again = opened(folder)
    assert again.store.read_head(script.run_id) is not None
    again.close()


def test_compact_takes_the_tail_along(folder: Path, tmp_path: Path) -> None:
    session = opened(folder)
    script = Script()
    session.must(script.accept(), script.step(), script.step(), script.step())
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = everything(session.store)
    session.close()
    compact(copy)
    compact(copy)
    session = opened(copy)
    assert everything(session.store) == before
    session.close()


READER = """
import sys
from agentrt.stores.lmdb import LmdbReader
reader = LmdbReader(sys.argv[1])
print(len(reader.scan_heads()), flush=True)
sys.stdin.read()
print(len(reader.scan_heads()))
"""


def test_fault_D14_positions_do_not_restart_after_compaction(folder: Path, tmp_path: Path) -> None:
    """LMDB numbers the transactions of a copy from the beginning; what is in the log is older all the same."""
    session = opened(folder)
    script, other = Script(), Script()
    for _ in range(30):
        session.must(Script().accept())
    session.must(script.accept(), other.accept(), script.step(), other.step())
    session.must(Batch(None, 0, (), (Row(NODE, b"k", b"1"),)), script.step())
    generation = session.store.generation
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)  # as a kill leaves it: with a log and a tail
    session.close()
    compact(copy)
    session = opened(copy)
    assert session.store.generation > generation
    assert session.store.read_records(script.run_id)[-1].seq == script.fold.version
    session.must(script.step(), other.step(), Batch(None, 0, (), (Row(NODE, b"k", b"2"),)), script.step())
    killed = tmp_path / "killed"
    shutil.copytree(copy, killed)
    session.close()
    session = opened(killed)
    found = everything(session.store)
    for each in (script, other):
        assert [record.seq for record in found["journals"][each.run_id]] == list(range(1, each.fold.version + 1))
    session.must(script.step(), script.end(), other.end())
    session.close()
    assert verify(killed).runs == 32


def test_a_reader_keeps_the_files_where_they_are(folder: Path) -> None:
    filled(folder)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "12\n"
        with pytest.raises(StoreInUseError, match="somebody reads"):
            compact(folder)
        assert not list(folder.glob("*.compact"))
        out, _ = reader.communicate()
        assert out == "12\n"
    compact(folder)
    assert not list(folder.glob("*.compact"))


COMPACT = """
import os, sys
from pathlib import Path
from agentrt.upkeep import compact as module
from agentrt.upkeep.offline import held
at, passed = int(sys.argv[2]), 0
def step(function):
    def counted(*arguments, **keywords):
        global passed
        passed += 1
        if passed == at:
            os._exit(9)
        return function(*arguments, **keywords)
    return counted
for owner, name in (
    (os, "fsync"), (os, "open"), (os, "ftruncate"), (Path, "rename"), (module, "verify"), (module, "sync_folder")
):
    setattr(owner, name, step(getattr(owner, name)))
with held(sys.argv[1]) as folder:
    module.compact(folder)
print(passed)
"""


def test_a_kill_at_any_step_of_compact_changes_nothing(folder: Path, tmp_path: Path) -> None:
    before = filled(folder)
    for at in range(1, 60):
        copy = tmp_path / f"copy{at}"
        shutil.copytree(folder, copy)
        done = subprocess.run([sys.executable, "-c", COMPACT, str(copy), str(at)], capture_output=True, check=False)
        session = opened(copy)
        assert everything(session.store) == before
        session.must(Script().accept())
        session.close()
        if done.returncode == 0:
            assert at > 10
            break
        assert done.returncode == 9, done.stderr
        compact(copy)  # the next one is not kept from its work by what is left
        assert not list(copy.glob("*.compact"))
        shutil.rmtree(copy)
    else:
        pytest.fail("it never came to its end")


def test_a_newer_store_is_left_alone(folder: Path) -> None:
    filled(folder)
    changed(folder, lambda env, txn: txn.put(b"schema", (9).to_bytes(4, "big"), db=of(env, txn, "meta")))
    files = {path.name: path.read_bytes() for path in folder.glob("*.mdb")}
    for act in (verify, compact, migrate, stats):
        with pytest.raises(StoreVersionError, match="schema 9"):
            act(folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.mdb")} == files


def test_migrate_brings_an_old_store_up(folder: Path) -> None:
    import lzma

    folder.mkdir()
    data = Path(__file__).parent / "data" / "store_schema1.mdb.xz"
    (folder / "journal.mdb").write_bytes(lzma.decompress(data.read_bytes()))
    reader = LmdbReader(folder)
    before = everything(reader)  # type: ignore[arg-type]
    reader.close()
    assert migrate(folder) == (1, SCHEMA) and migrate(folder) == (SCHEMA, SCHEMA)
    reader = LmdbReader(folder)
    assert everything(reader) == before  # type: ignore[arg-type]
    reader.close()


def test_where_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(InputError), held(tmp_path):
        pass
    assert StoreError and not list(tmp_path.iterdir())
