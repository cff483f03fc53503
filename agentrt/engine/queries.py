"""What is asked about runs: how they are, which there are, and how they end. Loop thread only."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from agentrt.engine.access import CLOSING, StoreAccess
from agentrt.engine.decisionlog import DecisionLog, saved
from agentrt.engine.downtime import Downtime
from agentrt.engine.group import Group
from agentrt.engine.info import RunInfo, RunResult
from agentrt.engine.listing import RunsPage, Wanted, find_heads
from agentrt.engine.locks import Locks
from agentrt.engine.machine import Phase, RunMachine
from agentrt.engine.places import Places
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.stuck import StuckRuns
from agentrt.engine.upgrade import UNCLAIMED
from agentrt.engine.versions import Versions
from agentrt.engine.views import Around, info_of_head, info_of_machine, place, with_fold
from agentrt.engine.waiters import ResultDone, Waiters
from agentrt.errors import AgentrtError, ClosedError, UnknownRunError
from agentrt.flow.decisions import Decision
from agentrt.fold import RunFold, fold
from agentrt.ids import parse_run_id
from agentrt.states import TERMINAL
from agentrt.stores.base import Head, Store

_WAITS_PER_TURN: Final = 1024  # of one group, at 1 to 5 us each


class QueriedRuns(Protocol):
    """What it needs of the engine."""

    @property
    def closing(self) -> bool: ...


class Queries:
    """Of one node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: QueriedRuns,
        store: Store,
        access: StoreAccess,
        places: Places,
        waiters: Waiters,
        versions: Versions,
        plan: RecoveryPlan,
        stuck: StuckRuns,
        locks: Locks,
        downtime: Downtime,
        decisions: DecisionLog,
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._store = store
        self._access = access
        self._readers = access.readers
        self._decisions = decisions
        self._places = places
        self._waiters = waiters
        self._versions = versions
        self._plan = plan
        self._stuck = stuck
        self._around = Around(locks.holder, downtime.moved)

    def wait_ended(self, run_id: str, done: ResultDone) -> None:
        """``done(result, None)`` once the run has ended, durably; ``done(None, error)`` if there is no such run or this
        node cannot end it."""
        live = self._places.in_memory(run_id) is not None
        if not live:
            try:
                parse_run_id(run_id)
            except AgentrtError as error:
                done(None, error)
                return
        self._waiters.add(run_id, done, live=live, last=ClosedError(CLOSING) if self._runs.closing else None)

    def stop_waiting(self, run_id: str, done: ResultDone) -> None:
        """Who called `wait_ended` with ``done`` does not want to know any more."""
        self._waiters.stop(run_id, done)

    def recent(self, run_id: str) -> RunResult | None:
        """The result of a run that ended lately; None says nothing. Any thread."""
        return self._waiters.recent(run_id)

    def wait_many(self, group: Group[RunResult], run_ids: Sequence[str], start: int = 0) -> None:
        """`wait_ended` for many, as `accept_many` accepts many."""
        end = min(start + _WAITS_PER_TURN, len(run_ids))
        for index in range(start, end):
            self.wait_ended(run_ids[index], group.parts[index])
        if end < len(run_ids):
            self._loop.call_soon(self.wait_many, group, run_ids, end)

    def stop_waiting_many(self, group: Group[RunResult], run_ids: Sequence[str], start: int = 0) -> None:
        """The `stop_waiting` of `wait_many`, at its pace, so that it stays behind it."""
        if not group.parts:
            return  # all have ended
        end = min(start + _WAITS_PER_TURN, len(run_ids))
        for index in range(start, end):
            self._waiters.stop(run_ids[index], group.parts[index])
        if end < len(run_ids):
            self._loop.call_soon(self.stop_waiting_many, group, run_ids, end)

    def decisions(self, run_id: str, done: Callable[[list[Decision] | None, BaseException | None], None]) -> None:
        """What flow control has decided about the run: the latest, in order."""

        def found(read: tuple[int, tuple[Decision, ...]] | None, error: BaseException | None) -> None:
            if read is None:
                done(None, error)
            else:
                done(self._decisions.of_run(run_id, read[1]), None)

        self._access.look(lambda store: saved(store, run_id), found)

    async def describe(self, run_id: str) -> RunInfo:
        """Raises UnknownRunError, InputError."""
        parse_run_id(run_id)
        machine = self._places.runs.get(run_id)
        if machine is not None and machine.phase is not Phase.ACCEPTING:
            return self._info_of_machine(machine)

        def look() -> tuple[Head | None, RunFold | None]:
            head = self._store.read_head(run_id)
            if head is None or head.state in TERMINAL:
                return head, None
            return head, fold(self._store.read_records(run_id))

        head, run = await self._loop.run_in_executor(self._readers, look)
        if head is None:
            raise UnknownRunError(f"there is no run {run_id}", run=run_id)
        info = self._info_of_head(head)
        return info if run is None else with_fold(info, run, self._around)

    def _info_of_machine(self, machine: RunMachine) -> RunInfo:
        run_id = machine.run_id
        suspect = self._stuck.since(run_id)
        awaited = self._versions.awaited_by(run_id)
        return info_of_machine(machine, self._around, awaited, None if suspect is None else suspect[0])

    async def list_runs(
        self, *, state: str | None = None, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> list[RunInfo]:
        """Durable runs in order of their ids (so of acceptance), after the id ``after``."""
        found: list[RunInfo] = []
        going_on: str | None = after
        while going_on is not None and len(found) < limit:
            page, going_on = await self.page_of_runs(Wanted(state, tenant), going_on, limit - len(found))
            found += page
        return found

    async def page_of_runs(self, wanted: Wanted, after: str, limit: int, newest_first: bool = False) -> RunsPage:
        """Durable runs that are like that, in order of their ids, or backwards, beyond the id ``after``."""
        if after:
            parse_run_id(after)
        found, going_on = await self._loop.run_in_executor(
            self._readers, find_heads, self._store, wanted, after, limit, newest_first
        )
        runs = []
        for head in found:
            machine = self._places.runs.get(head.run_id)
            info = self._info_of_head(head) if machine is None else self._info_of_machine(machine)
            if info.wait_reason == "operator" and info.detail is None:
                try:  # it is just being read; nobody decides without knowing what
                    info = await self.describe(head.run_id)
                except UnknownRunError:
                    continue
            runs.append(info)
        return RunsPage(runs, going_on)

    def _info_of_head(self, head: Head) -> RunInfo:
        if (parked := self._places.parked.get(head.run_id)) is not None:
            return info_of_head(head, "operator", parked.detail)
        if (version := self._plan.version_of(head.run_id)) is None:
            return info_of_head(head)
        if self._plan.runnable(version):
            turn = f"waits for its turn to start again: {place(head.tier, head.tenant)}, limits.rehydrate_per_s"
            return info_of_head(head, "pool", turn)
        if self._versions.get(head.agent) is not None:
            return info_of_head(head, "pool", "its module is being made ready")
        return info_of_head(head, "operator", f"{UNCLAIMED} {head.agent} (version {version})")
