"""Whether tool hosts of an earlier node on the same store are still there.

They die with their node, but one after the other (template, hosts, forkers, workers) and as the machine has time for
it: on a full one its successor may be up before the last of them is gone, and ask what became of a call that still has
its effect to come. So each node locks a file of its own beside its store, and every process from which tools run has
the descriptor: the kernel lets go of the lock with the last of them. What tools execute does not inherit it.

Not thread-safe.
"""

import fcntl
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

_PREFIX: Final = "hosts."
#: What was killed and is not gone by then sleeps in the kernel, or a tool has forked something that was to stay.
_PATIENCE_NS: Final = 10_000_000_000


class Orphans:
    """``fd`` is what the hosts of this node are to hold, -1 if there could be no file."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the store's, which this node has open."""
        self._folder = folder
        self._until_ns = time.monotonic_ns() + _PATIENCE_NS
        self._gone = False
        try:
            self.fd, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        except OSError as error:
            print(f"agentrt: a successor of this node will not see its tool hosts: {error}", file=sys.stderr)
            self.fd, self._own = -1, ""
        else:
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            self._own = os.path.basename(path)

    def left(self) -> bool:
        """Whether there are any that may be waited for. Once there are none, none will come."""
        if not self._gone:
            others = {path.name for path in self._folder.glob(f"{_PREFIX}*")} - {self._own}
            self._gone = all(_swept(self._folder / name) for name in others)
            if not self._gone and time.monotonic_ns() >= self._until_ns:
                print("agentrt: tool hosts of the node before are there for 10 s, and not waited for", file=sys.stderr)
                self._gone = True
        return not self._gone

    def close(self) -> None:
        """This node starts no hosts any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            _swept(self._folder / self._own)


def _swept(path: Path) -> bool:
    """Remove the file if nobody has it locked."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # it is gone, or none of ours
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    except OSError:
        return True  # who cannot remove it, need not
    finally:
        os.close(fd)
    return True
