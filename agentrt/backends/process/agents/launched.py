"""A process of an agent that was asked for, with this end of its socket and of its output. Whoever has it is told what
becomes of it, and may hand it on."""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from agentrt.backends.process.agents.command import ProcessProgram
from agentrt.backends.process.agents.launch import AgentProcess, End
from agentrt.backends.process.agents.output import Tail
from agentrt.backends.process.launcher import Launcher

_SOCKET_BUFFER_BYTES: Final = 256 * 1024


class Launched:
    """Raises OSError: no descriptor is left. ``on_start`` or ``on_end`` is called, not from inside the constructor, and
    after ``on_start`` in the end ``on_end``; ``on_stall`` as of `AgentProcess`. Whoever has it may set others."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        launcher: Launcher,
        program: ProcessProgram,
        *,
        confined: bool,
        tenant: str,
        tier: int,
        output_bytes_kept: int,
        on_start: Callable[[], None],
        on_end: Callable[[End], None],
        on_stall: Callable[[], bool],
    ) -> None:
        self.on_start = on_start
        self.on_end = on_end
        self.on_stall = on_stall
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            read, self._write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self.socket.close()
            self._theirs.close()
            raise
        for end in (self.socket, self._theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self.socket.setblocking(False)
        os.set_blocking(read, False)
        self.process: Final = AgentProcess(
            launcher,
            program,
            confined=confined,
            tenant=tenant,
            tier=tier,
            socket=self._theirs.fileno(),
            output=self._write,
            memory_bytes_max=program.memory_bytes_max,
            on_start=self._started,
            on_end=self._ended,
            on_stall=lambda: self.on_stall(),
        )
        self.tail: Final = Tail(loop, read, output_bytes_kept)

    def _started(self) -> None:
        self._given()
        self.on_start()

    def _ended(self, end: End) -> None:
        self._given()
        self.on_end(end)

    def _given(self) -> None:
        """The process has its ends."""
        if self._theirs.fileno() >= 0:
            self._theirs.close()
            os.close(self._write)
