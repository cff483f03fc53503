"""What is owed to somebody outside when a run ends: one row in OUTBOX, written with the end itself, gone when it was
delivered or given up. Who delivers stands in agentrt/callbacks."""

from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.stores.base import OUTBOX, Row
from agentrt.stores.keys import outbox_key

URL_CHARS_MAX: Final = 2_048
#: Where it stands among a run's rows in OUTBOX.
_PATH: Final = "!callback"


class Callback(msgspec.Struct, frozen=True, array_like=True):
    """The end of a run of ``tenant`` is to be told to ``url``; after so many attempts, not before ``due_ns``."""

    tenant: str
    url: str
    attempts: int
    due_ns: int


class CallbackDue(msgspec.Struct, frozen=True):
    """A run with a callback has ended; observers see it as ("callback", CallbackDue)."""

    run_id: str
    tenant: str
    due_ns: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Callback).decode


def callback_key(run_id: str) -> bytes:
    """Of the row in OUTBOX."""
    return outbox_key(run_id, _PATH)


def callback_row(run_id: str, callback: Callback | None) -> Row:
    """The row; None removes it."""
    return Row(OUTBOX, callback_key(run_id), None if callback is None else _encode(callback))


def is_callback(key: bytes) -> bool:
    """Whether a key of OUTBOX is one of these."""
    return key[16:] == _PATH.encode()


def read_callback(value: bytes) -> Callback:
    """Raises StoreCorruptError."""
    try:
        return _decode(value)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a callback's row cannot be read: {error}") from error
