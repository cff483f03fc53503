"""Checks of what the machine has: versions, CPUs, NUMA, cgroups, mappings."""

import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from agentrt._sys import lib
from agentrt.doctor import Check, Examined, Examiner
from agentrt.errors import ConfigError
from agentrt.sizing import GUESTS_DERIVED_MAX, pool_sizes

KERNEL_MIN: Final = (5, 14)
#: What bounds processes, and the v2 controller that it takes.
CONTROLLERS: Final = {
    "cpu": "weights of tiers between processes",
    "cpuset": "cores of their own for workers or processes",
    "memory": "memory limits of processes",
    "pids": "limits on the number of processes",
    "io": "limits on disk traffic",
}
_V1_NAMES: Final = {"io": "blkio"}


def check_versions(examined: Examined) -> Iterator[Check]:
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    kernel = (int(match[1]), int(match[2])) if match else (0, 0)
    ok = sys.platform == "linux" and kernel >= KERNEL_MIN
    yield Check(
        name="kernel",
        state="works" if ok else "refused",
        found=f"{sys.platform} {release}",
        why="" if ok else f"agentrt needs Linux {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or later",
    )
    yield Check(name="python", state="works", found=f"{platform.python_implementation()} {platform.python_version()}")


def check_cpus(examined: Examined) -> Iterator[Check]:
    machine, configured = examined.machine, examined.config.scheduler.workers
    quota = machine.cpu_quota
    found = f"{len(machine.cpus)} usable of {os.cpu_count()}"
    if quota is not None:
        found += f", quota {quota:g}"
    workers = configured or machine.workers
    found += f"; {workers} worker{'' if workers == 1 else 's'}"
    data = {"usable": list(machine.cpus), "quota": quota, "workers": workers}
    why = hint = ""
    if workers > len(machine.cpus):
        why = f"more workers than usable CPUs ({len(machine.cpus)}): slots are not cores, so quanta and latency stretch"
        hint = "Lower scheduler.workers, or 0"
    elif quota is not None and quota < len(machine.cpus):
        why = "a cgroup quota stops all threads for the rest of each period once it is used up, urgent work included"
        hint = "Use a cpuset instead of a quota"
    elif len(machine.cpus) == 1:
        why = "workers and control thread share one core"
    yield Check(name="cpus", state="degraded" if why else "works", found=found, why=why, hint=hint, data=data)


def check_numa(examined: Examined) -> Iterator[Check]:
    nodes = examined.machine.nodes
    several = len(nodes) > 1
    yield Check(
        name="numa",
        state="degraded" if several else "works",
        found=f"{len(nodes)} nodes" if several else "one node",
        why="this process spans several nodes; memory of the far ones is slower" if several else "",
        hint="One agentrt node per NUMA node: agentrt serve --numa-node N" if several else "",
        data={"nodes": {str(node): list(cpus) for node, cpus in nodes.items()}},
    )


def check_numa_memory(examined: Examined) -> Iterator[Check]:
    """Whether memory can be bound to a node, asked by a thread that ends with its answer."""
    errors: list[int] = []
    thread = threading.Thread(target=lambda: errors.append(lib.art_sys_memory_bind(min(examined.machine.nodes))))
    thread.start()
    thread.join()
    error = errors[0]
    yield Check(
        name="numa memory",
        state="degraded" if error else "works",
        found="cannot be bound to a node" if error else "can be bound to a node",
        why=f"{os.strerror(-error)}: with --numa-node only the CPUs are bound" if error else "",
        hint="A seccomp filter of the container may forbid set_mempolicy" if error else "",
    )


def check_cgroups(examined: Examined) -> Iterator[Check]:
    """One finding per controller: on a hybrid host each has a home of its own."""
    groups = {(group.controller, group.version): group for group in examined.machine.cgroups}
    versions = {group.version for group in examined.machine.cgroups}
    layout = {frozenset(): "none", frozenset({1}): "v1", frozenset({2}): "v2"}.get(frozenset(versions), "hybrid")
    for controller, purpose in CONTROLLERS.items():
        group = groups.get((controller, 2))
        name = f"cgroup {controller}"
        data: dict[str, Any] = {"layout": layout, "version": None, "path": None, "writable": False}
        if group is not None:
            data |= {"version": 2, "path": str(group.path), "writable": group.writable}
            delegated = group.writable
            yield Check(
                name=name,
                state="works" if delegated else "degraded",
                found=f"v2, {'writable' if delegated else 'read-only'}",
                why="" if delegated else f"this process may not make groups below {group.path}: no {purpose}",
                hint="" if delegated else "Delegate a group to this user (systemd: Delegate=yes)",
                data=data,
            )
            continue
        old = groups.get((_V1_NAMES.get(controller, controller), 1))
        if old is not None:
            data |= {"version": 1, "path": str(old.path), "writable": old.writable}
        yield Check(
            name=name,
            state="degraded",
            found=f"v1 only ({layout})" if old else f"not there ({layout})",
            why=f"agentrt uses cgroup v2: no {purpose}",
            hint="Boot with systemd.unified_cgroup_hierarchy=1 or cgroup_no_v1=all" if old else "",
            data=data,
        )


def check_mappings(examined: Examined) -> Iterator[Check]:
    limit = examined.machine.map_count_max
    try:
        guests, stacks = pool_sizes(examined.config, examined.machine)
    except ConfigError as error:
        yield Check(
            name="mappings",
            state="refused",
            found=f"vm.max_map_count {limit}",
            why=error.message,
            hint=error.hint or "",
        )
        return
    few = guests < GUESTS_DERIVED_MAX and not examined.config.wasm.guests_max
    yield Check(
        name="mappings",
        state="degraded" if few else "works",
        found=f"vm.max_map_count {limit if limit is not None else 'unknown'}: {guests:,} guests in memory at once",
        why=f"fewer than {GUESTS_DERIVED_MAX:,}; further runs wait for one of them to end" if few else "",
        hint="sysctl vm.max_map_count=262144 (and enough memory)" if few else "",
        data={"map_count_max": limit, "guests_max": guests, "stacks_max": stacks},
    )


EXAMINERS: Final[tuple[Examiner, ...]] = (
    check_versions,
    check_cpus,
    check_numa,
    check_numa_memory,
    check_cgroups,
    check_mappings,
)
