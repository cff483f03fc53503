"""What do 100,000 runs cost that wait for something, and how soon is a node with them back?

Each is a guest that waits for an event at its run's mailbox, or for a time-out a day away, so it has a row of both
kinds; all are cold: no guest, nothing but rows in LMDB. By how much memory grew from a tenth of them to all, a run:
``bytes_per_cold_run`` what only this process has, ``rss_bytes_per_cold_run`` with the pages of the store's file that it
has looked at, which are the kernel's to take back. ``parked_per_s``: from submit to cold.

Then the node is killed with SIGKILL. ``restart_accepting_s``: from the start of a new process until it has accepted a
run, durably; ``restarted_rss_bytes_per_run``: by how much it is larger then than a new node without runs.
``wake_all_per_s``: an event is sent to each of them, and each comes back from the store, takes it and ends;
``loop_longest_turn_ms``: of the control loop meanwhile, CPU time.
"""

import asyncio
import gc
import multiprocessing
import re
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrt import Run, Runtime
from agentrt.config import load_config
from perf.bench import run_async, until
from perf.report import Report, disk, machine

_GUEST = Path(__file__).parents[1] / "examples/guests/sequence.wasm"
_EVENT_WAIT = [[4, {"timeout_s": 86_400}]]
_AT_ONCE = 1000
_HOT_MAX = 5000  # runs that are not parked yet; more are submitted when there are fewer
_NO_ENV: dict[str, str] = {}


def _memory_bytes() -> tuple[int, int]:
    """(resident, of these anonymous) of this process."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    found = {key: int(kb) * 1024 for key, kb in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    return found["Rss"], found["Anonymous"]


async def _opened(folder: Path) -> Runtime:
    settings = {
        "store.path": str(folder / "store"), "store.force_place": True, "wasm.cache_path": str(folder / "cache"),
        "limits.hot_ms": 0,
    }  # fmt: skip
    made = Runtime(config=load_config(arguments=settings, env=_NO_ENV))
    await made.start()
    await made.register("waiter", _GUEST)
    return made


async def _park(made: Runtime, count: int, ids: Path) -> None:
    """``count`` runs that wait and are cold; their ids are appended to a file, so that they cost no memory."""
    parked = 0
    while parked < count:
        found = await made.submit_many("waiter", [_EVENT_WAIT] * min(_AT_ONCE, count - parked))
        accepted = [run.run_id for run in found if isinstance(run, Run)]
        parked += len(accepted)
        with ids.open("a") as file:
            file.writelines(f"{run_id}\n" for run_id in accepted)
        await until(made, lambda now: now.engine.live < _HOT_MAX)
    await until(made, lambda now: now.engine.live == 0)


async def _fill(folder: Path, count: int) -> dict[str, float]:
    made = await _opened(folder)
    ids = folder / "ids"
    empty = _memory_bytes()[0]
    warm = count // 10
    await _park(made, warm, ids)
    before, start = _memory_bytes(), time.monotonic()
    await _park(made, count - warm, ids)
    taken_s, after = time.monotonic() - start, _memory_bytes()
    return {
        "bytes_per_cold_run": (after[1] - before[1]) / (count - warm),
        "rss_bytes_per_cold_run": (after[0] - before[0]) / (count - warm),
        "parked_per_s": (count - warm) / taken_s,
        "empty_rss": empty,
    }


async def _wake(folder: Path, count: int) -> dict[str, float]:
    made = await _opened(folder)
    run = await made.submit("waiter", [])
    accepted_s = time.monotonic()
    await run.result()
    await until(made, lambda now: now.engine.recovering == 0)
    rss = _memory_bytes()[0]
    ids = (folder / "ids").read_text().split()
    start = time.monotonic()
    for first in range(0, count, _AT_ONCE):
        await asyncio.gather(*(made.send(1, run_id=run_id) for run_id in ids[first : first + _AT_ONCE]))
    now = await until(made, lambda now: sum(now.engine.ended.values()) > count)
    taken_s = time.monotonic() - start
    if now.engine.ended != {"SUCCEEDED": count + 1}:
        raise RuntimeError(f"{count} runs were woken and ended so: {now.engine.ended}")
    return {
        "accepted_s": accepted_s,
        "rss": rss,
        "wake_all_per_s": count / taken_s,
        "loop_longest_turn_ms": now.loop_longest_turn_ns / 1e6,
    }


def _work(phase: Callable[..., Any], folder: Path, count: int, answer: Connection) -> None:
    async def main() -> None:
        answer.send(await phase(folder, count))
        signal.pause()  # the node goes on until it is killed

    run_async(main())


def _killed(phase: Callable[..., Any], folder: Path, count: int) -> dict[str, float]:
    """What a phase gave, in a process that was killed right after it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(phase, folder, count, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, float] = ours.recv()
    finally:
        process.kill()
        process.join()
    return found


def run(tiny: bool) -> Report:
    count = 300 if tiny else 100_000
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        figures = _killed(_fill, Path(folder), count)
        size = sum(file.stat().st_blocks * 512 for file in (Path(folder) / "store").rglob("*") if file.is_file())
        start_s = time.monotonic()
        woken = _killed(_wake, Path(folder), count)
    figures["restart_accepting_s"] = woken.pop("accepted_s") - start_s
    figures["restarted_rss_bytes_per_run"] = (woken.pop("rss") - figures.pop("empty_rss")) / count
    return Report("waiting", figures | woken | {"store_bytes_per_run": size / count}, {}, machine() | disk())
