"""The node's dead letters: kept within bounds, looked at, tried again, thrown away. From any loop."""

import threading
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from agentrt.engine.accept import Asked, Via
from agentrt.errors import InputError, QueueFullError
from agentrt.ingress.deadletters import PREFIX, DeadLetter, key_of_id, letter_key, letter_row, read_letter
from agentrt.ingress.service import origin_of
from agentrt.stores.base import NODE, Row, Store

_PAGE: Final = 100  # of up to a payload's bound each

T = TypeVar("T")


class Place(Protocol):
    """What it needs of a runtime."""

    async def read_store(self, look: Callable[[Store], T]) -> T: ...

    async def commit_rows(self, rows: tuple[Row, ...]) -> None: ...

    def accept_event(self, asked: Asked) -> Awaitable[str]: ...


class Letterbox:
    """``items_max``, ``bytes_max``: of what is kept; the payloads count."""

    def __init__(self, place: Place, items_max: int, bytes_max: int) -> None:
        self._place = place
        self._items_max, self._bytes_max = items_max, bytes_max
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._loaded = False

    async def count(self) -> tuple[int, int]:
        """(letters, bytes) that are kept."""
        await self._load()
        return len(self._sizes), self._bytes

    async def keep(self, letter: DeadLetter) -> None:
        """Keep it, durably; the same event again replaces it. Raises QueueFullError, StoreError kinds."""
        await self._load()
        key, size = letter_key(letter.delivery), letter.size_bytes
        with self._lock:
            known = self._sizes.get(key)
            items, total = len(self._sizes) + (known is None), self._bytes + size - (known or 0)
            if items > self._items_max or (total > self._bytes_max and len(self._sizes) > (known is not None)):
                name = "items_max" if items > self._items_max else "bytes_max"
                raise QueueFullError(
                    f"{len(self._sizes)} dead letters with {self._bytes} bytes are kept",
                    limit=f"ingress.dead_letters_{name}",
                    hint="`agentrt dead-letters` shows, retries and drops them",
                )
            self._sizes[key], self._bytes = size, total
        try:
            await self._place.commit_rows((letter_row(letter),))
        except BaseException:
            with self._lock:  # it may be there all the same; the next start counts again
                if known is None:
                    self._forget(key)
            raise

    async def list(self, after: str = "", limit: int = _PAGE) -> list[DeadLetter]:
        """Those behind the id ``after``, in the order of their ids. Raises InputError, StoreError kinds."""
        key = key_of_id(after) if after else b""
        rows = await self._place.read_store(lambda store: store.scan_rows(NODE, PREFIX, key, min(limit, _PAGE)))
        return [read_letter(value) for _, value in rows]

    async def get(self, id: str) -> DeadLetter:
        """Raises InputError if there is none of that id."""
        key = key_of_id(id)
        value = await self._place.read_store(lambda store: store.read_row(NODE, key))
        if value is None:
            raise InputError(f"there is no dead letter {id}")
        return read_letter(value)

    async def retry(self, id: str, agent: str | None = None) -> str:
        """Make a run of it after all, and drop it; the run's id. ``agent``: another one than then. It is the event's
        one run, however often it is retried. Raises what `Runtime.submit` raises: the letter stays then."""
        letter = await self.get(id)
        delivery = letter.delivery
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        asked = Asked(
            agent or letter.agent,
            delivery.payload,
            letter.tenant,
            None if letter.tier < 0 else letter.tier,
            letter.key,
            via=Via("bus", delivery.topic, delivery.type, headers),
            origin=origin_of(delivery),
        )
        run_id = await self._place.accept_event(asked)
        await self.drop(id)
        return run_id

    async def drop(self, id: str) -> None:
        """Throw it away, durably; the bus does not deliver it again. Raises InputError if there is none of that id."""
        await self._load()
        await self.get(id)
        key = key_of_id(id)
        await self._place.commit_rows((Row(NODE, key, None),))
        with self._lock:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._bytes -= self._sizes.pop(key, 0)

    async def _load(self) -> None:
        """Count what the store has, once."""
        if self._loaded:
            return
        sizes: dict[bytes, int] = {}
        after = b""
        while True:

            def look(store: Store, after: bytes = after) -> list[tuple[bytes, bytes]]:
                return store.scan_rows(NODE, PREFIX, after, _PAGE)

            rows = await self._place.read_store(look)
            sizes |= {key: read_letter(value).size_bytes for key, value in rows}
            if len(rows) < _PAGE:
                break
            after = rows[-1][0]
        with self._lock:
            if not self._loaded:
                self._loaded = True
                self._sizes = sizes
                self._bytes = sum(sizes.values())
