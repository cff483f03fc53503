"""Log lines on their way to a handler, and a call's arguments in a tool host."""

import logging

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.engine.logrelay import LogRelay
from agentrt.tools.binding import Binding

from .kit import JSON, target

logging.getLogger("agentrt.agent").propagate = False  # the lines themselves say nothing here
logging.getLogger("agentrt.agent").addHandler(logging.NullHandler())


@target(JSON)
def log_line(data: bytes) -> None:
    """The request of a log: the relay's thread survives it."""
    relay = LogRelay()
    relay.put("run", data)
    relay.put("run", b'{"message": "after it"}')
    relay.close(10)
    assert relay.dropped == 0 and not relay._lines, "the relay died of it"


def _tool(number: int, text: str = "", items: list[int] | None = None, *, idempotency_key: str) -> None: ...


_binding = Binding(_tool)


@target(JSON)
def tool_arguments(data: bytes) -> None:
    """A call's arguments, in the host."""
    try:
        given = _binding.arguments(data, "key", 1)
    except UNREADABLE:
        return
    assert type(given["number"]) is int and given["idempotency_key"] == "key"
    assert msgspec.json.encode(given)
