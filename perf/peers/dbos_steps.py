"""DBOS with its system database in SQLite: a workflow that calls steps one after the other.

A step is one transaction, its outcome, which is committed before the workflow goes on (strace counts 22 fdatasync calls
for a run of 20 steps). DBOS leaves the journal mode as it finds it, so the database is made with a write-ahead log;
synchronous=FULL is SQLite's default. Of plain and of async workflows the plain ones were faster when many ran.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from perf.peers.timed import Peer, durability_of, main


@contextlib.contextmanager
def open_dbos(folder: Path, steps: int) -> Iterator[Peer]:
    """DBOS on a database in the folder."""
    import sqlalchemy
    from dbos import DBOS

    path = folder / "system.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    said: set[str] = set()

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
    def on_connect(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=FULL")
        said.add(durability_of(connection))

    @DBOS.step()
    def step(count: int) -> int:
        return count + 1

    @DBOS.workflow()
    def workflow() -> int:
        count = 0
        for _ in range(steps):
            count = step(count)
        return count

    def check(count: int) -> None:
        if count != steps:
            raise RuntimeError(f"a run of {steps} steps has counted {count}")

    def run_many(runs: int) -> None:
        for handle in [DBOS.start_workflow(workflow) for _ in range(runs)]:
            check(handle.get_result())

    DBOS(config={"name": "perf-steps", "system_database_url": f"sqlite:///{path}", "log_level": "ERROR"})
    DBOS.launch()
    try:
        yield Peer(lambda: check(workflow()), run_many, " and ".join(said))
    finally:
        DBOS.destroy()


if __name__ == "__main__":
    main(("dbos",), open_dbos)
