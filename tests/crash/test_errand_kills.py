"""kill -9 of a node, its hosts and their templates by an independent process, at random, while errands run at once."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from errand_kit import Errands

KILLER = Path(__file__).with_name("errand_killer.py")


@contextmanager
def killer(folder: Path, seed: int, killed: Counter[str]) -> Iterator[None]:
    """Kills at random meanwhile; what, is added to ``killed``."""
    process = subprocess.Popen(
        [sys.executable, str(KILLER), str(folder), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield
        said, _ = process.communicate()
        assert process.returncode == 0
        killed.update(json.loads(said))
    finally:
        process.kill()
        process.wait()


def storm(backend: str, folder: Path, seed: int, waves: int, at_once: int) -> Counter[str]:
    """Waves of errands under kills. What was killed."""
    killed: Counter[str] = Counter()
    with Errands(backend, folder) as errands:
        with killer(folder, seed, killed):
            for wave in range(waves):
                errands.errands([f"{wave}-{number}" for number in range(at_once)])
        errands.check()
    return killed


@pytest.mark.parametrize("backend", ["python", "wasm"])
def test_random_kills_lose_and_double_nothing(backend: str, tmp_path: Path) -> None:
    killed = storm(backend, tmp_path, 1, 1, 8)
    assert killed.total() >= 3


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["python", "wasm"])
@pytest.mark.parametrize("seed", range(2))
def test_many_random_kills_lose_and_double_nothing(backend: str, seed: int, tmp_path: Path) -> None:
    killed = storm(backend, tmp_path, 100 + seed, 6, 12)  # how often depends on the machine: fast ones are done sooner
    assert killed["node"] >= 2 and killed["tools"] >= 2 and killed.total() >= 8, killed
    if backend == "python":
        assert killed["agents"] >= 2, killed
