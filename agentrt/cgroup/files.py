"""Files of the cgroup file system: read, write and read back.

A write there is a request: the kernel may refuse it for a moment (EBUSY while processes move), take something else
than what was written (whole pages), or take it without effect. So what matters is read back, and what is busy is tried
again, a bounded number of times.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from agentrt.errors import AgentrtError

#: A group that was just left by a process is busy for less than a millisecond; together about a quarter of a second.
_TRIES: Final = 12
_FIRST_PAUSE_S: Final = 0.000_1
_READ_BYTES_MAX: Final = 1 << 20
_READ_BYTES: Final = 4096  # of a setting

Result = TypeVar("Result")


class CgroupError(AgentrtError):
    """The kernel refuses what was asked of a cgroup, or took something else."""

    code = "cgroup"


class Files(Protocol):
    """What is done with the file system; another one in tests of its rare errors. All raise OSError."""

    def read(self, path: Path) -> str: ...

    def write(self, path: Path, text: str) -> None: ...

    def exchange(self, path: Path, text: str) -> str:
        """Write, and what is there then."""

    def make(self, path: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def folders(self, path: Path) -> list[str]: ...

    def pause(self, seconds: float) -> None: ...


class KernelFiles:
    """The real one."""

    def read(self, path: Path) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _READ_BYTES_MAX).decode(errors="replace")
        finally:
            os.close(fd)

    def write(self, path: Path, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def exchange(self, path: Path, text: str) -> str:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
            return os.pread(fd, _READ_BYTES, 0).decode(errors="replace")
        finally:
            os.close(fd)

    def make(self, path: Path) -> None:
        os.mkdir(path, 0o755)

    def remove(self, path: Path) -> None:
        os.rmdir(path)

    def folders(self, path: Path) -> list[str]:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def insist(files: Files, action: Callable[[], Result]) -> Result:
    """Do it again while the kernel says EBUSY, for about a quarter of a second. Raises OSError."""
    pause_s = _FIRST_PAUSE_S
    for left in range(_TRIES - 1, -1, -1):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.EBUSY or not left:
                raise
            files.pause(pause_s)
            pause_s *= 2
    raise AssertionError("unreachable")


def put(files: Files, path: Path, text: str, same: Callable[[str, str], bool] = str.__eq__) -> None:
    """Write and read back; ``same(written, read)`` says whether it is what was meant. Raises CgroupError."""
    try:
        found = insist(files, lambda: files.exchange(path, text)).strip()
    except OSError as error:
        raise CgroupError(f"{text!r} for {path}: {error.strerror}") from error
    if not same(text, found):
        raise CgroupError(f"{path} is {found!r} after {text!r} was written")


def counters(text: str) -> dict[str, int]:
    """Lines of ``name number``, as in cgroup.events, memory.events and cpu.stat."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            found[name] = int(value)
    return found
