"""Whether a process is throttled without progress. Pure: samples in, a verdict out.

Above ``memory.high`` the kernel slows a process down instead of killing it. Without swap there may be nothing to
reclaim: it then stands still for as long as one lets it, and nothing else ever ends it. Seen from outside: the kernel
counts throttling (``high`` of memory.events), nearly all of the time all of its tasks wait for memory (``full`` of
memory.pressure), and it gets hardly any CPU time.
"""

from typing import Final

import msgspec

#: Of wall time: waiting for memory at least so much, and computing at most so much, is standing still.
_STALLED_MIN: Final = 0.7
_RUNNING_MAX: Final = 0.1


class MemorySample(msgspec.Struct, frozen=True):
    """A reading of one leaf. ``at_ns``: monotonic. ``full_us`` (None: the kernel does not say), ``user_us``: totals
    since the leaf was made."""

    at_ns: int
    high_events: int
    full_us: int | None
    user_us: int  # CPU time in the program's own code: reclaim is system time


class StallWatch:
    """Fed with samples of one leaf. ``stall_ns``: how long it may stand still."""

    def __init__(self, stall_ns: int) -> None:
        self._stall_ns = stall_ns
        self._since: MemorySample | None = None
        self._last: MemorySample | None = None

    def feed(self, sample: MemorySample) -> bool:
        """Whether it has stood still for ``stall_ns``."""
        last, self._last = self._last, sample
        if last is None or not self._stands_still(last, sample):
            self._since = None
            return False
        if self._since is None:
            self._since = last
        # The kernel lets a task sleep for up to 2 s at a time: not every sample has a new event.
        throttled = sample.high_events > self._since.high_events
        return throttled and sample.at_ns - self._since.at_ns >= self._stall_ns

    def restart(self) -> None:
        """What comes now has nothing to do with what was: it was frozen."""
        self._since = self._last = None

    @staticmethod
    def _stands_still(before: MemorySample, now: MemorySample) -> bool:
        wall_us = max(1, (now.at_ns - before.at_ns) // 1000)
        if (
            now.full_us is not None
            and before.full_us is not None
            and (now.full_us - before.full_us) / wall_us < _STALLED_MIN
        ):
            return False
        ran = (now.user_us - before.user_us) / wall_us
        return ran <= _RUNNING_MAX
