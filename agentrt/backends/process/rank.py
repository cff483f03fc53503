"""How native processes rank where the kernel gives their leaves no shares of the CPU: by policy and niceness.

Niceness ranks within one group of the scheduler. Each session is such a group of its own where the kernel has
autogroups (desktops, machines without cgroups): there a process at nice 19 has as much as the whole node, unless its
group has a niceness, too. And a group is heavy only on the CPU where its heavy threads are: beside a control thread on
another one, a worker at nice 19 brings a fraction of the node's weight, less than a single such process has. So the
node's own group is raised while there are any, where that is permitted.

The groups of what computes are left as they are: beside groups that were made light, the node's threads wake up late,
however heavy its own is (docs/decisions/0038). Higher tiers are raised above them instead. Whatever computes at the
tiers below the interactive ones is SCHED_IDLE, so that a worker that wakes up at nice 19 does not wait for it.
"""

import threading
from pathlib import Path
from typing import Final

#: Of a native process's session, by tier: its group's weight is 3121, 1991, 1024 and 1024, below the node's. Not as far
#: apart as leaves are, and none is lighter than what is foreign to the node and runs beside it.
PROCESS_NICE: Final = (-5, -3, 0, 0)
#: Of the session of a host of Python agents: 1024, 335, 36, 15.
GROUP_NICE: Final = (0, 5, 15, 19)
#: Of the node's own while there are such sessions: its weight is 9548.
NODE_NICE: Final = -10
#: From this tier on: SCHED_IDLE. It cannot be taken back without privileges, so only for what stays at its tier.
IDLE_TIER: Final = 2


def sessions_are_groups(root: str = "") -> bool:
    """Whether the kernel makes autogroups."""
    try:
        return Path(f"{root}/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
    except OSError:
        return False


def may_rank_sessions(root: str = "") -> bool:
    """Whether this process may do so whenever it likes: others may now and then. Tried on its own, so it is not known
    of a process whose own session is no group."""
    path = Path(f"{root}/proc/self/autogroup")
    try:
        for _ in range(2):
            path.write_text(path.read_text().split()[-1])
    except (OSError, IndexError):
        return False
    return True


def rank_session(pid: int, nice: int) -> bool:
    """The niceness of the group of the session that ``pid`` leads. False: it is gone, it is not permitted, or too often
    without privileges."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except OSError:
        return False
    return True


class NodeGroup:
    """The group of the node's own session, and of whoever else is in it: raised as long as somebody wants that. One per
    process; any thread. Does nothing where it is not permitted, or where the session is no group: that of a machine's
    or container's first process, whose file is empty, ranks with the other groups thread by thread."""

    def __init__(self, path: str = "/proc/self/autogroup") -> None:
        self._path: Final = Path(path)
        self._lock: Final = threading.Lock()
        self._users = 0
        self._before = ""

    def raised(self) -> None:
        """Raise it, until as many have `lowered` it. It is never lowered by this."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                try:
                    before = self._path.read_text().split()[-1]
                    if int(before) > NODE_NICE:
                        self._path.write_text(str(NODE_NICE))
                        self._before = before
                except (OSError, ValueError, IndexError):
                    return

    def lowered(self) -> None:
        """Back to what it was, if nobody else wants it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._before:
                before, self._before = self._before, ""
                try:
                    self._path.write_text(before)
                except OSError:
                    return


#: A process is in one session.
node_group: Final = NodeGroup()
