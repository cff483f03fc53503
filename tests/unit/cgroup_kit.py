"""A cgroup v2 file system in memory, with the kernel's rules and rare errors."""

import errno
import os
from pathlib import Path

from agentrt.cgroup.layout import CONTROLLERS, Layout

ROOT = Path("/cg")
NODE_PID = 4242

_FILES = {
    "cpu": ("cpu.weight", "cpu.max", "cpu.idle"),
    "cpuset": ("cpuset.cpus", "cpuset.mems"),
    "io": ("io.weight", "io.bfq.weight"),
    "memory": ("memory.high", "memory.max", "memory.swap.max", "memory.oom.group", "memory.current", "memory.peak"),
    "pids": ("pids.max",),
}
_ALWAYS = ("cgroup.procs", "cgroup.subtree_control", "cgroup.events", "cgroup.freeze", "cgroup.kill", "cpu.stat")


class Group:
    def __init__(self, controllers: set[str]) -> None:
        self.controllers = controllers
        self.enabled: set[str] = set()
        self.pids: set[int] = set()
        self.values: dict[str, str] = {}


class FakeKernel:
    """Implements `agentrt.cgroup.files.Files`. ``busy``: how many of the next writes to a file of that name fail with
    EBUSY. ``refuses``: file name -> errno of all writes. ``swallows``: file names whose writes have no effect.
    ``lingers``: how many tries a killed group stays populated."""

    def __init__(self, controllers: tuple[str, ...] = CONTROLLERS, whole: bool = False) -> None:
        self.whole = whole
        self.groups = {ROOT: Group(set(controllers))}
        self.groups[ROOT].pids = {NODE_PID, *((1,) if whole else ())}
        self.busy: dict[str, int] = {}
        self.refuses: dict[str, int] = {}
        self.swallows: set[str] = set()
        self.lacks: set[str] = set()
        self.lingers = 0
        self.writes: list[tuple[str, str]] = []
        self.pauses = 0

    def layout(self) -> Layout:
        have = frozenset(self.groups[ROOT].controllers)
        missing = {name: "not given to this group" for name in CONTROLLERS if name not in have}
        return Layout("v2", ROOT, self.whole, True, "", have, missing)

    def group_of(self, pid: int) -> Path:
        return next(path for path, group in self.groups.items() if pid in group.pids)

    # --- Files -------------------------------------------------------------------

    def read(self, path: Path) -> str:
        group = self._group(path.parent)
        name = path.name
        if name == "cgroup.procs":
            return "".join(f"{pid}\n" for pid in sorted(group.pids))
        if name == "cgroup.subtree_control":
            return " ".join(sorted(group.enabled)) + "\n"
        if name == "cgroup.events":
            frozen = group.values.get("cgroup.freeze", "0")
            return f"populated {int(bool(group.pids))}\nfrozen {frozen}\n"
        self._there(group, name)
        return group.values.get(name, "max") + "\n"

    def write(self, path: Path, text: str) -> None:
        group, name = self._group(path.parent), path.name
        self._there(group, name)
        if self.busy.get(name, 0):
            self.busy[name] -= 1
            raise _error(errno.EBUSY, path)
        if name in self.refuses:
            raise _error(self.refuses[name], path)
        self.writes.append((f"{path.parent.name}/{name}", text))
        if name in self.swallows:
            return
        if name == "cgroup.procs":
            if group.enabled and not (self.whole and path.parent == ROOT):
                raise _error(errno.EBUSY, path)
            for other in self.groups.values():
                other.pids.discard(int(text))
            group.pids.add(int(text))
        elif name == "cgroup.subtree_control":
            self._control(path, group, text)
        elif name == "cgroup.kill":
            if not self.lingers:
                group.pids.clear()
        else:
            group.values[name] = text

    def exchange(self, path: Path, text: str) -> str:
        self.write(path, text)
        return self.read(path)

    def _control(self, path: Path, group: Group, text: str) -> None:
        sign, controller = text[0], text[1:]
        if sign == "-":
            group.enabled.discard(controller)
            return
        if controller not in group.controllers:
            raise _error(errno.ENOENT, path)
        if group.pids and not (self.whole and path.parent == ROOT):  # no internal processes
            raise _error(errno.EBUSY, path)
        group.enabled.add(controller)
        for child, made in self.groups.items():
            if child.parent == path.parent:
                made.controllers.add(controller)

    def make(self, path: Path) -> None:
        if path in self.groups:
            raise _error(errno.EEXIST, path)
        if self.busy.get("mkdir", 0):
            self.busy["mkdir"] -= 1
            raise _error(errno.EBUSY, path)
        self.groups[path] = Group(set(self._group(path.parent).enabled))

    def remove(self, path: Path) -> None:
        group = self._group(path)
        if group.pids or any(child.parent == path for child in self.groups):
            raise _error(errno.EBUSY, path)
        del self.groups[path]

    def folders(self, path: Path) -> list[str]:
        self._group(path)
        return sorted(child.name for child in self.groups if child.parent == path)

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        if self.lingers:
            self.lingers -= 1

    # --- within --------------------------------------------------------------------

    def _group(self, path: Path) -> Group:
        try:
            return self.groups[path]
        except KeyError:
            raise _error(errno.ENOENT, path) from None

    def _there(self, group: Group, name: str) -> None:
        known = {*_ALWAYS, *(file for controller in group.controllers for file in _FILES[controller])}
        if name not in known or name in self.lacks:
            raise _error(errno.ENOENT, Path(name))


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
