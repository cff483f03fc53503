"""Messages between the demo's supervisor and its node: msgpack, each behind a 4-byte length."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import InputError


class Submit(msgspec.Struct, tag=True):
    """Start a run for an order; the order's id is the idempotency key, so sending it again is safe."""

    order: str
    agent: str
    tier: int
    tenant: str
    input: dict[str, Any]


class Watch(msgspec.Struct, tag=True):
    """Tell the end of a run accepted earlier."""

    order: str
    run_id: str


class ResumeParked(msgspec.Struct, tag=True):
    """An operator's word: let every run go on that waits for one."""


class Finish(msgspec.Struct, tag=True):
    """Close the runtime and exit."""


class Ready(msgspec.Struct, tag=True):
    """The node accepts work."""


class Accepted(msgspec.Struct, tag=True):
    """The order's run is durable."""

    order: str
    run_id: str


class Refused(msgspec.Struct, tag=True):
    order: str
    code: str
    message: str


class Ended(msgspec.Struct, tag=True):
    """The run ended. ``submitted_ns`` and ``first_ns`` (CLOCK_MONOTONIC) are 0 if it did not start in this process."""

    order: str
    run_id: str
    state: str
    error: str
    submitted_ns: int
    first_ns: int


class Resumed(msgspec.Struct, tag=True):
    """So many runs waited for an operator and go on."""

    count: int


class Statistics(msgspec.Struct, tag=True):
    """Counters since the node started."""

    values: dict[str, Any]


class Closed(msgspec.Struct, tag=True):
    """The runtime is closed; ``runs`` is how many the store holds."""

    runs: int


ToNode = Submit | Watch | ResumeParked | Finish
ToSupervisor = Ready | Accepted | Refused | Ended | Resumed | Statistics | Closed

_encoder: Final = msgspec.msgpack.Encoder()
_decode_to_node: Final = msgspec.msgpack.Decoder(ToNode).decode
_decode_to_supervisor: Final = msgspec.msgpack.Decoder(ToSupervisor).decode


def send(writer: asyncio.StreamWriter, message: ToNode | ToSupervisor) -> None:
    """Queue a message; the demo's own rate bounds what is queued."""
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


_T = TypeVar("_T")


async def _receive(reader: asyncio.StreamReader, decode: Callable[[bytes], _T]) -> _T | None:
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        data = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        return decode(data)
    except UNREADABLE as error:
        raise InputError(f"the other side sent what is no message: {error}") from error


async def receive_in_node(reader: asyncio.StreamReader) -> ToNode | None:
    """The next message; None when the supervisor is gone. Raises InputError for what is no message."""
    return await _receive(reader, _decode_to_node)


async def receive_in_supervisor(reader: asyncio.StreamReader) -> ToSupervisor | None:
    """The next message; None when the node is gone. Raises InputError for what is no message."""
    return await _receive(reader, _decode_to_supervisor)
