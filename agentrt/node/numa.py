"""A node on one NUMA node: its threads and all that it starts run there, and their memory comes from there.

To be called first of all in a process: threads and children inherit what was said before they began.
"""

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from agentrt._sys import lib
from agentrt.errors import ConfigError
from agentrt.machine import Machine, read_machine, read_text

AUTO: Final = "auto"
_FREE: Final = re.compile(r"MemFree:\s+(\d+) kB")


class Placed(msgspec.Struct, frozen=True):
    """Where this process is. ``memory``: bound, or why it is not; pages that it had before may be elsewhere."""

    node: int
    cpus: tuple[int, ...]
    memory: str

    @property
    def bound(self) -> bool:
        return self.memory == "bound"


def choose(wanted: str, machine: Machine, root: str = "") -> int:
    """The node that is meant by a number, or by ``auto``: the one with the most free memory of those whose CPUs this
    process may use. Raises ConfigError."""
    nodes = sorted(machine.nodes)
    if wanted == AUTO:
        return max(nodes, key=lambda node: (_free_kib(node, root), -node))
    if wanted not in map(str, nodes):
        raise ConfigError(
            f"node.numa_node: {wanted!r} is no NUMA node whose CPUs this process may use",
            hint=f"Use auto, or one of {', '.join(map(str, nodes))}",
        )
    return int(wanted)


def bind(wanted: str) -> Placed:
    """Bind this process to a node, as `choose` says. The CPUs are; memory is where the kernel lets it be bound, and is
    near its CPUs by the kernel's own habit elsewhere. Raises ConfigError, OSError (of the CPUs)."""
    machine = read_machine()
    node = choose(wanted, machine)
    cpus = machine.nodes[node]
    os.sched_setaffinity(0, cpus)
    error = lib.art_sys_memory_bind(node)
    if error:
        return Placed(node, cpus, os.strerror(-error))
    lib.art_sys_memory_move(node)
    return Placed(node, cpus, "bound")


def _free_kib(node: int, root: str) -> int:
    text = read_text(Path(f"{root}/sys/devices/system/node/node{node}/meminfo")) or ""
    match = _FREE.search(text)
    return int(match[1]) if match else 0
