"""Files of frames: a bound on all of them that holds, and is not looked up for each."""

import os
from pathlib import Path

import pytest

from agentrt.errors import StoreError, StoreFullError
from agentrt.ids import new_run_id
from agentrt.stores.frames import FolderFrames

ONE, TWO, THREE = ("ab" * 16, "cd" * 16, "ef" * 16)


def test_a_frame_that_somebody_has_is_not_read_over(tmp_path: Path) -> None:
    """Memory is used again, and only what nobody has any more."""
    frames = FolderFrames(tmp_path / "frames", 10**6)
    kept = {new_run_id(): bytes([number]) * (1000 - 100 * number) for number in range(4)}
    for run_id, frame in kept.items():
        frames.put(run_id, ONE, frame)
    held = [frames.get(run_id, ONE) for run_id in kept]
    assert held == [*kept.values()]
    del held[1:]  # of these the memory is free
    again = [frames.get(run_id, ONE) for run_id in reversed(kept)]
    assert held == [next(iter(kept.values()))] and again == [*reversed(kept.values())]


def test_the_bound_holds_through_replacing_dropping_sweeping_and_a_new_session(tmp_path: Path) -> None:
    frames = FolderFrames(tmp_path / "frames", 100)
    a, b, c = new_run_id(), new_run_id(), new_run_id()
    frames.put(a, ONE, b"a" * 60)
    frames.put(b, ONE, b"b" * 40)
    for run_id, frame_id in ((c, ONE), (b, TWO)):
        with pytest.raises(StoreFullError):
            frames.put(run_id, frame_id, b"c")
    with pytest.raises(StoreFullError):
        frames.put(b, ONE, b"b" * 41)
    assert frames.get(b, ONE) == b"b" * 40 and frames.get(c, ONE) is None and frames.get(b, TWO) is None
    frames.put(b, ONE, b"B" * 20)
    frames.put(c, ONE, b"c" * 20)
    frames.drop(a)
    frames.drop(a)
    frames = FolderFrames(tmp_path / "frames", 100)
    with pytest.raises(StoreFullError):
        frames.put(a, ONE, b"a" * 61)
    frames.put(a, ONE, b"a" * 60)
    assert sorted(frames.sweep(lambda run_id: run_id == a)) == sorted([b, c])
    frames.put(b, ONE, b"b" * 40)
    assert frames.get(a, ONE) == b"a" * 60


def test_a_runs_frames_are_beside_each_other_until_it_is_said_which_count(tmp_path: Path) -> None:
    frames = FolderFrames(tmp_path / "frames", 100)
    a, b = new_run_id(), new_run_id()
    frames.put(a, ONE, b"1" * 10)
    frames.put(a, TWO, b"2" * 20, copies=2)
    frames.put(a, THREE, b"3" * 10)
    frames.put(b, ONE, b"b" * 10)
    assert [frames.get(a, TWO, copy) for copy in range(2)] == [b"2" * 20] * 2
    assert frames.get(a, ONE, 1) is None
    frames.keep(a, {TWO, THREE})
    assert frames.get(a, ONE) is None and frames.get(a, THREE) == b"3" * 10 and frames.get(b, ONE) == b"b" * 10
    with pytest.raises(StoreFullError):
        frames.put(b, TWO, b"b" * 21, copies=2)
    frames.keep(a, {THREE})
    assert len([*(tmp_path / "frames").iterdir()]) == 2
    frames.put(b, TWO, b"b" * 40, copies=2)


def test_names_that_could_be_anywhere_are_refused(tmp_path: Path) -> None:
    frames = FolderFrames(tmp_path / "frames", 100)
    for run_id, frame_id in (("../x", ONE), (new_run_id(), "../" + ONE[3:]), (new_run_id(), ONE.upper() + "\n")):
        with pytest.raises(StoreError):
            frames.put(run_id, frame_id, b"x")
        with pytest.raises(StoreError):
            frames.get(run_id, frame_id)


def test_the_folder_is_not_looked_through_for_each_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda *path: looked.append(path) or scandir(*path))
    frames = FolderFrames(tmp_path, 10**6)
    for _ in range(20):
        run_id = new_run_id()
        frames.put(run_id, ONE, b"frame")
        frames.drop(run_id)
    assert len(looked) == 1


def test_a_folder_that_cannot_be_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    frames = FolderFrames(tmp_path / "file" / "frames", 100)
    with pytest.raises(StoreError):
        frames.put(new_run_id(), ONE, b"frame")
    (tmp_path / "file").unlink()
    frames.put(run_id := new_run_id(), ONE, b"frame" * 20)
    assert frames.get(run_id, ONE) == b"frame" * 20
