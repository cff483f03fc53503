"""How many durable steps a second?

200 concurrent wasm runs each call a keyed tool, wait for its answer and call it again. A step is two-phase: its
StepPrepared is durable before the tool is called, its outcome joins the transaction of the run's next step; every
transaction is synced. Counted are tool calls in a window in which all runs are under way.

``syscalls_per_s``: tools in tool hosts, as the product runs them. ``inline_syscalls_per_s``: tools answered inside the
process, which leaves the engine and the journal. ``inline_memory_syscalls_per_s``: without durability, which leaves
the engine. ``store_steps_per_s``: one loop that commits the same batches and does nothing else, which leaves the store.

Baseline: SQLite with write-ahead log and synchronous=FULL, one writer. A step is one transaction with the outcome of
the last step, the preparation of the next and the head of the run (``sqlite_steps_per_s``); or 200 steps share a
transaction, as a hand-written group commit would have it (``sqlite_grouped_steps_per_s``).
"""

import asyncio
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from agentrt.errors import StoreError
from agentrt.ids import new_run_id
from agentrt.plugins import Plugins
from agentrt.records import Record, RunAccepted, StepCommitted, StepPrepared
from agentrt.stores.base import Batch, Head
from agentrt.stores.lmdb import LmdbStore
from perf import guests, inline_tools
from perf.bench import run_async, runtime, until
from perf.report import Report, disk, machine
from perf.timing import isolated

_RUNS = 200
_ENDLESS = 1_000_000_000
_REQUEST = b'{"tool":"echo","args":{}}'


async def _steps_per_s(durable: bool, inline: bool, runs: int, seconds: float) -> float:
    plugins = Plugins({"perf.inline_tools": inline_tools}) if inline else None
    agents = {"loop": guests.tool_loop(_ENDLESS)}
    async with runtime(durable, agents, tools=(inline_tools.echo,), plugins=plugins) as made:
        await asyncio.gather(*(made.submit("loop") for _ in range(runs)))
        await until(made, lambda now: now.engine.tool_calls >= 4 * runs)  # the tool hosts are up
        before, start = (await made.statistics()).engine.tool_calls, time.perf_counter()
        await asyncio.sleep(seconds)
        after, end = (await made.statistics()).engine.tool_calls, time.perf_counter()
        return (after - before) / (end - start)


def steps_per_s(durable: bool, inline: bool, runs: int, seconds: float) -> float:
    """Keyed steps a second through a runtime."""
    return run_async(_steps_per_s(durable, inline, runs, seconds))


async def _store_steps_per_s(runs: int, seconds: float) -> float:
    sys.setswitchinterval(1e-4)  # as a node does
    committed = 0
    over = False

    def start(run_id: str) -> None:
        """The run commits its next step when the last one is durable."""
        version, now_ns, digest = 0, time.time_ns(), bytes(16)

        def go_on(error: StoreError | None) -> None:
            nonlocal version, committed
            if error is not None:
                raise error
            committed += 1
            if over:
                return
            records: tuple[Record, ...]
            if version == 0:
                records = (RunAccepted(1, now_ns, "t", "agent", "0" * 64, b"{}", 2, bytes(16), _ENDLESS),)
            else:
                path, key = f"1:{version}", f"{run_id}/1:{version}/echo"
                records = (
                    StepCommitted(version + 1, now_ns, path, "tool.call", digest, True, b"{}", digest, 1),
                    StepPrepared(version + 2, now_ns, path, "tool.call", "keyed", _REQUEST, digest, key, 1),
                )
            after, version = version, version + len(records)
            head = Head(run_id, version, "ACTIVE", "t", "agent", "0" * 64, 2, 2, now_ns)
            store.commit(Batch(head, after, records), go_on)

        go_on(None)

    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        store = LmdbStore(Path(folder) / "store", asyncio.get_running_loop(), force_place=True)
        for _ in range(runs):
            start(new_run_id())
        await asyncio.sleep(seconds / 8)
        before, begin = committed, time.perf_counter()
        await asyncio.sleep(seconds)
        steps, taken = committed - before, time.perf_counter() - begin
        over = True
        store.close()
        return steps / taken


def store_steps_per_s(runs: int, seconds: float) -> float:
    """Steps a second of the store alone."""
    return run_async(_store_steps_per_s(runs, seconds))


def sqlite_steps_per_s(per_transaction: int, runs: int, seconds: float) -> float:
    """Steps a second of a journal in SQLite."""
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        db = sqlite3.connect(Path(folder) / "journal.db", isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE journal(run BLOB, seq INTEGER, record BLOB, PRIMARY KEY(run, seq)) WITHOUT ROWID")
        db.execute("CREATE TABLE heads(run BLOB PRIMARY KEY, head BLOB) WITHOUT ROWID")
        names = [number.to_bytes(16, "big") for number in range(runs)]
        record, head = _REQUEST + bytes(100), bytes(120)
        steps, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            db.execute("BEGIN IMMEDIATE")
            for _ in range(per_transaction):
                run, seq = names[steps % runs], steps // runs * 2
                db.execute("INSERT INTO journal VALUES(?, ?, ?), (?, ?, ?)", (run, seq, record, run, seq + 1, record))
                db.execute("INSERT OR REPLACE INTO heads VALUES(?, ?)", (run, head))
                steps += 1
            db.execute("COMMIT")
        db.close()
        return steps / (now - start)


def run(tiny: bool) -> Report:
    runs, seconds = (20, 0.3) if tiny else (_RUNS, 8.0)
    figures = {
        "syscalls_per_s": isolated(steps_per_s, True, False, runs, seconds),
        "inline_syscalls_per_s": isolated(steps_per_s, True, True, runs, seconds),
        "inline_memory_syscalls_per_s": isolated(steps_per_s, False, True, runs, seconds),
        "store_steps_per_s": isolated(store_steps_per_s, runs, seconds / 2),
    }
    baselines = {
        "sqlite_steps_per_s": isolated(sqlite_steps_per_s, 1, runs, seconds / 2),
        "sqlite_grouped_steps_per_s": isolated(sqlite_steps_per_s, runs, runs, seconds / 2),
    }
    return Report("journal", figures, baselines, machine() | disk())
