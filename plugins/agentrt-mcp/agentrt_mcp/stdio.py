"""A server that is a program: a confined process of the node's launcher, and the SDK's streams over its pipes.

The launcher is the control loop's; the pipes, and all that is said, are of the plugin's thread.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.process import Ended, Order, Process
from agentrt.errors import AgentrtError

_ERRORS_BYTES_MAX: Final = 4096
#: For a server to end by itself once its input has ended.
_LEAVE_GRACE_S: Final = 1.0
_GONE_PATIENCE_S: Final = 20.0

_log = logging.getLogger(__name__)


class ServerError(Exception):
    """The server could not be started, or is gone; the text says why."""


class ServerProcess:
    """Made on the plugin's loop, used there. ``on_frozen(bool)`` is called there: urgent work wants the machine, or no
    longer."""

    def __init__(self, launcher: Launcher, order: Order, on_frozen: Callable[[bool], None]) -> None:
        self._launcher = launcher
        self._order = order
        self._on_frozen = on_frozen
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self.ended: Final = asyncio.Event()
        self.how = ""  # how it ended
        self.errors = bytearray()  # the end of what it wrote to its standard error
        self._process: Process | None = None  # the control loop's
        self._tier = order.tier
        self._ours: list[int] = []
        self._theirs: list[int] = []

    async def start(self) -> None:
        """Raises ServerError."""
        try:
            their_in, our_in = os.pipe2(os.O_CLOEXEC)
            self._theirs.append(their_in)
            self._ours.append(our_in)
            for _ in (1, 2):
                our_out, their_out = os.pipe2(os.O_CLOEXEC)
                self._ours.append(our_out)
                self._theirs.append(their_out)
        except OSError as error:
            self._close_ours()
            self._close_theirs()
            raise ServerError(f"no pipes: {error.strerror}") from error
        self._control(self._start)
        try:
            await asyncio.shield(self._started)
        except ServerError:
            self._close_ours()
            raise
        except asyncio.CancelledError:
            self.kill()
            self._close_ours()
            raise

    @property
    def fds(self) -> tuple[int, int, int]:
        """Our ends of its 0, 1 and 2. Whoever takes them closes them."""
        a, b, c = self._ours
        self._ours.clear()
        return a, b, c

    def serve(self, tier: int) -> None:
        """Its most urgent call is of this tier from now on."""
        if tier != self._tier:
            self._tier = tier
            self._control(self._serve, tier)

    def kill(self) -> None:
        self._control(self._kill)

    def describe(self) -> str:
        told = self.errors.decode(errors="replace").strip()
        text = self.how or "it closed its standard output"
        return f"{text}: {told[-1500:]}" if told else text

    # --- on the control loop ---------------------------------------------------------

    def _control(self, action: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed, and with it the process is gone
            self._launcher.loop.call_soon_threadsafe(action, *arguments)

    def _tell(self, action: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action, *arguments)

    def _start(self) -> None:
        try:
            process = self._launcher.start(self._order, tuple(self._theirs), self._on_end, self._on_start)
        except AgentrtError as error:
            self._close_theirs()
            self._tell(self._not_started, str(error))
            return
        self._process = process
        process.on_preempt = partial(self._freeze, process, True)
        process.on_resume = partial(self._freeze, process, False)

    def _freeze(self, process: Process, frozen: bool) -> None:
        if frozen:
            process.freeze()
        else:
            process.thaw()
        self._tell(self._on_frozen, frozen)

    def _on_start(self) -> None:
        self._close_theirs()
        self._tell(self._is_started)

    def _on_end(self, ended: Ended) -> None:
        self._close_theirs()
        if ended.error is not None:
            self._tell(self._not_started, str(ended.error))
        else:
            self._tell(self._has_ended, ended.describe())

    def _serve(self, tier: int) -> None:
        if self._process is not None:
            self._process.change_tier(tier)
            if not tier:
                self._process.resume()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    # --- on the plugin's loop ------------------------------------------------------------

    def _is_started(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _not_started(self, why: str) -> None:
        self.how = why
        self.ended.set()
        if not self._started.done():
            self._started.set_exception(ServerError(why))

    def _has_ended(self, how: str) -> None:
        self.how = how
        self._is_started()
        self.ended.set()

    def _close_ours(self) -> None:
        while self._ours:
            os.close(self._ours.pop())


@asynccontextmanager
async def stdio_streams(process: ServerProcess, line_bytes_max: int) -> AsyncIterator[Any]:
    """The SDK's streams to a process that has started: a line of JSON for each message. A line of more than
    ``line_bytes_max`` ends it. On leaving its input ends, and after a moment the process with all that it started."""
    loop = asyncio.get_running_loop()
    our_in, our_out, our_errors = process.fds
    reader = asyncio.StreamReader(limit=line_bytes_max)
    read_pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _file(our_out, "rb"))
    errors = asyncio.StreamReader()
    errors_pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(errors), _file(our_errors, "rb"))
    write_pipe, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop), _file(our_in, "wb")
    )
    writer = asyncio.StreamWriter(write_pipe, protocol, None, loop)
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](16)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](16)

    async def read() -> None:
        async with to_session:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while line := await _line(reader, process, line_bytes_max):
                    try:
                        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        _log.debug("a server wrote a line that is no message")
                        continue
                    await to_session.send(SessionMessage(message))

    async def write() -> None:
        with contextlib.suppress(OSError):
            async for sent in from_session:
                writer.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await writer.drain()

    async def keep_errors() -> None:
        with contextlib.suppress(OSError):
            while data := await errors.read(4096):
                process.errors += data
                del process.errors[:-_ERRORS_BYTES_MAX]

    tasks = [asyncio.create_task(each()) for each in (read, write, keep_errors)]
    try:
        yield from_server, to_server
    finally:
        tasks[1].cancel()
        write_pipe.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.ended.wait(), _LEAVE_GRACE_S)
        process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.ended.wait(), _GONE_PATIENCE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pipe in (read_pipe, errors_pipe):
            pipe.close()
        for stream in (to_session, from_server, to_server, from_session):
            stream.close()


async def _line(reader: asyncio.StreamReader, process: ServerProcess, bytes_max: int) -> bytes:
    """The next one, b"" at the end."""
    try:
        return await reader.readline()
    except ValueError:
        process.errors += f"\n(it wrote a line of more than {bytes_max} bytes)".encode()
        process.kill()
        return b""


def _file(fd: int, mode: str) -> Any:
    return os.fdopen(fd, mode, buffering=0)
