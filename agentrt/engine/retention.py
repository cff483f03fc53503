"""Runs that ended long ago go: head, records and the rows that only they had, in one transaction each.

`find_expired` reads and decides, on a reader thread; `Retention` paces it and commits. A child stays as long as its
parent has not ended, which may still want its result.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from agentrt.engine.rows import idempotency_keys
from agentrt.errors import AgentrtError
from agentrt.records import RunAccepted
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import DECISIONS, IDEMPOTENCY, INBOX, OUTBOX, Batch, Row, Store
from agentrt.stores.keys import run_prefix

_PAGE: Final = 500
_PERIOD_S: Final = 60.0  # between two walks through all runs
_PAUSE_S: Final = 0.05  # between two pages of one


class Found(NamedTuple):
    """``batches`` that erase one run each; ``after``: where to go on, "" at the end."""

    batches: list[Batch]
    after: str


def find_expired(store: Store, after: str, ended_before_ns: int, limit: int = _PAGE) -> Found:
    """Looks at ``limit`` runs behind ``after``. Blocks."""
    heads = store.scan_heads(after, limit)
    batches: list[Batch] = []
    for head in heads:
        if head.state == RunState.EXPORTED:
            last = store.read_records(head.run_id, head.version - 1)
            if not last or last[-1].at_ns >= ended_before_ns:
                continue
        elif head.state not in TERMINAL or head.ended_ns >= ended_before_ns:
            continue
        first = store.read_records(head.run_id, 0, 1)
        rows: list[Row] = []
        if first and isinstance(first[0], RunAccepted):
            accepted = first[0]
            if accepted.parent is not None:
                parent = store.read_head(accepted.parent.partition("/")[0])
                if parent is not None and parent.state not in TERMINAL:
                    continue
            rows += (Row(IDEMPOTENCY, key, None) for key in idempotency_keys(accepted))
        for table in (INBOX, OUTBOX, DECISIONS):
            rows += (Row(table, key, None) for key, _ in store.scan_rows(table, run_prefix(head.run_id)))
        batches.append(Batch(None, 0, (), tuple(rows), (), head.run_id))
    return Found(batches, heads[-1].run_id if len(heads) == limit else "")


class Runs(Protocol):
    """What it needs of the engine."""

    now_ns: Callable[[], int]

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def commit_plain(self, batch: Batch, done: Callable[[AgentrtError | None], None]) -> None: ...


class Retention:
    """Walks through the store again and again, a page at a time. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, keep_ns: int) -> None:
        self._loop = loop
        self._runs = runs
        self._keep_ns = keep_ns
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self.erased = 0

    def open(self) -> None:
        self._later(_PERIOD_S, "")

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def walk(self, after: str = "") -> None:
        """Look at the page behind ``after`` now."""
        before = self._runs.now_ns() - self._keep_ns
        self._runs.read(lambda store: find_expired(store, after, before), self._found)

    def _later(self, seconds: float, after: str) -> None:
        if not self._closed:
            self._handle = self._loop.call_later(seconds, self.walk, after)

    def _found(self, found: Found | None, error: BaseException | None) -> None:
        if found is None:
            self._loop.call_exception_handler({"message": "old runs cannot be read", "exception": error})
            self._later(_PERIOD_S, "")
            return
        for batch in found.batches:
            self._runs.commit_plain(batch, self._erased)
        self._later(_PAUSE_S if found.after else _PERIOD_S, found.after)

    def _erased(self, error: AgentrtError | None) -> None:
        if error is None:  # else the next walk tries again
            self.erased += 1
