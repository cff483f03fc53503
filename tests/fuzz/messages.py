"""Frames between processes: a node and its tool hosts, the demo's supervisor and its node."""

import asyncio
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.demo import wire
from agentrt.errors import AgentrtError
from agentrt.tools.protocol import FrameError, FrameReader, Init, Ready, Reply, Work, encode_frame

from .kit import MSGPACK, target

_decoders: Final = [msgspec.msgpack.Decoder(kind) for kind in (Init, Work, Ready, list[Reply])]


def _cut(data: bytes, sizes: bytes) -> tuple[list[bytes], bool, int]:
    """Bodies, whether the stream is broken, and bytes left, when it comes in parts of these sizes, again and again."""
    reader, bodies, at, turn = FrameReader(), list[bytes](), 0, 0
    try:
        while at < len(data):
            size = sizes[turn % len(sizes)] + 1 if sizes else len(data)
            bodies.extend(bytes(body) for body in reader.feed(memoryview(data[at : at + size])))
            at, turn = at + size, turn + 1
    except FrameError:
        return bodies, True, 0
    return bodies, False, reader.rest_bytes


@target()
def frames(data: bytes) -> None:
    """A byte stream of frames: it is cut the same way however it arrives."""
    count = data[0] % 8 if data else 0
    sizes, stream = data[1 : 1 + count], data[1 + count :]
    bodies, broken, left = _cut(stream, sizes)
    assert (bodies, broken, left) == _cut(stream, b"")
    assert broken or sum(map(len, bodies)) + 4 * len(bodies) + left == len(stream)


@target(MSGPACK)
def frame_body(data: bytes) -> None:
    """What may be in a frame."""
    for decoder in _decoders:
        try:
            value: Any = decoder.decode(data)
        except UNREADABLE:
            continue
        frame = encode_frame(value)
        (body,) = FrameReader().feed(memoryview(frame))
        assert encode_frame(decoder.decode(body)) == frame  # not the values: a NaN is not equal to itself


class _Sink:
    """The part of a StreamWriter that `wire.send` uses."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


_loop: asyncio.AbstractEventLoop | None = None


def _received(receive: Any, stream: bytes) -> Any:
    global _loop
    _loop = _loop or asyncio.new_event_loop()
    reader = asyncio.StreamReader(loop=_loop)
    reader.feed_data(stream)
    reader.feed_eof()
    return _loop.run_until_complete(receive(reader))


@target(MSGPACK)
def demo_message(data: bytes) -> None:
    """A message of the demo, in either direction, and the same bytes without a length before them."""
    for receive in (wire.receive_in_node, wire.receive_in_supervisor):
        for stream in (len(data).to_bytes(4, "big") + data, data):
            try:
                message = _received(receive, stream)
            except AgentrtError:
                continue
            if message is not None:
                sink = _Sink()
                wire.send(sink, message)  # type: ignore[arg-type]
                again = _Sink()
                wire.send(again, _received(receive, sink.data))  # type: ignore[arg-type]
                assert again.data == sink.data  # not the messages: a NaN is not equal to itself
