"""Frames between a node and a tool host, over one Unix stream socket.

    offset 0  u32 little endian: length of the body
           4  body: one msgpack value

The node's first frame is `Init`, then every frame is a `Work`; the host answers `Init` with a `Ready`, then every frame
is a list of `Reply`. A host and its workers speak in the same frames: `Job` one way, `Loaded` (the first time) and a
list of `Reply` the other. Frames carry whatever is ready when they are written; there is no timer.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

HEADER_BYTES: Final = 4
#: A frame is filled up to this size, and may exceed it by one call or reply (node: 1 MiB, host: 4 MiB by default).
FRAME_FILL_BYTES: Final = 1 << 20
#: More than any configured limit lets through: the peer has gone mad.
FRAME_BYTES_MAX: Final = 256 << 20
#: What is read at once.
RECEIVE_BYTES: Final = 256 * 1024


class ToolRef(msgspec.Struct, frozen=True, array_like=True):
    """Tell a host what tool ``number`` is."""

    number: int
    name: str
    ref: str


class Init(msgspec.Struct, frozen=True, array_like=True):
    sys_path: list[str]
    environment_path: str | None  # PYTHONPATH as the node has it; None: not set
    result_bytes_max: int
    out_bytes_max: int  # replies waiting for the node, above which the host takes no more calls
    memory_bytes_max: int  # 0: no limit
    tools: list[ToolRef]


class CallMore(msgspec.Struct, frozen=True, array_like=True):
    """What few calls have."""

    batch: int = 0  # not 0: neighbours in a frame with the same number are given to the tool at once
    reconcile: bool = False  # ask what became of the call instead
    secrets: dict[str, str] | None = None  # values behind the references in the arguments


class Call(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    number: int
    args: bytes  # JSON
    key: str | None
    attempt: int
    timeout_ns: int
    more: CallMore | None = None


class Work(msgspec.Struct, frozen=True, array_like=True):
    calls: list[Call]
    tools: list[ToolRef] = []  # new ones, to be imported before the calls
    cancels: list[int] = []  # ids of calls that nobody wants any more
    notice: bool = False  # the node stops: whatever runs gets SIGUSR1


class Ready(msgspec.Struct, frozen=True, array_like=True):
    pid: int


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    payload: bytes  # JSON: the result, or {"code", "message"}
    code: str | None  # None: ok
    cost_ns: int  # wall time of the execution
    unknown: bool = False  # the tool's code was stopped, or its process ended, and it may have had its effect


class Job(msgspec.Struct, frozen=True, array_like=True):
    """What a host gives a worker: calls of one sync tool, one or a batch."""

    tool: ToolRef
    calls: list[Call]


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """A worker has the tool of its job; the execution begins now. Sent once per tool and worker."""

    number: int


class FrameError(Exception):
    """The peer sent something that is no frame."""


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._need = HEADER_BYTES  # bytes in _rest at which there is something to cut

    def feed(self, data: memoryview) -> Iterator[memoryview]:
        """The bodies completed by ``data``; each is valid until the next one is asked for. Raises FrameError."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:  # so that a large frame is not copied again for each part of it
                return
            data = memoryview(self._rest)
            self._rest = bytearray()
        position, end = 0, len(data)
        self._need = HEADER_BYTES
        while end - position >= HEADER_BYTES:
            length = int.from_bytes(data[position : position + HEADER_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {length} bytes")
            after = position + HEADER_BYTES + length
            if after > end:
                self._need = HEADER_BYTES + length
                break
            yield data[position + HEADER_BYTES : after]
            position = after
        if position < end:
            self._rest += data[position:]

    @property
    def rest_bytes(self) -> int:
        """Bytes of a frame not yet complete."""
        return len(self._rest)


_encoder: Final = msgspec.msgpack.Encoder()


def encode_frame(value: Init | Work | Ready | Job | Loaded | list[Reply]) -> bytearray:
    """The value as one frame."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(value, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return buffer
