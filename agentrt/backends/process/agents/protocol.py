"""The lines between a node and an agent process, ABI 1. Pure and bounded.

One JSON object a line, ended by one newline, UTF-8, no other newline in it. What the node writes has its members in the
order shown, without spaces, its payload last, so that a program needs no JSON parser to find it.

    node to process                                         process to node
    {"start":{"abi":1,…}} {"input":…} [{"restored":…}]       {"ready":1}   first, once SIGUSR1 does not end it
                                                             {"ask":H,"op":"tool.call","request":{…}}
    {"answer":H,"ok":true,"clock_ns":N,"value":…}            {"wait":[H,…]}
    {"value":…}         to an ask with H = 0                 {"abandon":[H,…]}
    {"refused":"why"}   to a snapshot                        {"snapshot":…}
    {"unwind":"why"}    instead of an answer                 {"unwinding":true} … {"unwound":true}
                                                             {"return":…} or {"fail":{…}}
"""

from typing import Any, Final, NamedTuple

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.syscalls import BY_OP, TABLE

ABI: Final = 1
#: What a line of a process has around its payload, at most: longer ones are no lines.
FRAME_BYTES_MAX: Final = 1024
#: Handles in one wait or abandonment.
HANDLES_MAX: Final = 10_000
#: Ops that the adapter answers itself, and `log`, which is not answered: none of them is a step, and none has a handle.
UNNUMBERED: Final = frozenset(row.number for row in TABLE if not row.step)


class LineError(ValueError):
    """The process wrote what is no line of this ABI; the text is for its author."""


class Ready(NamedTuple):
    """The program is there, and speaks this ABI."""

    abi: int


class Ask(NamedTuple):
    """A syscall: handle (0 for `UNNUMBERED` ops), number of the op, JSON."""

    handle: int
    op: int
    payload: bytes


class Wait(NamedTuple):
    """The process goes on when one of these is answered."""

    handles: tuple[int, ...]


class Abandon(NamedTuple):
    """It will never wait for these."""

    handles: tuple[int, ...]


class Snapshot(NamedTuple):
    """A checkpoint that a notice has brought about, and not the program's order: taken or refused, it is no step."""

    state: bytes


class Unwinding(NamedTuple):
    """The program is over; what is asked for from now on, its unwinding handlers ask."""


class Unwound(NamedTuple):
    """The handlers are through."""


class Returned(NamedTuple):
    """The end, with the run's result as JSON."""

    result: bytes


class Failed(NamedTuple):
    """The end, with an error as a JSON object."""

    error: bytes


Line = Ready | Ask | Wait | Abandon | Snapshot | Unwinding | Unwound | Returned | Failed


class _Said(msgspec.Struct, forbid_unknown_fields=True, rename={"returned": "return"}):
    ready: int | msgspec.UnsetType = msgspec.UNSET
    ask: int | msgspec.UnsetType = msgspec.UNSET
    op: str | msgspec.UnsetType = msgspec.UNSET
    request: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    wait: list[int] | msgspec.UnsetType = msgspec.UNSET
    abandon: list[int] | msgspec.UnsetType = msgspec.UNSET
    snapshot: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    unwinding: bool | msgspec.UnsetType = msgspec.UNSET
    unwound: bool | msgspec.UnsetType = msgspec.UNSET
    returned: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    fail: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode: Final = msgspec.json.Decoder(_Said).decode
_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_KINDS: Final = ("ready", "ask", "wait", "abandon", "snapshot", "unwinding", "unwound", "returned", "fail")


def decode_line(data: bytes) -> Line:
    """A line of a process, without its newline. Raises LineError."""
    try:
        data.decode()
        said = _decode(data)
    except UNREADABLE as error:
        raise LineError(f"this is no line of the protocol: {error}") from None
    kinds = [kind for kind in _KINDS if getattr(said, kind) is not msgspec.UNSET]
    if len(kinds) != 1:
        raise LineError("a line has one of ready, ask, wait, abandon, snapshot, unwinding, unwound, return and fail")
    if kinds[0] == "ask":
        return _ask(said)
    if said.op is not msgspec.UNSET or said.request is not msgspec.UNSET:
        raise LineError("op and request belong to an ask")
    value = getattr(said, kinds[0])
    match kinds[0]:
        case "ready":
            return Ready(value)
        case "wait" | "abandon":
            handles = tuple(value)
            if not 0 < len(handles) <= HANDLES_MAX or min(handles) < 1 or len(set(handles)) != len(handles):
                raise LineError(f"{kinds[0]} names 1 to {HANDLES_MAX} different handles")
            return Wait(handles) if kinds[0] == "wait" else Abandon(handles)
        case "snapshot":
            return Snapshot(bytes(value))
        case "returned":
            return Returned(bytes(value))
        case "fail":
            try:
                told = _decode_object(value)
            except UNREADABLE:
                told = {}
            if not isinstance(told.get("code"), str) or not isinstance(told.get("message"), str):
                raise LineError("fail has an object with the texts code and message")
            return Failed(bytes(value))
        case _ if value is not True:
            raise LineError(f"{kinds[0]} is true or not there")
    return Unwinding() if kinds[0] == "unwinding" else Unwound()


def _ask(said: _Said) -> Ask:
    assert isinstance(said.ask, int)
    row = None if said.op is msgspec.UNSET else BY_OP.get(said.op)
    if row is None:
        raise LineError(f"there is no op {said.op if isinstance(said.op, str) else ''!r}")
    if not 0 <= said.ask < 1 << 31 or (said.ask == 0) is not (row.number in UNNUMBERED):
        raise LineError(f"an ask of {row.op} has the handle {'0' if row.number in UNNUMBERED else '1, 2, 3, …'}")
    payload = b"{}" if said.request is msgspec.UNSET else bytes(said.request)
    return Ask(said.ask, row.number, payload)


class LineReader:
    """Cuts what a process sends into lines, each at most ``line_bytes_max`` long without its newline."""

    def __init__(self, line_bytes_max: int) -> None:
        self._line_bytes_max = line_bytes_max
        self._held = bytearray()
        self._begin = 0  # of the next line
        self._seen = 0  # up to where there is no newline

    def add(self, data: bytes | memoryview) -> None:
        """More of it. To be asked for lines before the next."""
        del self._held[: self._begin]
        self._seen = max(0, self._seen - self._begin)
        self._begin = 0
        self._held += data

    def line(self) -> bytes | None:
        """The next line; None: it has not come yet. Raises LineError if it is too long."""
        end = self._held.find(b"\n", max(self._begin, self._seen))
        if (len(self._held) if end < 0 else end) - self._begin > self._line_bytes_max:
            raise LineError(f"a line has more than {self._line_bytes_max} bytes")
        if end < 0:
            self._seen = len(self._held)
            return None
        line = bytes(self._held[self._begin : end])
        self._begin = end + 1
        return line

    def rest(self) -> bytes:
        """What was added, and is in no line that was given."""
        return bytes(self._held[self._begin :])


# --- what the node writes -----------------------------------------------------------

_encode: Final = msgspec.json.encode


class Begin(msgspec.Struct, frozen=True):
    """What a process is told at its start, and with what limits."""

    abi: int
    run_id: str
    tenant: str
    clock_ns: int
    request_bytes_max: int
    result_bytes_max: int
    restored: bool  # whether a line with the state of the last checkpoint follows


def start_lines(begin: Begin, input: bytes, restored: bytes | None) -> bytes:
    """The first lines; ``input`` and ``restored`` are JSON."""
    lines = b'{"start":%b}\n{"input":%b}\n' % (_encode(begin), _one_line(input))
    return lines if restored is None else lines + b'{"restored":%b}\n' % _one_line(restored)


def answer_line(handle: int, ok: bool, payload: bytes, clock_ns: int) -> bytes:
    """The answer to a wait; ``payload`` is JSON, an error if it is not ``ok``."""
    return b'{"answer":%d,"ok":%b,"clock_ns":%d,"value":%b}\n' % (
        handle,
        b"true" if ok else b"false",
        clock_ns,
        _one_line(payload),
    )


def value_line(value: bytes) -> bytes:
    """The answer to an ask without a handle; ``value`` is JSON."""
    return b'{"value":%b}\n' % value


def refused_line(why: str) -> bytes:
    """The snapshot is not taken; the process goes on."""
    return b'{"refused":%b}\n' % _encode(why)


def unwind_line(why: str) -> bytes:
    """The run was told to end: no further answer comes to the program."""
    return b'{"unwind":%b}\n' % _encode(why)


def _one_line(payload: bytes) -> bytes:
    """The same JSON without newlines: inside a text JSON has none, elsewhere they mean as much as spaces."""
    if b"\n" in payload or b"\r" in payload:
        return payload.replace(b"\n", b" ").replace(b"\r", b" ")
    return payload
