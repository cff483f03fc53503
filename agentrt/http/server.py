"""The HTTP server: uvicorn on a thread and a loop of its own, so that health is answered while the control loop is
busy.

What uvicorn leaves unbounded is bounded here: how long and how large a request's head may be, how many connections
there are, how long they stay silent, and how long they leave answers lying.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrt.errors import ConfigError
from agentrt.http.settings import HttpConfig

_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 75


class HttpLimits(msgspec.Struct, frozen=True):
    """``head_*``: of the request line and headers; ``head_s`` counts from the connection or the first byte.
    ``write_s``: how long a client may leave an answer lying."""

    connections_max: int = 4096
    head_bytes_max: int = 32 * 2**10
    head_s: float = 10.0
    write_s: float = 30.0


def check_certificate(certificate: Path, private_key: Path) -> None:
    """Raises ConfigError for a certificate that cannot be used."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(certificate, private_key, error) from error


def _unusable(certificate: Path | None, private_key: Path | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"the certificate {certificate} with the key {private_key} cannot be used: {error}",
        limit="http.certificate",
        hint="http.certificate and http.private_key are PEM files that belong together and may be read",
    )


class HttpServer:
    """Serves an application from `start` to `stop`. ``before`` is awaited on the server's loop before it listens,
    ``stopping`` is called on it when it is to stop."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        limits: HttpLimits | None = None,
        certificate: Path | None = None,
        private_key: Path | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        stopping: Callable[[], None] | None = None,
    ) -> None:
        """Takes the socket over. Raises ConfigError for a certificate that cannot be used."""
        self._listener = listener
        self._before = before
        self._stopping = stopping
        config = uvicorn.Config(
            app,
            loop="none",
            http=_protocol(limits or HttpLimits()),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a line for whatever hostile clients send would be a flood
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_certfile=certificate,
            ssl_keyfile=private_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise _unusable(certificate, private_key, error) from error
        self._server = _Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="agentrt-http", daemon=True)
        self._started = self._server.up

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def start(self) -> None:
        """Returns when it serves. Raises what ``before`` raises."""
        self._thread.start()
        self._started.result()

    def stop(self, timeout_s: float) -> None:
        """Take no more connections, let answers under way finish for at most so long, then close the rest. Blocks."""
        self._server.should_exit = True
        if self._stopping is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stopping)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            if self._before is not None:
                await self._before()
        except BaseException as error:
            self._listener.close()
            self._started.set_exception(error)
            return
        await self._server.serve(sockets=[self._listener])


def limits_of(config: HttpConfig) -> HttpLimits:
    """The bounds of the configuration."""
    return HttpLimits(
        config.connections_max, config.head_bytes_max, config.head_timeout_ms / 1e3, config.write_timeout_ms / 1e3
    )


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up: Future[None] = Future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set_result(None)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises ConfigError."""
    try:
        return socket.create_server((host, port), backlog=_BACKLOG, family=_family(host))
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {_why(error)}",
            limit="http.listen",
            hint="Choose another address: http.listen, or --listen",
        ) from error


def _why(error: OSError) -> str:
    """Without the address once more, which Python adds."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _protocol(limits: HttpLimits) -> type[HttpToolsProtocol]:
    class Bounded(HttpToolsProtocol):
        """uvicorn's protocol with bounds on what comes before a request is known."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._in_head = True
            self._head_bytes = 0
            self._head_timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections_max:
                self._refuse(503, "too many connections")
                return
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_write_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """The client has not taken what is buffered for it."""
            super().pause_writing()
            self._stop_write_timer()
            self._write_timer = self.loop.call_later(limits.write_s, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_timer is None:
                    self._wait_for_head()
            super().data_received(data)
            if self._in_head and self._head_bytes > limits.head_bytes_max and not self.transport.is_closing():
                self._refuse(431, "the request's head is too large")

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_waiting()
            if self._head_size() > limits.head_bytes_max:
                self._refuse(431, "the request's head is too large")
                return
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_response_complete()

        def _head_size(self) -> int:
            return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

        def _wait_for_head(self) -> None:
            self._head_timer = self.loop.call_later(limits.head_s, self._too_slow)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _too_slow(self) -> None:
            self._head_timer = None
            if self._in_head and not self.transport.is_closing():
                self._refuse(408, "the request did not come")

        def _refuse(self, status: int, why: str) -> None:
            text = why.encode()
            self.transport.write(
                b"HTTP/1.1 %d refused\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, len(text), text)
            )
            self.transport.close()

    return Bounded
