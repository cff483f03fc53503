"""The secrets with which callbacks are signed: one of each tenant, and for a while after a rotation the one before.

Secrets follow from the store's own and are stored nowhere; a row holds how often a tenant's was rotated.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.stores.base import NODE, Row, Store, scan_all

PREFIX: Final = b"callback-secret/"


class SecretStore(Protocol):
    """Where rotations are kept and secrets come from; `Runtime` has all three."""

    def derive_secret(self, purpose: str) -> bytes:
        """32 bytes of its own for each purpose."""

    async def read_store(self, look: Callable[[Store], Any]) -> Any:
        """``look(store)`` on a reader thread."""

    async def commit_rows(self, rows: tuple[Row, ...]) -> None:
        """Durable when it returns."""


class Rotated(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's secret is its ``number``-th, from 0; the one before is valid until ``previous_until_ns`` (Unix ns)."""

    number: int = 0
    previous_until_ns: int = 0


_decode: Final = msgspec.msgpack.Decoder(Rotated).decode
_NEVER: Final = Rotated()


class CallbackSecrets:
    """One loop's."""

    def __init__(self, store: SecretStore) -> None:
        self._store = store
        self._rotated: dict[str, Rotated] = {}
        self._rotating = asyncio.Lock()

    async def load(self) -> None:
        """Raises StoreError kinds."""
        rows = await self._store.read_store(lambda store: list(scan_all(store, NODE, PREFIX)))
        try:
            self._rotated = {key[len(PREFIX) :].decode(): _decode(value) for key, value in rows}
        except UNREADABLE as error:
            raise StoreCorruptError(f"the row of a callback secret cannot be read: {error}") from error

    def valid(self, tenant: str, now_ns: int) -> tuple[bytes, ...]:
        """The tenant's secrets, the newest first: one or two."""
        rotated = self._rotated.get(tenant, _NEVER)
        numbers = [rotated.number]
        if now_ns < rotated.previous_until_ns:
            numbers.append(rotated.number - 1)
        return tuple(self._store.derive_secret(_purpose(tenant, number)) for number in numbers)

    def previous_until_ns(self, tenant: str) -> int:
        """Until when the secret before is valid; in the past: it is not."""
        return self._rotated.get(tenant, _NEVER).previous_until_ns

    async def rotate(self, tenant: str, overlap_s: float) -> None:
        """Make a new one, durably; the one that was current stays valid for so long, older ones do not. Raises
        StoreError kinds."""
        async with self._rotating:
            until_ns = time.time_ns() + round(overlap_s * 1e9)
            rotated = Rotated(self._rotated.get(tenant, _NEVER).number + 1, until_ns)
            row = Row(NODE, PREFIX + tenant.encode(), msgspec.msgpack.encode(rotated))
            await self._store.commit_rows((row,))
            self._rotated[tenant] = rotated


def _purpose(tenant: str, number: int) -> str:
    # A tenant's name may hold anything: "#" where the first one has "/" keeps the two apart.
    return f"callback#{number}/{tenant}" if number else f"callback/{tenant}"
