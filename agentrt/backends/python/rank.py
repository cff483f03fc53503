"""How a host ranks beside other processes while it works: by the tier of its turn, not by when it came.

A slot is the right to a CPU, not the CPU: what shares the machine with the slots' holders, the host of a run that has
overrun among them, is ordered by the kernel. In a leaf that is the leaf's weight. Elsewhere each host leads a session,
and where the kernel makes groups of those, their niceness counts (`agentrt.backends.process.rank`); where it does not,
that of the host itself, which only privileges lower. Whoever wakes up at a higher tier, the node's threads among them,
need not wait for the end of a host's slice, since hosts ask for longer ones (`agentrt.backends.slices`).
"""

import os
from typing import Final

from agentrt.backends.process.rank import GROUP_NICE, node_group, rank_session, sessions_are_groups
from agentrt.backends.slices import ask_for_slice
from agentrt.cgroup.hosts import HostLeaf
from agentrt.tiers import Tier

#: Between neighbouring tiers; the weight is halved, and whoever wakes up at the higher one need not wait for a slice of
#: the other.
_NICE_STEP: Final = 3
#: Of a host, by the tier that it works at. Tier 0 has the kernel's own, as the node's threads have: 0.7 to 2.8 ms, by
#: the number of CPUs. Each is longer than the one above, and none than a tick: who is ready, but has not just woken up,
#: may wait for the end of one.
SLICE_NS: Final = (0, 3_000_000, 3_500_000, 4_000_000)


class HostRanks:
    """``nice``: of the lowest tier. Of one node; no state but what the kernel is like."""

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._groups = sessions_are_groups()

    def nice_at(self, tier: int) -> int:
        """The niceness of a host that works at this tier."""
        return max(0, self._nice - _NICE_STEP * (Tier.MAINTENANCE - tier))

    def rank(self, pid: int, leaf: HostLeaf | None, tier: int) -> bool:
        """It works at this tier from now on. False: the kernel does not take it now, maybe later."""
        if leaf is not None:
            leaf.rank(tier)
            ask_for_slice(pid, SLICE_NS[tier])
            return True
        try:
            os.setpriority(os.PRIO_PROCESS, pid, self.nice_at(tier))
        except OSError:  # it is gone, or this is for the privileged
            pass
        ask_for_slice(pid, SLICE_NS[tier])
        return not self._groups or rank_session(pid, GROUP_NICE[tier])

    def outrank(self, hogs: bool) -> None:
        """A host more has a hog, or one less. While there are any, the node's own session ranks above, so that the
        threads that stop hogs and grant slots do not stand behind them (docs/decisions/0032)."""
        if self._groups:
            (node_group.raised if hogs else node_group.lowered)()
