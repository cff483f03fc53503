"""How long a run has run while it held something that others want."""

from typing import Final

from agentrt.backends.base import Guest

#: How often a holder is looked at: when its grace may be over, but not more often than the first; the second while it
#: does not run.
LOOK_MIN_S: Final = 0.01
LOOK_MAX_S: Final = 0.5


class Grace:
    """What a holder has run since the first `look`, over its guests. ``token`` is the caller's."""

    __slots__ = ("_delay_s", "_guest", "_runs", "_seen_ns", "token", "used_ns")

    def __init__(self, token: int = 0) -> None:
        self.token = token
        self.used_ns = 0
        self._guest: Guest | None = None
        self._seen_ns = 0
        self._runs = False
        self._delay_s = LOOK_MIN_S

    def look(self, guest: Guest | None) -> None:
        """Count what it has run since the last look."""
        fresh = 0
        if guest is not self._guest:  # brought back: what it ran to get there is not its
            self._guest, self._seen_ns = guest, 0 if guest is None else guest.ran_ns
        elif guest is not None:
            fresh = max(0, guest.ran_ns - self._seen_ns)
        self._seen_ns += fresh
        self.used_ns += fresh
        self._runs = fresh > 0
        self._delay_s = LOOK_MIN_S if fresh else min(LOOK_MAX_S, self._delay_s * 2)

    def next_s(self, grace_ns: int) -> float:
        """When to look again at the latest, for not to be late."""
        due_s = (grace_ns - self.used_ns) / 1e9 if self._runs else self._delay_s
        return max(LOOK_MIN_S, min(due_s, LOOK_MAX_S))
