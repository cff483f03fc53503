"""kill -9 of a node, its hosts and their templates by an independent process, at random, while errands run at once."""

import itertools
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from errand_kit import Errands

KILLER = Path(__file__).with_name("errand_killer.py")


@contextmanager
def killer(folder: Path, seed: int) -> Iterator[Counter[str]]:
    """Kills at random meanwhile. What was killed, kept current."""
    process = subprocess.Popen(
        [sys.executable, str(KILLER), str(folder), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    killed: Counter[str] = Counter()
    told = threading.Thread(target=lambda lines: killed.update(line.strip() for line in lines), args=[process.stdout])
    told.start()
    try:
        yield killed
        process.stdin.close()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        told.join()


def storm(backend: str, folder: Path, seed: int, at_once: int, wanted: dict[str, int]) -> None:
    """Waves of errands under kills until so many of each kind were killed: how many waves, is the machine's speed."""
    with Errands(backend, folder) as errands:
        with killer(folder, seed) as killed:
            for wave in itertools.count():
                errands.errands([f"{wave}-{number}" for number in range(at_once)])
                if all(killed[what] >= number for what, number in wanted.items()):
                    break
        errands.check()


@pytest.mark.parametrize("backend", ["python", "wasm", "process"])
def test_random_kills_lose_and_double_nothing(backend: str, tmp_path: Path) -> None:
    storm(backend, tmp_path, 1, 8, {"tools": 1})


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["python", "wasm", "process"])
@pytest.mark.parametrize("seed", range(2))
def test_many_random_kills_lose_and_double_nothing(backend: str, seed: int, tmp_path: Path) -> None:
    hosts = {"python": {"agents": 2}, "process": {"programs": 2}}.get(backend, {})
    storm(backend, tmp_path, 100 + seed, 12, {"node": 2, "tools": 2} | hosts)
