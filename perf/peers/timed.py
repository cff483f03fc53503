"""What the peers' programs share: how runs are timed, and the answer. Only the standard library."""

import contextlib
import importlib.metadata
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_WARM_RUNS = 20


class Peer(NamedTuple):
    """``run_one`` runs a run from start to result; ``run_many`` that many at once, until the last has its result.
    Both raise if one went wrong. ``durability``: what `durability_of` says."""

    run_one: Callable[[], None]
    run_many: Callable[[int], None]
    durability: str


def durability_of(connection: sqlite3.Connection) -> str:
    """Of SQLite; synchronous 2 is FULL."""
    return ", ".join(
        f"{name} {connection.execute(f'PRAGMA {name}').fetchone()[0]}" for name in ("journal_mode", "synchronous")
    )


def main(packages: tuple[str, ...], open_peer: Callable[[Path, int], contextlib.AbstractContextManager[Peer]]) -> None:
    """``open_peer(folder, steps)`` with the program's arguments; the last line of the output is the answer as JSON."""
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(json.dumps({"missing": package}))
            return
    folder, steps, runs, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    with open_peer(folder, steps) as peer:
        peer.run_one()
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds or not count:
            peer.run_one()
            count += 1
        sequential = count * steps / (now - start)
        peer.run_many(min(runs, _WARM_RUNS))
        start = time.perf_counter()
        peer.run_many(runs)
        concurrent = runs * steps / (time.perf_counter() - start)
        answer = {
            "sequential_steps_per_s": sequential,
            "concurrent_steps_per_s": concurrent,
            "versions": ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages),
            "durability": peer.durability,
        }
    print(json.dumps(answer))
