"""The state of a run for whoever wants to look at it: a frame of its guest as it waits now, which is not kept, or else
the one that the run left memory as. Nothing becomes of the run by that. Loop thread only."""

import asyncio
import re
from typing import Final

from agentrt.engine.access import StoreAccess
from agentrt.engine.frames import RunFrames
from agentrt.engine.machine import RunMachine
from agentrt.engine.places import Places
from agentrt.errors import FrameError, InputError, UnknownRunError
from agentrt.fold import RunFold, fold
from agentrt.ids import parse_run_id
from agentrt.stores.base import Store
from agentrt.stores.frames import COPIES_MAX, FrameData

#: Of the guest's memory, or of the frame: what may be looked at.
LOOK_BYTES_MAX: Final = 64 << 20

_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
_NOT_NOW: Final = "Guests that can be captured (`agentrt build`) have one while they wait, or when they left memory so"


class FrameLooks:
    """Of one node."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, store: Store, access: StoreAccess, places: Places, frames: RunFrames
    ) -> None:
        self._loop = loop
        self._store = store
        self._readers = access.readers
        self._places = places
        self._frames = frames

    async def now(self, run_id: str, frame_id: str | None = None) -> FrameData:
        """The run's state. ``frame_id``: another frame of it that is kept. Raises UnknownRunError, InputError,
        FrameError: there is none now, or it is too large."""
        parse_run_id(run_id)
        if frame_id is not None and _ID.match(frame_id) is None:
            raise InputError(f"{frame_id[:80]!r} is no frame's id", run=run_id, hint="These have 32 hex digits")
        machine = self._places.in_memory(run_id)
        if frame_id is None and machine is not None:
            taken = await self._of_waiting(machine)
            if taken is not None:
                return taken
        return await self._loop.run_in_executor(self._readers, self._kept, run_id, frame_id)

    async def _of_waiting(self, machine: RunMachine) -> FrameData | None:
        """None: it does not wait, or cannot be captured."""
        guest = machine.guest
        if guest is None or not machine.suspended:
            return None
        _check(machine.run_id, getattr(guest, "memory_bytes", 0))
        return await self._frames.take_one(machine)

    def _kept(self, run_id: str, frame_id: str | None) -> FrameData:
        """On a reader's thread: the one that the journal names, or that one."""
        records = self._store.read_records(run_id)
        if not records:
            raise UnknownRunError(f"there is no run {run_id}", run=run_id)
        run: RunFold = fold(records)
        named = frame_id or (None if run.frame is None else run.frame.frame)
        kept = self._frames.store
        for copy in range(COPIES_MAX):
            data = None if named is None or kept is None else kept.get(run_id, named, copy)
            if data is not None:
                _check(run_id, len(data))
                return data
        raise FrameError("there is no frame of the run now", run=run_id, hint=_NOT_NOW)


def _check(run_id: str, size_bytes: int) -> None:
    if size_bytes > LOOK_BYTES_MAX:
        raise FrameError(
            f"the run's state has {size_bytes} bytes, and {LOOK_BYTES_MAX} may be looked at so",
            run=run_id,
            hint="Its frame is in the folder frames of the store when it has left memory",
        )
