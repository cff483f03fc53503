"""The processes of a node: its templates, the hosts that they fork, and programs, as /proc tells."""

import os
from pathlib import Path


def kind_of(pid: int) -> str:
    """ "node", "agents" or "tools" (templates and hosts have one command line), "programs"; "" for all else."""
    try:
        command = Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return ""
    for what in ("agents", "tools"):
        if f"agentrt.{what}.".encode() in command:
            return what
    if b"errand_program.py" in command:
        return "programs"
    return "node" if b"errand_node.py" in command else ""


def processes(node: int, what: str) -> list[int]:
    """Of this node: "agents" and "tools" are hosts, "agents_template" and "tools_template" what forks them, and
    "programs" its own children."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_bytes()
            except OSError:
                continue
            parents[int(name)] = int(stat.rpartition(b")")[2].split()[1])
    kind, _, template = what.partition("_")
    templates = [pid for pid, parent in parents.items() if parent == node and kind_of(pid) == kind]
    return (
        templates if template or kind == "programs" else [pid for pid, parent in parents.items() if parent in templates]
    )
