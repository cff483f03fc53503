"""Who waits for which run's end, and what the store says about runs that have ended."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

from agentrt.engine.info import RunResult
from agentrt.engine.moving import exported
from agentrt.errors import StoreCorruptError, UnknownRunError
from agentrt.records import RunEnded
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import Store

#: How many of the last results are kept for those who ask a moment too late, and how large each may be: 16 MiB at most.
RECENT_MAX: Final = 4096
RECENT_BYTES_MAX: Final = 4096

ResultDone = Callable[[RunResult | None, BaseException | None], None]


class Waiters:
    """Loop thread only; the store is read on ``readers``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, readers: Executor, store: Store) -> None:
        self._loop = loop
        self._readers = readers
        self._store = store
        self._waiters: dict[str, list[ResultDone]] = {}
        self._recent: dict[str, RunResult] = {}
        self._recent_order: deque[str] = deque()  # oldest first

    def __len__(self) -> int:
        return len(self._waiters)

    def recent(self, run_id: str) -> RunResult | None:
        """The result, if the run ended lately: durably, and observed. Any thread."""
        return self._recent.get(run_id)

    def add(self, run_id: str, done: ResultDone, *, live: bool, last: BaseException | None = None) -> None:
        """``done`` is called once, later, with the result or an error. ``live``: the run is in memory, the store need
        not be asked. ``last``: the error for one that has not ended by now."""
        # First the entry, then the look: an end between the two finds the entry.
        waiters = self._waiters.get(run_id)
        if waiters is None:
            self._waiters[run_id] = [done]
        else:
            waiters.append(done)
        if live:
            return
        if (recent := self._recent.get(run_id)) is not None:
            self._loop.call_soon(self._tell, recent)
        else:
            self.look(run_id, last)

    def stop(self, run_id: str, done: ResultDone) -> None:
        """Who asked has given up; nothing happens if it was told already."""
        waiters = self._waiters.get(run_id)
        if waiters is not None and done in waiters:
            waiters.remove(done)
            if not waiters:
                del self._waiters[run_id]

    def ended(self, result: RunResult) -> None:
        """The run has ended, durably, and was in memory."""
        run_id = result.run_id
        if len(result.result or b"") + len(result.error or b"") <= RECENT_BYTES_MAX:
            self._recent[run_id] = result
            self._recent_order.append(run_id)
            if len(self._recent_order) > RECENT_MAX:
                self._recent.pop(self._recent_order.popleft(), None)
        if run_id in self._waiters:
            self._tell(result)

    def _tell(self, result: RunResult) -> None:
        for waiter in self._waiters.pop(result.run_id, ()):
            waiter(result, None)

    def fail(self, run_id: str, error: BaseException) -> None:
        """This node will not see the run's end."""
        for waiter in self._waiters.pop(run_id, ()):
            waiter(None, error)

    def fail_all(self, error: BaseException) -> None:
        for run_id in [*self._waiters]:
            self.fail(run_id, error)

    def look(self, run_id: str, last: BaseException | None = None) -> None:
        """Ask the store whether a run that is not in memory has ended."""
        if run_id in self._waiters:
            read = self._loop.run_in_executor(self._readers, read_ended, self._store, run_id)
            read.add_done_callback(partial(self._looked, run_id, last))

    def _looked(self, run_id: str, last: BaseException | None, read: "asyncio.Future[RunResult | None]") -> None:
        if read.cancelled():
            return
        error = read.exception()
        if error is not None:
            self.fail(run_id, error)
        elif (result := read.result()) is not None:
            self._tell(result)
        elif last is not None:
            self.fail(run_id, last)
        # else it will end, and then they are told


def read_ended(store: Store, run_id: str) -> RunResult | None:
    """How a run ended; None if it has not. Blocks. Raises UnknownRunError, StoreError kinds."""
    head = store.read_head(run_id)
    if head is None:
        raise UnknownRunError(f"there is no run {run_id}", run=run_id)
    if head.state == RunState.EXPORTED:
        raise exported(run_id)
    if head.state not in TERMINAL:
        return None
    records = store.read_records(run_id, head.version - 1)
    last = records[-1] if records else None
    if not isinstance(last, RunEnded):
        raise StoreCorruptError("a run has ended without RunEnded", run=run_id)
    return RunResult(
        run_id, RunState(head.state), last.result, last.error, last.cost, head.tier, None, head.tenant, head.agent
    )
