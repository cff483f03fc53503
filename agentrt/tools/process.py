"""A tool host process, seen from the node: how it starts, how it is ended, and when all of it is gone."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

from agentrt.cgroup.hosts import HostLeaf, host_leaf
from agentrt.spawn import describe_status, exit_status
from agentrt.tools.forking import Child, ForkClient
from agentrt.tools.users import HostUser

#: Room for a full frame, so that a batch is one write.
_SOCKET_BUFFER_BYTES: Final = 1 << 20

#: ``on_gone(status, excused)``: the host and its workers are gone. ``excused``: it was never started, by no fault of
#: its own.
OnGone = Callable[[str, bool], None]


class HostProcess:
    """What forked and executed hosts have in common: a socket, and the life pipe that ends with the last process.

    ``on_gone`` is called once, on the loop, unless `close` comes first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_gone: OnGone, user: HostUser | None) -> None:
        """``user``: as whom it runs, to be left when it is gone, or when this raises. Raises OSError."""
        self._loop = loop
        self._on_gone = on_gone
        self._status: str | None = None
        self._excused = False
        self._life_ended = False
        self._closed = False
        self._leaf: HostLeaf | None = None
        self._user = user
        try:
            self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            self._leave()
            raise
        try:
            for end in (self.socket, self._theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            self.socket.setblocking(False)
            self._life, self._life_theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            self.socket.close()
            self._theirs.close()
            self._leave()
            raise
        loop.add_reader(self._life, self._on_life)

    @property
    def pid(self) -> int:
        """0 while it is not known."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it and what it started in its process group."""
        raise NotImplementedError

    def rank(self, tier: int) -> None:
        """It serves this tier from now on."""
        if self._leaf is not None and not self._closed:
            self._leaf.rank(tier)

    def _let_go(self) -> None:
        """Its own ends are its own."""
        if self._theirs.fileno() >= 0:
            self._theirs.close()
            os.close(self._life_theirs)

    def _on_life(self) -> None:
        try:
            data = os.read(self._life, 4096)
        except BlockingIOError:
            return
        if data:
            return  # a tool that writes into whatever it finds
        self._loop.remove_reader(self._life)
        self._life_ended = True
        self._maybe_gone()

    def _exited(self, status: str, excused: bool = False) -> None:
        if self._status is None:
            self._status, self._excused = status, excused
            self._let_go()
            self._maybe_gone()

    def _maybe_gone(self) -> None:
        if self._status is not None and self._life_ended and not self._closed:
            self._on_gone(self._status, self._excused)

    def close(self) -> None:
        """Let go of the descriptors."""
        if not self._closed:
            self._closed = True
            if not self._life_ended:
                self._loop.remove_reader(self._life)
            self._let_go()
            os.close(self._life)
            self.socket.close()
            self._leave()

    def _leave(self) -> None:
        if self._leaf is not None:
            self._leaf.leave()
        if self._user is not None:
            self._user.leave()


class ForkedHost(HostProcess):
    """A child of the template."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_gone: OnGone,
        on_doomed: Callable[[], None],
        client: ForkClient,
        nice: int,
        memory_bytes_max: int = 0,
        user: HostUser | None = None,
    ) -> None:
        """``memory_bytes_max``: of its leaf. Raises OSError."""
        super().__init__(loop, on_gone, user)
        self._leaf = host_leaf(memory_bytes_max)
        try:
            fds = [self._theirs.fileno(), self._life_theirs, *([] if self._leaf is None else [self._leaf.fd])]
            uid, folder = (0, "") if user is None else (user.uid, user.folder)
            self._child: Child = client.fork(nice, fds, self._on_exit, on_doomed, uid=uid, folder=folder)
        except OSError:
            self.close()
            raise
        self._let_go()  # they are in the request
        if self._leaf is not None:
            self._leaf.handed()

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        self._child.kill()

    def _on_exit(self, status: int | None) -> None:
        never = self._child.pid == 0
        self._exited(self._child.refused or describe_status(status), never)


class ExecutedHost(HostProcess):
    """A child of the node in its own session; its pidfd is the only thing that waits for it.

    Must be started on a thread that lives as long as the host may: the kernel kills the child when that *thread* ends.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_gone: OnGone,
        nice: int,
        environment: Mapping[str, str],
        memory_bytes_max: int = 0,
        held_fd: int = -1,
        user: HostUser | None = None,
    ) -> None:
        """Blocks for about a millisecond (vfork and exec). Raises OSError."""
        super().__init__(loop, on_gone, user)
        fds = (self._theirs.fileno(), self._life_theirs)
        try:
            more = () if user is None else (str(user.uid), user.folder)
            self._process = start_python("agentrt.tools.host", fds, nice, environment, held_fd, more)
            try:
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
        except OSError:
            self.close()
            raise
        self._let_go()
        self._leaf = host_leaf(memory_bytes_max)
        if self._leaf is not None:
            self._leaf.enter(self._process.pid)  # Python takes a while to start
        loop.add_reader(self._pidfd, self._on_ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """It is not reaped yet, so the group's id is still its own."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not its own leader yet: killed between fork and setsid
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_ended(self) -> None:
        if os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.kill()
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        assert ended is not None
        self._process.returncode = exit_status(ended)  # tells subprocess that there is nothing left to wait for
        self._close_pidfd()
        self._exited(describe_status(self._process.returncode))

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def close(self) -> None:
        super().close()
        if hasattr(self, "_pidfd"):
            self._close_pidfd()


def start_python(
    module: str,
    fds: tuple[int, ...],
    nice: int,
    environment: Mapping[str, str],
    held_fd: int = -1,
    more: tuple[str, ...] = (),
) -> "subprocess.Popen[bytes]":
    """``python -m module FDS… PID NICE HELD_FD MORE…`` in a session of its own. Raises OSError."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, fds), str(os.getpid()), str(nice), str(held_fd), *more],
        stdin=subprocess.DEVNULL,
        stdout=_error_stream(),
        stderr=_error_stream(),
        pass_fds=fds if held_fd < 0 else (*fds, held_fd),
        start_new_session=True,
        env=environment,  # the child puts back the node's own PYTHONPATH once it runs
    )
    os.setpriority(os.PRIO_PROCESS, process.pid, nice)  # from its first instruction; it repeats this for itself
    return process


def _error_stream() -> int:
    """What tools print goes to the node's standard error; its standard output belongs to its own results."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
