"""A secret of the store: made once, kept in it, the same for every node that opens it."""

import asyncio
import os
from typing import Final

from agentrt.errors import StoreError
from agentrt.stores.base import NODE, Batch, Row, Store

_KEY: Final = b"secret"
_BYTES: Final = 32


async def store_secret(store: Store) -> bytes:
    """32 bytes. On the loop that ``done`` of commits runs on. Raises StoreError kinds."""
    found = store.read_row(NODE, _KEY)
    if found is not None:
        return found
    secret = os.urandom(_BYTES)
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StoreError | None) -> None:
        if error is None:
            kept.set_result(None)
        else:
            kept.set_exception(error)

    store.commit(Batch(None, 0, (), (Row(NODE, _KEY, secret),)), done)
    await kept
    return secret
