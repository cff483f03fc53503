"""Users of their own for hosts, where the node is root: no two hosts that live have the same.

For hosts of Python agents, which can write nothing, the lowest free one will do. Hosts of tools may leave files where
anybody may write, so theirs go round, and it takes long until somebody else has the same.
"""

import os
import stat
import sys
import threading
from pathlib import Path
from typing import Final

#: From a base on; more hosts than that live nowhere.
USERS: Final = 100_000

_lock: Final = threading.Lock()
_taken: Final[set[int]] = set()  # by hosts of whatever runtimes this process has
#: A node that starts again does not begin with those it had before.
_next = int.from_bytes(os.urandom(4), "little") % USERS


def take(base: int) -> int:
    """The lowest uid from ``base`` on that no host has; 0: hosts run as the node does, which is not root, or ``base``
    is 0. Any thread."""
    return _take(base, 0)


def take_next(base: int) -> int:
    """As `take`, of the `USERS` from ``base`` on the one that was not used for longest."""
    global _next
    with _lock:
        first = _next = (_next + 1) % USERS
    return _take(base, first)


def _take(base: int, first: int) -> int:
    if not base or os.geteuid() != 0:
        return 0
    with _lock:
        number = first
        while base + number in _taken:
            number = (number + 1) % USERS
        _taken.add(base + number)
        return base + number


def give(uid: int) -> None:
    """Nothing of the host is left, or it never was."""
    with _lock:
        _taken.discard(uid)


def become(uid: int, folder: str = "") -> None:
    """In a child: be this user and nobody else, for good, and at home in ``folder`` if there is one. Only root may.
    Before the child is bound to its parent, which a change of user undoes. Raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if folder:
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        if "tempfile" in sys.modules:
            vars(sys.modules["tempfile"])["tempdir"] = None  # whoever was imported may have asked for the node's


def open_to_all(path: Path) -> bool:
    """Whether any user may read it, as far as its mode and those above tell; also if it is not there."""
    try:
        real = path.resolve()
        mode = real.stat().st_mode
        wanted = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        above = {*real.parents, *path.absolute().parents}  # of a link, too
        return mode & wanted == wanted and all(each.stat().st_mode & stat.S_IXOTH for each in above)
    except OSError:
        return True
