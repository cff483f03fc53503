"""Runs that move between stores: whatever happens, each is owned by one side."""

import asyncio
import io
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrt import records as r
from agentrt.cli import exits
from agentrt.cli.main import run as command_line
from agentrt.config import StoreConfig
from agentrt.engine.mailbox import Event
from agentrt.engine.rows import rows_of
from agentrt.engine.steps import MAILBOX_TOPIC
from agentrt.errors import (
    ExportFileError,
    IdempotencyConflictError,
    InputError,
    RunExistsError,
    RunExportedError,
    StoreCorruptError,
    StoreInUseError,
    UnknownRunError,
)
from agentrt.fold import fold
from agentrt.ids import child_run_id
from agentrt.stores.base import EVENTS, IDEMPOTENCY, READY, TIMERS, WAITS, Batch, Row
from agentrt.stores.keys import address_of, event_key
from agentrt.stores.lmdb import LmdbStore
from agentrt.testing.stores import Script, Session, everything
from agentrt.transfer.format import ExportReader, ExportWriter, Header
from agentrt.transfer.offline import export_offline, import_offline
from agentrt.upkeep.verify import verify

RUN = "run_01J00000000000000000000000"


def config(folder: Path) -> StoreConfig:
    return StoreConfig(path=str(folder), force_place=True, free_bytes_min=0)


def opened(folder: Path) -> Session:
    return Session(lambda loop: LmdbStore(folder, loop, map_bytes=2**20, free_bytes_min=0, force_place=True))


def export(folder: Path, runs: Sequence[str], path: Path, **options: Any) -> list[str]:
    return asyncio.run(export_offline(config(folder), runs, path, "test", **options))


def take(folder: Path, path: Path) -> list[str]:
    return asyncio.run(import_offline(config(folder), path, "test"))


def noise(seed: int, size_bytes: int) -> bytes:
    """JSON that no other seed gives."""
    return b'"%b"' % random.Random(seed).randbytes(size_bytes // 2).hex().encode()


class Sleeper(Script):
    """A script whose run waits for a timer and an event, with mail in its box."""

    def wait(self) -> Batch:
        seq, now_ns = self._next()
        records: list[r.Record] = []
        for place, op, request in ((90, "timer.sleep", b'{"seconds":5}'), (91, "event.wait", b'{"timeout_s":9}')):
            key = f"{self.run_id}/1:{place}/{op}"
            records.append(r.StepPrepared(seq, now_ns, f"1:{place}", op, "keyed", request, b"d" * 16, key, 1))
            seq += 1
        records.append(r.Waiting(seq, now_ns, "timer", "1:90"))
        before = {(row.table, row.key): row for row in rows_of(self.run_id, self.fold)}
        batch = self._batch(records)
        after = {(row.table, row.key): row for row in rows_of(self.run_id, self.fold)}
        gone = [Row(table, key, None) for table, key in before if (table, key) not in after]
        event = Event("e1", now_ns, b'"mail"')
        address = address_of(self.tenant, MAILBOX_TOPIC, self.run_id)
        mail = Row(EVENTS, event_key(address, now_ns, "e1"), msgspec.msgpack.encode(event))
        return msgspec.structs.replace(batch, rows=(*gone, *after.values(), mail))


def filled(folder: Path, run_id: str = RUN, key: str = "k") -> Sleeper:
    """A store with a run that waits, and another one."""
    session = opened(folder)
    script = Sleeper(run_id)
    session.must(script.accept(key), script.step(), script.step(result=noise(1, 50_000)))
    session.must(script.step(), script.wait(), Script().accept("other"))
    session.close()
    assert verify(folder).sound
    return script


def contents(folder: Path) -> dict[str, Any]:
    session = opened(folder)
    found = everything(session.store)
    session.close()
    return found


def state(folder: Path, run_id: str = RUN) -> str | None:
    if not (folder / "journal.mdb").exists():
        return None
    session = opened(folder)
    head = session.store.read_head(run_id)
    session.close()
    return None if head is None else head.state


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.export"


# --- there and back ----------------------------------------------------------------------------


def test_a_run_moves_with_all_that_is_its(here: Path, there: Path, file: Path) -> None:
    script = filled(here)
    before = contents(here)
    assert export(here, [RUN], file) == [RUN]
    left = contents(here)
    assert left["heads"][RUN].state == "EXPORTED" and left["heads"][RUN].wait_reason is None
    for table in (TIMERS, WAITS, EVENTS):
        assert before["tables"][table] and not left["tables"][table]
    assert len(left["tables"][READY]) == 1 and len(left["tables"][IDEMPOTENCY]) == 2  # nobody starts it again here
    assert verify(here).sound
    assert take(there, file) == [RUN]
    come = contents(there)
    assert come["heads"][RUN].state == "WAITING" and come["heads"][RUN].wait_reason == "timer"
    assert come["journals"][RUN][: script.fold.version] == before["journals"][RUN]
    assert [type(record) for record in come["journals"][RUN][script.fold.version :]] == [r.Exported, r.Imported]
    for table in (TIMERS, WAITS, EVENTS):
        assert come["tables"][table] == before["tables"][table]
    assert len(come["tables"][IDEMPOTENCY]) == 1 and not come["tables"][READY]
    verdict = verify(there)
    assert verdict.sound and verdict.blobs == 1


def test_the_same_store_takes_it_back(here: Path, file: Path) -> None:
    filled(here)
    before = contents(here)
    export(here, [RUN], file)
    take(here, file)
    after = contents(here)
    assert after["tables"] == before["tables"]
    assert after["heads"][RUN].state == "WAITING" and verify(here).sound
    with pytest.raises(RunExistsError):
        take(here, file)
    file.unlink()
    export(here, [RUN], file)  # and once more
    take(here, file)
    assert contents(here)["tables"] == before["tables"]


def test_a_run_that_went_on_elsewhere_comes_back(here: Path, there: Path, file: Path, tmp_path: Path) -> None:
    filled(here)
    export(here, [RUN], file)
    take(there, file)
    session = opened(there)
    script = Script.resume(RUN, session.store.read_records(RUN))
    gone = tuple(Row(row.table, row.key, None) for row in rows_of(RUN, script.fold))
    seq, now_ns = script._next()
    resumed = script._batch([r.Resumed(seq, now_ns)])
    session.must(msgspec.structs.replace(resumed, rows=(*gone, *rows_of(RUN, script.fold))))
    session.close()
    home = tmp_path / "home.export"
    export(there, [RUN], home)
    with pytest.raises(RunExistsError):
        take(there, file)  # the old file, where the run has been since
    assert state(there) == "EXPORTED"
    take(here, home)
    assert state(here) == "ACTIVE" and verify(here).sound and verify(there).sound
    with pytest.raises(RunExistsError):
        take(here, file)


def test_a_family_moves_together(here: Path, there: Path, file: Path) -> None:
    session = opened(here)
    parent = Script(RUN)
    session.must(parent.accept())
    children = [child_run_id(RUN, f"1:{place}") for place in (1, 2)]
    for place, child in enumerate(children, 1):
        seq, now_ns = parent._next()
        path = f"1:{place}"
        spawn = r.StepPrepared(seq, now_ns, path, "run.spawn", "keyed", b'{"agent":"a"}', b"d" * 16, "k", 1)
        done = r.StepCommitted(seq + 2, now_ns, path, "run.spawn", b"d" * 16, True, b"{}", b"d" * 16, 1)
        session.must(parent._batch([spawn, r.Spawned(seq + 1, now_ns, path, child, False), done]))
        script = Script(child)
        accept = script.accept()
        accepted = msgspec.structs.replace(accept.records[0], parent=f"{RUN}/{path}", root=RUN)
        session.must(msgspec.structs.replace(accept, records=(accepted,)))
        if place == 2:
            session.must(script.end())
    session.close()
    with pytest.raises(InputError, match="belongs to"):
        export(here, [children[0]], file)
    with pytest.raises(InputError, match="has ended"):
        export(here, [children[1]], file)
    assert not file.exists() and state(here) == "ACTIVE"
    assert export(here, [RUN], file) == [RUN, *children]
    assert [state(here, run_id) for run_id in (RUN, *children)] == ["EXPORTED", "EXPORTED", "SUCCEEDED"]
    assert take(there, file) == [RUN, children[0]]
    assert [state(there, run_id) for run_id in (RUN, *children)] == ["ACTIVE", "ACTIVE", "SUCCEEDED"]
    assert verify(there).sound and verify(here).sound


# --- refusals ------------------------------------------------------------------------------------


def test_what_cannot_leave(here: Path, file: Path) -> None:
    filled(here)
    with pytest.raises(UnknownRunError):
        export(here, ["run_01J0000000000000000000000Z"], file)
    session = opened(here)
    script = Script()
    session.must(script.accept(), script.step())
    seq, now_ns = script._next()
    request = b'{"name":"l"}'
    prepared = r.StepPrepared(seq, now_ns, "1:9", "lock.acquire", "keyed", request, b"d" * 16, "k", 1)
    committed = r.StepCommitted(seq + 1, now_ns, "1:9", "lock.acquire", b"d" * 16, True, b'{"token":1}', b"d" * 16, 1)
    session.must(script._batch([prepared, committed]))
    session.close()
    with pytest.raises(InputError, match="holds lock 'l'"):
        export(here, [script.run_id], file)
    with pytest.raises(InputError, match="holds lock 'l'"):
        export(here, [RUN, script.run_id], file)
    file.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists"):
        export(here, [RUN], file)
    assert file.read_bytes() == b"mine" and state(here) == "WAITING"
    assert sorted(path.name for path in file.parent.iterdir()) == ["here", "run.export"]


def test_a_second_file_is_made_only_on_demand(here: Path, file: Path) -> None:
    filled(here)
    export(here, [RUN], file)
    with pytest.raises(RunExportedError):
        export(here, [RUN], file.with_name("second"))
    assert export(here, [RUN], file.with_name("second"), again=True) == [RUN]
    one, two = (ExportReader(io.BytesIO(path.read_bytes())) for path in (file, file.with_name("second")))
    assert [run.records for run in one.runs()] == [run.records for run in two.runs()]


def test_a_node_keeps_its_store(here: Path, there: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(here)
    session = opened(here)
    with pytest.raises(StoreInUseError):
        export(here, [RUN], file)
    session.close()
    assert command_line(["runs", "export", RUN, "-o", str(file), "--store", str(here)]) == exits.OK
    assert command_line(["runs", "show", RUN, "--store", str(here)]) == exits.OK
    assert "EXPORTED" in capsys.readouterr().out
    assert command_line(["runs", "import", str(file), "--store", str(there), "--json"]) == exits.OK
    assert capsys.readouterr().out == f'{{"runs": ["{RUN}"]}}\n'
    assert command_line(["runs", "import", str(file), "--store", str(there)]) == exits.INPUT


def test_an_idempotency_key_that_is_used_there(here: Path, there: Path, file: Path) -> None:
    filled(here, key="same")
    filled(there, "run_01J00000000000000000000001", key="same")
    before = contents(there)
    export(here, [RUN], file)
    with pytest.raises(IdempotencyConflictError):
        take(there, file)
    assert contents(there) == before
    take(here, file)
    assert state(here) == "WAITING"


def test_a_run_that_is_there(here: Path, there: Path, file: Path) -> None:
    filled(here)
    filled(there)
    before = contents(there)
    export(here, [RUN], file)
    with pytest.raises(RunExistsError):
        take(there, file)
    assert contents(there) == before


@pytest.mark.parametrize("field", ["schema", "abi"])
def test_another_schema_or_abi(here: Path, there: Path, file: Path, field: str) -> None:
    filled(here)
    export(here, [RUN], file)
    reader = ExportReader(io.BytesIO(file.read_bytes()))
    made = io.BytesIO()
    header = msgspec.structs.replace(reader.header, **{field: getattr(reader.header, field) + 1})
    writer = ExportWriter(made, header)
    for run in reader.runs():
        writer.run(run.run_id, run.records, run.rows)
    writer.seal()
    file.write_bytes(made.getvalue())
    with pytest.raises(ExportFileError):
        take(there, file)
    assert state(there) is None


def test_an_export_of_schema_4(here: Path, there: Path, file: Path) -> None:
    """What stores have had since does not travel."""
    filled(here)
    export(here, [RUN], file)
    made = io.BytesIO()
    reader = ExportReader(io.BytesIO(file.read_bytes()))
    writer = ExportWriter(made, msgspec.structs.replace(reader.header, schema=4))
    for run in reader.runs():
        writer.run(run.run_id, run.records, run.rows)
    writer.seal()
    file.write_bytes(made.getvalue())
    assert RUN in take(there, file)
    assert verify(there).sound


def test_cut_and_altered_files_change_nothing(here: Path, there: Path, file: Path) -> None:
    filled(here)
    export(here, [RUN], file)
    whole = file.read_bytes()
    rng = random.Random(2)
    cuts = [*range(60), len(whole) - 1, len(whole) - 32, len(whole) - 41, *rng.sample(range(len(whole)), 20)]
    for cut in cuts:
        with pytest.raises(ExportFileError):
            ExportReader(io.BytesIO(whole[:cut]))
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        with pytest.raises(ExportFileError):
            ExportReader(io.BytesIO(bytes(damaged)))
    with pytest.raises(ExportFileError):
        ExportReader(io.BytesIO(whole + b"x"))
    file.write_bytes(whole[:-1])
    with pytest.raises(ExportFileError):
        take(there, file)
    assert state(there) is None and state(here) == "EXPORTED"
    file.write_bytes(whole)
    assert take(there, file) == [RUN]


def test_a_file_of_somebody_who_knows_the_digest(there: Path, file: Path) -> None:
    """What is in it is held against fold, and runs that were never fenced are refused."""
    script = Script(RUN)
    batches = [script.accept(), script.step()]
    records = [record for batch in batches for record in batch.records]
    header = Header(3, 0, "x", "exp", 1, [RUN])
    from agentrt import _core

    header = msgspec.structs.replace(header, abi=_core.abi_version())
    bad: list[tuple[list[r.Record], list[Row]]] = [
        (records, []),
        (records[1:], []),
        ([*records, r.Exported(9, 1, "exp")], []),
        ([*records, r.Exported(3, 1, "exp")], [Row(READY, b"k", b"")]),
        ([*records, r.Exported(3, 1, "exp")], [Row(EVENTS, b"", b"")]),
        ([], []),
    ]
    for wrong, rows in bad:
        made = io.BytesIO()
        writer = ExportWriter(made, header)
        writer.run(RUN, wrong, rows)
        writer.seal()
        file.write_bytes(made.getvalue())
        with pytest.raises(ExportFileError):
            take(there, file)
    assert state(there) is None


def test_fold_knows_what_follows_an_export() -> None:
    script = Script(RUN)
    records = [*script.accept().records, *script.step().records]
    gone = [*records, r.Exported(3, 5, "exp_1")]
    assert fold(gone).state == "EXPORTED"
    back = fold([*gone, r.Imported(4, 5, "exp_1")])
    assert back.state == "ACTIVE" and back.exported is None
    for wrong in (r.Imported(4, 5, "exp_2"), r.Exported(4, 5, "exp_1"), r.TierChanged(4, 5, 1, "x")):
        with pytest.raises(StoreCorruptError):
            fold([*gone, wrong])
    with pytest.raises(StoreCorruptError):
        fold([*records, r.Imported(3, 5, "exp_1")])
    script.end()
    with pytest.raises(StoreCorruptError):
        fold([*records, r.RunEnded(3, 5, "FAILED", None, b"{}"), r.Exported(4, 5, "e")])


# --- kills -----------------------------------------------------------------------------------------

MOVE = """
import os, sys, asyncio
from pathlib import Path
from agentrt.config import StoreConfig
from agentrt.stores import lmdb, lmdb_env
from agentrt.transfer import moves, offline
from agentrt.transfer.format import ExportWriter
act, folder, path, at = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
passed = 0
def step(function):
    def counted(*arguments, **keywords):
        global passed
        passed += 1
        if passed == at:
            os._exit(9)
        result = function(*arguments, **keywords)
        passed += 1
        if passed == at:
            os._exit(9)
        return result
    return counted
for owner, name in (
    (ExportWriter, "_write"), (ExportWriter, "seal"), (os, "link"), (Path, "unlink"), (moves, "sync_folder"),
    (lmdb.LmdbStore, "commit"), (lmdb.LmdbStore, "_write"), (os, "fsync"),
):
    setattr(owner, name, step(getattr(owner, name)))
config = StoreConfig(path=folder, force_place=True, free_bytes_min=0)
if act == "export":
    asyncio.run(offline.export_offline(config, sys.argv[5:], path, "test"))
else:
    asyncio.run(offline.import_offline(config, path, "test"))
"""


def killed(act: str, folder: Path, path: Path, at: int, *runs: str) -> bool:
    """Whether it was killed before its end."""
    command = [sys.executable, "-c", MOVE, act, str(folder), str(path), str(at), *runs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 9), done.stderr
    return done.returncode == 9


def importable(path: Path) -> bool:
    try:
        ExportReader(io.BytesIO(path.read_bytes()))
    except (ExportFileError, FileNotFoundError):
        return False
    return True


def test_a_kill_at_any_step_of_an_export(tmp_path: Path) -> None:
    """Either the run is here and no file can be imported, or it is fenced; then exporting again gives the file."""
    stages: set[tuple[str | None, bool]] = set()
    for at in range(1, 200):
        here, there, file = (tmp_path / f"{name}{at}" for name in ("here", "there", "file"))
        filled(here)
        over = not killed("export", here, file, at, RUN)
        held = state(here)
        anywhere = importable(file) or importable(file.with_name(file.name + ".part"))
        stages.add((held, anywhere))
        assert held in ("WAITING", "EXPORTED")
        assert not (held == "WAITING" and anywhere)
        assert verify(here).sound
        if held == "WAITING":
            export(here, [RUN], file)
        elif not importable(file):
            export(here, [RUN], file, again=True)
        take(there, file)
        assert (state(here), state(there)) == ("EXPORTED", "WAITING")
        assert verify(here).sound and verify(there).sound
        if over:
            assert at > 15
            break
    else:
        pytest.fail("it never came to its end")
    assert {("WAITING", False), ("EXPORTED", False), ("EXPORTED", True)} <= stages


def test_a_kill_at_any_step_of_an_import(tmp_path: Path) -> None:
    here, file = tmp_path / "here", tmp_path / "file"
    filled(here)
    export(here, [RUN], file)
    before = contents(here)
    states: set[str | None] = set()
    for at in range(1, 100):
        there = tmp_path / f"there{at}"
        opened(there).close()
        over = not killed("import", there, file, at)
        held = state(there)
        states.add(held)
        assert held in (None, "WAITING") and verify(there).sound
        if held is None:
            take(there, file)
        else:
            with pytest.raises(RunExistsError):
                take(there, file)
        assert state(there) == "WAITING" and verify(there).sound
        if over:
            break
    assert states == {None, "WAITING"} and contents(here) == before
