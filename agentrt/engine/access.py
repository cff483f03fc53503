"""The store, for whoever reads it or writes rows that belong to no run. Loop thread only; reads run on two threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from agentrt.errors import AgentrtError, ClosedError
from agentrt.stores.base import Batch, Row, Store

#: What those are told whose question the end of the node overtakes.
CLOSING: Final = "the node stops; the run goes on at its next start"
#: Until what could not be read is looked at again.
AGAIN_S: Final = 1.0


class StoreAccess:
    """``readers``: for those who read on their own. Once it is closed only those from outside are answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store) -> None:
        self._loop = loop
        self._store = store
        self._closed = False
        self.readers: Final = ThreadPoolExecutor(2, thread_name_prefix="agentrt-read")

    def close(self) -> None:
        """The node stops: nobody inside is called any more."""
        self._closed = True

    def end(self) -> None:
        """Nothing is read any more."""
        self.readers.shutdown(wait=False, cancel_futures=True)

    def read_row(self, table: str, key: bytes) -> bytes | None:
        """As `Store.read_row`, at once. Any thread but the loop's."""
        return self._store.read_row(table, key)

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """``done(function(store), None)`` or ``done(None, error)``; the function runs on a reader thread."""

        def finished(read: "asyncio.Future[Any]") -> None:
            if self._closed or read.cancelled():
                return
            error = read.exception()
            done(None if error is not None else read.result(), error)

        try:
            self._loop.run_in_executor(self.readers, function, self._store).add_done_callback(finished)
        except RuntimeError:  # the readers are gone: the node ends
            return

    def look(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """`read` for callers from outside, who are answered in any case."""

        def finished(read: "asyncio.Future[Any]") -> None:
            error = ClosedError(CLOSING) if read.cancelled() else read.exception()
            done(None if error is not None else read.result(), error)

        try:
            self._loop.run_in_executor(self.readers, function, self._store).add_done_callback(finished)
        except RuntimeError:  # the readers are gone
            done(None, ClosedError(CLOSING))

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None:
        """Rows that belong to no run."""
        self.commit_plain(Batch(None, 0, (), rows), done)

    def commit_plain(self, batch: Batch, done: Callable[[AgentrtError | None], None]) -> None:
        """A batch of no run's."""
        try:
            self._store.commit(batch, done)
        except AgentrtError as error:
            self._loop.call_soon(done, error)

    def drop(self, rows: tuple[Row, ...]) -> None:
        """Remove rows that nobody needs, in a while if not now."""

        def done(error: AgentrtError | None) -> None:
            if error is not None:
                self.later(partial(self.drop, rows))

        self.commit_rows(rows, done)

    def later(self, again: Callable[[], None]) -> None:
        """Call it in a while: the store could not be read, or refused."""
        if not self._closed:
            self._loop.call_later(AGAIN_S, self._again, again)

    def _again(self, again: Callable[[], None]) -> None:
        if not self._closed:
            again()

    def read_again(self, what: str, error: BaseException, again: Callable[[], None]) -> None:
        """`later`, for the node's own reading, which is to succeed."""
        if not self._closed:
            self._loop.call_exception_handler({"message": f"{what} cannot be read", "exception": error})
            self.later(again)
