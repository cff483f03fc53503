"""The thin shell around the machines: it accepts, starts guests, commits, calls tools, and brings runs back.

Everything here runs on the control loop and nothing blocks it: the store's writes are callbacks, its reads happen on
two reader threads. There is no asyncio task per run or step. A run that has not ended is in one place: a `RunMachine`
in `_runs`, on its way from the store (`_loading`, or a timer that will load it), in the recovery plan, or parked;
`_out` names those that are counted by admission and have no machine.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec

from agentrt.backends.base import Guest
from agentrt.engine.accept import Door, settle_duplicate
from agentrt.engine.admission import Admission
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.flusher import Flusher
from agentrt.engine.group import Group
from agentrt.engine.history import read_history
from agentrt.engine.info import Agent, EngineLimits, EngineStatistics, RunInfo, RunResult
from agentrt.engine.logrelay import LogRelay
from agentrt.engine.machine import Phase, RunMachine, StepInFlight
from agentrt.engine.ports import Tools
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.views import info_of_head, info_of_machine
from agentrt.engine.waiters import ResultDone, Waiters
from agentrt.errors import (
    AgentrtError,
    ClosedError,
    EngineError,
    InputError,
    InternalError,
    StoreCorruptError,
    StoreError,
    UnknownAgentError,
    UnknownRunError,
)
from agentrt.ids import parse_run_id
from agentrt.records import Cost
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import READY, Batch, Head, Row, Store
from agentrt.stores.keys import parse_ready_key
from agentrt.tools.outcome import ToolOutcome

_READY_PAGE: Final = 1_000
_STARTS_PER_TURN: Final = 64  # at 5 to 10 us each
_ACCEPTS_PER_TURN: Final = 128  # of one group, at 10 to 20 us each
_WAITS_PER_TURN: Final = 1024  # of one group, at 1 to 5 us each
_LOADS_MAX: Final = 64  # runs being read at once
_TICK_S: Final = 0.005  # of the recovery's pace; the loop's timers count milliseconds
_RELOADS_MAX: Final = 8  # of one run, without a new record between them

AcceptDone = Callable[[str | None, BaseException | None], None]
Plain = Callable[[BaseException | None], None]
Observer = Callable[[str, Any], None]


class _Parked(msgspec.Struct, frozen=True):
    """A run that waits for an operator; nothing else of it is in memory."""

    tier: int
    accepted_ns: int
    version: str
    detail: str


class _Accepting(msgspec.Struct):
    """What a submit waits with."""

    done: AcceptDone
    digest: bytes | None


class Engine:
    """One node's runs. Made and used on the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        tools: Tools,
        *,
        limits: EngineLimits | None = None,
        pins: Mapping[str, str] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes],
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        limits = EngineLimits() if limits is None else limits
        self.limits: Final = limits
        self.attempts_max: int = limits.attempts_max
        self.journal_bytes_max: int = limits.journal_bytes_max
        self.result_bytes_max: int = limits.result_bytes_max
        self.now_ns = now_ns
        self._loop = loop
        self._store = store
        self._store_commit = store.commit
        self._tools = tools
        self._tools_call = tools.call
        self.tool = tools.registry.get
        self._monotonic_ns = monotonic_ns
        self._admission = Admission(limits.queue_items_max, limits.queue_bytes_max)
        self._door = Door(limits, self._admission, store, pins or {}, now_ns, random_bytes)
        self._plan = RecoveryPlan(limits.rehydrate_per_s)
        self._flusher = Flusher(loop, limits.commit_delay_ns, now_ns, lambda: store.backlog()[0] > 0)
        self._join_later = self._flusher.add
        self._logs = LogRelay()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="agentrt-read")
        self._agents: dict[str, Agent] = {}
        self._versions: dict[str, Agent] = {}
        self._runs: dict[str, RunMachine] = {}
        self._starts: tuple[deque[RunMachine], ...] = (deque(), deque(), deque(), deque())  # by tier
        self._starting = False
        self._loading: dict[str, list[Callable[[RunMachine], None]]] = {}
        self._parked: dict[str, _Parked] = {}
        self._out: set[str] = set()
        self._waiters = Waiters(loop, self._readers, store)
        self._cancels: dict[str, list[Plain]] = {}
        self._reloads: dict[str, tuple[int, int]] = {}
        self._observers: list[Observer] = []
        self._ended: dict[RunState, int] = {}
        self._accepted = self._duplicates = self._recovered = self._discarded = 0
        self._commits = self._tool_calls = 0
        self._accepting = True
        self._closing = False
        self._idle: asyncio.Event | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._started_ns = 0
        self._scanned = False

    # --- agents -------------------------------------------------------------------

    def register(self, agent: Agent) -> None:
        """Make an agent known under its name, in place of an older version; runs of its version start again."""
        self._agents[agent.name] = agent
        self._versions.setdefault(agent.version, agent)
        self._plan.register(agent.version)
        for run_id, parked in [*self._parked.items()]:
            if parked.version == agent.version and parked.detail.startswith(_UNCLAIMED):
                del self._parked[run_id]
                self._plan.add(parked.tier, parked.accepted_ns, run_id, parked.version)
        self._recover_soon()

    def agents(self) -> list[Agent]:
        """The agents by name."""
        return [self._agents[name] for name in sorted(self._agents)]

    # --- accept ---------------------------------------------------------------------

    def accept(
        self,
        agent_name: str,
        input: bytes,
        done: AcceptDone,
        tenant: str = "default",
        tier: int | str | None = None,
        idempotency_key: str | None = None,
        fuel_max: int | None = None,
    ) -> None:
        """Accept a run; ``done(run_id, None)`` is called once that is durable, or ``done(None, error)``.

        With an idempotency key that the tenant has used with the same agent and input, run_id is the earlier run's.
        Errors: ClosedError, UnknownAgentError, InputError, QueueFullError, IdempotencyConflictError, StoreError.
        """
        try:
            if not self._accepting:
                raise ClosedError("the runtime accepts no more runs")
            agent = self._agents.get(agent_name)
            if agent is None:
                known = ", ".join(sorted(self._agents)[:20]) or "none"
                raise UnknownAgentError(f"there is no agent {agent_name!r}", hint=f"Registered: {known}")
            request = self._door.enter(agent, input, tenant, tier, idempotency_key, fuel_max)
        except AgentrtError as error:
            done(None, error)
            return
        run_id = request.run_id
        machine = RunMachine(run_id, request.accepted, self)
        machine.tag = _Accepting(done, request.digest)
        self._runs[run_id] = machine
        machine.accept((Row(READY, machine.ready_key(), self._door.version_of(agent)),), request.unique)

    def accept_many(
        self,
        group: Group[str],
        agent_name: str,
        inputs: Sequence[bytes],
        tenant: str = "default",
        tier: int | str | None = None,
        idempotency_keys: Sequence[str] | None = None,
        fuel_max: int | None = None,
        start: int = 0,
    ) -> None:
        """`accept` a run per input, from the one numbered ``start`` on, over several turns of the loop if they are
        many. The group has a part for each, which gets the run's id or the error."""
        end = min(start + _ACCEPTS_PER_TURN, len(inputs))
        for index in range(start, end):
            key = None if idempotency_keys is None else idempotency_keys[index]
            self.accept(agent_name, inputs[index], group.parts[index], tenant, tier, key, fuel_max)
        if end < len(inputs):
            self._loop.call_soon(
                self.accept_many, group, agent_name, inputs, tenant, tier, idempotency_keys, fuel_max, end
            )

    def _not_accepted(self, machine: RunMachine, accepting: _Accepting, error: AgentrtError) -> None:
        """The store refused the acceptance; for a used idempotency key it says whose it is."""
        self._drop(machine)
        self._admission.leave(len(machine.accepted.input))
        found = settle_duplicate(error, accepting.digest)
        if isinstance(found, str):
            self._duplicates += 1
            accepting.done(found, None)
        else:
            accepting.done(None, found)

    # --- what machines ask for (RunPort) ------------------------------------------------

    def commit(self, machine: RunMachine, batch: Batch, done: Callable[[StoreError | None], None]) -> None:
        self._commits += 1
        try:
            self._store_commit(batch, done)
        except AgentrtError as error:
            # ClosedError or InternalError: nothing was taken. The machine hears of it as of any refusal.
            self._loop.call_soon(done, error)  # type: ignore[arg-type]

    def call_tool(self, machine: RunMachine, step: StepInFlight) -> None:
        self._tool_calls += 1
        done = partial(machine.on_outcome, step)
        try:
            self._tools_call(
                step.tool,
                step.args,
                key=step.key,
                tenant=machine.accepted.tenant,
                tier=machine.tier,
                attempt=step.attempt,
                done=done,
            )
        except AgentrtError as error:
            payload = msgspec.json.encode(error.to_dict())
            self._loop.call_soon(done, ToolOutcome(False, payload, error.code, 0, False))

    def join_later(self, machine: RunMachine) -> None:
        self._join_later(machine)

    def log(self, machine: RunMachine, payload: bytes) -> None:
        self._logs.put(machine.run_id, payload)

    def on_accepted(self, machine: RunMachine) -> None:
        self._accepted += 1
        accepting: _Accepting = machine.tag
        machine.tag = None
        if self._closing:
            machine.halt()
        else:
            if machine.tier or self._starting:
                # A group commit acknowledges thousands at once; they start over several turns, most urgent first.
                self._starts[machine.tier].append(machine)
            else:  # a lone urgent one at once, and before anybody is told, which wakes another thread
                self._start(machine, self._versions[machine.accepted.version])
            if not self._starting:
                self._starting = True
                self._loop.call_soon(self._start_some)
        if self._observers:
            self._tell("accepted", info_of_machine(machine))
        accepting.done(machine.run_id, None)

    def on_cancelled(self, machine: RunMachine) -> None:
        self._answer_cancels(machine.run_id, None)

    def on_ended(self, machine: RunMachine) -> None:
        run_id = machine.run_id
        outcome, exit = machine.outcome, machine.exit
        assert outcome is not None
        del self._runs[run_id]
        if self._idle is not None:
            self._check_idle()
        self._admission.leave(len(machine.accepted.input))
        if self._reloads:
            self._reloads.pop(run_id, None)
        state = outcome.state
        self._ended[state] = self._ended.get(state, 0) + 1
        cost = Cost(exit.fuel, exit.slot_ns) if exit is not None else Cost()
        result = RunResult(run_id, state, outcome.result, outcome.error, cost, machine.tier, exit)
        if self._observers:
            self._tell("ended", result)  # first: who has been told a result may rely on the observers having seen it
        self._waiters.ended(result)
        if self._cancels:
            self._answer_cancels(run_id, None)

    def on_parked(self, machine: RunMachine) -> None:
        self._drop(machine)
        if machine.wait is not None:
            self._let_out(machine)
            self._park(machine, machine.wait.detail or machine.wait.reason)
            self._tell("parked", info_of_machine(machine))

    def on_discarded(self, machine: RunMachine, error: AgentrtError) -> None:
        if isinstance(machine.tag, _Accepting):
            self._not_accepted(machine, machine.tag, error)
            return
        run_id = machine.run_id
        self._drop(machine)
        self._discarded += 1
        self._let_out(machine)
        if self._closing or isinstance(error, ClosedError):
            return
        count, version = self._reloads.get(run_id, (0, -1))
        count = 1 if machine.loaded_version > version else count + 1
        self._reloads[run_id] = (count, machine.loaded_version)
        if count > _RELOADS_MAX:
            # Another session owns the run, or the store is broken: this node must not go on with it.
            self._park(machine, f"the store refuses the run's records: {error.message}")
            self._give_up(run_id, error)
            return
        # First at once, then ever more patiently: a full store needs time.
        self._loop.call_later(min(5.0, 0.002 * 4**count), self._load, run_id)

    # --- starting guests ------------------------------------------------------------------

    def _start_some(self) -> None:
        left = _STARTS_PER_TURN
        for machines in self._starts:
            while machines:
                if not left:
                    self._loop.call_soon(self._start_some)
                    return
                machine = machines.popleft()
                if machine.phase is Phase.LIVE:  # not cancelled or halted meanwhile
                    left -= 1
                    self._start(machine, self._versions[machine.accepted.version])
        self._starting = False

    def _start(self, machine: RunMachine, agent: Agent) -> None:
        """Start the machine's guest; the machine is in `_runs`."""
        accepted = machine.accepted
        try:
            if accepted.pins is not self._door.pins_of(agent):  # it is, if the run was accepted in this process
                for name, version in agent.program.pins.items():
                    pinned = accepted.pins.get(name, version)
                    if pinned != version:
                        machine.wait_for_operator(
                            None, f"the run is pinned to {name} {pinned}, this node has {version}"
                        )
                        return
            machine.resume()
            guest: Guest = agent.backend.start(
                agent.program,
                machine,
                tenant=accepted.tenant,
                tier=machine.tier,
                input=accepted.input,
                fuel=accepted.fuel_max,
                seed=accepted.seed,
                clock_ns=accepted.at_ns,
                admitted=True,
                replay=machine.replays,
            )
        except ClosedError:
            machine.halt()
        except AgentrtError as error:
            machine.fail(error)
        except Exception as error:
            machine.fail(EngineError(f"the backend could not start the guest: {error!r}", run=machine.run_id))
        else:
            machine.guest = guest

    # --- recovery ---------------------------------------------------------------------------

    def recover(self) -> None:
        """Begin to bring back the runs of the store; those of registered agents start, the others wait for theirs."""
        self._started_ns = self._monotonic_ns()
        self._scan(b"")

    def _scan(self, after: bytes) -> None:
        page = self._loop.run_in_executor(self._readers, self._store.scan_rows, READY, b"", after, _READY_PAGE)
        page.add_done_callback(self._scanned_page)

    def _scanned_page(self, page: "asyncio.Future[list[tuple[bytes, bytes]]]") -> None:
        if self._closing or page.cancelled():
            return
        error = page.exception()
        if error is not None:
            self._loop.call_exception_handler({"message": "the runs of the store cannot be read", "exception": error})
            self._loop.call_later(1.0, self._scan, b"")
            return
        rows = page.result()
        for key, value in rows:
            tier, accepted_ns, run_id = parse_ready_key(key)
            if run_id not in self._runs and run_id not in self._loading and run_id not in self._out:
                self._out.add(run_id)
                self._admission.adopt()
                self._plan.add(tier, accepted_ns, run_id, value.decode())
        if len(rows) == _READY_PAGE:
            self._scan(rows[-1][0])
        else:
            self._scanned = True
            self._loop.call_later(self.limits.register_grace_ns / 1e9, self._grace_ends)
        self._recover_soon()
        self._check_idle()

    def _recover_soon(self) -> None:
        if self._tick is None and self._plan.ready and not self._closing:
            self._tick = self._loop.call_later(0, self._recover_some)

    def _recover_some(self) -> None:
        self._tick = None
        if self._closing:
            return
        for run_id in self._plan.take(self._monotonic_ns(), _LOADS_MAX - len(self._loading)):
            self._load(run_id)
        if self._plan.ready:
            self._tick = self._loop.call_later(_TICK_S, self._recover_some)

    def _grace_ends(self) -> None:
        """Journal that runs wait for somebody to register their agent."""
        if self._closing:
            return
        for run_id in self._plan.take_kept(_LOADS_MAX - len(self._loading)):
            self._load(run_id)
        if self._plan.kept:
            self._loop.call_later(_TICK_S, self._grace_ends)

    def _load(self, run_id: str, action: Callable[[RunMachine], None] | None = None) -> None:
        """Read a run from the store and go on with it (``action`` is applied first)."""
        if self._closing or run_id in self._runs:
            return
        actions = self._loading.get(run_id)
        if actions is None:
            actions = self._loading[run_id] = []
            read = self._loop.run_in_executor(self._readers, self._read_run, run_id)
            read.add_done_callback(partial(self._loaded, run_id))
        if action is not None:
            actions.append(action)

    def _read_run(self, run_id: str) -> Any:
        """On a reader thread: the run's `History`, or its Head if it has ended."""
        head = self._store.read_head(run_id)
        if head is None:
            raise UnknownRunError(f"there is no run {run_id}", run=run_id)
        if head.state in TERMINAL:
            return head
        return read_history(run_id, self._store.read_records(run_id))

    def _loaded(self, run_id: str, read: "asyncio.Future[Any]") -> None:
        actions = self._loading.pop(run_id, [])
        if self._closing or read.cancelled():
            return
        error = read.exception()
        if error is not None:
            self._unreadable(run_id, error)
            return
        history = read.result()
        if isinstance(history, Head):  # it ended meanwhile
            self._uncount(run_id)
            self._answer_cancels(run_id, None)
            self._waiters.look(run_id)
            return
        machine = RunMachine(run_id, history.run.run(), self, history)
        self._runs[run_id] = machine
        if run_id in self._out:
            self._out.remove(run_id)
        else:
            self._admission.adopt()
        self._admission.grow(len(machine.accepted.input))
        self._recovered += 1
        for action in actions:
            action(machine)
        if machine.phase > Phase.LIVE:
            return
        if machine.cancel_reason is not None:
            machine.end_cancelled()
            return
        agent = self._versions.get(machine.accepted.version)
        if agent is None:
            machine.wait_for_operator(None, f"{_UNCLAIMED} {machine.accepted.agent} {machine.accepted.version}")
            return
        path = machine.exhausted_step()
        if path is not None and machine.tag is not _RESUMED:
            machine.wait_for_operator(path, f"{self.attempts_max} attempts ended without an outcome")
            return
        machine.tag = None
        if ARMED:
            hit("recover.before_start")
        self._start(machine, agent)
        if ARMED:
            hit("recover.after_start")

    def _let_out(self, machine: RunMachine) -> None:
        """The run goes on without a machine."""
        self._out.add(machine.run_id)
        self._admission.grow(-len(machine.accepted.input))

    def _uncount(self, run_id: str) -> None:
        if run_id in self._out:
            self._out.remove(run_id)
            self._admission.leave(0)
        self._check_idle()

    def _unreadable(self, run_id: str, error: BaseException) -> None:
        self._reloads.pop(run_id, None)
        self._uncount(run_id)
        if isinstance(error, StoreCorruptError):
            # It keeps its READY row: whoever repairs the store gets it back.
            self._loop.call_exception_handler({"message": f"run {run_id} cannot be read", "exception": error})
        elif not isinstance(error, AgentrtError):
            error = InternalError(f"run {run_id} cannot be read: {error!r}", run=run_id)
        self._give_up(run_id, error)

    def _give_up(self, run_id: str, error: BaseException) -> None:
        """This node will not end the run: tell those who wait for it."""
        self._waiters.fail(run_id, error)
        self._answer_cancels(run_id, error)

    # --- cancel, resume -------------------------------------------------------------------

    def cancel(self, run_id: str, done: Plain, reason: str = "cancelled by request") -> None:
        """Cancel a run; ``done(None)`` once the request is durable or the run has ended, ``done(error)`` otherwise."""
        try:
            parse_run_id(run_id)
            if self._closing:
                raise ClosedError("the runtime is closing")
        except AgentrtError as error:
            done(error)
            return
        machine = self._runs.get(run_id)
        if machine is None:
            self._cancels.setdefault(run_id, []).append(done)
            self._forget_place(run_id)
            self._load(run_id, lambda machine: machine.cancel(reason))
            return
        if machine.cancel_reason is not None and machine.phase < Phase.ENDED:
            # Its request may still be on its way; the end follows it in any case.
            self._cancels.setdefault(run_id, []).append(done)
        elif machine.phase is Phase.ACCEPTING:
            # Nobody knows its id yet but who guessed it.
            done(UnknownRunError(f"there is no run {run_id}", run=run_id))
        else:
            self._cancels.setdefault(run_id, []).append(done)
            machine.cancel(reason)

    def resume(self, run_id: str, done: Plain) -> None:
        """An operator lets a parked run go on: its exhausted step gets one more attempt. ``done`` as for `cancel`."""
        parked = self._parked.get(run_id)
        if self._closing or parked is None:
            done(InputError(f"run {run_id} does not wait for an operator", run=run_id))
            return
        self._forget_place(run_id)
        self._load(run_id, _mark_resumed)
        done(None)

    def _forget_place(self, run_id: str) -> None:
        self._plan.discard(run_id)
        self._parked.pop(run_id, None)

    def _answer_cancels(self, run_id: str, error: BaseException | None) -> None:
        for done in self._cancels.pop(run_id, ()):
            done(error)

    # --- asking ---------------------------------------------------------------------------

    def wait_ended(self, run_id: str, done: ResultDone) -> None:
        """``done(result, None)`` once the run has ended, durably; ``done(None, error)`` if there is no such run or this
        node cannot end it."""
        if self._closing:
            done(None, ClosedError("the runtime is closing"))
            return
        live = run_id in self._runs
        if not live:
            try:
                parse_run_id(run_id)
            except AgentrtError as error:
                done(None, error)
                return
        self._waiters.add(run_id, done, live=live)

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
        end = min(start + _WAITS_PER_TURN, len(run_ids))
        for index in range(start, end):
            self._waiters.stop(run_ids[index], group.parts[index])
        if end < len(run_ids):
            self._loop.call_soon(self.stop_waiting_many, group, run_ids, end)

    async def describe(self, run_id: str) -> RunInfo:
        """Raises UnknownRunError, InputError."""
        parse_run_id(run_id)
        machine = self._runs.get(run_id)
        if machine is not None and machine.phase is not Phase.ACCEPTING:
            return info_of_machine(machine)
        head = await self._loop.run_in_executor(self._readers, self._store.read_head, run_id)
        if head is None:
            raise UnknownRunError(f"there is no run {run_id}", run=run_id)
        return self._info_of_head(head)

    async def list_runs(
        self, *, state: str | None = None, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> list[RunInfo]:
        """Durable runs in order of their ids (so of acceptance), after the id ``after``."""
        if after:
            parse_run_id(after)
        found: list[RunInfo] = []
        while len(found) < limit:
            heads = await self._loop.run_in_executor(self._readers, self._store.scan_heads, after, 1000)
            for head in heads:
                if (state is None or head.state == state) and (tenant is None or head.tenant == tenant):
                    machine = self._runs.get(head.run_id)
                    found.append(self._info_of_head(head) if machine is None else info_of_machine(machine))
                    if len(found) == limit:
                        break
            if len(heads) < 1000:
                break
            after = heads[-1].run_id
        return found

    def _info_of_head(self, head: Head) -> RunInfo:
        if (parked := self._parked.get(head.run_id)) is not None:
            return info_of_head(head, "operator", parked.detail)
        if (version := self._plan.version_of(head.run_id)) is None:
            return info_of_head(head)
        if version in self._versions:
            return info_of_head(head, None, "waits for its turn to start again")
        return info_of_head(head, "operator", f"{_UNCLAIMED} {head.agent} {version}")

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            accepted=self._accepted,
            refused=self._admission.refused,
            duplicates=self._duplicates,
            ended={state.value: count for state, count in self._ended.items()},
            live=len(self._runs),
            queued_bytes=self._admission.bytes,
            parked=len(self._parked),
            recovering=len(self._plan) + len(self._loading),
            recovered=self._recovered,
            unclaimed=self._plan.kept,
            discarded=self._discarded,
            commits=self._commits,
            commits_alone=self._flusher.alone,
            tool_calls=self._tool_calls,
            log_lines_dropped=self._logs.dropped,
        )

    def observe(self, observer: Observer) -> None:
        """``observer(event, data)`` on the loop: ("accepted", RunInfo), ("ended", RunResult), ("parked", RunInfo). It
        must not block; one that raises is reported and dropped."""
        self._observers.append(observer)

    def _tell(self, event: str, data: Any) -> None:
        for observer in [*self._observers]:
            try:
                observer(event, data)
            except Exception as error:
                self._observers.remove(observer)
                self._loop.call_exception_handler(
                    {"message": f"observer {observer!r} raised and is disabled", "exception": error}
                )

    # --- the end of the node ---------------------------------------------------------------

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait until no run is under way (parked ones do not count). False: time was up."""
        self._accepting = False
        return await self._wait_idle(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Stop all guests, record the steps in flight within the time-out, leave the runs to the next start.

        The caller closes tools, backends and the store afterwards, in this order."""
        if self._closing:
            return
        self._accepting = False
        self._closing = True
        if self._tick is not None:
            self._tick.cancel()
        self._flusher.flush_all()
        for machine in [*self._runs.values()]:
            machine.halt()
        await self._wait_idle(timeout_s)
        self._flusher.flush_all()
        self._flusher.close()
        closed = ClosedError("the runtime was closed; the run goes on at its next start")
        self._waiters.fail_all(closed)
        for run_id in [*self._cancels]:
            self._answer_cancels(run_id, closed)
        await asyncio.get_running_loop().run_in_executor(None, self._logs.close)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _wait_idle(self, timeout_s: float | None) -> bool:
        self._idle = asyncio.Event()
        if not self._busy():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _busy(self) -> bool:
        if self._closing:
            return bool(self._runs)
        return bool(self._runs or self._loading or self._plan.ready or (self._started_ns and not self._scanned))

    def _park(self, machine: RunMachine, detail: str) -> None:
        accepted = machine.accepted
        self._parked[machine.run_id] = _Parked(accepted.base_tier, accepted.at_ns, accepted.version, detail)

    def _drop(self, machine: RunMachine) -> None:
        del self._runs[machine.run_id]
        self._check_idle()

    def _check_idle(self) -> None:
        if self._idle is not None and not self._busy():
            self._idle.set()


_UNCLAIMED: Final = "nobody has registered agent"
_RESUMED: Final = object()


def _mark_resumed(machine: RunMachine) -> None:
    machine.tag = _RESUMED
