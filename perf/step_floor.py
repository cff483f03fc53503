"""What is the least that a durable step can take, with the same core, store and tool host, and no engine between them?

200 runs at once of 20 steps, as in `perf.steps`. ``control_us``, ``store_us``: CPU time a step of the two threads that
share the GIL; ``steps_per_s``. Baselines, in turns with them, ``floor_*``: the same where a run is a class that does no
more than prepare, call, commit and answer, durably and in the same order, and knows nothing of limits, time-outs,
replay, cancellation, metrics or of other runs. What lies between is the engine's; what the floor takes no engine can
save.
"""

import asyncio
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import wasmtime

from agentrt._core import Guest
from agentrt.backends.base import Exit, Request, Status
from agentrt.backends.wasm import WasmBackend, WasmProgram
from agentrt.config import load_config
from agentrt.engine.steps import ToolCall
from agentrt.errors import StoreError
from agentrt.ids import new_run_id
from agentrt.records import Record, RunAccepted, RunEnded, StepCommitted, StepPrepared
from agentrt.stores.base import Batch, Done, Head
from agentrt.stores.lmdb import LmdbStore
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.pool import ToolPool
from agentrt.tools.spec import ToolRegistry
from perf import guests, inline_tools, steps
from perf.bench import runtime
from perf.report import Report, disk, machine
from perf.timing import isolated, thread_cpu_ns

_STEPS = 20
_DIGEST = bytes(16)
_FUEL = 2**60
_VERSION = "0" * 64
_KEYS = ("control_us", "store_us", "steps_per_s")
_decode = msgspec.json.Decoder(ToolCall).decode


class _Parts:
    """What a node has beside its engine."""

    def __init__(self, backend: WasmBackend, program: WasmProgram, store: LmdbStore, tools: ToolPool) -> None:
        self.backend = backend
        self.program = program
        self.store = store
        self.tools = tools
        self.left = 0  # runs that have not ended
        self.ended = asyncio.Event()


class _Run:
    """A run without an engine: the events of its guest, and of its commits and calls."""

    def __init__(self, parts: _Parts) -> None:
        self.run_id = new_run_id()
        self._parts = parts
        self._version = self._handle = 0
        self._args = b""
        self._outcome: StepCommitted | None = None
        self._guest: Guest | None = None
        now = time.time_ns()
        accepted = RunAccepted(1, now, "default", "steps", _VERSION, b"null", 2, _DIGEST, _FUEL)
        self._commit((accepted,), self._accepted)

    def _commit(self, records: tuple[Record, ...], done: Done, ended_ns: int = 0) -> None:
        after, self._version = self._version, self._version + len(records)
        state = "SUCCEEDED" if ended_ns else "ACTIVE"
        head = Head(self.run_id, self._version, state, "default", "steps", _VERSION, 2, 2, 1, ended_ns)
        self._parts.store.commit(Batch(head, after, records), done)

    def _accepted(self, error: StoreError | None) -> None:
        backend, program = self._parts.backend, self._parts.program
        events: Any = self  # the part of `GuestEvents` that such a guest needs
        self._guest = backend.start(
            program, events, tenant="default", tier=2, input=b"null", fuel=_FUEL, seed=_DIGEST, clock_ns=0,
            admitted=True, replay=False,
        )  # fmt: skip

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        """One at a time: a call of the tool."""
        for handle, _, payload in requests:
            self._handle, self._args = handle, bytes(_decode(payload).args)
            seq = self._version + (1 if self._outcome is None else 2)
            path, key = f"1:{handle}", f"{self.run_id}/1:{handle}/echo"
            prepared = StepPrepared(seq, time.time_ns(), path, "tool.call", "keyed", payload, _DIGEST, key, 1)
            self._commit((prepared,) if self._outcome is None else (self._outcome, prepared), self._prepared)

    def _prepared(self, error: StoreError | None) -> None:
        key = f"{self.run_id}/1:{self._handle}/echo"
        self._parts.tools.call("echo", self._args, key=key, tenant="default", tier=2, attempt=1, done=self._answered)

    def _answered(self, outcome: ToolOutcome) -> None:
        now, seq = time.time_ns(), self._version + 1
        path = f"1:{self._handle}"
        self._outcome = StepCommitted(seq, now, path, "tool.call", _DIGEST, outcome.ok, outcome.payload, _DIGEST, 1)
        assert self._guest is not None
        self._guest.complete(self._handle, Status.OK, outcome.payload, now, seq)

    def on_exit(self, exit: Exit) -> None:
        """It has made all its steps."""
        assert self._outcome is not None and exit.reason == "returned"
        now = time.time_ns()
        ended = RunEnded(self._version + 2, now, "SUCCEEDED", b"null", None)
        self._commit((self._outcome, ended), self._ended, now)

    def _ended(self, error: StoreError | None) -> None:
        if error is not None:
            raise error
        self._parts.left -= 1
        if not self._parts.left:
            self._parts.ended.set()


async def _measured(wave: Callable[[], Awaitable[Any]], threads: tuple[int, int], runs: int, waves: int) -> list[float]:
    """CPU us a step of both threads, and steps a second."""
    await wave()  # tool hosts are up, places are warm
    before, began = [thread_cpu_ns(thread) for thread in threads], time.perf_counter()
    for _ in range(waves):
        await wave()
    taken_s = time.perf_counter() - began
    count = runs * _STEPS * waves
    used = [thread_cpu_ns(thread) - was for thread, was in zip(threads, before, strict=True)]
    return [*(ns / count / 1000 for ns in used), count / taken_s]


async def _floor(runs: int, waves: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        config = load_config(arguments={"wasm.cache_path": str(Path(folder) / "cache")}, env={})
        sys.setswitchinterval(config.node.switch_interval_us / 1e6)  # as a node does
        gc.set_threshold(config.node.gc_threshold, 50, 1000)
        loop = asyncio.get_running_loop()
        backend = WasmBackend(config)
        await backend.open()
        store = LmdbStore(Path(folder) / "store", loop, force_place=True)
        tools = ToolPool(ToolRegistry([inline_tools.echo]), loop)
        tools.start()
        try:
            program = await backend.prepare(bytes(wasmtime.wat2wasm(guests.tool_loop(_STEPS))))
            parts = _Parts(backend, program, store, tools)

            async def wave() -> None:
                parts.left = runs
                parts.ended.clear()
                under_way = [_Run(parts) for _ in range(runs)]
                await parts.ended.wait()
                under_way.clear()

            return await _measured(wave, (threading.get_native_id(), store.writer_thread_id), runs, waves)
        finally:
            await tools.close()
            await backend.close()
            await asyncio.to_thread(store.close)


async def _engine(runs: int, waves: int) -> list[float]:
    async with runtime(True, {"steps": guests.tool_loop(_STEPS)}, tools=(inline_tools.echo,)) as made:
        store: Any = made._store
        threads = made._control.thread_id, store.writer_thread_id
        return await _measured(lambda: steps.wave_s(made, "steps", runs), threads, runs, waves)


def floor(runs: int, waves: int) -> list[float]:
    """Control and store us a step, steps a second, without an engine."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_floor(runs, waves))


def engine(runs: int, waves: int) -> list[float]:
    """The same with it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_engine(runs, waves))


def run(tiny: bool) -> Report:
    runs, waves, rounds = (10, 1, 1) if tiny else (200, 10, 5)
    turns = [(isolated(engine, runs, waves), isolated(floor, runs, waves)) for _ in range(rounds)]
    ours, least = (
        [statistics.median(values) for values in zip(*each, strict=True)] for each in zip(*turns, strict=True)
    )
    figures = dict(zip(_KEYS, ours, strict=True))
    baselines = {f"floor_{key}": value for key, value in zip(_KEYS, least, strict=True)}
    return Report("step_floor", figures, baselines, machine() | disk())
