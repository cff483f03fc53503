"""When native processes make room for urgent work. Pure; time comes in.

A run of tier 0 begins: processes of lower tiers that have no network are stopped at once. Those with network may be in
the middle of a conversation that somebody else times; they are outranked by weight, and stopped if urgent work still
wants the machine after a second. All go on as soon as it does not. As everywhere tier 0 has a share, not everything:
processes run for the rest of each second.
"""

from typing import Final, NamedTuple

#: Between two looks at whether urgent work still wants the machine.
LOOK_NS: Final = 2_000_000
#: How long weights may try.
PATIENCE_NS: Final = 1_000_000_000
_PERIOD_NS: Final = 1_000_000_000


class Room(NamedTuple):
    """``stop``: processes without network stand still. ``stop_network``: those with network, too. ``look_ns``: when to
    look again, on the same clock; None: at the next arrival."""

    stop: bool
    stop_network: bool
    look_ns: int | None


class Preemption:
    """``share_pct``: of time that urgent work may have for itself (scheduler.tier0_share_pct)."""

    def __init__(self, share_pct: int = 80) -> None:
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
        self._stopped = self._stopped_ns < self._stopped_max_ns
        patient = now_ns - self._wanted_since_ns < PATIENCE_NS
        look_ns = now_ns + LOOK_NS if self._stopped else self._period_ns + _PERIOD_NS
        return Room(self._stopped, self._stopped and not patient, look_ns)
