"""When the node was down, and by how much approvals' deadlines move for it.

A person cannot answer a node that is down. So an approval's deadline moves by every downtime that begins before it: the
row of its timer stays where it is, and what is due at it is worked out from the spans. The node remembers when it was
last alive in a row that is written every ten seconds, and at a close in good order; so after a crash a deadline may
move by as much too far, never too little. Until it has read when its predecessor was alive, a node says so in a row of
its own: it may accept runs meanwhile, and be gone before it could read.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from agentrt.errors import AgentrtError
from agentrt.stores.base import NODE, Row, Store

_ALIVE_KEY: Final = b"alive"
_SPANS_KEY: Final = b"downtimes"
_EARLY_PREFIX: Final = b"early "  # and when that life began, 8 bytes
_BEAT_S: Final = 10.0
_RETRY_S: Final = 1.0
#: Remembered; of more the shortest are forgotten.
SPANS_MAX: Final = 1_000

Span = tuple[int, int]  # from, to: Unix ns

_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.Decoder(list[Span]).decode


def moved(spans: Sequence[Span], since_ns: int, due_ns: int) -> int:
    """The deadline of what was asked at ``since_ns`` and due at ``due_ns``, if ``spans`` (in order) were downtimes."""
    for begins, ends in spans:
        # It may have been asked in the last seconds of a life, after the node had last said that it was alive.
        if ends > since_ns and begins < due_ns:
            due_ns += ends - max(begins, since_ns)
    return due_ns


def with_span(spans: list[Span], begins: int, ends: int) -> list[Span]:
    """The spans and a new one, in order."""
    if ends <= begins:
        return spans
    found = [*spans, (begins, ends)]
    if len(found) > SPANS_MAX:
        found.remove(min(found, key=lambda span: span[1] - span[0]))
    return sorted(found)


def with_lives(spans: list[Span], alive_ns: int | None, lives: Sequence[Span], now_ns: int) -> list[Span]:
    """The spans and those between the lives of nodes: one that was last alive at ``alive_ns``, later ones, this one."""
    for begins, ends in [*sorted(lives), (now_ns, now_ns)]:
        spans = spans if alive_ns is None else with_span(spans, alive_ns, begins)
        alive_ns = ends
    return spans


class Runs(Protocol):
    """What it needs of the engine."""

    now_ns: Callable[[], int]

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None: ...


class Downtime:
    """Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs) -> None:
        self._loop = loop
        self._runs = runs
        self._spans: list[Span] = []
        self._handle: asyncio.TimerHandle | None = None
        self._open = self._closed = False
        self._began = b""  # key of this life's own row; empty: not open

    def open(self, then: Callable[[], None]) -> None:
        """Find out how long the node was down, then call ``then``."""
        self._began = _EARLY_PREFIX + self._runs.now_ns().to_bytes(8, "big")
        self._read(then)

    def _read(self, then: Callable[[], None]) -> None:
        def look(store: Store) -> tuple[bytes | None, bytes | None, list[tuple[bytes, bytes]]]:
            early = store.scan_rows(NODE, _EARLY_PREFIX, b"", SPANS_MAX)
            return store.read_row(NODE, _ALIVE_KEY), store.read_row(NODE, _SPANS_KEY), early

        def found(rows: Any, error: BaseException | None) -> None:
            if self._closed:
                return
            if error is not None:
                self._handle = self._loop.call_later(_RETRY_S, self._read, then)
                return
            alive, spans, early = rows
            lives = [(_time(key[-8:]), _time(value)) for key, value in early if key != self._began]
            known: list[Span] = [] if spans is None else _decode(spans)
            self._spans = with_lives(known, None if alive is None else _time(alive), lives, self._runs.now_ns())
            self._open = True
            gone = [Row(NODE, key, None) for key in dict.fromkeys([self._began, *(key for key, _ in early)])]
            self._write(Row(NODE, _SPANS_KEY, _encode(self._spans)), *gone, self._alive())
            then()

        self._runs.commit_rows((self._alive(),), lambda error: None)
        self._runs.read(look, found)

    def close(self) -> None:
        """The node stops in good order."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        if self._began:
            self._runs.commit_rows((self._alive(),), lambda error: None)

    def moved(self, since_ns: int, due_ns: int) -> int:
        """The deadline of what was asked at ``since_ns``."""
        return moved(self._spans, since_ns, due_ns) if self._spans else due_ns

    def _alive(self) -> Row:
        return Row(NODE, _ALIVE_KEY if self._open else self._began, self._runs.now_ns().to_bytes(8, "big"))

    def _write(self, *rows: Row) -> None:
        def written(error: AgentrtError | None) -> None:
            if self._closed:
                return
            if error is None:
                self._handle = self._loop.call_later(_BEAT_S, lambda: self._write(self._alive()))
            else:  # the spans are not in the store before the row that makes them unnecessary is
                self._handle = self._loop.call_later(_RETRY_S, lambda: self._write(*rows[:-1], self._alive()))

        self._runs.commit_rows(rows, written)


def _time(value: bytes) -> int:
    return int.from_bytes(value, "big")
