"""Requests for which there is no room, and which may be repeats: who repeats what was accepted gets its run, however
full the node is.

Only a request that names what makes it the same (an idempotency key, an event's origin) is looked up, and only if it
would be refused or has to wait. Loop thread only; the rows are read on a reader thread, many in one go, so that a flood
of refusals costs a few reads of pages. Beyond `_PENDING_MAX` nobody is looked up: the refusal stands, and the caller
comes back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from agentrt.stores.base import IDEMPOTENCY, Store

_PENDING_MAX: Final = 10_000
_AT_ONCE: Final = 256

#: What the row says, None if there is none, or it cannot be read now.
Found = Callable[[bytes | None], None]
_Look = Callable[[Callable[[Store], Any], Callable[[Any, BaseException | None], None]], None]


class Repeats:
    """``look(function, done)``: done(function(store), None) or done(None, error), in any case."""

    def __init__(self, look: _Look) -> None:
        self._look = look
        self._pending: list[tuple[tuple[bytes, ...], Found]] = []
        self._reading = False

    def ask(self, keys: tuple[bytes, ...], found: Found) -> bool:
        """``found(value)`` of the first of these IDEMPOTENCY rows that is there, not from inside this call. False: too
        many are asked for; it is not called then."""
        if len(self._pending) >= _PENDING_MAX:
            return False
        self._pending.append((keys, found))
        if not self._reading:
            self._read()
        return True

    def _read(self) -> None:
        self._reading = True
        batch, self._pending = self._pending[:_AT_ONCE], self._pending[_AT_ONCE:]
        self._look(partial(_values, [keys for keys, _ in batch]), partial(self._have_read, [tell for _, tell in batch]))

    def _have_read(self, tell: list[Found], values: list[bytes | None] | None, error: BaseException | None) -> None:
        self._reading = False
        if self._pending:
            self._read()
        for found, value in zip(tell, values or [None] * len(tell), strict=True):
            found(value)


def _values(wanted: Sequence[tuple[bytes, ...]], store: Store) -> list[bytes | None]:
    """On a reader thread."""
    return [next(filter(None, (store.read_row(IDEMPOTENCY, key) for key in keys)), None) for keys in wanted]
