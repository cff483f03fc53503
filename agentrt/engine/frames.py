"""Frames of runs: which are taken and when, where they go, and which one a guest goes on from.

A frame is a short-cut and nothing else: the journal has all that a run is. So whatever goes wrong with one, the run is
replayed; and one is taken only while all that the guest has seen is durable, at the position of the last record.

They are taken of a guest that is about to leave memory: it stays until its frame is durable and the run has changed
nothing meanwhile; then the run is parked, and the record FrameTaken, which names the frame, goes with the one that says
that it waits. And of a guest that has done more work than a replay may cost (`frame_of_running`): it goes on as soon as
it is copied. A guest of which there is no frame and that could be replayed at a higher cost only is *pinned*: it stays.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from agentrt.backends.base import Capture, Guest
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.info import FrameStatistics
from agentrt.engine.machine import Phase, RunMachine
from agentrt.engine.turns import Turns
from agentrt.errors import AgentrtError, FrameError
from agentrt.fold import RunFold
from agentrt.states import TERMINAL
from agentrt.stores.base import Store
from agentrt.stores.frames import COPIES_MAX, FrameData, Frames, Kept, opened
from agentrt.tiers import Tier

_log: Final = logging.getLogger(__name__)
_SWEEP_FIRST_S: Final = 60.0
_SWEEP_S: Final = 3600.0
#: Taken or waiting for that; what is idle beyond it goes without.
_AT_ONCE_MAX: Final = 16
#: Of their guests' memories, unless it is one alone.
_AT_ONCE_BYTES_MAX: Final = 256 << 20
_LOOK_S: Final = 0.05
_LOOKS_MAX: Final = 500  # at about 1 us each
#: Guests that stay are captured at most this part of the time.
_SHARE: Final = 1 / 20
#: A full frame from which on a delta pays: below it, it is the two syncs that take the time.
_DELTA_BYTES_MIN: Final = 256 << 10


class Runs(Protocol):
    """What it needs of the engine."""

    def capturing(self, machine: RunMachine) -> Capture | None:
        """How a frame of the machine's guest is taken; None: it cannot be."""

    def park_later(self, machine: RunMachine) -> None:
        """It could not be parked, and may be when it has been idle for long again."""

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...


class _Last(NamedTuple):
    """The newest frame of a run that its journal names, and what it is a delta to, itself if it is none."""

    frame: str
    segment: int
    fuel: int
    base: str
    base_bytes: int
    base_copies: int
    bytes: int


class _Take(msgspec.Struct, eq=False):
    """A frame that is being taken."""

    machine: RunMachine
    guest: Guest
    frame: str
    segment: int
    seq: int
    size_bytes: int
    base: _Last | None
    parks: bool  # the guest goes when it is done
    copies: int


class RunFrames:
    """Loop thread only, but for `read`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Runs,
        store: Frames | None,
        after_ns: int,
        replay_fuel_max: int = 0,
    ) -> None:
        """``after_ns``: slot time that a guest must have had since it began, or went on; less is replayed.
        ``replay_fuel_max``: what a replay may cost; 0: anything."""
        self._loop = loop
        self._runs = runs
        # one each, at the workers' priority: the disk is the journal's first, and nobody waits for a frame. Guests that
        # stay wait to be copied, and must not wait for others' frames to be written
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="agentrt-capture", initializer=_be_nice)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="agentrt-frames", initializer=_be_nice)
        self._copying, self._writing = Turns(), Turns()
        self._store = store
        self._after_ns = after_ns
        self._replay_fuel_max = replay_fuel_max
        self._taking: dict[str, _Take] = {}
        self._taking_bytes = 0
        self._takes: set[asyncio.Task[None]] = set()
        self._closed = False
        self._last: dict[str, _Last] = {}  # runs of this session that have one
        self._refused: dict[str, tuple[str, int]] = {}  # frames that could not be gone on from, and how many copies
        self._watched: OrderedDict[RunMachine, float] = OrderedDict()  # and when they may be captured again
        self._looking: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._pinned: set[str] = set()
        self.taken = self.used = self.refused = self.failed = self.deltas = 0

    def open(self) -> None:
        """Begin to remove those that nobody needs."""
        if self._store is not None:
            self._sweeping = self._loop.call_later(_SWEEP_FIRST_S, self.sweep)

    async def take_all(self, machines: Iterable[RunMachine], timeout_s: float) -> None:
        """The node stops: have those parked that are worth a frame, as many as there is time for; then no others."""
        end_s = self._loop.time() + timeout_s
        left = [*machines]
        while (left or self._takes) and self._loop.time() < end_s:
            while left and self._has_room(left[-1]):
                if self.is_worth(machine := left.pop()):
                    self.park(machine)
            if self._takes:
                rest_s = end_s - self._loop.time()
                await asyncio.wait(self._takes, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
        self._closed = True

    async def close(self) -> None:
        """Wait for the frame that is being written, if one is."""
        self._closed = True
        for handle in (self._sweeping, self._looking):
            if handle is not None:
                handle.cancel()
        self._sweeping = self._looking = None
        self._copier.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
        if self._takes:
            await asyncio.wait(self._takes)

    @property
    def store(self) -> Frames | None:
        """Where they are; None: there are none."""
        return self._store

    @property
    def pinned(self) -> int:
        """Runs that were to leave memory and stay, since they could be neither captured nor replayed within the
        bound."""
        return len(self._pinned)

    def statistics(self) -> FrameStatistics:
        return FrameStatistics(self.taken, self.used, self.refused, self.failed, self.deltas, self.pinned)

    # --- taking -------------------------------------------------------------------

    def park(self, machine: RunMachine) -> bool:
        """Park the machine, with a frame if it is worth one; false if it cannot be parked now."""
        take = self._taking.get(machine.run_id)
        if take is not None:
            take.parks = True
            return True
        if self.is_worth(machine) and self._has_room(machine) and self._begin(machine, parks=True):
            return True
        return self._park_without(machine)

    def _park_without(self, machine: RunMachine) -> bool:
        """It is replayed, if it may be."""
        if self._is_beyond(machine) and not self._closed:
            self._pinned.add(machine.run_id)
            return False
        return machine.park()

    def is_worth(self, machine: RunMachine) -> bool:
        """Whether a frame of it could be taken now, and would save a replay."""
        guest = machine.guest
        if guest is None or self._store is None or self._closed or not machine.may_be_framed:
            return False
        return guest.ran_ns >= self._after_ns or self._is_beyond(machine)

    def _is_beyond(self, machine: RunMachine) -> bool:
        """Whether a replay of what its guest has done would cost more than one may."""
        guest = machine.guest
        if guest is None or not self._replay_fuel_max:
            return False
        last = self._last.get(machine.run_id)
        kept = last.fuel if last is not None and last.segment == machine.segment else 0
        return getattr(guest, "fuel_used", 0) - kept > self._replay_fuel_max

    def _has_room(self, machine: RunMachine) -> bool:
        if len(self._taking) >= _AT_ONCE_MAX:
            return False
        size_bytes: int = getattr(machine.guest, "memory_bytes", 0)
        return not self._taking or self._taking_bytes + size_bytes <= _AT_ONCE_BYTES_MAX

    def _begin(self, machine: RunMachine, *, parks: bool) -> bool:
        """Take a frame of it; false if that cannot be."""
        guest, run_id = machine.guest, machine.run_id
        capture = self._runs.capturing(machine)
        if guest is None or capture is None:
            return False
        seq, fuel = machine.version, getattr(guest, "fuel_used", 0)
        # one that is all there is between the run and a replay beyond the bound
        copies = COPIES_MAX if self._replay_fuel_max and fuel > self._replay_fuel_max else 1
        last = self._last.get(run_id)
        base = last if last is not None and _is_base(last, copies) else None
        frame = hashlib.blake2b(f"{run_id} {seq}".encode(), digest_size=16).hexdigest()
        size_bytes = getattr(guest, "memory_bytes", 0)
        take = _Take(machine, guest, frame, machine.segment, seq, size_bytes, base, parks, copies)
        self._taking[run_id] = take
        self._taking_bytes += size_bytes
        task = self._loop.create_task(self._take(take, capture))
        self._takes.add(task)
        task.add_done_callback(partial(self._taken, take))
        return True

    async def take_one(self, machine: RunMachine) -> FrameData | None:
        """A frame of its guest, which waits and stays, for whoever asks: it is not kept. None: its module cannot be
        captured. Raises FrameError: it goes on already."""
        capture = self._runs.capturing(machine)
        if capture is None or self._closed:
            return None
        take = partial(capture, frame_id=secrets.token_bytes(16), segment=machine.segment, seq=machine.version)
        async with self._copying.turn(len(Tier)):  # behind all that are needed
            data, _ = await self._loop.run_in_executor(self._copier, take)
        return data

    async def _take(self, take: _Take, capture: Capture) -> None:
        store, machine = self._store, take.machine
        assert store is not None
        began_s = self._loop.time()
        try:
            work = partial(_captured, store, machine.run_id, capture, take)
            async with self._copying.turn(machine.tier):
                data, fuel, is_delta = await self._loop.run_in_executor(self._copier, work)
        finally:
            self._leave_safe_point(take)
        if machine.version != take.seq or machine.guest is not take.guest:
            return  # it goes on already, and may have seen what is not durable; there will be another
        put = partial(store.put, machine.run_id, take.frame, data, take.copies)
        async with self._writing.turn(machine.tier):
            await self._loop.run_in_executor(self._writer, put)
        if machine in self._watched:
            self._watched[machine] = self._loop.time() + (self._loop.time() - began_s) / _SHARE
        base = take.base if is_delta else None
        last = _Last(
            take.frame,
            take.segment,
            fuel,
            take.frame if base is None else base.base,
            len(data) if base is None else base.base_bytes,
            take.copies if base is None else base.base_copies,
            len(data),
        )
        self._name(take, last)
        self.deltas += is_delta

    def _name(self, take: _Take, last: _Last) -> None:
        """The frame is durable: have it journaled."""
        machine = take.machine
        if machine.phase is not Phase.LIVE or machine.guest is not take.guest:
            return
        if ARMED:
            hit("frame.before_name")
        told = partial(self._named, machine.run_id, last)
        unchanged = machine.version == take.seq
        parked = take.parks and unchanged and machine.park((last.frame, last.fuel), told)
        if parked or machine.note_frame(last.frame, last.fuel, take.segment, told):
            self.taken += 1

    def _named(self, run_id: str, last: _Last, error: BaseException | None) -> None:
        """The journal names it, or has refused to."""
        if error is not None:
            return
        if ARMED:
            hit("frame.named")
        self._last[run_id] = last
        self._pinned.discard(run_id)
        self._later(self._keep, run_id, {last.frame, last.base})

    def _taken(self, take: _Take, done: "asyncio.Task[None]") -> None:
        machine, run_id = take.machine, take.machine.run_id
        del self._taking[run_id]
        self._taking_bytes -= take.size_bytes
        self._takes.discard(done)
        error = None if done.cancelled() else done.exception()
        if machine.phase is Phase.ENDED:  # parked with it, it may be gone by now, too
            self.ended(run_id)
        if machine.guest is not take.guest or machine.phase is not Phase.LIVE:
            return
        if error is not None and machine.version == take.seq:
            self.failed += 1
            (_log.info if isinstance(error, AgentrtError) else _log.warning)("no frame of %s: %s", run_id, error)
        if not take.parks or not machine.suspended:
            return  # when it is idle again there will be another
        parked = error is not None and machine.version == take.seq and self._park_without(machine)
        if not parked and machine.may_be_parked:
            self._runs.park_later(machine)

    # --- of guests that stay ----------------------------------------------------------

    def watch(self, machine: RunMachine) -> None:
        """Its guest has begun: have a frame taken whenever a replay would cost more than it may."""
        if self._store is None or not self._replay_fuel_max or self._closed or self._runs.capturing(machine) is None:
            return
        self._watched[machine] = 0.0
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    def forget(self, machine: RunMachine) -> None:
        """It is not in memory any more."""
        self._watched.pop(machine, None)
        self._pinned.discard(machine.run_id)

    def _look(self) -> None:
        self._looking = None
        now_s = self._loop.time()
        for _ in range(min(_LOOKS_MAX, len(self._watched))):
            machine = next(iter(self._watched))
            self._watched.move_to_end(machine)
            if self._watched[machine] <= now_s and self._is_beyond(machine):
                self._take_of_running(machine)
        if self._watched and not self._closed:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    def _take_of_running(self, machine: RunMachine) -> None:
        guest = machine.guest
        if machine.run_id in self._taking or guest is None or not self._has_room(machine):
            return
        if machine.suspended:
            if machine.may_be_framed_as_it_is:
                self._begin(machine, parks=False)
        elif machine.phase is Phase.LIVE and hasattr(guest, "want_safe_point"):
            guest.want_safe_point()  # of no effect where its module has none

    def at_safe_point(self, machine: RunMachine) -> None:
        """Its guest has stopped there, asked to."""
        guest = machine.guest
        wanted = machine.may_be_framed_as_it_is and machine.run_id not in self._taking and not self._closed
        if not (wanted and self._is_beyond(machine) and self._begin(machine, parks=False)):
            guest.leave_safe_point()  # type: ignore[union-attr]

    @staticmethod
    def _leave_safe_point(take: _Take) -> None:
        leave = getattr(take.guest, "leave_safe_point", None)
        if leave is not None:
            leave()

    # --- going on ------------------------------------------------------------------

    def read(self, run_id: str, run: RunFold) -> Kept | None:
        """On any thread: the frame that the run may go on from, its pages not looked at."""
        named = run.frame
        if self._store is None or named is None or run.ending is not None:
            return None
        refused, copies = self._refused.get(run_id, ("", 0))
        for copy in range(copies if refused == named.frame else 0, COPIES_MAX):
            data = self._store.get(run_id, named.frame, copy)
            if data is None:
                continue
            try:
                base_id = opened(data).base_id
                base = None if base_id is None else self._base(run_id, base_id.hex(), copy)
            except FrameError as error:
                self._loop.call_soon_threadsafe(self.refuse, run_id, named.frame, copy, error.message)
                continue
            return Kept(data, base, copy)
        return None

    def _base(self, run_id: str, base: str, copy: int) -> FrameData:
        """Raises FrameError."""
        assert self._store is not None
        found = self._store.get(run_id, base, copy)
        if found is None:
            found = self._store.get(run_id, base, 0 if copy else 1)
        if found is None:
            raise FrameError("the frame that it is a delta to is not there")
        opened(found)
        return found

    def begun(self, machine: RunMachine, kept: Kept) -> None:
        """A guest was started from its frame."""
        self.used += 1
        frame = opened(kept.frame)
        name = frame.id.hex()
        base = name if frame.base_id is None else frame.base_id.hex()
        base_bytes = len(kept.frame if kept.base is None else kept.base)
        self._last[machine.run_id] = _Last(
            name, frame.segment, frame.fuel, base, base_bytes, kept.copy + 1, len(kept.frame)
        )

    def refuse(self, run_id: str, frame: str, copy: int, why: str) -> None:
        """That copy of it cannot be gone on from, now or later: there is another, or the run is replayed."""
        self.refused += 1
        _, copies = self._refused.get(run_id, ("", 0))
        self._refused[run_id] = (frame, max(copies, copy + 1))
        self._last.pop(run_id, None)
        _log.warning("run %s has a frame that is of no use: %s", run_id, why)

    # --- forgetting -----------------------------------------------------------------

    def ended(self, run_id: str) -> None:
        """The run needs none any more."""
        self._refused.pop(run_id, None)
        self._pinned.discard(run_id)
        if self._store is not None and run_id not in self._taking and self._last.pop(run_id, None) is not None:
            self._later(self._store.drop, run_id)

    def _keep(self, run_id: str, frames: set[str]) -> None:
        assert self._store is not None
        self._store.keep(run_id, frames)

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # closed: the next session sweeps
            self._writer.submit(function, *arguments)

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


def _is_base(last: _Last, copies: int) -> bool:
    """Whether the next frame is to be a delta to what this one is."""
    small = last.frame == last.base or last.bytes * 2 <= last.base_bytes
    return last.base_bytes >= _DELTA_BYTES_MIN and last.base_copies >= copies and small


def _captured(store: Frames, run_id: str, capture: Capture, take: _Take) -> tuple[FrameData, int, bool]:
    """On a thread: a frame, the guest's fuel, and whether it is a delta."""
    base = None if take.base is None else store.get(run_id, take.base.base)
    frame_id = bytes.fromhex(take.frame)
    data, fuel = capture(frame_id=frame_id, segment=take.segment, seq=take.seq, base=base)
    return data, fuel, base is not None


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
