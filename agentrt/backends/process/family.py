"""What a process has started, where neither a cgroup nor a process namespace keeps it together.

Each process of such a launcher bears a mark that its descendants inherit and that ordinary programs never touch: an odd
bound of real-time CPU, of which they have none. It can be read of any process, in whatever session, whoever is its
parent by now. While the process lives it is also the reaper of what it starts, so its descendants stay beneath it even
if they have taken their mark off; only such a one that outlives it is not found.
"""

import os
import resource
import secrets
import signal
import time
from collections.abc import Mapping
from typing import Final

_PASSES_MAX: Final = 200
_PAUSE_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.02
_BOUND: Final = b"Max realtime timeout"
_READ_BYTES: Final = 4096


class Family:
    """Of one process that is about to start. Reads all of /proc each time, which takes milliseconds; any thread."""

    def __init__(self) -> None:
        #: Microseconds: tens of thousands of years, and nobody else's.
        self._mark: Final = 1 << 61 | secrets.randbits(60)

    @property
    def limits(self) -> Mapping[int, int]:
        """What the process is to be born with, as of setrlimit."""
        return {resource.RLIMIT_RTTIME: self._mark}

    def members(self, pid: int = 0) -> list[int]:
        """Those who live and bear the mark, or are beneath ``pid`` (0: it is gone); without ``pid`` itself."""
        parents = _parents()
        found = {each for each in parents if each != pid and _mark_of(each) == self._mark}
        beneath = {pid} if pid else set()
        while new := {each for each, parent in parents.items() if parent in beneath and each not in beneath}:
            beneath |= new
        return sorted(found | beneath - {pid})

    def signal(self, pid: int, number: int) -> None:
        """Signal all but ``pid`` itself, until there are no new ones."""
        told: set[int] = set()
        for _ in range(_PASSES_MAX):
            new = [each for each in self.members(pid) if each not in told]
            if not new:
                return
            for each in new:
                self._send(each, pid, number)
            told.update(new)

    def end(self, pid: int = 0) -> bool:
        """Kill all but ``pid`` itself; blocks until they are gone. False: some are not."""
        pause_s = _PAUSE_S
        for _ in range(_PASSES_MAX):
            members = self.members(pid)
            if not members:
                return True
            for each in members:
                self._send(each, pid, signal.SIGKILL)
            time.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, pause_s * 2)
        return False

    def _send(self, member: int, pid: int, number: int) -> None:
        """By number only as long as it is sure whose it is."""
        try:
            pidfd = os.pidfd_open(member)
        except OSError:
            return
        try:
            if _mark_of(member) == self._mark or member in self.members(pid):
                signal.pidfd_send_signal(pidfd, number)
        except OSError:  # it has gone, or it has become somebody else
            return
        finally:
            os.close(pidfd)


def _parents() -> dict[int, int]:
    """Parents of all living processes."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 1 and fields[0] not in (b"Z", b"X"):
                found[int(name)] = int(fields[1])
    return found


def _mark_of(pid: int) -> int | None:
    _, _, rest = _read(f"/proc/{pid}/limits").partition(_BOUND)
    soft = rest.split(None, 1)[:1]
    return int(soft[0]) if soft and soft[0].isdigit() else None


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _READ_BYTES)
    except OSError:  # it has gone meanwhile
        return b""
    finally:
        os.close(fd)
