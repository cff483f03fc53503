"""Files of frames: a bound on all of them that holds, and is not looked up for each."""

import os
from pathlib import Path

import pytest

from agentrt.errors import StoreError, StoreFullError
from agentrt.ids import new_run_id
from agentrt.stores.frames import FolderFrames


def test_the_bound_holds_through_replacing_dropping_sweeping_and_a_new_session(tmp_path: Path) -> None:
    frames = FolderFrames(tmp_path / "frames", 100)
    a, b, c = new_run_id(), new_run_id(), new_run_id()
    frames.put(a, b"a" * 60)
    frames.put(b, b"b" * 40)
    with pytest.raises(StoreFullError):
        frames.put(c, b"c")
    with pytest.raises(StoreFullError):
        frames.put(b, b"b" * 41)
    assert frames.get(b) == b"b" * 40 and frames.get(c) is None
    frames.put(b, b"B" * 20)
    frames.put(c, b"c" * 20)
    frames.drop(a)
    frames.drop(a)
    frames = FolderFrames(tmp_path / "frames", 100)
    with pytest.raises(StoreFullError):
        frames.put(a, b"a" * 61)
    frames.put(a, b"a" * 60)
    assert sorted(frames.sweep(lambda run_id: run_id == a)) == sorted([b, c])
    frames.put(b, b"b" * 40)
    assert frames.get(a) == b"a" * 60


def test_the_folder_is_not_looked_through_for_each_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda *path: looked.append(path) or scandir(*path))
    frames = FolderFrames(tmp_path, 10**6)
    for _ in range(20):
        run_id = new_run_id()
        frames.put(run_id, b"frame")
        frames.drop(run_id)
    assert len(looked) == 1


def test_a_folder_that_cannot_be_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    frames = FolderFrames(tmp_path / "file" / "frames", 100)
    with pytest.raises(StoreError):
        frames.put(new_run_id(), b"frame")
    (tmp_path / "file").unlink()
    frames.put(run_id := new_run_id(), b"frame" * 20)
    assert frames.get(run_id) == b"frame" * 20
