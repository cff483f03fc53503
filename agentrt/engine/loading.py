"""Runs of the store come back to memory: after a restart, since something came for them, or since somebody asks.

Loop thread only; they are read on the readers' threads. After a restart the plan (recovery.py) says which come back,
when; a run that is wanted for something is read at once.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.access import AGAIN_S, StoreAccess
from agentrt.engine.admission import Intake
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.entrance import Entrance
from agentrt.engine.flow import EnsembleRows, Flow
from agentrt.engine.frames import RunFrames
from agentrt.engine.gates import Gates
from agentrt.engine.history import read_history
from agentrt.engine.locks import Locks
from agentrt.engine.machine import Phase, RunMachine
from agentrt.engine.moving import Moving, exported, leaving
from agentrt.engine.orders import Orders
from agentrt.engine.places import Action, Missing, Places
from agentrt.engine.ports import RunPort
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.versions import Versions
from agentrt.engine.waiters import Waiters
from agentrt.errors import AgentrtError, InternalError, StoreCorruptError, StoreError, UnknownRunError
from agentrt.flow.admission import Applicant
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import READY, Head, Store
from agentrt.stores.keys import parse_ready_key, parse_ready_value

_PAGE: Final = 1_000
_LOADS_MAX: Final = 64  # runs being read at once
_TICK_S: Final = 0.005  # of the recovery's pace; the loop's timers count milliseconds
_RELOADS_MAX: Final = 8  # of one run, without a new record between them


class LoadedRuns(RunPort[RunMachine], Protocol):
    """What it needs of the engine."""

    @property
    def closing(self) -> bool: ...

    def have_tier(self, machine: RunMachine) -> None:
        """Have the run know the tier that it is lent."""

    def may_go_on(self, machine: RunMachine) -> bool:
        """Whether the run needs a guest; else what is to be is done."""

    def on_scanned(self) -> None:
        """All runs of the store that go on by themselves are known."""

    def check_idle(self) -> None:
        """There is less to do."""


class Loader:
    """``scanned``: whether the store has been looked through; ``recovered``: runs that came back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: LoadedRuns,
        store: Store,
        access: StoreAccess,
        places: Places,
        plan: RecoveryPlan,
        versions: Versions,
        intake: Intake,
        entrance: Entrance,
        orders: Orders,
        waiters: Waiters,
        locks: Locks,
        flow: Flow,
        gates: Gates | None,
        frames: RunFrames,
        moving: Moving,
        grace_ns: int,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._store = store
        self._readers = access.readers
        self._places = places
        self._plan = plan
        self._versions = versions
        self._intake = intake
        self._entrance = entrance
        self._orders = orders
        self._waiters = waiters
        self._locks = locks
        self._flow = flow
        self._gates = gates
        self._frames = frames
        self._moving = moving
        self._grace_ns = grace_ns
        self._monotonic_ns = monotonic_ns
        self._later: dict[str, list[tuple[Action, Missing]]] = {}
        self._backing_off: dict[str, list[tuple[Action, Missing | None]]] = {}  # runs that are read again in a while
        self._reloads: dict[str, tuple[int, int]] = {}  # how often in a row, and of which version
        self._broken: set[str] = set()  # runs whose journals cannot be read
        self._tick: asyncio.TimerHandle | None = None
        self.scanned = False
        self.recovered = 0

    def close(self) -> None:
        """The node stops: nothing comes back any more."""
        if self._tick is not None:
            self._tick.cancel()

    def scan(self, after: bytes) -> None:
        page = self._loop.run_in_executor(self._readers, self._store.scan_rows, READY, b"", after, _PAGE)
        page.add_done_callback(self._scanned_page)

    def _scanned_page(self, page: "asyncio.Future[list[tuple[bytes, bytes]]]") -> None:
        if self._runs.closing or page.cancelled():
            return
        error = page.exception()
        if error is not None:
            self._loop.call_exception_handler({"message": "the runs of the store cannot be read", "exception": error})
            self._loop.call_later(1.0, self.scan, b"")
            return
        rows = page.result()
        found: dict[tuple[str, str], None] = {}
        for key, value in rows:
            tier, accepted_ns, run_id = parse_ready_key(key)
            if not self._places.knows(run_id):
                version, agent = parse_ready_value(value)
                self._count_out(run_id, tier, agent)
                self._plan.add(tier, accepted_ns, run_id, version, agent)
                found[version, agent] = None
        for version, agent in found:
            self._versions.found(version, agent)
        if len(rows) == _PAGE:
            self.scan(rows[-1][0])
        else:
            self.scanned = True
            self._loop.call_later(self._grace_ns / 1e9, self._grace_ends)
            self._runs.on_scanned()
        self.recover_soon()
        self._runs.check_idle()

    def recover_soon(self) -> None:
        if self._tick is None and self._plan.ready and not self._runs.closing:
            self._tick = self._loop.call_later(0, self._recover_some)

    def _recover_some(self) -> None:
        self._tick = None
        if self._runs.closing:
            return
        for taken in self._plan.take(self._monotonic_ns(), _LOADS_MAX - len(self._places.loading)):
            if isinstance(taken, str):
                self.load(taken)
            else:
                taken()
        if self._plan.ready:
            self._tick = self._loop.call_later(_TICK_S, self._recover_some)

    def _grace_ends(self) -> None:
        """Journal that runs wait for somebody to register their agent."""
        if self._runs.closing:
            return
        self._versions.end_grace()
        for run_id in self._plan.take_kept(_LOADS_MAX - len(self._places.loading)):
            self.load(run_id)
        if self._plan.kept:
            self._loop.call_later(_TICK_S, self._grace_ends)

    def load_later(self, run_id: str, delay_s: float) -> None:
        """Whoever wants something of the run until then waits as well."""

        def load() -> None:
            actions = self._backing_off.pop(run_id)
            self.load(run_id)
            for action, missing in actions:
                self.load(run_id, action, missing)

        self._backing_off[run_id] = []
        self._loop.call_later(delay_s, load)

    def load(self, run_id: str, action: Action | None = None, missing: Missing | None = None) -> None:
        """Read a run from the store and go on with it (``action`` is applied first), unless it still waits then."""
        if self._runs.closing or run_id in self._places.runs:
            return
        if run_id in self._moving.leaving:
            if missing is not None:
                self._loop.call_soon(missing, leaving(run_id))
            self._orders.answer_cancels(run_id, leaving(run_id))
            return
        if (backing_off := self._backing_off.get(run_id)) is not None:
            if action is not None:
                backing_off.append((action, missing))
            return
        if not self._flow.ready():
            self.load_later(run_id, AGAIN_S)
            if action is not None:
                self._backing_off[run_id].append((action, missing))
            return
        self.forget_place(run_id)
        actions = self._places.loading.get(run_id)
        if actions is None:
            actions = self._places.loading[run_id] = []
            self._read_for_loading(run_id)
        if action is not None:
            actions.append((action, missing))

    def _read_for_loading(self, run_id: str) -> None:
        began = self._flow.reading()
        read = self._loop.run_in_executor(self._readers, self._read_run, run_id)
        read.add_done_callback(partial(self._loaded, run_id, began))

    def _read_run(self, run_id: str) -> Any:
        """On a reader thread: the run's `History` and what its ensemble has used; or its Head if it has ended."""
        head = self._store.read_head(run_id)
        if head is None:
            raise UnknownRunError(f"there is no run {run_id}", run=run_id)
        if head.state in TERMINAL:
            return head
        if head.state == RunState.EXPORTED:
            raise exported(run_id)
        history = read_history(run_id, self._store.read_records(run_id))
        history = history._replace(frame=self._frames.read(run_id, history.run))
        root = history.run.run().root or run_id
        done = None if self._gates is None else self._gates.read_loops(self._store, root)
        return history, self._flow.read(self._store, root, run_id), done

    def _loaded(self, run_id: str, began: int, read: "asyncio.Future[Any]") -> None:
        actions = self._places.loading.pop(run_id, [])
        if self._runs.closing or read.cancelled():
            return
        if run_id in self._moving.leaving:
            for _, missing in actions:
                if missing is not None:
                    missing(leaving(run_id))
            self._orders.answer_cancels(run_id, leaving(run_id))
            self._moving.gone(run_id)
            self._flow.done_reading()
            return
        error = read.exception()
        rows, done = EnsembleRows(), None
        if error is None and not isinstance(read.result(), Head):
            history, rows, done = read.result()
            if self._flow.stale(history.run.run().root or run_id, began):
                self._flow.done_reading()
                self._places.loading[run_id] = actions
                self._read_for_loading(run_id)
                return
        self._flow.done_reading()
        if error is not None:
            self._unreadable(run_id, error)
            gone = None if isinstance(error, UnknownRunError) else error
            for _, missing in actions:
                if missing is not None:
                    missing(gone)
            return
        if isinstance(read.result(), Head):  # it ended meanwhile
            self._reloads.pop(run_id, None)
            self.uncount(run_id)
            self._orders.answer_cancels(run_id, None)
            self._waiters.look(run_id)
            for _, missing in actions:
                if missing is not None:
                    missing(None)
            return
        machine = RunMachine(run_id, history.run.run(), self._runs, history)
        self._places.runs[run_id] = machine
        self._flow.loaded(machine, rows)
        if self._gates is not None:
            self._gates.loaded(machine, history, done)
        machine.place = self._intake.adopt(self._entrance.applicant(machine))
        if (out := self._places.out.pop(run_id, None)) is not None:
            self._intake.withdraw(out)
        self.recovered += 1
        agent = self._versions.of(machine)
        machine.unwinds = agent is not None and agent.program.unwinds
        if machine.tier != machine.accepted.base_tier or self._locks.lent(run_id) is not None:
            self._runs.have_tier(machine)
        for action, missing in actions:
            if machine.phase <= Phase.PARKING:
                action(machine)
            elif missing is not None:  # one before it has ended the run
                self._later.setdefault(run_id, []).append((action, missing))
        if machine.phase <= Phase.LIVE and machine.cancel_reason is not None:
            machine.end_cancelled()
        if machine.ending is not None and agent is not None and not machine.unwinds:
            machine.end_told()
        if machine.phase > Phase.LIVE:
            return
        if machine.cold:  # what came does not wake it
            for path, op, request, since_ns in machine.open_steps():
                if op == "lock.acquire":  # it had an answer that was refused
                    self._locks.wait_again(machine, path, request, since_ns)
            machine.rest()
            return
        stuck = None if machine.ending is not None else machine.stuck_step()
        if stuck is not None:
            machine.wait_for_operator(*stuck)
            return
        if ARMED:
            hit("recover.before_start")
        if not self._runs.may_go_on(machine):
            return
        self._versions.go_on(machine)
        if ARMED:
            hit("recover.after_start")

    def let_out(self, machine: RunMachine) -> None:
        """The run goes on without a machine."""
        assert machine.place is not None
        self._places.out[machine.run_id] = self._intake.adopt(msgspec.structs.replace(machine.place, size_bytes=0))
        self._intake.gone(machine)

    def _count_out(self, run_id: str, tier: int, agent: str) -> None:
        """A run of the store that will start; whose it is, is seen then."""
        self._places.out[run_id] = self._intake.adopt(Applicant(tier, "", self._versions.class_of(agent)))

    def uncount(self, run_id: str) -> None:
        if (out := self._places.out.pop(run_id, None)) is not None:
            self._intake.leave(out)
        self._runs.check_idle()

    def _unreadable(self, run_id: str, error: BaseException) -> None:
        if isinstance(error, StoreError) and not isinstance(error, StoreCorruptError):
            # It is read again: here, or by whoever wakes it. Who waits for its end waits on.
            self._orders.answer_cancels(run_id, error)
            if run_id in self._places.out:
                self.load_later(run_id, AGAIN_S)
            return
        self._reloads.pop(run_id, None)
        self.uncount(run_id)
        if isinstance(error, StoreCorruptError):
            # It keeps its READY row: whoever repairs the store gets it back.
            self._broken.add(run_id)
            self._loop.call_exception_handler({"message": f"run {run_id} cannot be read", "exception": error})
        elif not isinstance(error, AgentrtError):
            error = InternalError(f"run {run_id} cannot be read: {error!r}", run=run_id)
        self.give_up(run_id, error)

    def give_up(self, run_id: str, error: BaseException) -> None:
        """This node will not end the run: tell those who wait for it."""
        self._waiters.fail(run_id, error)
        self._orders.answer_cancels(run_id, error)

    def with_run(self, run_id: str, action: Action, missing: Missing) -> None:
        """Have ``action(machine)`` called with the run, which is read from the store if need be; ``missing(None)`` if
        it has ended or never was, ``missing(error)`` if it cannot be read."""
        machine = self._places.runs.get(run_id)
        if self._runs.closing:
            return
        if machine is None:
            if (parked := self._places.parked.get(run_id)) is not None and parked.refusal is not None:
                self._loop.call_soon(missing, parked.refusal)  # it would be refused again
                return
            self.load(run_id, action, missing)
        elif Phase.ACCEPTING < machine.phase <= Phase.PARKING:
            action(machine)
        else:  # it is about to be gone, or accepted: a child that its parent spawns again may be there already
            self._later.setdefault(run_id, []).append((action, missing))

    def forget_place(self, run_id: str) -> None:
        self._plan.discard(run_id)
        self._places.parked.pop(run_id, None)

    def do_later(self, run_id: str) -> None:
        for action, missing in self._later.pop(run_id, ()):
            self._loop.call_soon(self.with_run, run_id, action, missing)

    def has_room(self) -> bool:
        """Whether more runs may be read now."""
        return len(self._places.loading) < _LOADS_MAX and not self._runs.closing

    def again(self, machine: RunMachine) -> bool:
        """The store refused a record of the run, which is read again; False: that was in vain too often. Another
        session owns the run, or the store is broken: this node must not go on with it."""
        count, version = self._reloads.get(machine.run_id, (0, -1))
        count = 1 if machine.loaded_version > version else count + 1
        self._reloads[machine.run_id] = (count, machine.loaded_version)
        if count > _RELOADS_MAX:
            return False
        # First at once, then ever more patiently: a full store needs time.
        self.load_later(machine.run_id, min(5.0, 0.002 * 4**count))
        return True

    def ended(self, run_id: str) -> None:
        """Its records were taken."""
        if self._reloads:
            self._reloads.pop(run_id, None)

    def stay_away(self, run_id: str) -> None:
        """The run is in the store, and this node does not go on with it."""
        self.forget_place(run_id)
        self._backing_off.pop(run_id, None)
        self.uncount(run_id)

    def bring_back(self, tier: int, accepted_ns: int, run_id: str, version: str, agent: str) -> None:
        self._count_out(run_id, tier, agent)
        self._plan.add(tier, accepted_ns, run_id, version, agent)
        self._versions.found(version, agent)
        self.recover_soon()

    def nobody_has(self, run_id: str) -> bool:
        return not self._places.knows(run_id) and run_id not in self._broken
