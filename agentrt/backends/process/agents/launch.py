"""From what an agent process needs to the node's launcher of native processes, which tools share."""

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from agentrt.backends.process.agents.command import SOCKET_VARIABLE, ProcessProgram
from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.process import Ended, Order, Process
from agentrt.errors import AgentrtError, QueueFullError

#: Its descriptor of the socket, after the standard three.
_SOCKET: Final = 3


class End(NamedTuple):
    """Nothing of the process is left. ``status``: negative for a signal. ``memory``: that its limit of memory has ended
    it, in words with the numbers. ``error``: why it was never started; ``again``: that may be otherwise later."""

    status: int
    memory: str | None = None
    error: str | None = None
    again: bool = False


class AgentProcess:
    """A program that is started, until its end. Before it runs it can be killed; after that nothing here does anything.

    ``on_start`` and, once, ``on_end`` are called on the loop and not from inside the constructor; ``on_stall`` if it
    stands still for lack of memory: whether it was asked for its state, before it is killed. ``socket`` and
    ``output`` (its stdout and stderr) are the caller's to close then.
    """

    def __init__(
        self,
        launcher: Launcher,
        program: ProcessProgram,
        *,
        confined: bool,
        tenant: str,
        tier: int,
        socket: int,
        output: int,
        memory_bytes_max: int,
        on_start: Callable[[], None],
        on_end: Callable[[End], None],
        on_stall: Callable[[], bool],
    ) -> None:
        self._launcher = launcher
        self._on_start = on_start
        self._on_end = on_end
        self._memory_bytes_max = memory_bytes_max or launcher.config.memory_max_bytes
        self._confined = confined
        self._cpu_ns = 0
        order = Order(
            argv=program.command,
            domain=tenant,
            tier=tier,
            environment=program.environment | {SOCKET_VARIABLE: str(_SOCKET)},
            network=program.network,
            read=(*(path for path, *_ in program.seen), *program.read),
            write=program.write,
            memory_max_bytes=memory_bytes_max or None,
            in_slot=True,
            confined=confined,
        )
        self._null = -1
        self._process: Process | None = None
        try:
            self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._process = launcher.start(order, (self._null, output, output, socket), self._ended, self._started)
        except (AgentrtError, OSError) as error:  # OSError: no descriptor is left
            again = isinstance(error, QueueFullError | OSError)
            launcher.loop.call_soon(self._finish, End(0, error=str(error), again=again))
            return
        # Urgent work takes the CPU from it through its slot.
        self._process.on_preempt = self._process.on_resume = _nothing
        self._process.on_stall = on_stall

    def _started(self) -> None:
        process = self._process
        assert process is not None
        #: The process's CPU clock; see clock_getcpuclockid(3).
        self._cpu_clock = (~process.pid << 3) | 2
        tree = self._launcher.tree
        if not self._confined and (process.leaf is None or tree is None or "memory" not in tree.controllers):
            try:
                resource.prlimit(process.pid, resource.RLIMIT_DATA, (self._memory_bytes_max,) * 2)
            except ProcessLookupError:
                pass
        self._close()
        self._on_start()

    def _ended(self, ended: Ended) -> None:
        memory = ended.describe() if ended.out_of_memory else None
        error = ended.error
        self._finish(
            End(ended.status, memory, None if error is None else str(error), isinstance(error, QueueFullError))
        )

    def _finish(self, end: End) -> None:
        self._close()
        self._on_end(end)

    def _close(self) -> None:
        if self._null >= 0:
            os.close(self._null)
            self._null = -1

    @property
    def pid(self) -> int:
        """0 before it runs."""
        return 0 if self._process is None else self._process.pid

    @property
    def pidfd(self) -> int:
        """From its start to its end, else -1; whoever wants it for longer takes a copy."""
        return -1 if self._process is None else self._process.pidfd

    def send_signal(self, number: signal.Signals) -> None:
        """To the program itself."""
        if self._process is not None:
            self._process.signal(number)

    def freeze(self) -> None:
        """Stop it with all that it has started."""
        if self._process is not None:
            self._process.freeze()

    def thaw(self) -> None:
        """Let it go on with all that it has started, whoever has stopped it: the core stops the program itself."""
        if self._process is not None:
            self._process.thaw()
            self._process.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with all that it has started."""
        if self._process is not None:
            self._process.kill()

    def change_tier(self, tier: int) -> None:
        """Its weight beside other processes."""
        if self._process is not None:
            self._process.change_tier(tier)

    def cpu_ns(self) -> int:
        """CPU time of the program so far."""
        if self.pidfd >= 0:
            try:
                self._cpu_ns = time.clock_gettime_ns(self._cpu_clock)
            except OSError:
                pass
        return self._cpu_ns


def _nothing() -> None:
    """Not by this way."""
