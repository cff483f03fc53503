"""The lock on a store's folder: one process, one session.

A POSIX record lock, because it ends with the process (whatever killed it), is not inherited by children (a host that
outlives its node must not keep the store), and names its holder. Its weakness, that closing *any* descriptor of the
file in the process drops it, is met by the registry: no one else in this process opens the file.
"""

import fcntl
import os
import struct
import threading
from pathlib import Path
from typing import Final

from agentrt.errors import StoreInUseError

# struct flock of 64-bit Linux: l_type, l_whence, (pad) l_start, l_len, l_pid, (pad)
_FLOCK: Final = struct.Struct("hhqqi4x")

_held: set[tuple[int, int]] = set()  # (device, inode) of the lock files this process holds
_guard: Final = threading.Lock()


def _after_fork() -> None:
    _held.clear()  # the locks stayed with the parent


os.register_at_fork(after_in_child=_after_fork)


class FolderLock:
    """Held from construction to `release`. Raises StoreInUseError naming the holder's process id."""

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        with _guard:
            try:
                seen = path.stat()
            except FileNotFoundError:
                pass
            else:
                if (seen.st_dev, seen.st_ino) in _held:
                    raise _in_use(folder, os.getpid())
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = _holder(self._fd)
                os.close(self._fd)
                raise _in_use(folder, holder) from None
            made = os.fstat(self._fd)
            self._identity = (made.st_dev, made.st_ino)
            _held.add(self._identity)
        # For people; the lock itself knows its holder.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Lets go. Call once, in the process that took it."""
        with _guard:
            _held.discard(self._identity)
            os.close(self._fd)


def _holder(fd: int) -> int | None:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    # 0: a process of another pid namespace.
    return int(pid) if kind != fcntl.F_UNLCK and pid > 0 else None


def _in_use(folder: Path, holder: int | None) -> StoreInUseError:
    who = f"process {holder}" if holder is not None else "another process"
    return StoreInUseError(f"{folder} is in use by {who}", hint="Stop it, or choose another folder: one node per store")
