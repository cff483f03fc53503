"""The one tree of this process, for as long as somebody uses it: a process can be in one group only. So its tiers have
one set of weights, too: what was said last."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentrt.cgroup.affinity import kept_affinity
from agentrt.cgroup.files import CgroupError
from agentrt.cgroup.layout import read_layout
from agentrt.cgroup.tree import Tree
from agentrt.cgroup.weights import TIER_WEIGHTS

_lock: Final = threading.Lock()
_users = 0
_tree: Tree | None = None
_weights: tuple[int, ...] = TIER_WEIGHTS

#: Values of the setting ``process.cgroup`` that are no folder.
AUTO, NONE = "auto", "none"


def acquire(wanted: str) -> Tree:
    """The tree, taken if nobody has it yet. ``wanted``: auto (this process's own group, if it is delegated or the top
    of the hierarchy), none, or the folder of a group that an operator has delegated. Blocks for milliseconds. Give it
    back with `release`. Raises CgroupError that says why there is none."""
    global _tree, _users
    with _lock:
        if _tree is None:
            if wanted == NONE:
                raise CgroupError("process.cgroup is none")
            layout = read_layout() if wanted == AUTO else read_layout(group=Path(wanted))
            tree = Tree(layout, tier_weights=_weights)
            with kept_affinity(os.getpid()):
                tree.open()
            _tree = tree
        _users += 1
        return _tree


def share(tier_weights: tuple[int, ...]) -> Callable[[], None]:
    """How tiers share the CPU from now on, in whatever tree there is or will be; empty: as by default. What is given
    brings the leaves that are there in line: it blocks for milliseconds, and may be called on any thread."""
    global _weights
    with _lock:
        _weights = tier_weights or TIER_WEIGHTS
    return _reweigh


def _reweigh() -> None:
    with _lock:
        if _tree is not None:
            _tree.share(_weights)


def hold(wanted: str) -> bool:
    """`acquire` it for as long as a node runs, if there are controllers to divide: before anything is started beside
    the node, which would be in the way of that. False: there is nothing to hold. Blocks for milliseconds."""
    if wanted == NONE:
        return False
    layout = read_layout() if wanted == AUTO else read_layout(group=Path(wanted))
    if not (layout.usable and layout.controllers):
        return False
    try:
        acquire(wanted)
    except CgroupError:
        return False
    return True


def held() -> Tree | None:
    """The tree, if somebody has it."""
    return _tree


def release() -> None:
    """The last one gives the group back: what is left in it is killed. Blocks for milliseconds."""
    global _tree, _users
    with _lock:
        _users -= 1
        if not _users and _tree is not None:
            with kept_affinity(os.getpid()):
                _tree.close()
            _tree = None
