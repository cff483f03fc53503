"""Rows of a plugin in a store: a table of its own, ordered by key, durable with one call.

For plugins that keep something beside runs. Each sees its own rows only. Rows may be large (the store keeps values of
more than 16 KiB apart); a call's changes are made all or none.
"""

import asyncio
import re
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from agentrt.errors import InputError, StoreError
from agentrt.stores.base import KEY_BYTES_MAX, PLUGINS, Batch, Row, Store

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,39}")
#: Bytes of a key; the plugin's name takes the rest of what the store allows.
PLUGIN_KEY_BYTES_MAX: Final = KEY_BYTES_MAX - 41

Change = tuple[bytes, bytes | None]  # a key, and its value; None: the row goes


class PluginRows:
    """The rows of ``plugin`` (lower-case letters, digits, _ and -, at most 40; else InputError) in ``store``, which was
    opened with ``loop``. All methods may be called from any thread."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop, plugin: str) -> None:
        if not _NAME.fullmatch(plugin):
            raise InputError(f"{plugin!r} is no name for a plugin's rows")
        self._store = store
        self._loop = loop
        self._prefix = plugin.encode() + b"\0"

    def read(self, key: bytes) -> bytes | None:
        """The row's value, None if there is no such row; durable ones only."""
        return self._store.read_row(PLUGINS, self._prefix + key)

    def scan(self, prefix: bytes = b"", after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, bytes]]:
        """Rows with the prefix and key > ``after``, in key order, the first ``limit``; durable ones only."""
        start = self._prefix + after if after else b""
        cut = len(self._prefix)
        found = self._store.scan_rows(PLUGINS, self._prefix + prefix, start, limit)
        return [(key[cut:], value) for key, value in found]

    async def write(self, changes: Iterable[Change], unique: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Put and delete rows, durably. ``unique`` rows must not be there yet, or nothing is changed: DuplicateError
        with the value found. Raises InputError, StoreError kinds."""
        if asyncio.get_running_loop() is not self._loop:
            await asyncio.wrap_future(self.begin(changes, unique))
            return
        batch = self._batch(changes, unique)
        if batch is not None:
            settled: asyncio.Future[None] = self._loop.create_future()
            self._store.commit(batch, partial(_settle, settled))
            await settled

    def begin(self, changes: Iterable[Change], unique: Iterable[tuple[bytes, bytes]] = ()) -> "Future[None]":
        """`write` for threads: its result is there when the rows are durable. Waiting for it on the store's own loop
        would be for ever."""
        settled: Future[None] = Future()
        batch = self._batch(changes, unique)
        if batch is None:
            settled.set_result(None)
        else:
            self._store.commit(batch, partial(_settle, settled))
        return settled

    def _batch(self, changes: Iterable[Change], unique: Iterable[tuple[bytes, bytes]]) -> Batch | None:
        rows = tuple(Row(PLUGINS, self._key(key), value) for key, value in changes)
        uniques = tuple(Row(PLUGINS, self._key(key), value) for key, value in unique)
        return Batch(None, 0, (), rows, uniques) if rows or uniques else None

    def _key(self, key: bytes) -> bytes:
        if not 0 < len(key) <= PLUGIN_KEY_BYTES_MAX:
            raise InputError(f"a key of {len(key)} bytes: 1 to {PLUGIN_KEY_BYTES_MAX} are possible")
        return self._prefix + key


def _settle(future: Any, error: StoreError | None) -> None:
    if future.cancelled():  # it is durable, or not, all the same
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
