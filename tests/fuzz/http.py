"""What HTTP clients and servers say: streams of events and problems as the client gets them, keys, callbacks'
addresses, and the protocol of the server over a transport that only remembers."""

import asyncio
from typing import Any, Final, cast

import uvicorn

from agentrt.callbacks.address import check_url
from agentrt.client.answers import error_of
from agentrt.client.events import Event, EventReader
from agentrt.errors import AgentrtError, InputError, UnauthorizedError, UnreachableError
from agentrt.http.keys import KeyRing, KeyStore
from agentrt.http.server import HttpLimits, _protocol

from .kit import JSON, target


@target()
def event_stream(data: bytes) -> None:
    """In whatever pieces it comes, the events are the same."""

    def read(pieces: list[bytes]) -> list[Event] | None:
        reader, found = EventReader(), []
        try:
            for piece in pieces:
                found += reader.feed(piece)
        except UnreachableError:
            return None
        return found

    middle = len(data) // 2
    whole, halves = read([data]), read([data[:middle], data[middle:]])
    assert whole == halves or whole is None or halves is None


@target(JSON)
def problem(data: bytes) -> None:
    """What answers with an error becomes one."""
    for status in (400, 503):
        assert isinstance(error_of(status, data), AgentrtError)


@target()
def authorization(data: bytes) -> None:
    """No header is a key where there is none."""
    try:
        KeyRing(cast(KeyStore, None)).check(data.decode("latin-1"))
    except UnauthorizedError:
        return
    raise AssertionError("a key was found")


@target()
def callback_url(data: bytes) -> None:
    """A URL is refused, or has a host that a connection can be made to."""
    try:
        found = check_url(data.decode(errors="surrogateescape"), ())
    except InputError:
        return
    assert found.scheme == "https" and found.host and 0 < found.port < 65_536


class _Transport(asyncio.Transport):
    """Takes what is written and remembers whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


_LIMITS: Final = HttpLimits(head_bytes_max=1_024)


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@target()
def http_connection(data: bytes) -> None:
    """Bytes on a connection, the first says in how many pieces: answers are whole, and a head has its bound."""

    async def talk() -> None:
        config = uvicorn.Config(_answer, loop="none", ws="none", lifespan="off", log_config=None, log_level="critical")
        config.load()
        state = uvicorn.server.ServerState()
        protocol = _protocol(_LIMITS)(config=config, server_state=state, app_state={})
        transport = _Transport()
        protocol.connection_made(transport)
        size = 1 + (data[0] if data else 0)
        for at in range(1, len(data), size):
            if transport.closed:
                break
            protocol.data_received(data[at : at + size])
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        assert not state.connections
        for answer in transport.written.split(b"HTTP/1.1 ")[1:]:
            assert answer[:3] in (b"204", b"400", b"431", b"100"), answer[:80]

    asyncio.run(talk())
