"""One leaf: the group of one process and of all that it starts."""

import errno
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from agentrt.cgroup.files import CgroupError, Files, counters, insist, put
from agentrt.cgroup.pressure import MemorySample

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: The bfq scheduler's weights end at 1,000, all others at 10,000.
_BFQ_STEP: Final = 10
_FULL: Final = re.compile(r"^full .*\btotal=(\d+)", re.MULTILINE)


class LeafLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a leaf; None: none. ``memory_high_bytes`` is where a process is slowed down, ``memory_max_bytes`` where
    one of its group is killed; between the two it must have room to write its state."""

    memory_high_bytes: int | None = None
    memory_max_bytes: int | None = None
    swap_max_bytes: int | None = None
    pids_max: int | None = None
    cpu_max_pct: int | None = None  # of one CPU
    idle: bool = False  # runs only when nobody else wants the CPU
    cpus: str | None = None  # as 0-3,8
    memory_nodes: str | None = None


class MemoryEvents(msgspec.Struct, frozen=True):
    """What the kernel counts. ``peak_bytes``: None where it does not say."""

    high: int
    max: int
    oom: int
    oom_kill: int
    current_bytes: int
    peak_bytes: int | None
    limit_bytes: int | None


class Leaf:
    """Made by `Tree.make`. What needs a controller that is not there does nothing and returns False, or None."""

    def __init__(self, files: Files, path: Path, controllers: frozenset[str], tier: int) -> None:
        self._files = files
        self._controllers = controllers
        self.path: Final = path
        self.tier = tier
        self.weight = 0  # in force; 0: none was written
        self.frozen = False

    # --- limits ------------------------------------------------------------------

    def limit(self, limits: LeafLimits) -> dict[str, str]:
        """Put the bounds in force. Returns what does not hold: setting -> why. Raises CgroupError if the kernel refuses
        one whose controller is there."""
        missing: dict[str, str] = {}
        self._bytes("memory", "memory.high", limits.memory_high_bytes, missing)
        self._bytes("memory", "memory.max", limits.memory_max_bytes, missing)
        self._bytes("memory", "memory.swap.max", limits.swap_max_bytes, missing, optional=True)
        self._set("pids", "pids.max", limits.pids_max, missing)
        if limits.cpu_max_pct is not None:
            self._set("cpu", "cpu.max", f"{limits.cpu_max_pct * 1000} 100000", missing)
        if limits.idle:
            self._set("cpu", "cpu.idle", 1, missing, optional=True)
        self._set("cpuset", "cpuset.cpus", limits.cpus, missing)
        self._set("cpuset", "cpuset.mems", limits.memory_nodes, missing)
        # When the kernel kills for memory it kills the whole leaf: half a process group is of no use to anyone.
        self._set("memory", "memory.oom.group", 1, {}, optional=True)
        return missing

    def _bytes(
        self, controller: str, name: str, value: int | None, missing: dict[str, str], optional: bool = False
    ) -> None:
        whole = max(_PAGE, value // _PAGE * _PAGE) if value else value  # none at all is something else than little
        self._set(controller, name, whole, missing, optional)

    def _set(
        self, controller: str, name: str, value: int | str | None, missing: dict[str, str], optional: bool = False
    ) -> None:
        if value is None:
            return
        if controller not in self._controllers:
            missing[name] = f"no {controller} controller"
            return
        try:
            put(self._files, self.path / name, str(value))
        except CgroupError as error:
            if not (optional and isinstance(error.__cause__, FileNotFoundError)):
                raise
            missing[name] = "this kernel has none"

    def lift(self) -> bool:
        """Slow it down no more: it has the room up to memory.max. Raises CgroupError."""
        if "memory" not in self._controllers:
            return False
        put(self._files, self.path / "memory.high", "max")
        return True

    def reweigh(self, weight: int) -> bool:
        """Its share of CPU and disk; written only if it changes. Raises CgroupError."""
        if weight == self.weight:
            return False
        if "cpu" in self._controllers:
            put(self._files, self.path / "cpu.weight", str(weight))
        if "io" in self._controllers:  # each policy has a file, if it is there; a disk follows one of them, or none
            self._share_disks("io.weight", weight)
            self._share_disks("io.bfq.weight", max(1, weight // _BFQ_STEP))
        self.weight = weight
        return True

    def _share_disks(self, name: str, weight: int) -> None:
        try:
            put(self._files, self.path / name, f"default {weight}", _first_line)
        except CgroupError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    # --- running -----------------------------------------------------------------

    def freeze(self) -> bool:
        """Ask that all processes in it stop; `is_frozen` says when they have. False: this kernel cannot."""
        return self._switch("1")

    def thaw(self) -> bool:
        return self._switch("0")

    def _switch(self, value: str) -> bool:
        try:
            put(self._files, self.path / "cgroup.freeze", value)
        except CgroupError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        self.frozen = value == "1"
        return True

    def is_frozen(self) -> bool:
        """Whether all of them have stopped."""
        return self._events().get("frozen", 0) == 1

    def populated(self) -> bool:
        """Whether a living process is in it."""
        return self._events().get("populated", 0) == 1

    def processes(self) -> list[int]:
        """Their ids. A moment later there may be others."""
        try:
            return [int(pid) for pid in self._files.read(self.path / "cgroup.procs").split()]
        except OSError:
            return []

    def enter(self, pid: int) -> None:
        """Move a process here: only one that has not run foreign code yet, once. Raises CgroupError: it stays where it
        is (EPERM if it comes from outside the delegated group)."""
        try:
            insist(self._files, lambda: self._files.write(self.path / "cgroup.procs", str(pid)))
        except OSError as error:
            raise CgroupError(f"process {pid} cannot be moved into {self.path}: {error.strerror}") from error

    def kill(self) -> bool:
        """Kill all processes in it, whatever they do meanwhile. False: this kernel cannot."""
        try:
            self._files.write(self.path / "cgroup.kill", "1")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise CgroupError(f"{self.path} cannot be killed: {error.strerror}") from error
        return True

    def remove(self) -> bool:
        """Remove it. False: something is still in it, ask again. Raises CgroupError."""
        try:
            self._files.remove(self.path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise CgroupError(f"{self.path} cannot be removed: {error.strerror}") from error
        return True

    # --- what it used ------------------------------------------------------------

    def memory(self) -> MemoryEvents | None:
        """What the kernel counted. None without the memory controller."""
        if "memory" not in self._controllers:
            return None
        events = counters(self._read("memory.events"))
        return MemoryEvents(
            high=events.get("high", 0),
            max=events.get("max", 0),
            oom=events.get("oom", 0),
            oom_kill=events.get("oom_kill", 0),
            current_bytes=_number(self._read("memory.current")) or 0,
            peak_bytes=_number(self._read("memory.peak")),
            limit_bytes=_number(self._read("memory.max")),
        )

    def sample(self, now_ns: int) -> MemorySample | None:
        """For a `StallWatch`. None without the memory controller."""
        if "memory" not in self._controllers:
            return None
        full = _FULL.search(self._read("memory.pressure"))
        return MemorySample(
            now_ns,
            counters(self._read("memory.events")).get("high", 0),
            None if full is None else int(full[1]),
            counters(self._read("cpu.stat")).get("user_usec", 0),
        )

    def cpu_us(self) -> int | None:
        """CPU time of all that ran in it; None where the kernel does not say."""
        return counters(self._read("cpu.stat")).get("usage_usec")

    def _events(self) -> dict[str, int]:
        return counters(self._read("cgroup.events"))

    def _read(self, name: str) -> str:
        try:
            return self._files.read(self.path / name)
        except OSError:  # not on this kernel, or the leaf is gone
            return ""


def _first_line(written: str, read: str) -> bool:
    return read.partition("\n")[0] == written


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None
