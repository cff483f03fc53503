"""Which runs start again after a restart, in which order and how fast. Pure: the engine reads, asks and starts.

A run starts when the version of its agent is registered, or another one under the same name and it is known that its
own is not kept; the most urgent tier first, in a tier the oldest first. Runs that nobody can run yet are kept aside.
What waits, and for which something came during the downtime, is brought back in the same order and at the same pace.
Starts are paced by a token bucket, so that a restart with 100,000 runs does not look like a storm to tools and slots;
and by another for the memories that come back from frames, so that it does not to the disk and the machine's memory.
"""

import heapq
from collections.abc import Callable
from typing import Final

_BURST_S: Final = 0.02  # of starts that may happen at once

Entry = tuple[int, int, str]  # tier, accepted_ns, run_id
Action = Callable[[], None]


class RecoveryPlan:
    """Runs of the store that are not in memory."""

    def __init__(self, per_s: int, bytes_per_s: int = 0) -> None:
        """``bytes_per_s``: of what is charged for runs that have started; 0: any number of."""
        self._per_s: Final = per_s
        self._bytes_per_s: Final = bytes_per_s
        self._owed_bytes = 0.0
        self._ready: list[Entry] = []
        self._wakes: list[tuple[int, int, int, Action]] = []  # tier, since_ns, number
        self._number = 0
        self._kept: dict[str, list[Entry]] = {}  # by version of their agent
        self._names: dict[str, set[str]] = {}  # of agents, by kept version
        self._versions: set[str] = set()
        self._known: dict[str, str] = {}  # run_id -> version, of all that are here
        self._tokens = 0.0
        self._at_ns = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._known

    def version_of(self, run_id: str) -> str | None:
        """The version that the run waits for or starts with; None if it is not here."""
        return self._known.get(run_id)

    @property
    def ready(self) -> int:
        """Runs that only wait for their turn."""
        return len(self._ready) + len(self._wakes)

    @property
    def wakes(self) -> int:
        """Of these, those that wait for something that came while the node was down."""
        return len(self._wakes)

    def wake(self, tier: int, since_ns: int, action: Action) -> None:
        """Something came while the node was down for a run that waits: it is brought back at the same pace."""
        self._number += 1
        heapq.heappush(self._wakes, (tier, since_ns, self._number, action))

    def add(self, tier: int, accepted_ns: int, run_id: str, version: str, agent: str = "") -> None:
        """A run of the store. Again is harmless."""
        if run_id in self._known:
            return
        self._known[run_id] = version
        if version in self._versions:
            heapq.heappush(self._ready, (tier, accepted_ns, run_id))
        else:
            self._kept.setdefault(version, []).append((tier, accepted_ns, run_id))
            self._names.setdefault(version, set()).add(agent)

    def hurry(self, run_id: str, tier: int) -> bool:
        """Somebody of that tier waits for the run; whether it is here."""
        if self._known.get(run_id) in self._versions:
            heapq.heappush(self._ready, (tier, 0, run_id))  # beside the one it has: what comes up first counts
        return run_id in self._known

    def charge(self, size_bytes: int) -> None:
        """Some run has come back with so much memory: the next starts come later for that."""
        if self._bytes_per_s:
            self._owed_bytes += size_bytes

    def discard(self, run_id: str) -> None:
        """The run needs no start any more."""
        self._known.pop(run_id, None)  # its entry is skipped when it comes up

    def register(self, version: str) -> None:
        """The version can be run from now on."""
        if version not in self._versions:
            self._versions.add(version)
            self._names.pop(version, None)
            for entry in self._kept.pop(version, ()):
                heapq.heappush(self._ready, entry)

    def runnable(self, version: str) -> bool:
        """Whether runs of the version need nobody any more."""
        return version in self._versions

    def versions_of(self, agent: str) -> list[str]:
        """Versions that runs of the agent wait for."""
        return [version for version, names in self._names.items() if agent in names]

    @property
    def kept(self) -> int:
        """Runs whose version nobody has registered; discarded ones may still be counted."""
        return sum(len(entries) for entries in self._kept.values())

    def take_kept(self, count: int) -> list[str]:
        """At most ``count`` of those, which are not the plan's any more."""
        taken: list[str] = []
        for version in [*self._kept]:
            entries = self._kept[version]
            while entries and len(taken) < count:
                run_id = entries.pop()[2]
                if self._known.pop(run_id, None) is not None:
                    taken.append(run_id)
            if not entries:
                del self._kept[version]
        return taken

    def take(self, now_ns: int, room: int) -> list[str | Action]:
        """Runs to start now, and actions that bring runs back: at most ``room`` and no more than the pace allows, the
        most urgent tier first, and in a tier who waits first. ``now_ns`` is monotonic."""
        burst = max(1.0, self._per_s * _BURST_S)
        if self._at_ns:
            passed_s = (now_ns - self._at_ns) / 1e9
            self._tokens = min(burst, self._tokens + passed_s * self._per_s)
            self._owed_bytes = max(0.0, self._owed_bytes - passed_s * self._bytes_per_s)
        else:
            self._tokens = burst
        self._at_ns = now_ns
        if self._owed_bytes > self._bytes_per_s * _BURST_S:
            return []
        taken: list[str | Action] = []
        while (self._ready or self._wakes) and self._tokens >= 1.0 and len(taken) < room:
            if self._wakes and (not self._ready or self._wakes[0][:2] <= self._ready[0][:2]):
                taken.append(heapq.heappop(self._wakes)[3])
            else:
                run_id = heapq.heappop(self._ready)[2]
                if self._known.pop(run_id, None) is None:
                    continue
                taken.append(run_id)
            self._tokens -= 1.0
        return taken
