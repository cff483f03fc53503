"""What agent processes write: lines, and any sequence of them at the guest that they talk to."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from agentrt.backends.base import Exit, Request
from agentrt.backends.process.agents.command import ProcessProgram
from agentrt.backends.process.agents.guest import ProcessGuest
from agentrt.backends.process.agents.limits import ProcessLimits
from agentrt.backends.process.agents.protocol import Line, LineError, LineReader, decode_line
from agentrt.syscalls import BY_NUMBER

from .kit import JSON, target

_LINE_BYTES_MAX: Final = 4096


def _cut(data: bytes, sizes: bytes) -> tuple[list[bytes], bool]:
    """Lines, and whether one is too long, when it comes in parts of these sizes, again and again."""
    reader, lines, at, turn = LineReader(_LINE_BYTES_MAX), list[bytes](), 0, 0
    try:
        while at < len(data):
            size = sizes[turn % len(sizes)] + 1 if sizes else len(data)
            reader.add(data[at : at + size])
            while (line := reader.line()) is not None:
                lines.append(line)
            at, turn = at + size, turn + 1
    except LineError:
        return lines, True
    return lines, False


@target()
def process_stream(data: bytes) -> None:
    """A byte stream of lines: it is cut the same way however it arrives."""
    count = data[0] % 8 if data else 0
    sizes, stream = data[1 : 1 + count], data[1 + count :]
    assert _cut(stream, sizes) == _cut(stream, b"")


def _decoded(data: bytes) -> Line | None:
    try:
        return decode_line(data)
    except LineError:
        return None


@target(JSON)
def process_line(data: bytes) -> None:
    """One line: refused, or what it says, and its payload is JSON."""
    line = _decoded(data)
    if line is not None:
        for part in line:
            if isinstance(part, bytes):
                part.decode()
                JSON.decode(part)


class _Node:
    """The pool and the engine around one guest, which checks what it is told."""

    def __init__(self) -> None:
        self.limits = ProcessLimits(request_bytes_max=_LINE_BYTES_MAX, result_bytes_max=_LINE_BYTES_MAX, inflight_max=8)
        self.loop = SimpleNamespace(
            add_reader=_nothing, remove_reader=_nothing, add_writer=_nothing, call_soon=_nothing, call_later=_timer
        )
        self.slots = SimpleNamespace(ask=lambda *_, **__: SimpleNamespace(lend=bool, release=lambda: True))
        self.snapshots = self.preemptions = 0
        self.handles = 0
        self.exits: list[Exit] = []
        self.unwinding = False

    on_ready = watch = forget = staticmethod(lambda *_: None)

    def tell(self, event: Callable[..., None], *args: Any) -> None:
        assert not self.exits, "nothing follows an exit"
        event(*args)

    def may_snapshot(self) -> bool:
        return self.handles % 2 == 0

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        for request in requests:
            row = BY_NUMBER[request.op]
            request.payload.decode()
            if request.handle:
                self.handles += 1
            assert request.handle == (self.handles if row.step else 0)
        assert waiting is None or all(0 < handle <= self.handles for handle in waiting)

    def on_abandoned(self, handles: tuple[int, ...]) -> None:
        assert handles and all(0 < handle <= self.handles for handle in handles)

    def on_unwinding(self) -> None:
        assert not self.unwinding
        self.unwinding = True

    def on_exit(self, exit: Exit) -> None:
        self.exits.append(exit)


def _nothing(*_: Any) -> None:
    """Readers, writers and callbacks of a loop that does not run."""


def _timer(*_: Any) -> asyncio.TimerHandle:
    return SimpleNamespace(cancel=lambda: None)  # type: ignore[return-value]


class _Socket:
    """Takes all that is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def fileno(self) -> int:
        return 3

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)


@target()
def process_guest(data: bytes) -> None:
    """A guest that hears these lines, one a row, and is answered, told to unwind and killed in between: it tells the
    engine what it may, ends once, and says nothing but lines to its process. A row of one letter is the engine's move:
    ``a`` answers what it waits for, ``l`` goes live, ``u`` unwinds, ``k`` kills."""
    node: Any = _Node()
    program = ProcessProgram("v", {}, True, ("x",), {}, "freeze", (), (), False, 0, ())
    replay = data[:1] == b"r"
    guest = ProcessGuest(
        node, 1, program, node, run_id="run", tenant="t", tier=1, input=b"1", restored=None, fuel=1, seed=b"s",
        clock_ns=1, replay=replay,
    )  # fmt: skip
    process: Any = SimpleNamespace(
        pidfd=4, kill=_nothing, cpu_ns=int, thaw=_nothing, freeze=_nothing, change_tier=_nothing
    )
    own: Any = _Socket()
    launched: Any = SimpleNamespace(process=process, socket=own, tail=None)
    guest.began(launched)
    guest._reading = True
    seq = 0
    for row in data.split(b"\n")[:200]:
        if node.exits:
            break
        if row == b"a" and guest.waiting is not None:
            seq += 1
            guest.complete(guest.waiting[seq % len(guest.waiting)], seq % 3 == 0, b"[1,\n2]", seq, seq)
        elif row == b"l" and replay:
            replay = False
            guest.go_live()
        elif row == b"u":
            guest.unwind("why")
        elif row == b"k":
            guest.kill()
        else:
            guest._reader.add(row + b"\n")
            guest._hear()
    guest._flush()
    assert len(node.exits) <= 1
    for line in bytes(own.sent).split(b"\n")[:-1]:
        assert isinstance(JSON.decode(line), dict)
