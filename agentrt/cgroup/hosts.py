"""Leaves for hosts of Python agents and tools: bounded with all that they start, and ranked by tier.

A host enters its leaf itself, once, before it does anything else: the node makes the leaf, and the descriptor of its
cgroup.procs goes along with the request to fork. Where the node has no group with controllers there are no leaves, and
hosts are bounded by their rlimits alone.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from agentrt.cgroup import shared
from agentrt.cgroup.files import CgroupError
from agentrt.cgroup.leaf import Leaf, LeafLimits
from agentrt.cgroup.tree import Tree
from agentrt.machine import memory_nodes, number_list

_log: Final = logging.getLogger(__name__)
_PROCESSES_MAX: Final = 4096  # of a host: its workers, and what tools start
_TIER: Final = 1  # until it is known whom it serves
_CLEAR_PATIENCE_S: Final = 2.0
_remover: Final = ThreadPoolExecutor(1, "agentrt-leaves")


class HostLeaf:
    """``fd``: for the host to write "0" to; -1 once `handed`."""

    def __init__(self, tree: Tree, leaf: Leaf, fd: int) -> None:
        self._tree = tree
        self._leaf = leaf
        self.fd = fd

    @property
    def path(self) -> str:
        return str(self._leaf.path)

    def handed(self) -> None:
        """The host has the descriptor, or is not to be."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def enter(self, pid: int) -> None:
        """For a host that was executed and cannot be told: before it can have got far."""
        self.handed()
        try:
            self._leaf.enter(pid)
        except CgroupError as error:
            _log.warning("a host runs outside its leaf: %s", error)

    def rank(self, tier: int) -> None:
        """It serves this tier from now on."""
        try:
            self._tree.change_tier(self._leaf, tier)
        except CgroupError as error:
            _log.warning("the weight of a host: %s", error)

    def leave(self) -> None:
        """The host is gone: end what it left, remove the leaf. Does not block."""
        self.handed()
        _remover.submit(self._remove)

    def _remove(self) -> None:
        try:
            self._tree.clear(self._leaf, _CLEAR_PATIENCE_S)
        except CgroupError as error:
            _log.warning("what a host left: %s", error)


def host_leaf(memory_bytes_max: int) -> HostLeaf | None:
    """A leaf for a host that is about to start. ``memory_bytes_max`` 0: not bounded. None: there is none to be had."""
    tree = shared.held()
    if tree is None or not tree.controllers:
        return None
    bound = memory_nodes()  # of this thread: a node on one NUMA node
    limits = LeafLimits(
        memory_max_bytes=memory_bytes_max or None,
        pids_max=_PROCESSES_MAX,
        cpus=number_list(os.sched_getaffinity(0)) if bound else None,
        memory_nodes=number_list(bound) or None,
    )
    try:
        leaf, _ = tree.make(_TIER, limits)
        try:
            return HostLeaf(tree, leaf, os.open(leaf.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            tree.remove(leaf)
            raise
    except (CgroupError, OSError) as error:
        _log.warning("a host gets no leaf: %s", error)
        return None
