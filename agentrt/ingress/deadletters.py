"""Events that could become no runs: a row each, of the node's own store, under the event's name. Pure.

The row is durable before the event is acknowledged, so an event is always on the bus, a run, or here.
"""

from hashlib import blake2b
from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import InputError, StoreCorruptError
from agentrt.ingress.port import OFFSET_MAX, Delivery
from agentrt.stores.base import NODE, Row

#: Rows of NODE that begin so.
PREFIX: Final = b"dead letter\0"
_ID_BYTES: Final = 24


class DeadLetter(msgspec.Struct, frozen=True):
    """``source_name``: the ingress source, whose settings were ``agent``, ``tenant`` and ``tier`` then. ``code`` and
    ``message``: the error. ``at_ns``: Unix ns."""

    source_name: str
    delivery: Delivery
    agent: str
    tenant: str
    tier: int
    code: str
    message: str
    at_ns: int
    key: str | None = None  # the idempotency key that its run would have had

    @property
    def id(self) -> str:
        """48 hexadecimal digits; the same for every delivery of the event."""
        return letter_key(self.delivery)[len(PREFIX) :].hex()

    @property
    def size_bytes(self) -> int:
        """What counts against the bound."""
        return len(self.delivery.payload)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(DeadLetter).decode


def letter_key(delivery: Delivery) -> bytes:
    """Prefix | hash of source and partition (16) | offset (8)."""
    place = blake2b(f"{delivery.source} {delivery.partition}".encode(), digest_size=16).digest()
    return PREFIX + place + delivery.offset.to_bytes(8, "big")


def key_of_id(id: str) -> bytes:
    """The row's key. Raises InputError."""
    try:
        raw = bytes.fromhex(id)
    except ValueError:
        raw = b""
    if len(raw) != _ID_BYTES:
        raise InputError(f"{id!r:.100} is no id of a dead letter", hint="`agentrt dead-letters ls` shows them")
    return PREFIX + raw


def letter_row(letter: DeadLetter) -> Row:
    """The row that keeps it."""
    return Row(NODE, letter_key(letter.delivery), _encode(letter))


def read_letter(value: bytes) -> DeadLetter:
    """Raises StoreCorruptError."""
    try:
        letter = _decode(value)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a dead letter cannot be read: {error}") from error
    if not 0 <= letter.delivery.offset <= OFFSET_MAX:
        raise StoreCorruptError(f"a dead letter's event has the offset {letter.delivery.offset}")
    return letter
