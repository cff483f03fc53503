"""A process that forks others on request, and its client: the node's template of hosts, a host's source of workers.

One `SOCK_SEQPACKET` socket, a msgpack message each way per packet. The forker has one thread and no loop, no handler of
signals and no descriptors but its own, so that what it forks starts clean. It is the parent of what it forks and the
only one that reaps it; a child's process group is ended before the child is reaped, so its id is still its own.

A forker whose client is gone ends all its children and itself. Children die with their forker by PR_SET_PDEATHSIG.
"""

import asyncio
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.spawn import exit_status
from agentrt.tools.protocol import ToolRef

_PACKET_BYTES_MAX: Final = 256 * 1024
_FDS_MAX: Final = 4
#: How long children may take to end by themselves after `Finish`.
_FINISH_GRACE_S: Final = 1.0
#: A child that ended is reported by its forker; one that does not answer any more is not waited for longer than this.
_REPORT_GRACE_S: Final = 1.0


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``argument``, ``uid`` and ``folder`` are the child's to understand."""

    token: int
    argument: int
    uid: int = 0
    folder: str = ""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """End once the children have ended; those still there after a second are killed."""


class Import(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Import the tools' modules (the template's)."""

    sys_path: list[str]
    environment_path: str | None
    tools: list[ToolRef]


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """With the child's pidfd."""

    token: int
    pid: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    token: int
    reason: str


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The child and its process group are gone. ``status`` is negative for a signal."""

    token: int
    status: int


class Imported(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """``unsafe``: why nothing may be forked after these imports; empty: it may."""

    unsafe: str


_Request = Fork | Finish | Import
_Answer = Forked | Refused | Exited | Imported
_request_decoder: Final = msgspec.msgpack.Decoder(_Request)
_answer_decoder: Final = msgspec.msgpack.Decoder(_Answer)
_encode: Final = msgspec.msgpack.Encoder().encode


# --- the forker ------------------------------------------------------------------


class Forker:
    """``child(asked, fds)`` is what a child does; it never returns. ``load`` imports, and says why not to fork."""

    def __init__(
        self,
        sock: socket.socket,
        child: Callable[[Fork, list[int]], NoReturn],
        load: Callable[[Import], str] | None = None,
    ) -> None:
        self._sock = sock
        self._child = child
        self._load = load
        self._unsafe = ""
        self._finishing = False
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (token, pid)
        self._poll = select.poll()

    def run(self) -> NoReturn:
        """Serve until the client is gone or asks for the end."""
        self._sock.setblocking(True)
        self._poll.register(self._sock.fileno(), select.POLLIN)
        serving = True
        while serving:
            for fd, _ in self._poll.poll():
                if fd != self._sock.fileno():
                    self._reap(fd)
                elif not self._serve():
                    serving = False
        self._poll.unregister(self._sock.fileno())
        if self._finishing:
            self._wait_for_children()
        self._end()

    def _serve(self) -> bool:
        """Whether to go on."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, _PACKET_BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        if not data or flags & socket.MSG_TRUNC:
            return False
        try:
            request = _request_decoder.decode(data)
        except UNREADABLE:  # a tool that writes into whatever socket it finds
            for fd in fds:
                os.close(fd)
            return True
        if isinstance(request, Fork):
            self._fork(request, fds)
        elif isinstance(request, Import):
            self._unsafe = self._unsafe or ("" if self._load is None else self._load(request))
            self._send(Imported(self._unsafe))
        else:
            self._finishing = True
            return False
        return True

    def _fork(self, request: Fork, fds: list[int]) -> None:
        try:
            if self._unsafe:
                self._send(Refused(request.token, self._unsafe))
                return
            try:
                pid = os.fork()
            except OSError as error:
                self._send(Refused(request.token, f"fork: {error.strerror}"))
                return
            if pid == 0:
                self._become_child(request, fds)
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = (request.token, pid)
            self._poll.register(pidfd, select.POLLIN)
            self._send(Forked(request.token, pid), pidfd)
        finally:
            for fd in fds:
                os.close(fd)

    def _become_child(self, asked: Fork, fds: list[int]) -> NoReturn:
        try:
            self._sock.close()
            for pidfd in self._children:
                os.close(pidfd)
            self._child(asked, fds)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        token, pid = self._children[pidfd]
        if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        _kill_group(pid)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert ended is not None
        self._poll.unregister(pidfd)
        del self._children[pidfd]
        os.close(pidfd)
        self._send(Exited(token, exit_status(ended)))

    def _send(self, answer: _Answer, *fds: int) -> None:
        try:
            socket.send_fds(self._sock, [_encode(answer)], fds)
        except OSError:  # the client is gone: the next read says so
            return

    def _wait_for_children(self) -> None:
        deadline = time.monotonic() + _FINISH_GRACE_S
        while self._children and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._reap(fd)

    def _end(self) -> NoReturn:
        """Nobody is left to talk to."""
        for pidfd, (_, pid) in self._children.items():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _kill_group(pid)
        # Not waitid without WNOHANG: a client's loop makes the shared description of a pidfd non-blocking.
        while self._children:
            for fd, _ in self._poll.poll():
                self._reap(fd)
        os._exit(0)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended before it had a group of its own
        return


# --- its client --------------------------------------------------------------------


class Child:
    """What a client asked for. ``pid`` is 0 until it is forked."""

    def __init__(self, on_exit: Callable[[int | None], None], on_doomed: Callable[[], None] | None) -> None:
        self.on_exit = on_exit
        self.on_doomed = on_doomed
        self.pid = 0
        self.refused = ""
        self.pidfd = -1
        self._killed = self._noticed = False
        self._gone = False

    def kill(self) -> None:
        """End it now; its group goes before it is reported."""
        self._killed = True
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return

    def notice(self) -> None:
        """Send SIGUSR1, as soon as it is there."""
        self._noticed = True
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)
            except ProcessLookupError:
                return

    def forked(self, pid: int, pidfd: int) -> None:
        self.pid, self.pidfd = pid, pidfd
        if self._killed:
            self.kill()
        elif self._noticed:
            self.notice()

    def gone(self, status: int | None) -> None:
        if not self._gone:
            self._gone = True
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
            self.on_exit(status)


class ForkClient:
    """Callbacks run on the loop: ``on_exit(status)`` of a child, once (None: not known, or never forked);
    ``on_imported(unsafe)`` per `import_tools`; ``on_lost()`` when the forker is gone, before its children are."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_lost: Callable[[], None],
        on_imported: Callable[[str], None] = lambda _: None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = loop
        self._on_lost = on_lost
        self._on_imported = on_imported
        self._children: dict[int, Child] = {}
        self._next_token = 0
        self._lost = False
        loop.add_reader(sock.fileno(), self._on_readable)

    @property
    def children(self) -> int:
        return len(self._children)

    def fork(
        self,
        argument: int,
        fds: list[int],
        on_exit: Callable[[int | None], None],
        on_doomed: Callable[[], None] | None = None,
        *,
        uid: int = 0,
        folder: str = "",
    ) -> Child:
        """Ask for a child with these descriptors, which stay the caller's to close. ``on_doomed``: the forker is gone,
        and the child goes with it. Raises OSError."""
        child = Child(on_exit, on_doomed)
        self._next_token += 1
        socket.send_fds(self._sock, [_encode(Fork(self._next_token, argument, uid, folder))], fds)
        self._children[self._next_token] = child
        return child

    def drop_unforked(self) -> None:
        """Give up what was asked for and is not there; a child that comes all the same finds its descriptors' other
        ends closed."""
        for token, child in list(self._children.items()):
            if not child.pid:
                self._gone(token, None)

    def import_tools(self, request: Import) -> None:
        """Raises OSError."""
        self._sock.send(_encode(request))

    def finish(self) -> None:
        """Let it end in order, and close."""
        try:
            self._sock.send(_encode(Finish()))
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        """Let go: the forker ends its children and itself. Nothing is reported any more."""
        if not self._lost:
            self._lost = True
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for child in self._children.values():
            if child.pidfd >= 0:
                self._loop.remove_reader(child.pidfd)
                os.close(child.pidfd)
                child.pidfd = -1
        self._children.clear()

    def _on_readable(self) -> None:
        while not self._lost:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._lose()
                return
            self._take(_answer_decoder.decode(data), fds)

    def _take(self, answer: _Answer, fds: list[int]) -> None:
        if isinstance(answer, Imported):
            self._on_imported(answer.unsafe)
            return
        token = answer.token
        child = self._children.get(token)
        if child is None:
            for fd in fds:
                os.close(fd)
        elif isinstance(answer, Forked):
            child.forked(answer.pid, fds[0])
            self._loop.add_reader(fds[0], self._on_child_ended, token)
        elif isinstance(answer, Refused):
            child.refused = answer.reason
            self._gone(token, None)
        else:
            self._gone(token, answer.status)

    def _on_child_ended(self, token: int) -> None:
        """The child is a zombie: its forker reports it, or cannot any more."""
        child = self._children[token]
        self._loop.remove_reader(child.pidfd)
        if self._lost:
            self._gone(token, None)
        else:
            self._loop.call_later(_REPORT_GRACE_S, self._gone, token, None)

    def _gone(self, token: int, status: int | None) -> None:
        child = self._children.pop(token, None)
        if child is not None:
            if child.pidfd >= 0:
                self._loop.remove_reader(child.pidfd)
            child.gone(status)

    def _lose(self) -> None:
        self._lost = True
        self._loop.remove_reader(self._sock.fileno())
        for child in self._children.values():
            if child.on_doomed is not None:
                child.on_doomed()
        self._on_lost()
        self.drop_unforked()
