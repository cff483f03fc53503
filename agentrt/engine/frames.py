"""Frames of runs that leave memory: taken before their guests go, so that they need no replay when they are back.

A frame is a short-cut and nothing else: the journal has all that a run is. So whatever goes wrong with one, the run is
replayed; and one is taken only while all that the guest has seen is durable, at the position of the last record.

The guest stays until its frame is durable and the run has changed nothing meanwhile; then the run is parked, and the
record FrameTaken, which names the frame, goes with the one that says that it waits.
"""

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from agentrt.backends.base import Capture, Guest
from agentrt.engine.machine import Phase, RunMachine
from agentrt.errors import AgentrtError
from agentrt.fold import RunFold
from agentrt.states import TERMINAL
from agentrt.stores.base import Store
from agentrt.stores.frames import Frames

_log: Final = logging.getLogger(__name__)
_SWEEP_FIRST_S: Final = 60.0
_SWEEP_S: Final = 3600.0
#: Taken or waiting for that; what is idle beyond it goes without.
_AT_ONCE_MAX: Final = 16


class Runs(Protocol):
    """What it needs of the engine."""

    def capturing(self, machine: RunMachine) -> Capture | None:
        """How a frame of the machine's guest is taken; None: it cannot be."""

    def park_later(self, machine: RunMachine) -> None:
        """It could not be parked, and may be when it has been idle for long again."""

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...


class RunFrames:
    """Loop thread only, but for `read`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, store: Frames | None, after_ns: int) -> None:
        """``after_ns``: slot time that a guest must have had since it began, or went on; less is replayed."""
        self._loop = loop
        self._runs = runs
        # one, at the workers' priority: the disk is the journal's first, and nobody waits for a frame
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="agentrt-frames", initializer=_be_nice)
        self._store = store
        self._after_ns = after_ns
        self._taking: dict[str, RunMachine] = {}
        self._takes: set[asyncio.Future[int]] = set()
        self._closed = False
        self._kept: set[str] = set()  # runs of this session that have one
        self._refused: dict[str, str] = {}  # frames that could not be gone on from, by run
        self._sweeping: asyncio.TimerHandle | None = None
        self.taken = self.used = self.refused = self.failed = 0

    def open(self) -> None:
        """Begin to remove those that nobody needs."""
        if self._store is not None:
            self._sweeping = self._loop.call_later(_SWEEP_FIRST_S, self.sweep)

    async def take_all(self, machines: Iterable[RunMachine], timeout_s: float) -> None:
        """The node stops: have those parked that are worth a frame, as many as there is time for; then no others."""
        end_s = self._loop.time() + timeout_s
        left = [*machines]
        while (left or self._takes) and self._loop.time() < end_s:
            while left and len(self._taking) < _AT_ONCE_MAX:
                if self.is_worth(machine := left.pop()):
                    self.park(machine)
            if self._takes:
                rest_s = end_s - self._loop.time()
                await asyncio.wait(self._takes, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
        self._closed = True

    async def close(self) -> None:
        """Wait for the frame that is being written, if one is."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._sweeping = None
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._takes:
            await asyncio.wait(self._takes)

    # --- taking -------------------------------------------------------------------

    def park(self, machine: RunMachine) -> bool:
        """Park the machine, with a frame if it is worth one; false if it cannot be parked now."""
        guest = machine.guest
        if machine.run_id in self._taking:
            return True
        if guest is None or self._store is None or not self.is_worth(machine):
            return machine.park()
        capture = self._runs.capturing(machine)
        if capture is None or len(self._taking) >= _AT_ONCE_MAX:
            return machine.park()
        seq, segment = machine.version, machine.segment
        frame_id = hashlib.blake2b(f"{machine.run_id} {seq}".encode(), digest_size=16).digest()
        self._taking[machine.run_id] = machine
        take = partial(self._take, self._store, machine.run_id, capture, frame_id, segment, seq)
        done = self._loop.run_in_executor(self._executor, take)
        self._takes.add(done)
        done.add_done_callback(partial(self._taken, machine, guest, frame_id, seq))
        return True

    def is_worth(self, machine: RunMachine) -> bool:
        """Whether a frame of it could be taken now, and would save a replay."""
        guest = machine.guest
        if guest is None or self._store is None or self._closed or not machine.may_be_framed:
            return False
        return guest.ran_ns >= self._after_ns

    @staticmethod
    def _take(store: Frames, run_id: str, capture: Capture, frame_id: bytes, segment: int, seq: int) -> int:
        """On a thread: the guest's fuel."""
        frame, fuel = capture(frame_id=frame_id, segment=segment, seq=seq)
        store.put(run_id, frame)
        return fuel

    def _taken(self, machine: RunMachine, guest: Guest, frame_id: bytes, seq: int, done: "asyncio.Future[int]") -> None:
        run_id = machine.run_id
        del self._taking[run_id]
        self._takes.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._kept.add(run_id)
        if machine.phase >= Phase.ENDED:
            self.ended(run_id)
        if machine.guest is not guest or machine.phase is not Phase.LIVE:
            return
        if error is not None:
            self.failed += 1
            (_log.info if isinstance(error, AgentrtError) else _log.warning)("no frame of %s: %s", run_id, error)
        if machine.version != seq or not machine.suspended:
            return  # it goes on already; when it is idle again there will be another
        self.taken += error is None
        if not machine.park((frame_id.hex(), done.result()) if error is None else None) and machine.may_be_parked:
            self._runs.park_later(machine)

    # --- going on ------------------------------------------------------------------

    def read(self, run_id: str, run: RunFold) -> bytes | None:
        """On any thread: the frame that the run may go on from, unopened."""
        named = run.frame
        if self._store is None or named is None or run.ending is not None:
            return None
        return None if self._refused.get(run_id) == named.frame else self._store.get(run_id)

    def begun(self, run_id: str) -> None:
        """A guest was started from its frame."""
        self.used += 1
        self._kept.add(run_id)

    def refuse(self, run_id: str, frame: str, why: str) -> None:
        """It cannot be gone on from: the run is replayed, now and later."""
        self.refused += 1
        self._refused[run_id] = frame
        _log.warning("run %s is replayed, its frame being of no use: %s", run_id, why)

    # --- forgetting -----------------------------------------------------------------

    def ended(self, run_id: str) -> None:
        """The run needs none any more."""
        self._refused.pop(run_id, None)
        if self._store is not None and run_id in self._kept and run_id not in self._taking:
            self._kept.discard(run_id)
            with suppress(RuntimeError):  # closed: the next session sweeps
                self._executor.submit(self._store.drop, run_id)

    def sweep(self) -> None:
        """Look now for those that nobody needs."""
        frames = self._store
        assert frames is not None

        def sweep(store: Store) -> list[str]:
            def needed(run_id: str) -> bool:
                head = store.read_head(run_id)
                return head is not None and head.state not in TERMINAL

            return frames.sweep(needed)

        self._runs.read(sweep, self._swept)

    def _swept(self, gone: Any, error: BaseException | None) -> None:
        if error is not None:
            self._loop.call_exception_handler({"message": "frames cannot be swept", "exception": error})
        if self._sweeping is not None:
            self._sweeping = self._loop.call_later(_SWEEP_S, self.sweep)


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
