"""How fast are runs of twenty trivial durable steps, one after the other and 200 at once?

A step is a keyed tool in a tool host: its StepPrepared is durable before the tool is called, its outcome joins the
transaction of the next step or of the run's end. A run is timed from submit to result, so its acceptance and its end,
two more transactions, are the steps' to carry.

``sequential_steps_per_s``: one run at a time. ``lmdb_puts_per_s``: what the disk and LMDB allow, one synced put of a
record's size per transaction, on the same disk; both take turns, round by round, and ``sequential_vs_lmdb`` is the
median of the rounds' ratios. ``concurrent_steps_per_s``: 200 runs submitted together, until the last has ended.

Baselines: the same with LangGraph and DBOS on SQLite with synchronous=FULL and a write-ahead log, where a step is
durable before the next one starts too (perf/peers says how). Their steps are plain functions of the same process,
which is less than a tool host does. ``best_peer_ratio``: concurrent steps per second against the better peer's. A peer
that is not installed is left out, and a note says so. Another note says that the disk changed its speed meanwhile, as
disks with a limit do: then neither ratio means anything.
"""

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import lmdb
import uvloop
import wasmtime

from agentrt import Run, Runtime
from perf import guests, inline_tools
from perf.bench import runtime
from perf.peers.driver import PEERS, PeerMissingError, peer_steps_per_s
from perf.report import Report, disk, machine
from perf.timing import interleaved, isolated

_STEPS = 20
_KEY_BYTES = 24  # as a key of the journal
_RECORD = bytes(200)  # StepPrepared and StepCommitted of such a step
_DISK_CHANGE_MAX = 2.0


async def _register(made: Runtime) -> str:
    """The agent whose runs are timed: ``_STEPS`` calls of the tool echo, one after the other. Its name."""
    await made.register("steps", bytes(wasmtime.wat2wasm(guests.tool_loop(_STEPS))))
    return "steps"


async def wave_s(made: Runtime, agent: str, runs: int) -> float:
    """Seconds from submit to the last result of ``runs`` runs at once. Raises RuntimeError unless each has taken all
    its steps."""
    before = (await made.statistics()).engine.tool_calls
    start = time.perf_counter()
    accepted = [run for run in await made.submit_many(agent, [None] * runs) if isinstance(run, Run)]
    results = await made.wait_many(accepted)
    taken_s = time.perf_counter() - start
    steps = (await made.statistics()).engine.tool_calls - before
    if steps != runs * _STEPS or any(result.error is not None for result in results):
        raise RuntimeError(f"{len(results)} of {runs} runs ended after {steps} steps")
    return taken_s


async def _sequential_steps_per_s(made: Runtime, agent: str, seconds: float) -> float:
    runs, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds or not runs:
        await (await made.submit(agent)).result()
        runs += 1
    return runs * _STEPS / (now - start)


class _Puts:
    """Synced single puts into an LMDB of its own."""

    def __init__(self, folder: Path) -> None:
        self._env = lmdb.open(str(folder), map_size=1 << 30)
        self._count = 0

    def per_s(self, seconds: float) -> float:
        first, start = self._count, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            with self._env.begin(write=True) as txn:
                txn.put(self._count.to_bytes(_KEY_BYTES, "big"), _RECORD)
            self._count += 1
        return (self._count - first) / (now - start)

    def close(self) -> None:
        self._env.close()


def sequential(rounds: int, seconds: float) -> list[list[float]]:
    """Per round: steps a second of one run at a time, and puts a second."""
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrt-perf-"))
        puts = stack.enter_context(contextlib.closing(_Puts(Path(folder))))
        opened = contextlib.AsyncExitStack()
        try:
            made = runner.run(opened.enter_async_context(runtime(True, {}, tools=(inline_tools.echo,))))
            agent = runner.run(_register(made))
            runner.run(wave_s(made, agent, 1))  # the tool host is up
            return interleaved(
                rounds,
                lambda: runner.run(_sequential_steps_per_s(made, agent, seconds)),
                lambda: puts.per_s(seconds / 2),
            )
        finally:
            runner.run(opened.aclose())


async def _concurrent_steps_per_s(runs: int, waves: int) -> float:
    async with runtime(True, {}, tools=(inline_tools.echo,)) as made:
        agent = await _register(made)
        await wave_s(made, agent, runs)  # the tool hosts are up
        return runs * _STEPS * waves / sum([await wave_s(made, agent, runs) for _ in range(waves)])


def concurrent_steps_per_s(runs: int, waves: int) -> float:
    """Steps a second of ``waves`` times ``runs`` runs at once."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_concurrent_steps_per_s(runs, waves))


def run(tiny: bool) -> Report:
    runs, rounds, waves, seconds = (10, 1, 1, 0.05) if tiny else (200, 9, 20, 0.5)
    syncs_us = [disk()["fdatasync_us"]]
    measured = isolated(sequential, rounds, seconds)
    syncs_us.append(disk()["fdatasync_us"])
    figures = {
        "sequential_steps_per_s": statistics.median(steps for steps, _ in measured),
        "lmdb_puts_per_s": statistics.median(puts for _, puts in measured),
        "sequential_vs_lmdb": statistics.median(steps / puts for steps, puts in measured),
        "concurrent_steps_per_s": isolated(concurrent_steps_per_s, runs, waves),
    }
    syncs_us.append(disk()["fdatasync_us"])
    baselines: dict[str, float] = {}
    notes: list[str] = []
    peers: list[str] = []
    for peer in PEERS:
        try:
            found = peer_steps_per_s(peer, _STEPS, runs, seconds * 4)
        except PeerMissingError as error:
            notes.append(str(error))
            continue
        baselines[f"{peer}_sequential_steps_per_s"] = found.sequential_steps_per_s
        baselines[f"{peer}_concurrent_steps_per_s"] = found.concurrent_steps_per_s
        syncs_us.append(disk()["fdatasync_us"])
        peers.append(f"{found.versions}: {found.durability}")
    concurrent = [value for key, value in baselines.items() if "_concurrent_" in key]
    if concurrent:
        figures["best_peer_ratio"] = figures["concurrent_steps_per_s"] / max(concurrent)
    if max(syncs_us) > _DISK_CHANGE_MAX * min(syncs_us):
        notes.append(
            f"the disk changed its speed: between parts an fdatasync took {min(syncs_us)} to {max(syncs_us)} us"
        )
    return Report("steps", figures, baselines, machine(notes) | disk() | {"peers": peers})
