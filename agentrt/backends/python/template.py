"""A template as the node sees it: its process, its socket, what it said of its bundle, the hosts it forks."""

import array
import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from agentrt import users
from agentrt.agents.protocol import (
    PAGE_BYTES,
    Fork,
    Forked,
    FromTemplate,
    Gone,
    HostLimits,
    Prepare,
    Prepared,
    Refused,
    ToTemplate,
    encode_packet,
    from_template_decoder,
)
from agentrt.agents.template import PACKET_BYTES_MAX
from agentrt.backends.python.limits import PythonLimits
from agentrt.cgroup.hosts import HostLeaf, host_leaf
from agentrt.errors import AgentrtError, EngineError, ModuleError
from agentrt.spawn import import_path

#: What agents may see of the node's environment, besides what `PythonLimits.environment` names.
_PASSED: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "HOME", "USER", "LD_LIBRARY_PATH", "PYTHONHOME")
#: Libraries that start threads when they are imported, told not to: a template has one.
_ONE_THREAD: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SOCKET_BUFFER_BYTES: Final = 1 << 20


class ForkedHost(NamedTuple):
    """A host that was forked; its descriptors are the receiver's, but for the leaf's. ``page``: see
    agentrt.agents.protocol."""

    pid: int
    pidfd: int
    socket: socket.socket
    page: mmap.mmap
    leaf: HostLeaf | None = None  # ended by the template, with the host


OnForked = Callable[[ForkedHost | str], None]
"""Called with the host, or with why there is none."""


class Template:
    """One template process. Made on the loop's thread, which must live as long as it."""

    def __init__(self, source: str, limits: PythonLimits, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the process: about a millisecond. Raises OSError."""
        self.source: Final = source
        self.alive = True
        self._limits = limits
        self._loop = loop
        self._tickets = 0
        self._forks: dict[int, tuple[OnForked, socket.socket, mmap.mmap, HostLeaf | None, int]] = {}
        self._uids: dict[int, int] = {}  # by the host's pid
        self._leaves: dict[int, HostLeaf] = {}  # by the host's pid
        self._statuses: dict[int, Callable[[int | None], None]] = {}
        self._gone: dict[int, int] = {}
        self._prepared: asyncio.Future[Prepared] = loop.create_future()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            self._socket.setblocking(False)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "agentrt.agents.template"),
                    *(str(number) for number in (theirs.fileno(), os.getpid(), limits.nice)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=_error_stream(),
                stderr=_error_stream(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(limits),
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._socket.fileno(), self._on_readable)
        loop.add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def prepare(self) -> Prepared:
        """Let it import its source. Raises ModuleError, SandboxError, EngineError; the template is closed then."""
        limits = self._limits
        inside = HostLimits(
            limits.request_bytes_max, limits.result_bytes_max, limits.memory_bytes_max, limits.inflight_max
        )
        self._send(Prepare(import_path(), self.source, inside, not limits.allow_unsandboxed))
        try:
            async with asyncio.timeout(limits.start_timeout_ns / 1e9):
                return await self._prepared
        except TimeoutError:
            raise ModuleError(
                f"{self.source} was not imported within {limits.start_timeout_ns / 1e9:g} seconds"
            ) from None
        finally:
            if not self._prepared.done() or self._prepared.cancelled() or self._prepared.exception() is not None:
                self.close()

    @property
    def prepared(self) -> Prepared:
        """What it said; only after `prepare`."""
        return self._prepared.result()

    def fork(self, then: OnForked) -> None:
        """Ask for a host; ``then`` is called on the loop, not from inside this call."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = os.memfd_create("agentrt-page", os.MFD_CLOEXEC)
        leaf = host_leaf(self._limits.memory_bytes_max)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            ours.setblocking(False)
            os.ftruncate(memory, PAGE_BYTES)
            page = mmap.mmap(memory, PAGE_BYTES)
            self._tickets += 1
            uid = users.take(self._limits.uid_base)
            self._forks[self._tickets] = (then, ours, page, leaf, uid)
            self._send(Fork(self._tickets, uid), theirs.fileno(), memory, *([] if leaf is None else [leaf.fd]))
        finally:
            if leaf is not None:
                leaf.handed()
            theirs.close()
            os.close(memory)

    def when_gone(self, pid: int, then: Callable[[int | None], None]) -> None:
        """Tell the exit status of a host that has ended (negative: signal; None: nobody knows)."""
        if pid in self._gone or not self.alive:
            self._loop.call_soon(then, self._gone.pop(pid, None))
        else:
            self._statuses[pid] = then

    def close(self) -> None:
        """End the process, and with it all its hosts."""
        if self.alive:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    # --- packets ----------------------------------------------------------------------

    def _send(self, message: ToTemplate, *descriptors: int) -> None:
        control: list[tuple[int, int, Any]] = []
        if descriptors:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._socket.sendmsg([encode_packet(message)], control)
        except OSError:  # it is gone or hangs: noticed elsewhere, by its pidfd or by time
            self._loop.call_soon(self.close)

    def _on_readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, PACKET_BYTES_MAX, 4)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            self.close()
            return
        try:
            self._on_message(from_template_decoder.decode(data), descriptors)
        except msgspec.MsgspecError:
            for fd in descriptors:
                os.close(fd)
            self.close()

    def _on_message(self, message: FromTemplate, descriptors: list[int]) -> None:
        if isinstance(message, Forked):
            fork = self._forks.pop(message.ticket, None)
            if fork is None:
                for fd in descriptors:
                    os.close(fd)
                return
            then, ours, page, leaf, uid = fork
            if message.pid:
                self._uids[message.pid] = uid
            else:
                users.give(uid)
            if leaf is not None and message.pid:
                self._leaves[message.pid] = leaf
            elif leaf is not None:
                leaf.leave()
            if not message.pid or len(descriptors) != 1:
                ours.close()
                page.close()
                then(message.message or "it was not forked")
            else:
                then(ForkedHost(message.pid, descriptors[0], ours, page, leaf))
        elif isinstance(message, Gone):
            users.give(self._uids.pop(message.pid, 0))
            if (leaf := self._leaves.pop(message.pid, None)) is not None:
                leaf.leave()
            told = self._statuses.pop(message.pid, None)
            if told is not None:
                told(message.status)
            else:
                self._gone[message.pid] = message.status
        elif isinstance(message, Prepared):
            if not self._prepared.done():
                self._prepared.set_result(message)
        elif isinstance(message, Refused):
            self._fail(_refusal(message))

    def _fail(self, error: AgentrtError) -> None:
        if not self._prepared.done():
            self._prepared.set_exception(error)
            self._prepared.exception()  # seen: perhaps nobody waits any more

    def _on_exit(self) -> None:
        if self._process.poll() is None:
            return
        self.alive = False
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._socket.fileno())
        os.close(self._pidfd)
        self._socket.close()
        self._fail(ModuleError(f"{self.source} ended its process while it was imported"))
        forks, self._forks = self._forks, {}
        for leaf in self._leaves.values():
            leaf.leave()
        self._leaves.clear()
        for uid in self._uids.values():
            users.give(uid)
        self._uids.clear()
        for then, ours, page, waiting, uid in forks.values():
            users.give(uid)
            if waiting is not None:
                waiting.leave()
            ours.close()
            page.close()
            then("its template ended")
        statuses, self._statuses = self._statuses, {}
        for told in statuses.values():
            told(None)


def _refusal(message: Refused) -> AgentrtError:
    if message.kind == "sandbox":
        return EngineError(message.message, hint="Or set allow_unsandboxed, if you trust all agents")
    return ModuleError(message.message)


def _environment(limits: PythonLimits) -> dict[str, str]:
    """Little of the node's own: its variables may hold secrets."""
    names = (*_PASSED, *limits.environment)
    passed = {name: os.environ[name] for name in names if name in os.environ}
    return passed | {
        "PYTHONPATH": os.pathsep.join(import_path()),
        "PYTHONHASHSEED": str(limits.hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TZ": "UTC",
        **dict.fromkeys(_ONE_THREAD, "1"),
    }


def _error_stream() -> int:
    """What a module prints while it is imported goes to the node's standard error."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
