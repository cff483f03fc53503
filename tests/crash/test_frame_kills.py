"""kill -9 between any two writes of a frame: the run goes on from the last one that its journal names, or is replayed,
and ends as it would have ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrt.capture.instrument import Preempt, instrument
from agentrt.engine.crashpoints import POINTS, VARIABLE

NODE = Path(__file__).with_name("frames_node.py")
PLAIN = Path(__file__).parents[1] / "guests" / "works.wasm"
FRAME = [name for name in POINTS if name.startswith("frame.")]


@pytest.fixture(scope="module")
def module() -> bytes:
    return instrument(PLAIN.read_bytes(), Preempt.SYSCALLS)


@pytest.fixture(scope="module")
def expected(module: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "module.wasm").write_bytes(module)
    said = live(folder)
    assert said is not None and said[0]["state"] == "SUCCEEDED" and said[1]["taken"] > 2
    return said[0]


def live(folder: Path, crash_at: str = "") -> list[dict[str, Any]] | None:
    """One life of the node; None if it was killed, else what it printed."""
    done = subprocess.run(
        [sys.executable, NODE, folder], env={**os.environ, VARIABLE: crash_at}, capture_output=True, timeout=100
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def kill_and_check(folder: Path, module: bytes, crash_at: str, expected: dict[str, Any]) -> bool:
    """Whether the point was passed."""
    folder.mkdir()
    (folder / "module.wasm").write_bytes(module)
    said = live(folder, crash_at)
    killed = said is None
    said = live(folder) if said is None else said
    assert said is not None and said[0] == expected
    assert said[1]["refused"] == 0, "what the journal names is whole"
    left = [path.name for path in (folder / "store" / "frames").iterdir() if not path.name.startswith(".")]
    assert len(left) <= 2 * 2, left  # removed with the run, but for what nobody named, which is swept
    return killed


@pytest.mark.parametrize("point", FRAME)
def test_a_kill_at_a_write_of_a_frame_costs_that_frame_at_most(
    point: str, module: bytes, expected: dict[str, Any], tmp_path: Path
) -> None:
    assert kill_and_check(tmp_path / "once", module, f"{point}:2", expected), f"{point} is not passed"


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", FRAME)
def test_a_kill_between_any_two_writes_of_a_frame_costs_that_frame_at_most(
    point: str, module: bytes, expected: dict[str, Any], tmp_path: Path
) -> None:
    passes = 1
    while kill_and_check(tmp_path / str(passes), module, f"{point}:{passes}", expected):
        passes += 1
    assert passes > 2, f"{point} is not passed"
