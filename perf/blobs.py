"""What does a large payload cost the commits beside it?

One loop of small batches, each committed when the last one is durable, while results of 64 MiB of a run are stored.
``quiet_p99_ms`` and ``quiet_max_ms``: without them; ``p99_ms`` and ``max_ms``: beside them. Baseline: the same payload
as one value in the environment of the journal, which every commit then waits for (``inline_max_ms``).
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path

import lmdb

from agentrt.stores.base import NODE, Batch, Row
from agentrt.stores.lmdb import LmdbStore
from agentrt.testing.stores import Script
from perf.bench import run_async
from perf.report import Report, disk, machine
from perf.timing import isolated

_MIB = 2**20


async def _commit_times_ms(size_bytes: int, puts: int, seconds: float) -> tuple[list[float], float]:
    """Times of small commits, and MiB per second of the large ones beside them (0.0 without any)."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    over = False

    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        store = LmdbStore(Path(folder) / "store", loop, force_place=True)

        async def commit(batch: Batch) -> None:
            done = loop.create_future()
            store.commit(batch, lambda error: done.set_exception(error) if error else done.set_result(None))
            await done

        async def small() -> None:
            number = 0
            while not over:
                started = time.perf_counter()
                await commit(Batch(None, 0, (), (Row(NODE, b"k", b"%d" % number),)))
                times.append((time.perf_counter() - started) * 1e3)
                number += 1

        script = Script()
        await commit(script.accept())
        await commit(script.step())
        large = [script.step(result=os.urandom(size_bytes)) for _ in range(puts)]
        beside = asyncio.create_task(small())
        await asyncio.sleep(0.05)
        times.clear()
        started = time.perf_counter()
        if puts:
            for batch in large:
                await commit(batch)
        else:
            await asyncio.sleep(seconds)
        taken = time.perf_counter() - started
        found = [*times]
        over = True
        await beside
        store.close()
        return found, puts * size_bytes / _MIB / taken


def commit_times_ms(size_bytes: int, puts: int, seconds: float) -> tuple[float, float, float]:
    """(p99, max) of small commits in ms, and MiB per second."""
    times, rate = run_async(_commit_times_ms(size_bytes, puts, seconds))
    times.sort()
    return times[int(len(times) * 0.99)], times[-1], rate


def inline_ms(size_bytes: int) -> float:
    """How long one transaction with the payload takes: what a commit behind it waits for."""
    payload = os.urandom(size_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder,
        lmdb.open(folder, map_size=4 * size_bytes + 64 * _MIB) as env,
    ):
        started = time.perf_counter()
        with env.begin(write=True) as txn:
            txn.put(b"k", payload)
        return (time.perf_counter() - started) * 1e3


def run(tiny: bool) -> Report:
    size_bytes, puts, seconds = (2 * _MIB, 1, 0.1) if tiny else (64 * _MIB, 8, 4.0)
    quiet_p99, quiet_max, _ = isolated(commit_times_ms, size_bytes, 0, seconds)
    p99, longest, rate = isolated(commit_times_ms, size_bytes, puts, seconds)
    figures = {
        "quiet_p99_ms": quiet_p99,
        "quiet_max_ms": quiet_max,
        "p99_ms": p99,
        "max_ms": longest,
        "put_mib_per_s": rate,
    }
    return Report("blobs", figures, {"inline_max_ms": isolated(inline_ms, size_bytes)}, machine() | disk())
