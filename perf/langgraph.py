"""How many checkpoints a second does LangGraph's state get, 200 threads of conversation at once?

A thread puts one checkpoint after the other, each durable before the next, of the size that a small graph's state has
(``_STATE``). ``saver_checkpoints_per_s``: plugins/agentrt-langgraph. Baselines: LangGraph's SQLite savers with
synchronous=FULL and a write-ahead log, the asynchronous one on the same loop and the other on a pool of 8
threads. Savers take turns, round by round; ``saver_ratio`` is the median of the rounds' ratios to the better of the
two. ``graph_*``: twenty nodes one after the other with durability="sync", 50 graphs at once, against the asynchronous
saver: most of ours is LangGraph itself.

Needs the extra ``peers``.
"""

import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from perf.report import Report, disk, machine

_PLUGIN = Path(__file__).parents[1] / "plugins" / "agentrt-langgraph"
_THREADS = 8
_NODES = 20
_STATE = {"messages": ["what is the weather in Paris?", "it rains"] * 4, "count": 3, "city": "Paris"}

_ids = itertools.count()


class State(TypedDict):
    """The graph's."""

    count: int


def _checkpoint(number: int) -> Any:
    from langgraph.checkpoint.base import empty_checkpoint

    made = empty_checkpoint()
    made["channel_values"] = _STATE | {"count": number}
    made["channel_versions"] = dict.fromkeys(_STATE, f"{number + 1:032}")
    return made


_METADATA: Any = {"source": "loop", "step": 1, "parents": {}}


async def _thread(put: Callable[..., Awaitable[Any]], checkpoints: int) -> None:
    config: Any = {"configurable": {"thread_id": str(next(_ids)), "checkpoint_ns": ""}}
    for number in range(checkpoints):
        made = _checkpoint(number)
        config = await put(config, made, _METADATA, made["channel_versions"])


async def _puts_per_s(put: Callable[..., Awaitable[Any]], threads: int, checkpoints: int) -> float:
    start = time.perf_counter()
    await asyncio.gather(*[_thread(put, checkpoints) for _ in range(threads)])
    return threads * checkpoints / (time.perf_counter() - start)


async def _graphs_per_s(saver: Any, graphs: int) -> float:
    """Steps a second."""
    from langgraph.graph import END, START, StateGraph

    async def node(state: State) -> State:
        return {"count": state["count"] + 1}

    builder = StateGraph(State)
    names = [f"step{number}" for number in range(_NODES)]
    for name in names:
        builder.add_node(name, node)
    for name, after in itertools.pairwise([START, *names, END]):
        builder.add_edge(name, after)
    graph = builder.compile(checkpointer=saver)

    async def one() -> None:
        config: Any = {"configurable": {"thread_id": str(next(_ids))}, "recursion_limit": _NODES + 5}
        found = await graph.ainvoke({"count": 0}, config, durability="sync")
        if found["count"] != _NODES:
            raise RuntimeError(f"a graph of {_NODES} nodes has counted {found['count']}")

    start = time.perf_counter()
    await asyncio.gather(*[one() for _ in range(graphs)])
    return graphs * _NODES / (time.perf_counter() - start)


@contextlib.asynccontextmanager
async def _async_sqlite(folder: Path) -> AsyncIterator[Any]:
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async with AsyncSqliteSaver.from_conn_string(str(folder / "async.db")) as saver:
        await saver.setup()
        await saver.conn.execute("PRAGMA journal_mode=WAL")
        await saver.conn.execute("PRAGMA synchronous=FULL")
        yield saver


@contextlib.contextmanager
def _sqlite(folder: Path) -> Any:
    import sqlite3

    from langgraph.checkpoint.sqlite import SqliteSaver

    with contextlib.closing(sqlite3.connect(folder / "sync.db", check_same_thread=False)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        saver = SqliteSaver(connection)
        saver.setup()
        yield saver


async def _measure(
    threads: int, rounds: int, checkpoints: int, checkpoints_sqlite: int, graphs: int
) -> dict[str, list[float]]:
    from agentrt_langgraph import AgentrtSaver

    found: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrt-perf-")))
        ours = await stack.enter_async_context(AgentrtSaver.open(folder / "store"))
        asynchronous = await stack.enter_async_context(_async_sqlite(folder))
        synchronous = stack.enter_context(_sqlite(folder))
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        loop = asyncio.get_running_loop()

        async def pooled(*arguments: Any) -> Any:
            return await loop.run_in_executor(pool, synchronous.put, *arguments)

        for _ in range(rounds):
            for key, measured in (
                ("saver_checkpoints_per_s", _puts_per_s(ours.aput, threads, checkpoints)),
                ("sqlite_async_checkpoints_per_s", _puts_per_s(asynchronous.aput, threads, checkpoints_sqlite)),
                ("sqlite_threads_checkpoints_per_s", _puts_per_s(pooled, threads, checkpoints_sqlite)),
            ):
                found.setdefault(key, []).append(await measured)
        found["graph_steps_per_s"] = [await _graphs_per_s(ours, graphs)]
        found["sqlite_async_graph_steps_per_s"] = [await _graphs_per_s(asynchronous, graphs)]
    return found


def run(tiny: bool) -> Report:
    os.environ["LANGSMITH_TRACING"] = "false"
    sys.path.insert(0, str(_PLUGIN))
    found = asyncio.run(_measure(*((5, 1, 3, 3, 2) if tiny else (200, 5, 50, 10, 50))))
    medians = {key: statistics.median(values) for key, values in found.items()}
    peers = ("sqlite_async_checkpoints_per_s", "sqlite_threads_checkpoints_per_s")
    ratios = [
        ours / max(best)
        for ours, *best in zip(found["saver_checkpoints_per_s"], *(found[key] for key in peers), strict=True)
    ]
    figures = {
        "saver_ratio": statistics.median(ratios),
        "saver_checkpoints_per_s": medians["saver_checkpoints_per_s"],
        "graph_steps_per_s": medians["graph_steps_per_s"],
        "graph_ratio": medians["graph_steps_per_s"] / medians["sqlite_async_graph_steps_per_s"],
    }
    baselines = {key: value for key, value in medians.items() if key.startswith("sqlite_")}
    return Report("langgraph", figures, baselines, machine() | disk())
