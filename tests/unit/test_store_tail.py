"""The tail of the LMDB store: what was written since the last transaction."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrt.errors import StaleWriteError, StoreCorruptError, StoreError
from agentrt.fold import head_of
from agentrt.stores.base import INBOX, Batch, Row
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.tail import TAIL_BYTES, TAIL_NAME, Tail, read_tail
from agentrt.testing.stores import Script, Session, everything

READER = """
import json, sys
from agentrt.stores.lmdb import LmdbReader
reader = LmdbReader(sys.argv[1])
print(json.dumps({head.run_id: [head.version, len(reader.read_records(head.run_id))] for head in reader.scan_heads()}))
"""


def opened(folder: Path) -> Session:
    return Session(lambda loop: LmdbStore(folder, loop, map_bytes=2**20, free_bytes_min=0, force_place=True))


def in_tail(session: Session) -> int:
    assert isinstance(session.store, LmdbStore)
    return len(session.store._in_tail)


def folded(store: Any, scripts: list[Script]) -> bool:
    """Whether the store has exactly what the scripts committed."""
    heads = {head.run_id: head for head in store.scan_heads(limit=1000)}
    for script in scripts:
        assert heads[script.run_id] == head_of(script.fold, script.run_id) == store.read_head(script.run_id)
        assert len(store.read_records(script.run_id)) == script.fold.version
    return len(heads) == len(scripts)


@given(st.lists(st.binary(max_size=2000), max_size=30), st.integers(0, 2**63), st.integers(0, 2**63))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_what_is_appended_is_read(tmp_path: Path, rows: list[bytes], generation: int, after: int) -> None:
    (tmp_path / TAIL_NAME).unlink(missing_ok=True)  # no two sessions have the same generation
    tail = Tail(tmp_path, generation, after)
    for row in rows:
        assert tail.append(row)
    assert read_tail(tmp_path, generation, after) == rows
    assert read_tail(tmp_path, generation, after + 1) == read_tail(tmp_path, generation + 1, after) == []
    tail.begin(after + 1)
    assert read_tail(tmp_path, generation, after + 1) == []
    assert tail.append(b"next")
    assert read_tail(tmp_path, generation, after + 1) == [b"next"]
    tail.close()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_a_record_cut_off_is_the_end_and_damage_is_found(tmp_path: Path, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.binary(min_size=1, max_size=1500), min_size=1, max_size=6))
    (tmp_path / TAIL_NAME).unlink(missing_ok=True)
    tail = Tail(tmp_path, 3, 7)
    ends = [0]
    for row in rows:
        assert tail.append(row)
        ends.append(tail._end)
    tail.close()
    path = tmp_path / TAIL_NAME
    written = path.read_bytes()
    which = data.draw(st.integers(0, len(rows) - 1))
    record_bytes = 48 + len(rows[which])
    at = data.draw(st.integers(0, record_bytes - 1))
    torn = bytearray(written)
    torn[ends[which] + at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(torn)
    if which == len(rows) - 1:
        assert read_tail(tmp_path, 3, 7) == rows[:-1]
    else:
        with pytest.raises(StoreCorruptError, match=f"record {which} of the store's tail"):
            read_tail(tmp_path, 3, 7)
    path.write_bytes(written[: ends[which] + at])
    assert read_tail(tmp_path, 3, 7) == rows[:which]


def test_there_is_an_end_to_it(tmp_path: Path) -> None:
    tail = Tail(tmp_path, 1, 1)
    assert not tail.append(bytes(TAIL_BYTES))
    row = bytes(100_000)
    while tail.append(row):
        pass
    assert len(read_tail(tmp_path, 1, 1)) == TAIL_BYTES // 100_000
    assert (tmp_path / TAIL_NAME).stat().st_size == TAIL_BYTES
    tail.close()


def test_steps_go_to_the_tail_and_everyone_sees_them(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    session = opened(folder)
    script, other = Script(), Script()
    session.must(script.accept(), other.accept())
    for count in range(1, 4):
        session.must(script.step())
        assert in_tail(session) == count
        assert folded(session.store, [script, other])
        assert versions_beside(folder) == {run.run_id: [run.fold.version] * 2 for run in (script, other)}
    session.must(Script().accept())
    assert in_tail(session) == 0
    session.must(other.step())
    assert versions_beside(folder)[other.run_id] == [other.fold.version] * 2
    session.close()


def versions_beside(folder: Path) -> dict[str, list[int]]:
    """What another process reads: versions of heads, and number of records."""
    command = [sys.executable, "-c", READER, str(folder)]
    found: dict[str, list[int]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


@given(st.lists(st.tuples(st.sampled_from(["step", "accept", "end", "stale"]), st.integers(0, 3)), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
def test_a_copy_at_any_moment_has_what_was_acknowledged(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int]]
) -> None:
    """A copy is what a kill leaves."""
    folder = tmp_path_factory.mktemp("tail") / "store"
    session = opened(folder)
    scripts: list[Script] = []
    for number, (act, which) in enumerate(acts):
        if act == "accept" or not scripts:
            scripts.append(Script())
            session.must(scripts[-1].accept())
            continue
        script = scripts[which % len(scripts)]
        if act == "stale":
            assert type(session.commit(Script.resume(script.run_id, []).accept())) is StaleWriteError
        elif script.fold.ended is None:
            session.must(script.step() if act == "step" else script.end())
        if number % 7 == 3:
            copy = folder.with_name(f"copy{number}")
            shutil.copytree(folder, copy)
            again = opened(copy)
            assert folded(again.store, scripts)
            everything(again.store)
            again.close()
    session.close()


@pytest.mark.parametrize("what", ["stale", "nothing there"])
def test_a_transaction_that_changed_nothing_does_not_hide_the_tail(tmp_path: Path, what: str) -> None:
    """LMDB does not number it; the steps after it were once lost with the process."""
    folder = tmp_path / "store"
    session = opened(folder)
    script = Script()
    session.must(script.accept(), Script().accept())
    if what == "stale":
        assert type(session.commit(Script.resume(script.run_id, []).accept())) is StaleWriteError
    else:
        session.must(Batch(None, 0, (), (Row(INBOX, b"never", None),)))
    session.must(script.step(), script.step())
    assert in_tail(session) == 2
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    again = opened(copy)
    assert len(again.store.read_records(script.run_id)) == script.fold.version
    again.close()
    session.close()


def test_a_tail_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk sends the group another way; after any other error nobody knows what is there."""
    folder = tmp_path / "store"
    session = opened(folder)
    script = Script()
    session.must(script.accept(), script.step())

    def refuse(code: int) -> Any:
        def pwritev(*_: Any) -> int:
            raise OSError(code, os.strerror(code))

        return pwritev

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse(errno.ENOSPC))
        session.must(script.step())
        assert in_tail(session) == 0
    session.must(script.step())
    assert in_tail(session) == 1
    version = script.fold.version
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse(errno.EIO))
        assert type(session.commit(script.step())) is StoreError
    assert type(session.commit(Script().accept())) is StoreError
    session.close()
    again = opened(folder)
    assert len(again.store.read_records(script.run_id)) == version
    again.close()


def test_a_session_that_is_over_writes_nothing_more(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    session = opened(folder)
    script = Script()
    session.must(script.accept(), script.step())
    assert isinstance(session.store, LmdbStore)
    version = script.fold.version
    assert session.store._files.begin_session()[0] == session.store.generation + 1  # what a successor does
    assert type(session.commit(script.step())) is StaleWriteError
    session.close()
    again = opened(folder)
    assert len(again.store.read_records(script.run_id)) == version
    again.close()
