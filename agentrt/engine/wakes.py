"""What comes for runs that wait in the store: their timers, and what came while the node was down.

That brings them back at the recovery's pace, the most urgent tier first, so that a start after a long downtime is no
storm. Loop thread only.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from agentrt.engine.access import StoreAccess
from agentrt.engine.downtime import Downtime
from agentrt.engine.family import Family
from agentrt.engine.locks import Locks
from agentrt.engine.machine import RunMachine
from agentrt.engine.mailbox import Mailbox
from agentrt.engine.places import Action, Missing, Places
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.schedules import SCHEDULE_PATH
from agentrt.engine.steps import parse_asked_at
from agentrt.engine.timers import Timer, Timers
from agentrt.states import RunState
from agentrt.stores.base import EVENTS, INBOX, TIMERS, WAITS, Head, Row, Store
from agentrt.stores.keys import parse_inbox_key, parse_timer_key, parse_wait_key

_PAGE: Final = 1_000
_WAKES_MAX: Final = 10_000  # of what came during a downtime, sorted by tier at once


class WakeRuns(Protocol):
    """What it needs of the engine."""

    now_ns: Callable[[], int]

    @property
    def closing(self) -> bool: ...

    def with_run(self, run_id: str, action: Action, missing: Missing) -> None: ...

    def has_room(self) -> bool:
        """Whether more runs may be read now."""

    def recover_soon(self) -> None:
        """The plan has something to bring back."""

    def fire_schedule(self, tenant: str) -> None:
        """A tenant's schedule is due."""


class Wakes:
    """``timers``: of waits, deadlines and schedules, as far ahead as is kept in memory."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: WakeRuns,
        access: StoreAccess,
        places: Places,
        plan: RecoveryPlan,
        downtime: Downtime,
        family: Family,
        mailbox: Mailbox,
        locks: Locks,
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._access = access
        self._places = places
        self._plan = plan
        self._downtime = downtime
        self._family = family
        self._mailbox = mailbox
        self._locks = locks
        self._late: list[tuple[str, int, Callable[[], None]]] = []  # run, since, action: of what came meanwhile
        self._started_ns = 0
        self.timers: Final = Timers(loop, runs.now_ns, self._scan_timers, self._fire, self._has_room)

    def begin(self) -> None:
        """What is due from before now came while the node was down."""
        self._started_ns = self._runs.now_ns()

    def open(self) -> None:
        """Runs of the store that wait, and for which something came that nobody could deliver before the node ended."""
        self.timers.open()
        self._locks.open()
        self._find_ended_children(b"")
        self._locks.reading()
        self._find_waits(b"")

    def _find_ended_children(self, after: bytes) -> None:
        def found(rows: list[tuple[bytes, bytes]], error: BaseException | None) -> None:
            if error is not None:
                self._access.read_again("children that have ended", error, partial(self._find_ended_children, after))
                return
            for key, _ in rows:
                parent, child = parse_inbox_key(key)
                machine = self._places.runs.get(parent)
                starts = parent in self._places.out or (machine is not None and machine.state is not RunState.WAITING)
                if not starts:  # those ask then; one that waits is here for something else, and leaves again
                    self.wake_late(parent, 0, partial(self._family.ended_before, parent, child))
            if len(rows) == _PAGE:
                self._find_ended_children(rows[-1][0])

        self._access.read(lambda store: store.scan_rows(INBOX, b"", after, _PAGE), found)

    def _find_waits(self, after: bytes) -> None:
        """Addresses that have an event as well as somebody who waits; and who waits for locks. Both come back at the
        recovery's pace."""

        def look(
            store: Store,
        ) -> tuple[list[tuple[bytes, str, int]], list[tuple[bytes, str, str, int, int]], bytes | None]:
            rows = store.scan_rows(WAITS, b"", after, _PAGE)
            first: dict[bytes, tuple[str, int]] = {}  # who waits longest at an address, and since when
            for key, value in rows:
                address, since_ns, run_id, _ = parse_wait_key(key)
                if value != b"lock":
                    first.setdefault(address, (run_id, since_ns))
            both = [(address, *wait) for address, wait in first.items() if store.scan_rows(EVENTS, address, b"", 1)]
            locks = []
            for key, value in rows:
                if value == b"lock":
                    address, since_ns, run_id, path = parse_wait_key(key)
                    head = store.read_head(run_id)
                    if head is not None:
                        locks.append((address, run_id, path, head.base_tier, since_ns))
            return both, locks, rows[-1][0] if len(rows) == _PAGE else None

        def found(read: Any, error: BaseException | None) -> None:
            if error is not None:
                self._access.read_again("waits", error, partial(self._find_waits, after))
                return
            both, locks, more = read
            for address, run_id, since_ns in both:
                match = partial(self._mailbox.match, address)
                if run_id in self._places.runs:
                    match()
                else:
                    self.wake_late(run_id, since_ns, match)
            for wait in locks:
                self._locks.recovered(*wait)
            if more is not None:
                self._find_waits(more)
            else:
                self._locks.done_reading()

        self._access.read(look, found)

    def _scan_timers(self, after: bytes, limit: int, done: Callable[[list[tuple[bytes, Timer]]], None]) -> None:
        def look(store: Store) -> list[tuple[bytes, Timer]]:
            found: list[tuple[bytes, Timer]] = []
            while len(found) < limit:
                start = found[-1][0] if found else after
                rows = store.scan_rows(TIMERS, b"", start, min(_PAGE, limit - len(found)))
                for key, value in rows:
                    due_ns, run_id, path = parse_timer_key(key)
                    asked_ns = parse_asked_at(value)
                    if asked_ns is not None:
                        due_ns = self._downtime.moved(asked_ns, due_ns)
                    found.append((key, (due_ns, run_id, path)))
                if len(rows) < _PAGE:
                    break
            return found

        def found(rows: list[tuple[bytes, Timer]], error: BaseException | None) -> None:
            if error is not None:
                self._access.read_again("timers", error, partial(self._scan_timers, after, limit, done))
            else:
                done(rows)

        self._access.read(look, found)

    def _has_room(self) -> bool:
        return self._runs.has_room() and self._plan.wakes + len(self._late) < _WAKES_MAX

    def wake_late(self, run_id: str, since_ns: int, action: Callable[[], None]) -> None:
        """Something came for the run while the node was down: ``action`` brings it back when it is its tier's turn."""
        if not self._late:
            self._loop.call_soon(self._sort_late)
        self._late.append((run_id, since_ns, action))

    def _sort_late(self) -> None:
        late, self._late = self._late, []

        def look(store: Store) -> list[int]:
            heads = [store.read_head(run_id) for run_id, _, _ in late]
            return [3 if head is None else head.tier for head in heads]

        def found(tiers: Any, error: BaseException | None) -> None:
            for (_, since_ns, action), tier in zip(late, [3] * len(late) if error is not None else tiers, strict=True):
                self._plan.wake(tier, since_ns, action)
            self._runs.recover_soon()

        self._access.read(look, found)

    def arm(self, due_ns: int, run_id: str, path: str) -> None:
        """A row of TIMERS is durable."""
        self.timers.arm(due_ns, run_id, path)

    def _fire(self, run_id: str, path: str, due_ns: int) -> None:
        if path == SCHEDULE_PATH:
            self._runs.fire_schedule(run_id)
        elif due_ns < self._started_ns and run_id not in self._places.runs:
            self.wake_late(run_id, due_ns, partial(self._fall_due, run_id, path))
        else:
            self._fall_due(run_id, path)

    def _fall_due(self, run_id: str, path: str) -> None:
        def due(machine: RunMachine) -> None:
            machine.fall_due(path)

        def missing(error: BaseException | None) -> None:
            if error is not None:  # a run that has ended took its rows with it; this one is still there
                self._access.later(partial(self._fall_due, run_id, path))

        self._runs.with_run(run_id, due, missing)

    def take_up(self, run_id: str, head: Head, rows: tuple[Row, ...]) -> None:
        """The run has come to this store with these rows: what it waits for finds it."""
        for row in rows:
            if row.table == TIMERS:
                due_ns, _, path = parse_timer_key(row.key)
                self.timers.arm(due_ns, run_id, path)
            elif row.table == WAITS:
                address, since_ns, _, path = parse_wait_key(row.key)
                if row.value == b"lock":
                    self._locks.recovered(address, run_id, path, head.base_tier, since_ns)
                else:
                    self._mailbox.match(address)
