"""The demo's ledger: a process of its own that keeps effects by idempotency key.

It stands for the outside world: an effect with a new key is entered, one with a known key is dropped and counted. It
never sees the node's store, so what it holds is independent evidence. One JSON object a line over a Unix socket:
``{"key", "order", "place"}`` -> ``{"new": bool}``; ``{"report": true}`` -> `Report`.
"""

import asyncio
import sys
from collections import Counter
from typing import Final

import msgspec

_BACKLOG: Final = 1024  # hosts start many at once after a kill


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """An effect: place ``place`` of order ``order``."""

    key: str
    order: str
    place: int


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    report: bool


class Answer(msgspec.Struct):
    new: bool


class Report(msgspec.Struct):
    """``entries[order][place]`` counts the distinct keys entered; ``dropped`` the repetitions of known keys."""

    entries: dict[str, dict[int, int]]
    dropped: int


class Book:
    """The ledger's state, pure."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._entries: dict[str, Counter[int]] = {}
        self._dropped = 0

    def enter(self, entry: Entry) -> Answer:
        if entry.key in self._keys:
            self._dropped += 1
            return Answer(new=False)
        self._keys.add(entry.key)
        self._entries.setdefault(entry.order, Counter())[entry.place] += 1
        return Answer(new=True)

    def report(self) -> Report:
        return Report({order: dict(places) for order, places in self._entries.items()}, self._dropped)


LINE_BYTES_MAX: Final = 64 << 20  # of a report
_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _answer(book: Book, line: bytes) -> bytes:
    if "report" in _decoder.decode(line):
        return msgspec.json.encode(book.report())
    return msgspec.json.encode(book.enter(msgspec.json.decode(line, type=Entry)))


async def serve(path: str) -> None:
    """Serve until standard input closes (the supervisor is gone). Prints "ready" when it listens."""
    book = Book()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(_answer(book, line) + b"\n")
                await writer.drain()
        except ConnectionError:
            pass  # the node's tools die with the node, that is the point of the demo
        finally:
            writer.close()

    async with await asyncio.start_unix_server(client, path, backlog=_BACKLOG):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Client:
    """A connection to the ledger; calls may overlap, answers come in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(cls, path: str) -> "Client":
        return cls(*await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX))

    async def _ask(self, message: Entry | Ask) -> bytes:
        async with self._lock:
            self._writer.write(msgspec.json.encode(message) + b"\n")
            line = await self._reader.readline()
        if not line:
            raise ConnectionError("the ledger is gone")
        return line

    async def enter(self, entry: Entry) -> bool:
        """Whether the key was new."""
        return msgspec.json.decode(await self._ask(entry), type=Answer).new

    async def report(self) -> Report:
        return msgspec.json.decode(await self._ask(Ask(report=True)), type=Report)

    def close(self) -> None:
        self._writer.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
