"""LangGraph with its SQLite saver: a graph of nodes one after the other, with durability="sync".

Each superstep of one node is two transactions: the node's writes, and the checkpoint, for which the graph waits before
the next node starts (strace counts 44 fdatasync calls for a run of 20 nodes). The functional API's tasks take one, but
the next task may start before it is durable, so they are no step in this sense. Of the two savers and of numbers of
threads, what was fastest here is used: SqliteSaver, a thread per run.
"""

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from perf.peers.timed import Peer, durability_of, main


class State(TypedDict):
    """The graph's."""

    count: int


def _node(state: State) -> State:
    return {"count": state["count"] + 1}


@contextlib.contextmanager
def open_langgraph(folder: Path, steps: int) -> Iterator[Peer]:
    """The graph on a database in the folder."""
    os.environ["LANGSMITH_TRACING"] = "false"
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import END, START, StateGraph

    with contextlib.closing(sqlite3.connect(folder / "checkpoints.db", check_same_thread=False)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        builder = StateGraph(State)
        names = [f"step{number}" for number in range(steps)]
        for name in names:
            builder.add_node(name, _node)
        for name, after in itertools.pairwise([START, *names, END]):
            builder.add_edge(name, after)
        graph = builder.compile(checkpointer=SqliteSaver(connection))
        threads = itertools.count()

        def run_one() -> None:
            config: Any = {"configurable": {"thread_id": str(next(threads))}, "recursion_limit": steps + 5}
            found = graph.invoke({"count": 0}, config, durability="sync")
            if found["count"] != steps:
                raise RuntimeError(f"a run of {steps} steps has counted {found['count']}")

        def run_many(runs: int) -> None:
            with ThreadPoolExecutor(runs) as pool:
                for future in [pool.submit(run_one) for _ in range(runs)]:
                    future.result()

        yield Peer(run_one, run_many, durability_of(connection))


if __name__ == "__main__":
    main(("langgraph", "langgraph-checkpoint-sqlite"), open_langgraph)
