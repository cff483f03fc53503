"""The delegated group of a node, and the leaves in it.

    <group>/node        the node itself, moved here before controllers are enabled: a group that divides its
                        resources may hold no processes
    <group>/leaf-<pid>-<start>-7      one process and what it starts

At the top of a hierarchy, where others live as well, the group is one of our own making, ``agentrt-<pid>-<start>``.
What a node left that is gone (its id and start are in the names) is removed by the next one. Leaves are siblings and
are never moved: a tier is a weight.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

from agentrt.cgroup.files import CgroupError, Files, KernelFiles, insist, put
from agentrt.cgroup.layout import CONTROLLERS, Layout
from agentrt.cgroup.leaf import Leaf, LeafLimits
from agentrt.cgroup.weights import NODE_WEIGHT, TIER_WEIGHTS, weights

_NODE: Final = "node"
_LEAF: Final = "leaf-"
_OWN: Final = "agentrt-"
#: For what a dead node left to go.
_CLEAR_PAUSE_S: Final = 0.000_2
_CLEAR_PAUSE_MAX_S: Final = 0.05
_AHEAD_MAX: Final = 4
_SWEEP_TRIES: Final = 200
_SWEEP_PAUSE_S: Final = 0.005


class Tree:
    """Take the group with `open`; give it back with `close`. A process has one (`shared.py`). Any thread."""

    def __init__(
        self,
        layout: Layout,
        *,
        files: Files | None = None,
        tier_weights: tuple[int, ...] = TIER_WEIGHTS,
        pid: int | None = None,
    ) -> None:
        """Raises CgroupError if the layout is not usable."""
        if not layout.usable or layout.group is None:
            raise CgroupError(layout.why or "no group is usable", hint="Delegate one (systemd: Delegate=yes)")
        self._files: Final = KernelFiles() if files is None else files
        self._layout = layout
        self._tier_weights = tier_weights
        self._pid = os.getpid() if pid is None else pid
        self._parent: Path = layout.group
        self._moved = False
        self._next = 0
        self._lock = threading.Lock()  # of leaves and their weights
        self._mark = f"{self._pid}-{started(self._pid)}"
        self.group: Path = layout.group / (_OWN + self._mark) if layout.whole else layout.group
        self.controllers: frozenset[str] = frozenset()
        self.missing: dict[str, str] = dict(layout.missing)
        self.leaves: dict[str, Leaf] = {}
        #: Made before anybody needs them, with their bounds in force; they count nowhere.
        self.ahead: OrderedDict[LeafLimits, tuple[Leaf, dict[str, str]]] = OrderedDict()
        self._node: Leaf | None = None

    def open(self) -> None:
        """Sweep what dead nodes left, move this process aside, enable controllers. What is not to be had is in
        ``missing``. Raises CgroupError if no leaf could be made at all; nothing has changed then."""
        try:
            if self._layout.whole:
                self._sweep()
                for controller in self._enable(self._parent):
                    self.missing.setdefault(controller, "the top of the hierarchy does not give it")
                self._make(self.group)
            else:
                self._remove_leaves(self.group, gone=True)
            node = self.group / _NODE
            self._make(node)
            leaf = Leaf(self._files, node, frozenset(), 0)
            leaf.enter(self._pid)
            self._moved = True
        except (OSError, CgroupError) as error:
            self.close()
            if isinstance(error, CgroupError):
                raise
            raise CgroupError(f"no groups can be made in {self.group}: {error.strerror}") from error
        failed = self._enable(self.group)
        self.missing |= failed
        self.controllers = self._layout.controllers - failed.keys()
        self._node = Leaf(self._files, self.group / _NODE, self.controllers, 0)
        self._node.reweigh(NODE_WEIGHT)

    def _enable(self, group: Path) -> dict[str, str]:
        """One by one: where one is refused, the others still work. Returns the refused ones."""
        refused: dict[str, str] = {}
        path = group / "cgroup.subtree_control"
        for name in CONTROLLERS:
            if name not in self._layout.controllers:
                continue
            try:
                put(self._files, path, f"+{name}", lambda written, read: written[1:] in read.split())
            except CgroupError as error:
                refused[name] = error.message
        return refused

    def _make(self, path: Path) -> None:
        try:
            self._files.make(path)
        except FileExistsError:
            return

    # --- leaves --------------------------------------------------------------------

    def make(self, tier: int, limits: LeafLimits) -> tuple[Leaf, dict[str, str]]:
        """A leaf for a process of this tier, and which of its limits do not hold: setting -> why. All weights of the
        tier follow. Raises CgroupError."""
        with self._lock:
            leaf, missing = self.ahead.pop(limits) if limits in self.ahead else self._bounded(limits)
            leaf.tier = tier
            try:
                self.leaves[leaf.path.name] = leaf
                self._reweigh()
            except CgroupError:
                self.leaves.pop(leaf.path.name, None)
                leaf.remove()
                raise
            return leaf, missing

    def prepare(self, limits: LeafLimits) -> None:
        """Make a leaf now for a `make` with these limits later, which then takes one write instead of a dozen. Again is
        harmless; of several limits the last few are remembered. Raises CgroupError."""
        with self._lock:
            if limits not in self.ahead:
                self.ahead[limits] = self._bounded(limits)
                if len(self.ahead) > _AHEAD_MAX:
                    self.ahead.popitem(last=False)[1][0].remove()

    def _bounded(self, limits: LeafLimits) -> tuple[Leaf, dict[str, str]]:
        self._next += 1
        leaf = Leaf(self._files, self.group / f"{_LEAF}{self._mark}-{self._next}", self.controllers, 0)
        try:
            insist(self._files, lambda: self._files.make(leaf.path))
        except OSError as error:
            raise CgroupError(f"no leaf {leaf.path}: {error.strerror}") from error
        try:
            return leaf, leaf.limit(limits)
        except CgroupError:
            leaf.remove()
            raise

    def remove(self, leaf: Leaf) -> bool:
        """Remove an empty leaf. False: something is still in it. Raises CgroupError."""
        if not leaf.remove():
            return False
        with self._lock:
            if self.leaves.pop(leaf.path.name, None) is not None:
                self._reweigh()
        return True

    def clear(self, leaf: Leaf, patience_s: float) -> bool:
        """End what is still in a leaf and remove it; blocks until the kernel has let go of all of it, for about
        ``patience_s``. False: something is still in it. Raises CgroupError."""
        pause_s, left_s = _CLEAR_PAUSE_S, patience_s
        while not self.remove(leaf):
            if left_s <= 0:
                return False
            leaf.kill()
            self._files.pause(pause_s)
            left_s -= pause_s
            pause_s = min(_CLEAR_PAUSE_MAX_S, pause_s * 2)
        return True

    def change_tier(self, leaf: Leaf, tier: int) -> None:
        """In place. Raises CgroupError."""
        with self._lock:
            if leaf.tier != tier:
                leaf.tier = tier
                self._reweigh()

    def share(self, tier_weights: tuple[int, ...]) -> None:
        """Other weights of the tiers from now on, of those that are there too. Raises CgroupError."""
        with self._lock:
            if tier_weights != self._tier_weights:
                self._tier_weights = tier_weights
                self._reweigh()

    def _reweigh(self) -> int:
        """Bring all weights in line with who is there: one pass, which writes what has changed. Returns how many."""
        shares = weights({leaf: leaf.tier for leaf in self.leaves.values()}, self._tier_weights)
        written = 0
        for leaf, weight in shares.items():
            try:
                written += leaf.reweigh(weight)
            except CgroupError:
                if leaf.path.name in self.leaves and leaf.populated():  # or it is on its way out
                    raise
        return written

    # --- the end -------------------------------------------------------------------

    def close(self) -> None:
        """Kill what is left in leaves, remove them, and go back where this process was. Raises nothing."""
        self._remove_leaves(self.group)
        self.leaves.clear()
        self.ahead.clear()
        if self._moved:
            for name in self.controllers:
                try:
                    put(self._files, self.group / "cgroup.subtree_control", f"-{name}", _without)
                except CgroupError:
                    continue
            try:
                Leaf(self._files, self._parent, frozenset(), 0).enter(self._pid)
                self._moved = False
            except CgroupError:
                return
        for path in (self.group / _NODE, *([self.group] if self._layout.whole else ())):
            self._remove_group(path)

    def _sweep(self) -> None:
        """Remove what nodes left here that were killed."""
        for name in self._files.folders(self._parent):
            if name.startswith(_OWN) and not lives(name.removeprefix(_OWN)):
                group = self._parent / name
                self._remove_leaves(group)
                self._remove_group(group / _NODE)
                self._remove_group(group)

    def _remove_leaves(self, group: Path, gone: bool = False) -> None:
        """``gone``: only those whose node is."""
        try:
            names = self._files.folders(group)
        except OSError:
            return
        for name in names:
            if name.startswith(_LEAF) and not (gone and lives(name.removeprefix(_LEAF))):
                self._remove_group(group / name, kill=True)

    def _remove_group(self, path: Path, kill: bool = False) -> None:
        leaf = Leaf(self._files, path, frozenset(), 0)
        for _ in range(_SWEEP_TRIES):
            try:
                if kill:
                    leaf.kill()
                if leaf.remove():
                    return
            except CgroupError:
                return
            self._files.pause(_SWEEP_PAUSE_S)


def started(pid: int) -> str:
    """When the process began, in the kernel's ticks: tells it from a later one of the same id. "": there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def lives(mark: str) -> bool:
    """Whether the node that made what is called ``<pid>-<start>…`` is there."""
    pid, _, rest = mark.partition("-")
    return not pid.isdecimal() or started(int(pid)) == rest.partition("-")[0]


def _without(written: str, read: str) -> bool:
    return written[1:] not in read.split()
