"""Whether the machine, or the cgroup that this process is in, is short of memory, by what the kernel says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentrt.machine import read_text, unified_group

#: Of wall time that something waited for memory: above it, memory is short. A machine that has enough shows 0.
_STALLED_MIN: Final = 0.02


class MemoryPressure:
    """Asked again and again; the kernel's totals since the last time decide. ``now_ns`` is monotonic; ``root`` is put
    before the kernel's paths, for tests. Where the kernel tells nothing (no PSI, no cgroup v2) there is no pressure."""

    def __init__(self, now_ns: Callable[[], int], root: str = "") -> None:
        self._now_ns = now_ns
        group = unified_group(root)
        inside = None if group is None else group / "memory.pressure"
        everywhere = Path(f"{root}/proc/pressure/memory")
        self._stalls = [path for path in (inside, everywhere) if path is not None and read_text(path) is not None]
        self._events = None if group is None else group / "memory.events"
        self._at_ns = now_ns()
        self._before_us = [_stalled_us(path) for path in self._stalls]
        self._high = self._high_events()

    def __call__(self) -> bool:
        """Whether memory was short since the last call: something waited for it, or the group was over its
        memory.high."""
        now_ns, stalled_us, high = self._now_ns(), [_stalled_us(path) for path in self._stalls], self._high_events()
        wall_us = max(1, (now_ns - self._at_ns) // 1000)
        pairs = zip(self._before_us, stalled_us, strict=True)
        waited = any((after - before) / wall_us > _STALLED_MIN for before, after in pairs)
        short = waited or high > self._high
        self._at_ns, self._before_us, self._high = now_ns, stalled_us, high
        return short

    def _high_events(self) -> int:
        text = None if self._events is None else read_text(self._events)
        for line in (text or "").splitlines():
            if line.startswith("high "):
                return int(line.split()[1])
        return 0


def _stalled_us(path: Path) -> int:
    """Total time that some task has waited."""
    for line in (read_text(path) or "").splitlines():
        if line.startswith("some "):
            total = line.rpartition("total=")[2]
            return int(total) if total.isdecimal() else 0
    return 0
