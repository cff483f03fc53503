"""A user of its own for each host of Python agents, where the node is root: no two that live have the same.

Whether a host takes it is up to its template, which knows what the host has to read.
"""

import os
import threading
from typing import Final

_lock: Final = threading.Lock()
_taken: Final[set[int]] = set()  # by hosts of whatever runtimes this process has


def take(base: int) -> int:
    """The lowest uid from ``base`` on that no host has; 0: hosts run as the node does, which is not root, or ``base``
    is 0. Any thread."""
    if not base or os.geteuid() != 0:
        return 0
    with _lock:
        uid = base
        while uid in _taken:
            uid += 1
        _taken.add(uid)
        return uid


def give(uid: int) -> None:
    """Nothing of the host is left, or it never was."""
    with _lock:
        _taken.discard(uid)
