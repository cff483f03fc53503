"""How many children an ensemble may have: bounds on its queue, and how spawning waits at them without deadlock. Pure.

A child is **queued** from its acceptance until its guest first starts. Only queued children count against the bounds:
parents that wait for their children never take a place from them. ``live_max`` bounds the runs of an ensemble that have
begun and are not idle, which is waiting for a child, an event, a time, or in the store; above it queued children are
kept from starting.

A spawn that finds the queue full waits for a place, in the order of arrival. If every live run that is not idle does
that, and no queued child may start, nothing would ever move: then the spawn of the youngest run is refused.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from agentrt.errors import InputError


class EnsembleLimits(msgspec.Struct, frozen=True):
    """Of one ensemble; ``live_max`` 0: as many as there are. Raises InputError."""

    queued_max: int = 1_000
    queued_bytes_max: int = 64 * 1024 * 1024
    live_max: int = 0

    def __post_init__(self) -> None:
        if self.queued_max < 1 or self.queued_bytes_max < 1 or self.live_max < 0:
            raise InputError("an ensemble's queue has room for one child at least")


class Moves(msgspec.Struct):
    """What may happen now: spawns (by key) that have a place or are refused, queued children that may start."""

    placed: list[str] = []
    refused: list[str] = []
    start: list[str] = []


class _Spawn(msgspec.Struct):
    run_id: str
    size_bytes: int


class Ensemble:
    """One ensemble. A key of a spawn is the caller's: run id and step path. ``idle(run_id)``: the run only waits now,
    for something else than a place. Not thread-safe."""

    __slots__ = ("_held", "_idle", "_live", "_never", "_queued", "_spawns", "limits", "queued_bytes")

    def __init__(self, limits: EnsembleLimits, idle: Callable[[str], bool] = lambda run_id: False) -> None:
        self.limits = limits
        self._idle = idle
        self.queued_bytes = 0
        self._queued: OrderedDict[str, int] = OrderedDict()  # run id or spawn key -> bytes
        self._held: OrderedDict[str, None] = OrderedDict()  # queued, and kept from starting
        self._live: OrderedDict[str, None] = OrderedDict()  # in the order in which they began
        self._spawns: OrderedDict[str, _Spawn] = OrderedDict()  # that wait
        self._never: list[str] = []  # that wait, and are larger than there may be room for since the limits are others

    def configure(self, limits: EnsembleLimits) -> None:
        """Other limits from now on: who is queued stays so, those who wait look again in `settle`."""
        self.limits = limits
        self._never = [key for key, spawn in self._spawns.items() if spawn.size_bytes > limits.queued_bytes_max]

    @property
    def queued(self) -> int:
        """Children and promised places."""
        return len(self._queued)

    @property
    def keeps(self) -> bool:
        """Somebody waits here for somebody else to become idle."""
        return bool(self._spawns or self._held)

    def keeps_back(self, run_id: str) -> bool:
        """Whether the child may not start yet."""
        return run_id in self._held

    def _busy(self) -> list[str]:
        return [run_id for run_id in self._live if not self._idle(run_id)]

    @property
    def empty(self) -> bool:
        """Nothing of it is here."""
        return not (self._queued or self._live or self._spawns)

    # --- spawning ---

    def spawn(self, key: str, run_id: str, size_bytes: int, *, wait: bool) -> bool | None:
        """A live run wants a child. True: it has a place, taken under ``key`` until `queue` or `drop`. None: it waits;
        the key comes in a `Moves`. False: refused, since it would wait (``wait`` is false), or never fit, or because
        all would wait; others may then still have to be told: see `settle`."""
        limits = self.limits
        if size_bytes > limits.queued_bytes_max:
            return False
        if not self._spawns and self._fits(size_bytes):
            self._take(key, size_bytes)
            return True
        if not wait:
            return False
        self._spawns[key] = _Spawn(run_id, size_bytes)
        return None

    def waits(self, key: str) -> bool:
        """Whether the spawn waits for a place."""
        return key in self._spawns

    def _fits(self, size_bytes: int) -> bool:
        limits = self.limits
        return len(self._queued) < limits.queued_max and self.queued_bytes + size_bytes <= limits.queued_bytes_max

    def _take(self, key: str, size_bytes: int) -> None:
        self._queued[key] = size_bytes
        self.queued_bytes += size_bytes

    def give_up(self, key: str) -> None:
        """The spawn does not wait any more, or does not use its place."""
        if self._spawns.pop(key, None) is None:
            self._drop(key)

    def queue(self, key: str, child: str) -> None:
        """The child of the spawn is accepted: the place is its."""
        size_bytes = self._queued.pop(key, None)
        if size_bytes is not None:
            self._queued[child] = size_bytes

    def _drop(self, name: str) -> None:
        self.queued_bytes -= self._queued.pop(name, 0)
        self._held.pop(name, None)

    # --- runs ---

    def add(self, run_id: str, size_bytes: int) -> None:
        """A run of the ensemble that was accepted before: it is queued, whatever the bounds say."""
        if run_id not in self._live and run_id not in self._queued:
            self._take(run_id, size_bytes)

    def may_start(self, run_id: str) -> bool:
        """The run's guest is about to start for the first time. False: not now; it comes in a `Moves`."""
        if not self.limits.live_max or len(self._busy()) < self.limits.live_max:
            return True
        self._held[run_id] = None
        return False

    def begin(self, run_id: str) -> None:
        """The run is live: it began, or came back from the store."""
        self._drop(run_id)
        self._live[run_id] = None

    def leave(self, run_id: str) -> None:
        """The run has ended or waits in the store; what it wanted to spawn is forgotten."""
        self._drop(run_id)
        self._live.pop(run_id, None)
        for key in [key for key, spawn in self._spawns.items() if spawn.run_id == run_id]:
            del self._spawns[key]

    def settle(self) -> Moves:
        """What may happen now; to be asked after every call of the others."""
        moves = Moves()
        if not self.keeps:
            return moves
        while self._never:
            key = self._never.pop()
            if self._spawns.pop(key, None) is not None:
                moves.refused.append(key)
        busy = self._busy()
        live_max = self.limits.live_max or len(busy) + len(self._held)
        while self._held and len(busy) + len(moves.start) < live_max:
            moves.start.append(self._held.popitem(last=False)[0])
        while self._spawns:
            key, spawn = next(iter(self._spawns.items()))
            if not self._fits(spawn.size_bytes):
                break
            del self._spawns[key]
            self._take(key, spawn.size_bytes)
            moves.placed.append(key)
        blocked = {spawn.run_id for spawn in self._spawns.values()}
        can_start = moves.start or len(self._queued) > len(self._held)
        if blocked and not moves.placed and not can_start and all(run_id in blocked for run_id in busy):
            youngest = next((run_id for run_id in reversed(self._live) if run_id in blocked), next(iter(blocked)))
            for key in [key for key, spawn in self._spawns.items() if spawn.run_id == youngest]:
                del self._spawns[key]
                moves.refused.append(key)
        return moves
