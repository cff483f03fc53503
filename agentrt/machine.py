"""What this machine allows this process: CPUs, memory, mappings, cgroups. Plain readings, taken when asked.

CPUs, NUMA nodes and the mapping limit are read by the C core (csrc/topo.h); what is added here is what only the
control plane wants. Files that cannot be read are no error: limits degrade to "unknown" (None) and `agentrt doctor`
says so. ``root`` is put before every path, so that tests can show other machines; the CPUs and what the
kernel can do are always the real ones.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt._sys import ffi, lib
from agentrt.errors import InternalError

#: Bounds of the kernel's "no limit" in a cgroup v1 memory limit: anything this large is none.
_UNLIMITED: Final = 2**60
WORKERS_MAX: Final = 64


class Cgroup(msgspec.Struct, frozen=True):
    """Where one controller has this process."""

    controller: str
    version: int  # 1 or 2
    path: Path  # the group's folder
    writable: bool  # a child group can be made here


class Machine(msgspec.Struct, frozen=True):
    """One reading."""

    cpus: tuple[int, ...]  # numbers of the CPUs this thread may run on
    nodes: dict[int, tuple[int, ...]]  # NUMA node -> its usable CPUs; one node where nothing is known
    cpu_quota: float | None  # CPUs that a cgroup quota allows, None without one
    memory_bytes: int  # of the machine, or less by a cgroup limit; 0: unknown
    map_count_max: int | None  # vm.max_map_count
    cgroups: tuple[Cgroup, ...]
    light_guards: bool = False  # pages can be made to fault without a mapping (csrc/stack_guard.h)

    @property
    def workers(self) -> int:
        """CPU slots that fit: usable cores, fewer under a quota, at least 1 and at most 64."""
        count = len(self.cpus)
        if self.cpu_quota is not None:
            count = min(count, math.ceil(self.cpu_quota))
        return max(1, min(count, WORKERS_MAX))


def read_machine(root: str = "") -> Machine:
    """The machine as the calling thread sees it."""
    topology = ffi.new("art_topo *")
    if (code := lib.art_topo_read(root.encode(), topology)) != 0:
        raise InternalError(f"the CPUs of this process cannot be read ({code})")
    cgroups = tuple(_cgroups(root))
    return Machine(
        _numbers(topology.cpus),
        {node.id: _numbers(node.cpus) for node in topology.nodes[0 : topology.node_count]},
        _cpu_quota(cgroups, root),
        _memory_bytes(cgroups, root),
        topology.map_count_max or None,
        cgroups,
        bool(lib.art_stack_guards_light()),
    )


def _numbers(cpus: Any) -> tuple[int, ...]:
    pointer = ffi.addressof(cpus)
    return tuple(lib.art_cpuset_nth(pointer, n) for n in range(lib.art_cpuset_count(pointer)))


def memory_nodes() -> tuple[int, ...]:
    """The NUMA nodes that new memory of the calling thread is bound to (agentrt/node/numa.py); none if it is not."""
    found = ffi.new("uint64_t *")
    if lib.art_sys_memory_bound(found):
        return ()
    mask = found[0]
    return tuple(node for node in range(mask.bit_length()) if mask >> node & 1)


def number_list(numbers: Iterable[int]) -> str:
    """Numbers as the kernel lists CPUs and nodes: ``0-3,8``."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def read_text(path: str | Path) -> str | None:
    """The file's text without the last newline, or None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _int_in(path: str | Path) -> int | None:
    text = read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _mounts(root: str) -> dict[str, tuple[int, str, str]]:
    """Where cgroups are mounted: controller, or "" for v2 -> version, mount point, root in the mount."""
    mounts: dict[str, tuple[int, str, str]] = {}
    for line in (read_text(f"{root}/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            mounts.setdefault("", (2, fields[4], fields[3]))
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                mounts.setdefault(option, (1, fields[4], fields[3]))
    return mounts


def unified_group(root: str = "") -> Path | None:
    """The folder of this process's group in the v2 hierarchy, which may have no controllers; None without one."""
    mount = _mounts(root).get("")
    if mount is not None:
        for line in (read_text(f"{root}/proc/self/cgroup") or "").splitlines():
            if line.startswith("0::"):
                return Path(root + mount[1]) / _below(line[3:], mount[2])
    return None


def _cgroups(root: str) -> list[Cgroup]:
    """The group of this process per controller; on a hybrid host some are of version 1 and some of 2."""
    mounts = _mounts(root)
    found = []
    for line in (read_text(f"{root}/proc/self/cgroup") or "").splitlines():
        number, names, inside = line.split(":", 2)
        for name in names.split(","):
            mount = mounts.get(name if number != "0" else "")
            if mount is None or name.startswith("name="):
                continue
            version, point, mounted = mount
            path = Path(root + point) / _below(inside, mounted)
            controllers = (read_text(path / "cgroup.controllers") or "").split() if version == 2 else [name]
            found += [Cgroup(each, version, path, os.access(path, os.W_OK)) for each in controllers]
    return found


def _below(inside: str, mounted: str) -> str:
    """The group's path under its mount point; in a container the mount shows only a part of the tree."""
    if mounted != "/" and (inside == mounted or inside.startswith(mounted + "/")):
        inside = inside[len(mounted) :]
    return inside.lstrip("/")


def _up(group: Cgroup, root: str) -> list[Path]:
    """The group's folder and those above it, as far as they are of the same tree."""
    paths = [group.path, *group.path.parents]
    marker = "cgroup.procs"
    return [path for path in paths if str(path).startswith(f"{root}/sys/fs/cgroup") and (path / marker).exists()]


def _cpu_quota(cgroups: tuple[Cgroup, ...], root: str) -> float | None:
    quotas = []
    for group in cgroups:
        if group.controller != "cpu":
            continue
        for path in _up(group, root):
            if group.version == 2:
                quota, _, period = (read_text(path / "cpu.max") or "max").partition(" ")
            else:
                quota = read_text(path / "cpu.cfs_quota_us") or "-1"
                period = read_text(path / "cpu.cfs_period_us") or ""
            if quota.isdecimal() and period.isdecimal() and int(period):
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_bytes(cgroups: tuple[Cgroup, ...], root: str) -> int:
    limits = []
    for line in (read_text(f"{root}/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for group in cgroups:
        if group.controller == "memory":
            name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
            limits += [limit for path in _up(group, root) if (limit := _int_in(path / name)) and limit < _UNLIMITED]
    return min(limits, default=0)
