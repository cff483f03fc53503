"""Starting a program and having it: the port to whatever isolates processes, and the plain way without isolation.

One waiter, one signaller, and both by pidfd: whoever has the `Process` reaps it, and a number that is another's by now
is never signalled. The child is the leader of a session of its own, with default signals, no descriptor but its own
three and the socket, and the lowest priority.
"""

import asyncio
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from agentrt.spawn import exit_status


class Launch(NamedTuple):
    """What is to be started. ``socket`` becomes a descriptor whose number is in AGENTRT_SOCKET; ``output`` is stdout
    and stderr. Both are the caller's to close once ``on_start`` or ``on_end`` was called."""

    command: Sequence[str]
    environment: Mapping[str, str]
    socket: int
    output: int
    tenant: str
    tier: int
    memory_bytes_max: int
    nice: int


class End(NamedTuple):
    """Nothing of the process is left. ``status``: negative for a signal. ``memory``: that its limit of memory has ended
    it, in words with the numbers. ``error``: why it was never started; ``again``: that may be otherwise later."""

    status: int
    memory: str | None = None
    error: str | None = None
    again: bool = False


class Process(Protocol):
    """A program that is started, until its end; after that and before it runs, nothing here does anything."""

    @property
    def pid(self) -> int:
        """0 before it runs."""

    @property
    def pidfd(self) -> int:
        """From its start to its end; whoever wants it for longer takes a copy."""

    def send_signal(self, number: signal.Signals) -> None:
        """To the program itself."""

    def freeze(self) -> None:
        """Stop it with all that it has started."""

    def thaw(self) -> None:
        """Let it go on with all that it has started."""

    def kill(self) -> None:
        """End it with all that it has started, also if it does not run yet."""

    def cpu_ns(self) -> int:
        """CPU time so far."""


class Launcher(Protocol):
    """What starts processes."""

    async def open(self) -> None:
        """Find out what can be had."""

    def refusal(self) -> str | None:
        """Why no process is started, None if they are: nothing would keep them inside, say."""

    def launch(self, launch: Launch, on_start: Callable[[], None], on_end: Callable[[End], None]) -> Process:
        """Takes about a millisecond. ``on_start`` and, once, ``on_end`` are called on the loop and not from inside this
        call."""

    async def close(self) -> None:
        """When all processes have ended."""


class PlainLauncher:
    """No isolation: a session of its own, rlimits, and that is all. Only where the operator has ``allowed`` that."""

    def __init__(self, loop: asyncio.AbstractEventLoop, allowed: bool) -> None:
        self._loop = loop
        self._allowed = allowed

    async def open(self) -> None:
        """There is nothing to find out."""

    def refusal(self) -> str | None:
        return None if self._allowed else "nothing keeps the programs of agents inside"

    def launch(self, launch: Launch, on_start: Callable[[], None], on_end: Callable[[End], None]) -> Process:
        return _PlainProcess(self._loop, launch, on_start, on_end)

    async def close(self) -> None:
        """There is nothing to close."""


class _PlainProcess:
    """Implements `Process` by the session."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        launch: Launch,
        on_start: Callable[[], None],
        on_end: Callable[[End], None],
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self.pid = 0
        self.pidfd = -1
        self._cpu_ns = 0
        try:
            self._start(launch)
        except OSError as error:
            again = error.filename is None  # of a program that is none the name is known
            loop.call_soon(on_end, End(0, error=str(error), again=again))
            return
        loop.call_soon(on_start)
        loop.call_soon(loop.add_reader, self.pidfd, self._on_exit)

    def _start(self, launch: Launch) -> None:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=launch.output,
            stderr=launch.output,
            env={**launch.environment, "AGENTRT_SOCKET": str(launch.socket)},
            cwd="/",
            pass_fds=(launch.socket,),
            start_new_session=True,
        )
        try:
            self.pidfd = os.pidfd_open(process.pid)
            os.setpriority(os.PRIO_PROCESS, process.pid, launch.nice)
            for limit, value in ((resource.RLIMIT_DATA, launch.memory_bytes_max), (resource.RLIMIT_CORE, 0)):
                resource.prlimit(process.pid, limit, (value, value))
        except OSError:
            process.kill()
            process.wait()
            if self.pidfd >= 0:
                os.close(self.pidfd)
            raise
        self._process = process
        self.pid = process.pid
        #: The process's CPU clock; see clock_getcpuclockid(3).
        self._cpu_clock = (~process.pid << 3) | 2

    def send_signal(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                pass

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def kill(self) -> None:
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        """It is not reaped yet, so the group's id is still its own."""
        if self.pidfd >= 0:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                self.send_signal(number)
            except PermissionError:  # a member has become another user's: the others have got it
                pass

    def cpu_ns(self) -> int:
        if self.pidfd >= 0:
            try:
                self._cpu_ns = time.clock_gettime_ns(self._cpu_clock)
            except OSError:
                pass
        return self._cpu_ns

    def _on_exit(self) -> None:
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.cpu_ns()
        self.kill()  # its group, while its number is its own
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert ended is not None
        self._process.returncode = exit_status(ended)  # tells subprocess that there is nothing left to wait for
        self._loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1
        self._on_end(End(self._process.returncode))
