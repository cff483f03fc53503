"""When native processes make room for urgent work. Pure; time comes in.

A run of tier 0 begins: processes of lower tiers that have no network are stopped, at once where nothing outranks them,
after a moment where something does: most urgent work is over by then, and stopping many takes longer than it does.
Those with network may be in the middle of a conversation that somebody else times; they are stopped if urgent work
still wants the machine after a second. All go on as soon as it does not. As everywhere tier 0 has a share, not
everything: processes run for the rest of each second.
"""

from typing import Final, NamedTuple

#: Between two looks at whether urgent work still wants the machine.
LOOK_NS: Final = 2_000_000
#: How long urgent work that outranks all others may try to get by without.
OUTRANKED_NS: Final = 4_000_000
#: The same for those with network.
PATIENCE_NS: Final = 1_000_000_000
_PERIOD_NS: Final = 1_000_000_000


class Room(NamedTuple):
    """``stop``: processes without network stand still. ``stop_network``: those with network, too. ``look_ns``: when to
    look again, on the same clock; None: at the next arrival."""

    stop: bool
    stop_network: bool
    look_ns: int | None


class Preemption:
    """``share_pct``: of time that urgent work may have for itself (scheduler.tier0_share_pct). ``outranked``: that the
    kernel prefers a worker to any of the processes."""

    def __init__(self, share_pct: int = 80, outranked: bool = False) -> None:
        self.outranked = outranked
        self._stopped_max_ns = _PERIOD_NS * share_pct // 100
        self._wanted_since_ns: int | None = None
        self._period_ns = 0  # when this period began
        self._stopped_ns = 0  # how long they stood still in it
        self._last_ns = 0
        self._stopped = False

    def arrived(self, now_ns: int) -> Room:
        """Urgent work has come."""
        return self._decide(now_ns, True)

    def look(self, now_ns: int, wanted: bool) -> Room:
        """Whether urgent work still wants the machine."""
        return self._decide(now_ns, wanted)

    def _decide(self, now_ns: int, wanted: bool) -> Room:
        if self._stopped:
            self._stopped_ns += max(0, now_ns - self._last_ns)
        self._last_ns = now_ns
        if now_ns - self._period_ns >= _PERIOD_NS:
            self._period_ns, self._stopped_ns = now_ns, 0
        if not wanted:
            self._wanted_since_ns, self._stopped = None, False
            return Room(False, False, None)
        if self._wanted_since_ns is None:
            self._wanted_since_ns = now_ns
        waited_ns = now_ns - self._wanted_since_ns
        if self.outranked and waited_ns < OUTRANKED_NS and not self._stopped:
            return Room(False, False, self._wanted_since_ns + OUTRANKED_NS)
        self._stopped = self._stopped_ns < self._stopped_max_ns
        patient = waited_ns < PATIENCE_NS
        look_ns = now_ns + LOOK_NS if self._stopped else self._period_ns + _PERIOD_NS
        return Room(self._stopped, self._stopped and not patient, look_ns)
