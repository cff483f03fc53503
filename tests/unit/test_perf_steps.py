"""The benchmark of steps: what it prints, what it does where peers are missing, and that it counts what was done."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from perf import steps
from perf.peers import driver, timed
from perf.peers.driver import PEERS, PeerMissingError, peer_steps_per_s

ROOT = Path(__file__).parents[2]


def test_figures_peers_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def peer_or_none(peer: str, count: int, runs: int, seconds: float) -> driver.PeerSteps:
        asked.append((peer, count, runs))
        if peer == "dbos":
            raise PeerMissingError("dbos is left out: dbos is not installed")
        return driver.PeerSteps(50.0, 20.0, "langgraph 9", "journal_mode wal, synchronous 2")

    monkeypatch.setattr(steps, "peer_steps_per_s", peer_or_none)
    monkeypatch.setattr(steps, "disk", lambda: {"fdatasync_us": 100.0})
    report = steps.run(True)
    assert asked == [(peer, 20, 10) for peer in PEERS]
    assert set(report.figures) == {
        *("sequential_steps_per_s", "lmdb_puts_per_s", "sequential_vs_lmdb", "concurrent_steps_per_s"),
        "best_peer_ratio",
    }
    assert all(math.isfinite(value) and value > 0 for value in report.figures.values())
    assert report.figures["best_peer_ratio"] == report.figures["concurrent_steps_per_s"] / 20
    assert report.baselines == {"langgraph_sequential_steps_per_s": 50, "langgraph_concurrent_steps_per_s": 20}
    assert report.machine["notes"] == ["dbos is left out: dbos is not installed"]
    assert report.machine["peers"] == ["langgraph 9: journal_mode wal, synchronous 2"]


def test_without_peers_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(peer: str, *_: object) -> driver.PeerSteps:
        raise PeerMissingError(f"{peer} is left out")

    monkeypatch.setattr(steps, "peer_steps_per_s", none)
    monkeypatch.setattr(steps, "isolated", lambda function, *_: [[3.0, 4.0]] if function is steps.sequential else 5.0)
    monkeypatch.setattr(steps, "disk", lambda: {"fdatasync_us": 100.0})
    report = steps.run(True)
    assert report.figures["sequential_vs_lmdb"] == 0.75
    assert "best_peer_ratio" not in report.figures and not report.baselines
    assert report.machine["notes"] == [f"{peer} is left out" for peer in PEERS]


def test_disk_that_changes_its_speed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = driver.PeerSteps(50.0, 20.0, "peer 1", "journal_mode wal, synchronous 2")
    monkeypatch.setattr(steps, "peer_steps_per_s", lambda *_: peer)
    monkeypatch.setattr(steps, "isolated", lambda function, *_: [[3.0, 4.0]] if function is steps.sequential else 5.0)
    for syncs_us, notes in (
        ([100.0, 190.0, 110.0, 120.0, 130.0, 140.0], []),
        (
            [100.0, 90.0, 110.0, 120.0, 4000.0, 140.0],
            ["the disk changed its speed: between parts an fdatasync took 90.0 to 4000.0 us"],
        ),
    ):
        seen = iter(syncs_us)
        monkeypatch.setattr(steps, "disk", lambda seen=seen: {"fdatasync_us": next(seen)})
        assert steps.run(True).machine["notes"] == notes


@pytest.mark.parametrize("peer", PEERS)
def test_peer_runs_synced_or_says_that_it_is_missing(peer: str) -> None:
    try:
        found = peer_steps_per_s(peer, 2, 3, 0.01)
    except PeerMissingError as error:
        assert f"{peer} is left out" in str(error)
        return
    assert found.sequential_steps_per_s > 0 and found.concurrent_steps_per_s > 0
    assert found.durability == "journal_mode wal, synchronous 2"
    assert peer in found.versions


def test_peer_program_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setenv("PEERS_PYTHON", str(python))
    with pytest.raises(RuntimeError, match=r"dbos ended with 3.*no luck"):
        peer_steps_per_s("dbos", 1, 1, 0.0)


def test_missing_package_is_said_by_the_program(tmp_path: Path) -> None:
    program = "from perf.peers.timed import main; main(('no-such-package',), None)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "1", "1", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == {"missing": "no-such-package"}, done.stderr


def test_peer_modules_need_nothing_but_the_peer() -> None:
    """They run in environments where agentrt and what it needs are not installed."""
    program = "import perf.peers.langgraph_steps, perf.peers.dbos_steps"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {os.fspath(ROOT)!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_durability_is_read_from_the_connection(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.db")
    connection.execute("PRAGMA synchronous=OFF")
    assert timed.durability_of(connection) == "journal_mode delete, synchronous 0"
    connection.close()
