"""Server-sent events, as they arrive. Pure."""

from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import UnreachableError

#: Longer than any event of a node.
EVENT_BYTES_MAX: Final = 2**20


class Event(msgspec.Struct, frozen=True):
    """What happened to a run; ``id`` is the number of the journal's record, 0 for what has none. Of a node: Unix ms."""

    id: int
    kind: str
    data: dict[str, Any]


class EventReader:
    """Takes a stream in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete now. Raises UnreachableError for what no node would send."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise UnreachableError("an event is too long to be one of an agentrt node")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
    if b"event" not in fields:
        return None  # a comment, or the pause that the server wishes
    try:
        return Event(
            int(fields.get(b"id", b"0")),
            fields[b"event"].decode(),
            msgspec.json.decode(fields[b"data"], type=dict[str, Any]),
        )
    except (*UNREADABLE, KeyError, ValueError) as error:  # ValueError: an id that is no number
        raise UnreachableError(f"an event cannot be read: {error}") from error
