"""What agentrt takes from a machine, and what happens where it is missing: one table, for `agentrt doctor`, which adds
what is here, and for docs/operations.md.

Limits and speed degrade, and say so; security boundaries and durability refuse, unless a setting says otherwise.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from agentrt.doctor import STATES, Check, State

DEGRADES: Final = "degrades"
REFUSES: Final = "refuses"


class Need(NamedTuple):
    """``checks``: names of the doctor's findings that say whether it is here."""

    what: str
    needs: str
    without: str
    then: str
    checks: tuple[str, ...]

    def here(self, checks: Iterable[Check]) -> State | None:
        """The worst of its findings; None if the doctor has not looked."""
        found = [check.state for check in checks if check.name in self.checks]
        return max(found, key=STATES.index, default=None)

    def to_dict(self, checks: Iterable[Check]) -> dict[str, Any]:
        """``{"what", "needs", "without", "then", "here"}``"""
        return {
            "what": self.what,
            "needs": self.needs,
            "without": self.without,
            "then": self.then,
            "here": self.here(checks),
        }


NEEDS: Final = (
    Need("the node", "Linux 5.14 or later", REFUSES, "`agentrt` is not tried on older ones", ("kernel",)),
    Need("wasm agents", "wasmtime 50.x", REFUSES, "the node does not start", ("engine",)),
    Need(
        "many wasm agents in memory",
        "`vm.max_map_count`",
        DEGRADES,
        "fewer guests at once; the others wait",
        ("mappings",),
    ),
    Need(
        "the store",
        "a local file system",
        REFUSES,
        "the node does not start, but with `store.force_place`; network and overlay file systems lose what was durable",
        ("store folder", "fsync"),
    ),
    Need(
        "stopping hosts and programs",
        "pidfds",
        REFUSES,
        "hosts and programs are not started: a number may be another's by now",
        ("pidfd",),
    ),
    Need(
        "Python agents, kept inside",
        "landlock and seccomp",
        REFUSES,
        "they are not registered, but with `python.allow_unsandboxed`; landlock before ABI 3 cannot forbid truncating",
        ("landlock", "seccomp"),
    ),
    Need(
        "hosts of Python agents, kept apart",
        "root, and Python where any user may read it",
        DEGRADES,
        "hosts run as the node's user; landlock and seccomp keep them inside all the same",
        ("host users",),
    ),
    Need(
        "hosts of tools, kept apart (`tools.uid_base`)",
        "root, and Python where any user may read it",
        REFUSES,
        "root: their calls fail with `tool_host_start`; else hosts run as the node's user, who is not root",
        ("host users",),
    ),
    Need(
        "urgent work while a low tier computes",
        "niceness below 0 for the control thread (`LimitNICE`, CAP_SYS_NICE)",
        DEGRADES,
        "it ranks 19 steps of niceness above the workers instead of 29",
        ("nice",),
    ),
    Need(
        "the same beside any load",
        "SCHED_RR (`LimitRTPRIO`, CAP_SYS_NICE) and `node.control_realtime`",
        DEGRADES,
        "the control thread is raised by niceness only",
        ("real-time",),
    ),
    Need(
        "CPU between native processes by tier",
        "cgroup v2 `cpu`, a group of the node's own",
        DEGRADES,
        "none has a share; they rank by policy and niceness, and stand still while tier 0 computes",
        ("cgroup cpu",),
    ),
    Need(
        "memory of native processes",
        "cgroup v2 `memory`",
        DEGRADES,
        "bounded by `RLIMIT_DATA` for each; no `tool_memory` with numbers: allocations fail in the program",
        ("cgroup memory",),
    ),
    Need(
        "number of native processes",
        "cgroup v2 `pids`",
        DEGRADES,
        "bounded by `RLIMIT_NPROC` of a user of its own",
        ("cgroup pids",),
    ),
    Need(
        "native processes, kept inside",
        "landlock, seccomp, a way to keep signals in",
        REFUSES,
        "nothing is started, `sandbox`, but with `process.allow_unsandboxed`",
        ("native processes",),
    ),
    Need(
        "networks and folders of native processes",
        "root, or user namespaces",
        DEGRADES,
        "the network is shut by seccomp; working folders are on disk, bounded by file",
        ("native processes",),
    ),
    Need(
        "all that native processes start ends with them",
        "cgroup v2, or process namespaces",
        DEGRADES,
        "they are found by a mark that they inherit; one that takes it off may outlive a process that ends by itself",
        ("native processes",),
    ),
    Need(
        "cores and memory of one NUMA node",
        "`--numa-node`, `set_mempolicy`",
        DEGRADES,
        "CPUs are bound all the same; memory comes from the node where it is touched first, unless that is full",
        ("numa", "numa memory"),
    ),
    Need("CPU slots", "a core for each worker", DEGRADES, "slots are no cores: quanta and latency stretch", ("cpus",)),
)
