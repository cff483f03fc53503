"""The thin shell around the machines: it accepts, starts guests, commits, calls tools, and brings runs back.

Everything here runs on the control loop and nothing blocks it: the store's writes are callbacks, its reads happen on
two reader threads. There is no asyncio task per run or step. A run that has not ended is in one place: a `RunMachine`
in `_runs`, on its way from the store (`_loading`, or a timer that will load it), in the recovery plan, or parked;
`_out` names those that are counted by admission and have no machine.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec

from agentrt.backends.base import Capture, Guest
from agentrt.engine.accept import EMBEDDED, Asked, Door, Origin, Via, ingress_of, settle_duplicate
from agentrt.engine.activations import Activations
from agentrt.engine.admission import Intake
from agentrt.engine.callbacks import CallbackDue
from agentrt.engine.callers import Callers
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.downtime import Downtime
from agentrt.engine.family import Ended, Family
from agentrt.engine.flow import EnsembleRows, Flow
from agentrt.engine.flowview import FlowView, flow_view
from agentrt.engine.flusher import FineTimer, FineTimerMaker, Flusher
from agentrt.engine.foreign import ForeignHolds
from agentrt.engine.frames import RunFrames
from agentrt.engine.gates import Gates
from agentrt.engine.group import Group
from agentrt.engine.history import read_history
from agentrt.engine.idle import Idle
from agentrt.engine.info import Agent, Emitted, EngineLimits, EngineStatistics, RunInfo, RunResult
from agentrt.engine.listing import RunsPage, Wanted, find_heads
from agentrt.engine.locks import Locks
from agentrt.engine.logrelay import LogRelay
from agentrt.engine.machine import DEADLINE_PATH, HOLD_PATH, START_PATH, Phase, RunMachine
from agentrt.engine.mailbox import Mailbox
from agentrt.engine.modelsteps import NOT_CALLED, ModelSteps, Streamed
from agentrt.engine.moving import Moving, exported, leaving
from agentrt.engine.ports import Hold as StepHold
from agentrt.engine.ports import Models, Refusal, Tools
from agentrt.engine.preload import Preload
from agentrt.engine.profiling import APPLY_TOPIC, Profiles
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.retention import Retention
from agentrt.engine.revalidate import Go, Hold, Revalidation, TimedOut, Verdict
from agentrt.engine.rows import rows_of
from agentrt.engine.schedules import SCHEDULE_PATH, Schedules
from agentrt.engine.steps import EventSend, Spawn, StepInFlight, decode, parse_asked_at, registration, send_address
from agentrt.engine.stuck import StuckRuns
from agentrt.engine.tenants import Tenants
from agentrt.engine.timers import Timer, Timers
from agentrt.engine.upgrade import UNCLAIMED
from agentrt.engine.urgent import UrgentRuns, begun_since
from agentrt.engine.versions import Bringer, Versions
from agentrt.engine.views import Around, info_of_head, info_of_machine, place, with_fold
from agentrt.engine.waiters import ResultDone, Waiters
from agentrt.engine.watch import Watches
from agentrt.errors import (
    AgentrtError,
    ClosedError,
    DeferredError,
    DeniedError,
    EngineError,
    FrameError,
    InputError,
    InternalError,
    QueueFullError,
    StaleWriteError,
    StepSettledError,
    StoreCorruptError,
    StoreError,
    UnknownAgentError,
    UnknownRunError,
)
from agentrt.flow.admission import Applicant, Bound
from agentrt.flow.classifier import Classifier
from agentrt.flow.decisions import Action as Did
from agentrt.flow.decisions import Control, Decision, Scope
from agentrt.flow.limits import GateLimits
from agentrt.flow.loopguard import LoopLimits
from agentrt.flow.profiles import InForce, Profile
from agentrt.flow.timeouts import Layer, end_of
from agentrt.flow.urgent import UrgentRates
from agentrt.fold import RunFold, fold
from agentrt.ids import new_run_id, parse_run_id
from agentrt.observe.labels import class_of
from agentrt.observe.logs import RUNS, log_end
from agentrt.observe.meter import Meter
from agentrt.policy import Allow, Defer, Policies
from agentrt.records import Cost
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import EVENTS, INBOX, READY, TIMERS, WAITS, Batch, Head, Row, Store
from agentrt.stores.frames import Frames, Kept
from agentrt.stores.keys import (
    address_of,
    parse_inbox_key,
    parse_ready_key,
    parse_ready_value,
    parse_timer_key,
    parse_wait_key,
)
from agentrt.tools.outcome import ToolOutcome

_logger: Final = logging.getLogger("agentrt.engine")
_runs_logger: Final = logging.getLogger(RUNS)
_CLOSING: Final = "the node stops; the run goes on at its next start"
_READY_PAGE: Final = 1_000
_STARTS_PER_TURN: Final = 64  # at 5 to 10 us each
_ACCEPTS_PER_TURN: Final = 32  # of one group, at 10 to 20 us each: for so long an urgent request waits for it
_URGENT: Final = frozenset(("0", "urgent", "critical"))
_WAITS_PER_TURN: Final = 1024  # of one group, at 1 to 5 us each
_LOADS_MAX: Final = 64  # runs being read at once
_AGAIN_S: Final = 1.0  # until what could not be read is looked at again
_TICK_S: Final = 0.005  # of the recovery's pace; the loop's timers count milliseconds
_LEND_AGAIN_S: Final = 0.001  # a guest that is just being queued or picked
_AFTER_NS: Final = 10_000_000  # a tool is stopped so long after its run's deadline, which is to be met first
_FRAMES_S: Final = 2.0  # for frames of what waits when the node stops; the others are replayed
_EVICT_S: Final = 5.0  # for what was ended to be gone, and recorded
_WAKES_MAX: Final = 10_000  # of what came during a downtime, sorted by tier at once
_DEFERRED_S: Final = 10.0  # after which to ask again whether a policy lets a run in: picked by feel
_SPAWNED: Final = Via("spawn")
_RELOADS_MAX: Final = 8  # of one run, without a new record between them

AcceptDone = Callable[[str | None, BaseException | None], None]
Plain = Callable[[BaseException | None], None]
Action = Callable[[RunMachine], None]
Missing = Callable[[BaseException | None], None]
Observer = Callable[[str, Any], None]


class _Parked(msgspec.Struct, frozen=True):
    """A run that waits for an operator; nothing else of it is in memory."""

    tier: int
    accepted_ns: int
    tenant: str
    agent: str
    detail: str
    path: str | None  # the step that somebody has to look at; None: it is about the whole run
    refusal: AgentrtError | None = None  # of the store, as long as nobody has stepped in


class _Accepting(msgspec.Struct):
    """What a submit waits with."""

    done: AcceptDone
    digest: bytes | None
    origin: Origin | None = None


class Engine:
    """One node's runs. Made and used on the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        tools: Tools,
        *,
        models: Models | None = None,
        limits: EngineLimits | None = None,
        pins: Mapping[str, str] | None = None,
        policies: Policies | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes],
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        fine_timer: FineTimerMaker = FineTimer,
        profile: Profile | None = None,
        profiles: Mapping[str, Profile] | None = None,
        gates: GateLimits | None = None,
        loops: LoopLimits | None = None,
        meter: Meter | None = None,
        classifier: Classifier | None = None,
        urgent_rates: UrgentRates | None = None,
        frames: Frames | None = None,
        memory_is_short: Callable[[], bool] | None = None,
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
        self._urgent = UrgentRuns(getattr(tools, "urgent", None))
        self.tool = tools.registry.get
        self._models = ModelSteps(models, limits.attempts_max, loop.call_soon, self._streamed)
        self.plan_model = self._models.plan
        self.reserve_model = self._models.reserve
        self._monotonic_ns = monotonic_ns
        self._random_bytes = random_bytes
        bounds = msgspec.structs.replace(limits.admission, node=Bound(limits.queue_items_max, limits.queue_bytes_max))
        self._intake = Intake(
            loop, bounds, monotonic_ns, now_ns, lambda decision: self.flow.decide(decision), self._look_again
        )
        self._policies = Policies() if policies is None else policies
        self._door = Door(limits, store, {**(pins or {}), **self._policies.pins}, now_ns, random_bytes)
        self._classifier = Classifier() if classifier is None else classifier
        self._urgent_rates = UrgentRates() if urgent_rates is None else urgent_rates
        self.tenants = Tenants(self)
        self._plan = RecoveryPlan(limits.rehydrate_per_s, limits.rehydrate_bytes_per_s)
        self._flusher = Flusher(loop, limits.commit_delay_ns, now_ns, lambda: store.backlog()[0] > 0, fine_timer)
        self._join_later = self._flusher.add
        self._logs = LogRelay()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="agentrt-read")
        self._versions = Versions(self, self._door, self._plan, tools)
        self._preload = Preload(self, self._versions.make_ready)
        self._runs: dict[str, RunMachine] = {}
        self._starts: tuple[deque[RunMachine], ...] = (deque(), deque(), deque(), deque())  # by tier
        self._starting = False
        self._loading: dict[str, list[tuple[Action, Missing | None]]] = {}
        self._parked: dict[str, _Parked] = {}
        self._out: dict[str, Applicant] = {}  # and as what they are counted
        self._waiters = Waiters(loop, self._readers, store)
        self._cancels: dict[str, list[Plain]] = {}
        self._later: dict[str, list[tuple[Action, Missing]]] = {}
        self._doomed: dict[str, str] = {}  # runs on their way into the store that are cancelled at once, and why
        self.frames: Final = RunFrames(loop, self, frames, limits.frames_after_ns, limits.replay_fuel_max)
        self.on_safe_point = self.frames.at_safe_point
        pressure = _enough if memory_is_short is None else memory_is_short
        bounds_of_idle = (limits.hot_ns, limits.hot_runs_max, self.frames.park, limits.hot_bytes_max, pressure)
        self._idle_guests = Idle(loop, monotonic_ns, *bounds_of_idle)
        self._timers = Timers(loop, now_ns, self._scan_timers, self._fire, self._room)
        self._downtime = Downtime(loop, self)
        self._stuck = StuckRuns(loop, self, limits.stuck_ns, monotonic_ns)
        self._broken: set[str] = set()  # runs whose journals cannot be read
        self._late: list[tuple[str, int, Callable[[], None]]] = []  # run, since, action: of what came during a downtime
        self._started_wall_ns = 0
        self._mailbox = Mailbox(self, limits.event_ttl_ns)
        self._family = Family(self)
        self._locks = Locks(loop, self, limits.lock_hold_ns, limits.lock_grace_ns)
        self._revalidation = Revalidation(self.tenants, self._policies, self._locks, now_ns)
        self._foreign = ForeignHolds(loop, limits.lock_grace_ns, self._lend)
        self.moving = Moving(self)
        #: Told when other profiles are in force.
        self.on_profiles: Callable[[InForce], None] | None = None
        #: None: no rates, breakers and the like, and no loop guard.
        self._gates: Gates | None = None
        self.flow: Final = Flow(
            loop,
            self,
            store,
            Profile(name="base") if profile is None else profile,
            depth_max=limits.depth_max,
            fan_out_max=limits.fan_out_max,
            tell=self._tell,
            configured=self._configured,
        )
        self._door.budget_of = self.flow.budget_of
        self.profiles: Final = Profiles(self, self.flow, dict(profiles or {}))
        self.schedules: Final = Schedules(loop, self, self.profiles)
        self.admit = self._admit_amounts
        self.woken = self._intake.woken
        self.unheld = self._unheld
        self.settled = self.flow.settled
        self.settled_recorded = self.flow.settled_recorded
        self.released = self.flow.released
        self.account_rows = self.flow.account_rows
        self.end_account = self.flow.end_account
        self.may_repeat = self.flow.may_repeat
        if gates is not None:
            self._gates = Gates(
                loop,
                now_ns,
                lambda: int.from_bytes(random_bytes(6)) / 2**48,
                gates,
                LoopLimits() if loops is None else loops,
                lambda tool: self.tool(tool).cls,
                self._look_again,
                self.flow.decide,
                self.flow.learn,
            )
            self._gates.apply(self.flow.force)
            self.admits = True
            self.admit = partial(self._admit_step, self._gates)
        self._retention = Retention(loop, self, limits.retention_ns)
        self._reloads: dict[str, tuple[int, int]] = {}
        self._backing_off: dict[str, list[tuple[Action, Missing | None]]] = {}  # runs that are read again in a while
        self._observers: list[Observer] = []
        self._activations = Activations(self._tell, now_ns)
        self._meter = Meter() if meter is None else meter
        self.count_step = self._meter.settled
        self.watches: Final[Watches[int]] = Watches()
        self.texts: Final[Watches[Streamed]] = Watches()  # who reads answers of models as they come
        self._ended: dict[RunState, int] = {}
        self._accepted = self._duplicates = self._recovered = self._discarded = 0
        self._commits = self._tool_calls = 0
        self._accepting = True
        self._closing = self._closed = False
        self._parking: asyncio.Future[None] | None = None
        self._callers = Callers()
        self._idle: asyncio.Event | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._started_ns = 0
        self._scanned = False
        if self._gates is not None:
            self._gates.open(self)
        if limits.profiles_tenant:
            self._mailbox.serve(address_of(limits.profiles_tenant, APPLY_TOPIC, ""), self.profiles.on_event)

    # --- agents -------------------------------------------------------------------

    def register(self, agent: Agent) -> None:
        """Make an agent known under its name, in place of an older version; runs of its version start again, and those
        of older versions as its ``on_upgrade`` says."""
        self._versions.register(agent)
        self._warm(self.flow.force)

    def keep_versions(self, bring: Bringer) -> None:
        """Older versions of agents can be brought back."""
        self._versions.bring = bring

    def agents(self) -> list[Agent]:
        """The agents by name."""
        return [agent for name in self._versions.names() if (agent := self._versions.get(name)) is not None]

    def agent(self, name: str) -> Agent | None:
        """The agent of that name. Any thread."""
        return self._versions.get(name)

    def registered_versions(self) -> set[str]:
        """Versions that new runs may have."""
        return self._versions.registered()

    # --- what versions ask for (VersionedRuns) -------------------------------------------

    @property
    def closing(self) -> bool:
        return self._closing

    def start(self, machine: RunMachine, agent: Agent) -> None:
        self._start(machine, agent)

    def claim(self, version: str, agent: str) -> None:
        self._plan.register(version)
        for run_id, parked in [*self._parked.items()]:
            if parked.path is None and parked.refusal is None and agent == parked.agent:
                del self._parked[run_id]
                self._plan.add(parked.tier, parked.accepted_ns, run_id, version)
        self._recover_soon()

    def tell(self, event: str, data: Any) -> None:
        self._tell(event, data)

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
        budget: Mapping[str, int | float] | None = None,
        timeout_ns: int | None = None,
        start_ns: int | None = None,
        callback_url: str | None = None,
        traceparent: str | None = None,
        via: Via = EMBEDDED,
    ) -> None:
        """Accept a run; ``done(run_id, None)`` is called once that is durable, or ``done(None, error)``. ``timeout_ns``
        is its wall time, after which it is TIMED_OUT; before ``start_ns`` (Unix ns) it does not begin. ``callback_url``
        is told when it has ended (see callbacks.py). ``traceparent``: the caller's span; ignored if it is none.

        If there is no room and ``via`` says that the caller waits, it is looked at again when there is, unless
        `stop_entering` is called with ``done``.

        With an idempotency key that the tenant has used with the same agent and input, or the ``origin`` of an event
        (`Asked`) of which a run was made, run_id is the earlier run's.
        Errors: ClosedError, UnknownAgentError, InputError, QueueFullError, IdempotencyConflictError, StoreError.
        """
        bounds = (fuel_max, budget, timeout_ns, start_ns, callback_url, traceparent)
        self.enter(Asked(agent_name, input, tenant, tier, idempotency_key, *bounds, via), done)

    def is_urgent(self, asked: Asked) -> bool:
        """Whether the request is of tier 0, as far as it says and before anybody has had a say. Any thread."""
        tier: Any = asked.tier
        if tier is None and isinstance(asked.agent, str):
            agent = self._versions.get(asked.agent)
            tier = None if agent is None else agent.tier
        return tier == 0 or (isinstance(tier, str) and tier in _URGENT)

    def enter(self, asked: Asked, done: AcceptDone) -> None:
        """`accept`, of a request as one."""
        self._enter(asked, done, None)

    def refuse_unread(self, tier: int, tenant: str) -> QueueFullError | None:
        """Of a door at which nobody waits: see `Edge.refuse`. Any thread."""
        return self._intake.edge.refuse(tier, tenant)

    def stop_entering(self, done: AcceptDone) -> None:
        """Who called `accept` with ``done`` does not wait at the door any more."""
        self._intake.give_up(done)

    def _enter(self, asked: Asked, done: AcceptDone, place: Applicant | None) -> None:
        """``place``: there is room for it, which is taken."""
        try:
            if not self._accepting:
                raise ClosedError("the runtime accepts no more runs")
            if not self.flow.ready():
                raise StoreError("the accounts of flow control cannot be read", hint="Try again")
            self._door.check(asked.tenant, asked.input)
            agent, tier, key = self._classify(asked)
            self._admit(agent, asked.tenant, tier, asked.via, None)
            if place is None:
                place = self._come_in(agent, asked, tier, done)
                if place is None:
                    return
            if not tier and self._urgent_rates.active:
                self._begin_urgent(asked)
            request = self._door.enter(agent, asked, tier, key)
            run_id = request.run_id
            machine = RunMachine(run_id, request.accepted, self)
            rows = self.flow.accept(machine, None)
        except AgentrtError as error:
            if place is not None:
                self._intake.withdraw(place)
            # Its traceback holds this frame, and with it ``done``, which leads to whoever keeps the error: a circle for
            # each refusal, and a collection of garbage for each thousands of them, which urgent requests wait for.
            done(None, error.with_traceback(None))
            return
        except Exception as error:
            if place is not None:
                self._intake.withdraw(place)
            done(None, InternalError(f"the run was not accepted: {type(error).__name__}: {error}"))
            raise
        machine.tag = _Accepting(done, request.digest, request.origin)
        machine.unwinds = agent.program.unwinds
        machine.place = place
        self._runs[run_id] = machine
        machine.accept(request.unique, rows)

    def _classify(self, asked: Asked, *, tell: bool = True) -> tuple[Agent, int, str | None]:
        """The agent, tier and idempotency key of a request. Raises UnknownAgentError, InputError, DeniedError."""
        via, classifier = asked.via, self._classifier
        if not classifier.active:
            agent = self._agent_named(asked.agent)
            return agent, max(self._door.tier_of(agent, asked.tier), via.max_tier), asked.idempotency_key
        found = classifier.classify(ingress_of(asked, classifier), self.now_ns())
        if found.decision is not None and tell:
            self.flow.decide(found.decision)
        if found.refused:
            kind = InputError if found.incomplete else DeniedError
            raise kind(found.refused, limit="rules", hint="The node's rules say so")
        agent = self._agent_named(found.agent)
        bound = max(classifier.max_tier(asked.tenant), via.max_tier)
        return agent, max(self._door.tier_of(agent, found.tier), bound), found.key

    def recall_urgent(self, store: Store) -> None:
        """Count what urgent runs tenants have begun just before this start. Blocks; before anything is accepted."""
        if self._urgent_rates.active:
            since_ns = self.now_ns() - self._urgent_rates.memory_ns
            for tenant, at_ns in begun_since(store, since_ns):
                self._urgent_rates.recall(tenant, at_ns, since_ns)

    def _begin_urgent(self, asked: Asked) -> None:
        """Raises QueueFullError: the tenant has begun as many runs of tier 0 as it may."""
        now_ns = self.now_ns()
        wait_ns = self._urgent_rates.take(asked.tenant, now_ns)
        if not wait_ns:
            return
        limit = "flow.urgent_per_minute"
        self.flow.decide(
            Decision(
                at_ns=now_ns,
                control=Control.RATE,
                action=Did.REFUSE,
                scope=Scope.TENANT,
                name=asked.tenant,
                limit=limit,
                until_ns=now_ns + wait_ns,
            )
        )
        raise QueueFullError(
            f"tenant {asked.tenant} has begun as many urgent runs as it may",
            limit=limit,
            retry_after_s=wait_ns / 1e9,
            hint="Ask for tier 1, or later",
        )

    def _agent_named(self, name: str) -> Agent:
        """Raises UnknownAgentError."""
        if name == "":
            raise InputError("the request names no agent, and no rule does", hint="Name the agent")
        agent = self._versions.get(name) if isinstance(name, str) else None
        if agent is None:
            known = ", ".join(self._versions.names()[:20]) or "none"
            raise UnknownAgentError(f"there is no agent {name!r:.200}", hint=f"Registered: {known}")
        return agent

    def _come_in(self, agent: Agent, asked: Asked, tier: int, done: AcceptDone) -> Applicant | None:
        """Take a place for a new run; None: it stands at the door, and is asked again. Raises QueueFullError."""
        applicant = Applicant(tier, asked.tenant, class_of(agent.backend.name), len(asked.input))
        if not asked.via.wait:
            return self._intake.enter(applicant)
        return self._intake.wait(applicant, done, partial(self._enter, asked, done), partial(done, None))

    def accept_child(
        self, parent: RunMachine, run_id: str, path: str, spawn: Spawn, done: Callable[[AgentrtError | None], None]
    ) -> None:
        """The run that a step spawns. Raises what the door raises."""
        try:
            if self._accept_child(parent, run_id, path, spawn, done):
                return
        except AgentrtError:
            self._not_started(parent, path)
            if self._gates is not None:
                self._gates.unheld(parent.run_id, path, child=True)
            raise
        self._not_started(parent, path)
        done(None)  # it was accepted in an earlier life of its parent's guest

    def _not_started(self, parent: RunMachine, path: str) -> None:
        """The places that a child was promised are others'."""
        self.flow.child_refused(parent, path)
        self._intake.drop_child(f"{parent.run_id}/{path}")

    def _accept_child(
        self, parent: RunMachine, run_id: str, path: str, spawn: Spawn, done: Callable[[AgentrtError | None], None]
    ) -> bool:
        if not self._accepting:
            raise ClosedError("the runtime accepts no more runs")
        if run_id in self._runs or run_id in self._loading or run_id in self._out:
            return False
        agent, tier = self._classify_child(spawn, parent)
        self._admit(agent, parent.accepted.tenant, tier, _SPAWNED, f"{parent.run_id}/{path}")
        accepted = self._door.enter_child(agent, spawn, tier, parent.accepted, parent.run_id, path, parent.tool_calls)

        def settled(child: str | None, error: BaseException | None) -> None:
            if isinstance(error, StaleWriteError):
                done(None)  # it exists
            elif error is None or isinstance(error, AgentrtError):
                done(error)
            else:
                done(InternalError(f"the child was not accepted: {error!r}", run=run_id))

        machine = RunMachine(run_id, accepted, self)
        machine.tag = _Accepting(settled, None)
        machine.unwinds = agent.program.unwinds
        rows = self.flow.accept(machine, parent)
        place = self._intake.claim(f"{parent.run_id}/{path}")
        # Without one it had it in an earlier life of the node: what is journaled is not refused any more.
        machine.place = self._intake.adopt(self._applicant(machine)) if place is None else place
        self._runs[run_id] = machine
        self.flow.child_accepted(parent.run_id, path, machine)
        machine.accept(rows=rows)
        return True

    def _classify_child(self, spawn: Spawn, parent: RunMachine, *, tell: bool = True) -> tuple[Agent, int]:
        """The same of a child, which is never more urgent than its parent."""
        accepted = parent.accepted
        asked = Asked(spawn.agent, bytes(spawn.input), accepted.tenant, spawn.tier, via=_SPAWNED)
        agent, tier, _ = self._classify(asked, tell=tell)
        return agent, max(tier, accepted.base_tier)

    def _applicant(self, machine: RunMachine) -> Applicant:
        """As what admission counts a run that is in memory."""
        accepted = machine.accepted
        return Applicant(accepted.base_tier, accepted.tenant, self._class_of(accepted.agent), len(accepted.input))

    def accept_many(
        self,
        group: Group[str],
        agent_name: str,
        inputs: Sequence[bytes],
        tenant: str = "default",
        tier: int | str | None = None,
        idempotency_keys: Sequence[str] | None = None,
        fuel_max: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        timeout_ns: int | None = None,
        via: Via = EMBEDDED,
        start: int = 0,
    ) -> None:
        """`accept` a run per input, from the one numbered ``start`` on, over several turns of the loop if they are
        many. The group has a part for each, which gets the run's id or the error."""
        end = min(start + _ACCEPTS_PER_TURN, len(inputs))
        for index in range(start, end):
            key = None if idempotency_keys is None else idempotency_keys[index]
            asked = Asked(agent_name, inputs[index], tenant, tier, key, fuel_max, budget, timeout_ns, via=via)
            self.enter(asked, group.parts[index])
        if end < len(inputs):
            more = (tenant, tier, idempotency_keys, fuel_max, budget, timeout_ns, via, end)
            self._loop.call_soon(self.accept_many, group, agent_name, inputs, *more)

    def _admit(self, agent: Agent, tenant: str, tier: int, via: Via, parent: str | None) -> None:
        """Raises TenantDisabledError, DeniedError, DeferredError."""
        self.tenants.check(tenant)
        if self._policies:
            facts = {"tenant": tenant, "agent": agent.name, "version": agent.version, "tier": tier, "parent": parent}
            facts |= {"door": via.door, "source": via.source, "type": via.type}
            decision = self._policies.decide("run.accept", facts)
            if isinstance(decision, Defer):
                raise DeferredError(decision.reason, hint="Try again later", retry_after_s=_DEFERRED_S)
            if not isinstance(decision, Allow):
                raise DeniedError(decision.reason, hint="Change the policy, or what is asked for")

    def tenant_enabled(self, tenant: str) -> None:
        for run_id, parked in [*self._parked.items()]:
            agent = self._versions.get(parked.agent)
            if parked.path is None and parked.tenant == tenant and agent is not None:
                del self._parked[run_id]
                self._plan.add(parked.tier, parked.accepted_ns, run_id, agent.version)
        self._recover_soon()

    def may_go_on(self, machine: RunMachine) -> bool:
        """Whether the run, which was brought back, needs a guest; else what is to be is done."""
        return self._follow(machine, self._revalidation.verdict(machine))

    def _follow(self, machine: RunMachine, verdict: Verdict) -> bool:
        if isinstance(verdict, Go):
            for name, token in verdict.lost:
                machine.lock_broken(name, token, (), lambda error: None)
            return True
        if isinstance(verdict, Hold):
            machine.wait_for_operator(None, verdict.detail)
        elif isinstance(verdict, TimedOut):
            machine.time_out()
        else:
            machine.refuse(verdict.error)
        return machine.phase <= Phase.LIVE  # it unwinds

    def _not_accepted(self, machine: RunMachine, accepting: _Accepting, error: AgentrtError) -> None:
        """The store refused the acceptance; for a used idempotency key it says whose it is."""
        self._drop(machine)
        self.flow.refused(machine, exists=isinstance(error, StaleWriteError))
        self._intake.gone(machine)
        if (reason := self._doomed.pop(machine.run_id, None)) is not None:
            # It may be there from an earlier life of its parent's guest.
            self.cancel_child(machine.run_id, reason, partial(self._tell_gone, machine))
        found = settle_duplicate(error, accepting.digest, accepting.origin)
        if isinstance(found, str):
            self._duplicates += 1
            accepting.done(found, None)
        else:
            accepting.done(None, found)

    # --- what machines ask for (RunPort) ------------------------------------------------

    def commit(self, machine: RunMachine, batch: Batch, done: Callable[[StoreError | None], None]) -> None:
        self._commits += 1
        if machine.run_id in self.watches:
            done = partial(self._grown, batch, done)
        try:
            self._store_commit(batch, done)
        except AgentrtError as error:
            # ClosedError or InternalError: nothing was taken. The machine hears of it as of any refusal.
            self._loop.call_soon(done, error)  # type: ignore[arg-type]

    def _grown(self, batch: Batch, done: Callable[[StoreError | None], None], error: StoreError | None) -> None:
        done(error)
        if error is None and batch.head is not None:
            self.watches.grown(batch.head.run_id, batch.head.version)

    def _admit_step(self, gates: Gates, machine: RunMachine, step: StepInFlight) -> StepHold | Refusal | None:
        """Rates first: what waits for them reserves nothing."""
        verdict = gates.admit(machine, step)
        if step.op == "event.send":
            return verdict
        # A further attempt keeps what was reserved for the first; one of a model may need more.
        if verdict is None and (step.attempt == 1 or step.plan is not None):
            verdict = self._admit_amounts(machine, step)
            if verdict is not None:
                gates.unheld(machine.run_id, step.path, child=not step.tool)
        return verdict

    def _admit_amounts(self, machine: RunMachine, step: StepInFlight) -> StepHold | Refusal | None:
        if step.op == "event.send":
            return None
        if step.plan is not None:
            self._models.reserve(step)  # the gate may have passed on to another model
        verdict = self.flow.admit(machine, step)
        if verdict is None and step.op == "run.spawn":
            verdict = self._admit_child(machine, step)
        return verdict

    def _admit_child(self, machine: RunMachine, step: StepInFlight) -> StepHold | Refusal | None:
        """Is there room for the run that the step starts?"""
        spawn = decode(step.op, step.request)
        assert isinstance(spawn, Spawn)
        try:
            agent, tier = self._classify_child(spawn, machine, tell=False)
        except AgentrtError:
            return None  # as is found when it is accepted
        cls, size_bytes = class_of(agent.backend.name), len(spawn.input)
        applicant = Applicant(tier, machine.accepted.tenant, cls, size_bytes)
        key = f"{machine.run_id}/{step.path}"
        verdict = self._intake.admit_child(key, applicant, block=spawn.when_full == "block")
        if isinstance(verdict, StepHold):
            self.flow.keep_place(machine.run_id, step.path)
            self.arm(verdict.until_ns, machine.run_id, HOLD_PATH)
        elif verdict is not None:
            self.flow.child_refused(machine, step.path)
        return verdict

    def _unheld(self, machine: RunMachine, step: StepInFlight) -> None:
        if self._gates is not None:
            self._gates.unheld(machine.run_id, step.path, child=not step.tool)
        self.flow.unheld(machine, step)
        if step.op == "run.spawn":
            self._intake.drop_child(f"{machine.run_id}/{step.path}")

    def capacity(self, machine: RunMachine) -> bytes:
        """See RunPort."""
        known = self.flow.estimates.of_agent(machine.accepted.agent)
        rates = [] if self._gates is None else self._gates.headroom(machine, known)
        return self.flow.capacity(machine, known, rates)

    def _look_again(self, run_id: str) -> None:
        """What keeps a step of the run from beginning may be over."""
        self.with_run(run_id, _unhold, lambda error: None)  # if it cannot be read, its timer looks again

    def call_tool(self, machine: RunMachine, step: StepInFlight) -> None:
        self._tool_calls += step.plan is None
        call = self._call if step.plan is None else self._models.call
        if self._gates is None or step.unwinding:
            call(machine, step, partial(self._told, machine, step))
        else:
            self._gates.dispatch(machine, step, call)

    def _call(self, machine: RunMachine, step: StepInFlight, done: Callable[..., None]) -> None:
        timeouts, clock = machine.timeouts, machine.clock
        timeout_ns = None
        if (timeouts.deadline_ns or clock is not None) and not step.unwinding:  # who unwinds has a time of its own
            now_ns = self.now_ns()
            spent_ns = 0 if clock is None else clock.spent_ns(now_ns)
            left_ns, layer = timeouts.left(spent_ns, now_ns, self.tool(step.tool).timeout_ns)
            timeout_ns = None if layer is Layer.TOOL else max(0, left_ns) + _AFTER_NS
        try:
            step.call = self._tools_call(
                step.tool,
                step.args,
                key=step.key,
                tenant=machine.accepted.tenant,
                tier=machine.tier,
                attempt=step.attempt,
                done=done,
                timeout_ns=timeout_ns,
            )
        except AgentrtError as error:
            payload = msgspec.json.encode(error.to_dict())
            self._loop.call_soon(done, ToolOutcome(False, payload, error.code, 0, False))

    def _told(self, machine: RunMachine, step: StepInFlight, outcome: ToolOutcome, model: object = None) -> None:
        self.flow.learn(machine, step, outcome.cost_ns)
        machine.on_outcome(step, outcome)

    def stop_call(self, machine: RunMachine, step: StepInFlight) -> None:
        if step.call is not None:
            self._tools.cancel(step.call)
        elif self._gates is not None and self._gates.withdraw(machine.run_id, step.path):
            self._loop.call_soon(machine.on_outcome, step, NOT_CALLED)

    def stop_model(self, machine: RunMachine, step: StepInFlight) -> None:
        if step.call is not None:
            self._models.stop(step)
        elif self._gates is not None and self._gates.withdraw(machine.run_id, step.path):
            self._loop.call_soon(machine.on_outcome, step, NOT_CALLED)

    def reconcile(self, machine: RunMachine, step: StepInFlight) -> None:
        done = partial(machine.on_reconciled, step)
        try:
            self._tools_call(
                step.tool,
                step.args,
                key=step.key,
                tenant=machine.accepted.tenant,
                tier=machine.tier,
                attempt=step.attempt,
                done=done,
                reconcile=True,
            )
        except AgentrtError as error:
            payload = msgspec.json.encode(error.to_dict())
            self._loop.call_soon(done, ToolOutcome(False, payload, error.code, 0, False))

    def begin(self, machine: RunMachine, step: StepInFlight) -> None:
        # Not at once: a machine is not called back before its own call has returned.
        self._loop.call_soon(self._begin, machine, step)

    def _begin(self, machine: RunMachine, step: StepInFlight) -> None:
        if self._closing or machine.open.get(step.handle) is not step:
            return
        op = step.op
        if op == "run.spawn":
            self._family.spawn(machine, step)
        elif op == "run.join":
            self._family.join(machine, step)
            if self._locks.lent(machine.run_id) is not None and machine.open.get(step.handle) is step:
                self._find_joins(machine)
        elif op == "event.send":
            self._send(machine, step)
        elif op == "lock.release":
            self._locks.release(machine, step)
        else:
            if op == "lock.acquire":
                self._locks.acquire(machine, step)
            found = registration(machine.run_id, machine.accepted.tenant, op, step.path, step.request, step.prepared_ns)
            if found.due_ns:
                due_ns = found.due_ns
                if op == "approval.request":
                    due_ns = self._downtime.moved(step.prepared_ns, due_ns)
                self._timers.arm(due_ns, machine.run_id, step.path, moved=due_ns != found.due_ns)
            if op == "event.wait":
                self._mailbox.match(found.address)

    def _send(self, machine: RunMachine, step: StepInFlight) -> None:
        request = decode(step.op, step.request)
        assert isinstance(request, EventSend)
        path = step.path
        event_id = request.id or f"{machine.run_id}/{path}"
        answer = msgspec.json.encode({"id": event_id})

        def done(fresh: bool, error: BaseException | None) -> None:
            if not fresh and error is None:
                machine.answer(path, True, answer)  # an event of this id was sent before
            elif error is not None:  # nothing was sent: the id says so if it was
                self.later(partial(self._begin, machine, step))

        address = send_address(machine.accepted.tenant, request)
        self._mailbox.publish(
            address,
            event_id,
            bytes(request.data),
            lambda rows, told: machine.answer(path, True, answer, rows, told),
            done,
        )

    # --- tiers that are lent: see `Locks` ---

    def wait_over(self, machine: RunMachine, path: str) -> None:
        self._locks.wait_over(machine.run_id, path)

    def tier_is_lent(self, run_id: str) -> None:
        lent = self._locks.lent(run_id)
        if lent is not None and self._plan.hurry(run_id, lent):
            return  # the rest as it is loaded
        if run_id not in self._parked and run_id not in self._plan:
            # One that only waits is read for it: what it is lent may be needed by whom it waits for.
            self.with_run(run_id, self._have_tier, partial(self._tier_not_told, run_id))

    def _have_tier(self, machine: RunMachine) -> None:
        """Have the run, its guest and what it waits for know the tier that the run is lent."""
        lent, base = self._locks.lent(machine.run_id), machine.accepted.base_tier
        tier = base if lent is None else min(base, lent)
        if tier != machine.tier:
            machine.change_tier(tier, "nobody waits for it" if tier == base else "somebody of that tier waits for it")
        if lent is not None:
            self._find_joins(machine)
        self._lend(machine)

    def _tier_not_told(self, run_id: str, error: BaseException | None) -> None:
        if error is not None:  # it cannot be read now
            self.later(partial(self.tier_is_lent, run_id))

    def _find_joins(self, machine: RunMachine) -> None:
        for path, child in machine.joined():
            self._locks.joining(machine, path, child)

    def _lend(self, machine: RunMachine) -> None:
        guest = machine.guest
        lent = self._locks.lent(machine.run_id)
        own = self._foreign.floor(machine.run_id, machine.accepted.base_tier)
        floor = lent if own is None else own if lent is None else min(own, lent)
        if guest is not None and not guest.lend(floor):
            self._loop.call_later(_LEND_AGAIN_S, self._lend, machine)

    def on_foreign(self, machine: RunMachine) -> None:
        self._loop.call_soon(self._foreign.look, machine)

    def end_children(self, machine: RunMachine, children: tuple[str, ...]) -> None:
        self._loop.call_soon(self._family.end_children, machine, children)

    def cancel_child(self, run_id: str, reason: str, gone: Callable[[], None]) -> None:
        """Cancel it; ``gone`` is called if it has ended already or never was. Its end tells its parent otherwise."""
        machine = self._runs.get(run_id)
        if machine is not None and machine.phase is Phase.ACCEPTING:
            self._doomed[run_id] = reason
            return

        def missing(error: BaseException | None) -> None:
            if error is None:
                gone()
            else:  # it cannot be read now, and its parent may not end before it
                self._loop.call_later(1.0, self.cancel_child, run_id, reason, gone)

        self.with_run(run_id, lambda machine: machine.cancel(reason), missing)

    def start_again(self, machine: RunMachine) -> None:
        if not self._closing:
            self._versions.go_on(machine)

    def _configured(self, limited: bool, force: InForce) -> None:
        self.admits = limited or self._gates is not None
        if self.on_profiles is not None:
            self.on_profiles(force)
        self._warm(force)
        self._intake.apply(force)
        if self._gates is not None:
            self._gates.apply(force)

    def _warm(self, force: InForce) -> None:
        """Have backends keep guests ready, and tools hosts, as the profiles in force say."""
        agents = self.agents()
        wanted = force.prewarm()
        if (warm_tools := getattr(self._tools, "prewarm", None)) is not None:
            prefix = Scope.CLASS.value + ":"
            warm_tools({key.removeprefix(prefix): wanted[key] for key in wanted if key.startswith(prefix)})
        if not agents:  # as while the engine is made
            return
        for backend in {agent.backend.name: agent.backend for agent in agents}.values():
            prewarm = getattr(backend, "prewarm", None)
            if prewarm is not None:
                prewarm([(each.program, wanted.get(each.name, 0)) for each in agents if each.backend is backend])
        self._preload.want(self.flow.force.preload() & {agent.name for agent in agents})

    def mind_clock(self, machine: RunMachine, after_ns: int) -> None:
        self._loop.call_later(after_ns / 1e9, self._clock_due, machine)

    def _clock_due(self, machine: RunMachine) -> None:
        if self._runs.get(machine.run_id) is machine:
            machine.clock_due()

    def start_held(self, machine: RunMachine) -> None:
        """See FlowRuns."""
        self._versions.go_on(machine)

    def on_idle(self, machine: RunMachine) -> None:
        self._idle_guests.add(machine)
        self._intake.idle(machine)
        self.flow.idle(machine)

    def on_emitted(self, machine: RunMachine, path: str, data: bytes) -> None:
        if self._gates is not None:
            self._gates.output(machine)
        self._tell("emitted", Emitted(machine.run_id, path, data))

    def join_later(self, machine: RunMachine) -> None:
        self._join_later(machine)

    def log(self, machine: RunMachine, payload: bytes) -> None:
        self._logs.put(machine.run_id, payload)

    def on_accepted(self, machine: RunMachine) -> None:
        self._accepted += 1
        accepting: _Accepting = machine.tag
        machine.tag = None
        accepted = machine.accepted
        self._meter.accepted(accepted.base_tier, self._class_of(accepted.agent))
        if self._closing:
            machine.halt()
        elif accepted.start_ns:
            self._timers.arm(accepted.start_ns, machine.run_id, START_PATH)
            self._go_cold(machine)
        else:
            if machine.tier or self._starting or self._doomed:
                # A group commit acknowledges thousands at once; they start over several turns, most urgent first.
                self._starts[machine.tier].append(machine)
            else:  # a lone urgent one at once, and before anybody is told, which wakes another thread
                self._versions.go_on(machine)
            if not self._starting:
                self._starting = True
                self._loop.call_soon(self._start_some)
        if accepted.deadline_ns:
            self._timers.arm(accepted.deadline_ns, machine.run_id, DEADLINE_PATH)
        if self._observers:
            self._tell("accepted", info_of_machine(machine))
        accepting.done(machine.run_id, None)
        if self._later:
            self._do_later(machine.run_id)
        if self._doomed and (reason := self._doomed.pop(machine.run_id, None)) is not None:
            machine.cancel(reason)

    def on_cancelled(self, machine: RunMachine) -> None:
        self._answer_cancels(machine.run_id, None)

    def on_ended(self, machine: RunMachine) -> None:
        run_id = machine.run_id
        outcome, exit, cost = machine.outcome, machine.exit, machine.cost
        assert outcome is not None
        self._drop(machine)
        self.flow.ended(machine)
        if run_id in self.moving.leaving:
            self.moving.gone(run_id)
        if self._gates is not None:
            self._gates.ended(machine, outcome.state)
        self._intake.ended(machine)
        if self._reloads:
            self._reloads.pop(run_id, None)
        self.frames.ended(run_id)
        state = outcome.state
        self._ended[state] = self._ended.get(state, 0) + 1
        self._measure(machine, state, cost)
        accepted = machine.accepted
        result = RunResult(
            run_id, state, outcome.result, outcome.error, cost, machine.tier, exit, accepted.tenant, accepted.agent
        )
        if machine.accepted.parent is not None:
            self._family.ended(run_id, machine.accepted, Ended(state.value, outcome.result, outcome.error))
        if machine.foreign:
            names = ", ".join(sorted(set(machine.foreign.values())))
            _logger.warning("run %s ended without releasing what it held elsewhere: %s", run_id, names)
        if machine.locks:
            self._locks.ended(run_id, machine.accepted.tenant, list(machine.locks))
        if accepted.callback_url is not None:
            self._tell("callback", CallbackDue(run_id, accepted.tenant, self.now_ns()))
        if self._observers:
            self._tell("ended", result)  # first: who has been told a result may rely on the observers having seen it
        self._waiters.ended(result)
        if self._cancels:
            self._answer_cancels(run_id, None)

    def _measure(self, machine: RunMachine, state: RunState, cost: Cost) -> None:
        """Count and log a run that has ended."""
        accepted = machine.accepted
        took_ns = max(0, machine.at_ns - max(accepted.at_ns, accepted.start_ns))
        cls = self._class_of(accepted.agent)
        self._meter.ended(accepted.base_tier, cls, state._value_, took_ns, machine.tool_calls, cost.fuel)
        assert machine.outcome is not None
        if state is RunState.TIMED_OUT:
            limit = msgspec.json.decode(machine.outcome.error or b"{}", type=dict[str, Any]).get("limit") or ""
            spent_ns = took_ns if machine.clock is None or limit != "active_s" else machine.clock.active_ns
            self.flow.decide(end_of(machine.run_id, limit, spent_ns, self.now_ns()))
        log_end(_runs_logger, machine.run_id, accepted, machine.outcome, took_ns)

    def _class_of(self, name: str) -> str:
        agent = self._versions.get(name)
        return class_of(None if agent is None else agent.backend.name)

    def on_parked(self, machine: RunMachine) -> None:
        if machine.exit is not None and machine.exit.reason == "evicted" and machine.frame_named:
            self.frames.refuse(machine.run_id, machine.frame_named, machine.frame_copy, machine.exit.message)
        if machine.run_id in self.moving.leaving:
            self._drop(machine)
            self.flow.parked(machine)
            self._let_out(machine)
            self.moving.gone(machine.run_id)
            return
        if machine.cold:
            self._go_cold(machine)
            return
        self._drop(machine)
        self.flow.parked(machine)
        if self._gates is not None:
            self._gates.parked(machine.run_id, waits=False)
        if machine.wait is None:
            if not self._closing:  # what it waited for came while it was parked
                self._let_out(machine)
                self._load(machine.run_id)
        else:
            self._let_out(machine)
            if self._versions.changed(machine.run_id):  # what it waits for came while it was parked
                self._load(machine.run_id)
                return
            self._park(machine, machine.wait.detail or machine.wait.reason)
            self._tell("parked", info_of_machine(machine))

    def _go_cold(self, machine: RunMachine) -> None:
        """The run waits in the store; what wakes it is there too."""
        self._drop(machine)
        self.flow.parked(machine)
        if self._gates is not None:
            self._gates.parked(machine.run_id, waits=True)
        self._intake.gone(machine)
        self._tell("parked", info_of_machine(machine))

    def _tell_gone(self, machine: RunMachine) -> None:
        """A run that a parent waits for was never accepted."""
        if machine.accepted.parent is not None:
            parent = self._runs.get(machine.accepted.parent.partition("/")[0])
            if parent is not None:
                parent.child_gone(machine.run_id)

    def on_discarded(self, machine: RunMachine, error: AgentrtError) -> None:
        if isinstance(machine.tag, _Accepting):
            self._not_accepted(machine, machine.tag, error)
            return
        run_id = machine.run_id
        self._drop(machine)
        if rows := self.flow.discarded(machine):
            self.drop(rows)
        if self._gates is not None:
            self._gates.parked(run_id, waits=False)
        self._discarded += 1
        self._let_out(machine)
        if self._closing or isinstance(error, ClosedError):
            return
        if run_id in self.moving.leaving:  # what the store has is what leaves
            self.moving.gone(run_id)
            return
        count, version = self._reloads.get(run_id, (0, -1))
        count = 1 if machine.loaded_version > version else count + 1
        self._reloads[run_id] = (count, machine.loaded_version)
        if count > _RELOADS_MAX:
            # Another session owns the run, or the store is broken: this node must not go on with it.
            self._park(machine, f"the store refuses the run's records: {error.message}", error)
            self._give_up(run_id, error)
            return
        # First at once, then ever more patiently: a full store needs time.
        self._load_later(run_id, min(5.0, 0.002 * 4**count))
        if machine.cancel_reason is not None:
            self._cancel_again(run_id, machine.cancel_reason)

    def _cancel_again(self, run_id: str, reason: str) -> None:
        """The request may have been refused with the rest, and whoever made it waits for the run's end."""

        def missing(error: BaseException | None) -> None:
            if error is not None:
                self.later(partial(self._cancel_again, run_id, reason))

        self.with_run(run_id, lambda machine: machine.cancel(reason), missing)

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
                    self._versions.go_on(machine)
        self._starting = False

    def _start(self, machine: RunMachine, agent: Agent) -> None:
        """Start the machine's guest; the machine is in `_runs`."""
        if not self.flow.may_start(machine):
            return
        accepted = machine.accepted
        machine.unwinds = agent.program.unwinds
        kept, machine.frame = machine.frame, None
        frame = None if kept is None else self._frame_of(machine, agent, kept)
        try:
            machine.resume()
            guest: Guest = agent.backend.start(
                agent.program,
                machine,
                tenant=accepted.tenant,
                tier=accepted.base_tier,
                input=accepted.input,
                restored=machine.restored,
                # What it takes again to come to where it unwinds may be a little more than it was, measured in time.
                fuel=accepted.fuel_max * (1 if machine.ending is None else 2),
                seed=machine.segment_seed,
                clock_ns=machine.segment_ns,
                admitted=True,
                replay=machine.replays,
                **({} if frame is None else {"frame": frame}),
            )
        except ClosedError:
            machine.halt()
        except AgentrtError as error:
            machine.fail(error)
        except Exception as error:
            machine.fail(EngineError(f"the backend could not start the guest: {error!r}", run=machine.run_id))
        else:
            machine.guest = guest
            machine.mind_clock()
            if not machine.tier:
                self._urgent.began(machine)
            if self._locks.lent(machine.run_id) is not None:
                self._lend(machine)
            if machine.foreign:
                self._foreign.look(machine)
            self.frames.watch(machine)
            if self._activations.wanted:
                self._activations.begun(machine, frame is not None)
            if frame is not None and kept is not None:
                self.frames.begun(machine, kept)
                self._plan.charge(frame.frame.memory_bytes)
                machine.go_on_from(frame.frame.seq, frame.frame.next_handle)

    def _frame_of(self, machine: RunMachine, agent: Agent, kept: Kept) -> Any:
        """The frame that the machine's guest begins with; None: it is replayed."""
        frame_of = getattr(agent.backend, "frame_of", None)
        if frame_of is None or machine.ending is not None:
            return None
        named = machine.frame_named or ""
        try:
            found = frame_of(agent.program, kept)
        except FrameError as error:
            self.frames.refuse(machine.run_id, named, kept.copy, error.message)
            return None
        # one under this name that says otherwise was put there by somebody
        frame = found.frame
        if frame.id.hex() == named and frame.segment == machine.segment and frame.seq <= machine.version:
            machine.frame_copy = kept.copy
            return found
        self.frames.refuse(machine.run_id, named, kept.copy, "it is another one, or of another moment")
        return None

    def capturing(self, machine: RunMachine) -> Capture | None:
        """See agentrt.engine.frames.Runs."""
        agent = self._versions.of(machine)
        capturing = None if agent is None else getattr(agent.backend, "capturing", None)
        if agent is None or capturing is None:
            return None
        capture: Capture | None = capturing(agent.program, machine.guest)
        return capture

    def park_later(self, machine: RunMachine) -> None:
        """See agentrt.engine.frames.Runs."""
        self._idle_guests.add(machine)

    # --- recovery ---------------------------------------------------------------------------

    def recover(self) -> None:
        """Begin to bring back the runs of the store; those of registered agents start, the others wait for theirs."""
        self._started_ns = self._monotonic_ns()
        self._started_wall_ns = self.now_ns()
        self.watch_progress()
        self._versions.begin_grace()
        self._downtime.open(partial(self._scan, b""))

    def watch_progress(self) -> None:
        """Begin to look for runs that are stuck."""
        self._stuck.open()

    def machines(self) -> list[RunMachine]:
        return [*self._runs.values()]

    def awaited_by(self, run_id: str) -> str | None:
        return self._versions.awaited_by(run_id) or self.flow.awaited_by(run_id)

    def nobody_has(self, run_id: str) -> bool:
        return not any(run_id in place for place in (self._runs, self._loading, self._out, self._broken))

    def bring_back(self, tier: int, accepted_ns: int, run_id: str, version: str, agent: str) -> None:
        self._count_out(run_id, tier, agent)
        self._plan.add(tier, accepted_ns, run_id, version, agent)
        self._versions.found(version, agent)
        self._recover_soon()

    def _wake_waiting(self) -> None:
        """Runs of the store that wait, and for which something came that nobody could deliver before the node ended."""
        self._timers.open()
        self._locks.open()
        self._retention.open()
        self._find_ended_children(b"")
        self._locks.reading()
        self._find_waits(b"")

    def _find_ended_children(self, after: bytes) -> None:
        def found(rows: list[tuple[bytes, bytes]], error: BaseException | None) -> None:
            if error is not None:
                self._read_again("children that have ended", error, partial(self._find_ended_children, after))
                return
            for key, _ in rows:
                parent, child = parse_inbox_key(key)
                machine = self._runs.get(parent)
                starts = parent in self._out or (machine is not None and machine.state is not RunState.WAITING)
                if not starts:  # those ask then; one that waits is here for something else, and leaves again
                    self.wake_late(parent, 0, partial(self._family.ended_before, parent, child))
            if len(rows) == _READY_PAGE:
                self._find_ended_children(rows[-1][0])

        self.read(lambda store: store.scan_rows(INBOX, b"", after, _READY_PAGE), found)

    def _find_waits(self, after: bytes) -> None:
        """Addresses that have an event as well as somebody who waits; and who waits for locks. Both come back at the
        recovery's pace."""

        def look(
            store: Store,
        ) -> tuple[list[tuple[bytes, str, int]], list[tuple[bytes, str, str, int, int]], bytes | None]:
            rows = store.scan_rows(WAITS, b"", after, _READY_PAGE)
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
            return both, locks, rows[-1][0] if len(rows) == _READY_PAGE else None

        def found(read: Any, error: BaseException | None) -> None:
            if error is not None:
                self._read_again("waits", error, partial(self._find_waits, after))
                return
            both, locks, more = read
            for address, run_id, since_ns in both:
                match = partial(self._mailbox.match, address)
                if run_id in self._runs:
                    match()
                else:
                    self.wake_late(run_id, since_ns, match)
            for wait in locks:
                self._locks.recovered(*wait)
            if more is not None:
                self._find_waits(more)
            else:
                self._locks.done_reading()

        self.read(look, found)

    def _read_again(self, what: str, error: BaseException, again: Callable[[], None]) -> None:
        if not self._closing:
            self._loop.call_exception_handler({"message": f"{what} cannot be read", "exception": error})
            self._loop.call_later(1.0, again)

    def _scan_timers(self, after: bytes, limit: int, done: Callable[[list[tuple[bytes, Timer]]], None]) -> None:
        def look(store: Store) -> list[tuple[bytes, Timer]]:
            found: list[tuple[bytes, Timer]] = []
            while len(found) < limit:
                start = found[-1][0] if found else after
                rows = store.scan_rows(TIMERS, b"", start, min(_READY_PAGE, limit - len(found)))
                for key, value in rows:
                    due_ns, run_id, path = parse_timer_key(key)
                    asked_ns = parse_asked_at(value)
                    if asked_ns is not None:
                        due_ns = self._downtime.moved(asked_ns, due_ns)
                    found.append((key, (due_ns, run_id, path)))
                if len(rows) < _READY_PAGE:
                    break
            return found

        def found(rows: list[tuple[bytes, Timer]], error: BaseException | None) -> None:
            if error is not None:
                self._read_again("timers", error, partial(self._scan_timers, after, limit, done))
            else:
                done(rows)

        self.read(look, found)

    def _room(self) -> bool:
        return len(self._loading) < _LOADS_MAX and self._plan.wakes + len(self._late) < _WAKES_MAX and not self._closing

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
            self._recover_soon()

        self.read(look, found)

    def arm(self, due_ns: int, run_id: str, path: str) -> None:
        """A row of TIMERS is durable."""
        self._timers.arm(due_ns, run_id, path)

    def _fire(self, run_id: str, path: str, due_ns: int) -> None:
        if path == SCHEDULE_PATH:
            self.schedules.fire(run_id)
        elif due_ns < self._started_wall_ns and run_id not in self._runs:
            self.wake_late(run_id, due_ns, partial(self._fall_due, run_id, path))
        else:
            self._fall_due(run_id, path)

    def _fall_due(self, run_id: str, path: str) -> None:
        def due(machine: RunMachine) -> None:
            machine.fall_due(path)

        def missing(error: BaseException | None) -> None:
            if error is not None:  # a run that has ended took its rows with it; this one is still there
                self.later(partial(self._fall_due, run_id, path))

        self.with_run(run_id, due, missing)

    def drop(self, rows: tuple[Row, ...]) -> None:
        def done(error: AgentrtError | None) -> None:
            if error is not None:
                self.later(partial(self.drop, rows))

        self.commit_rows(rows, done)

    def later(self, again: Callable[[], None]) -> None:
        if not self._closing:
            self._loop.call_later(_AGAIN_S, self._again, again)

    def _again(self, again: Callable[[], None]) -> None:
        if not self._closing:
            again()

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """``done(function(store), None)`` or ``done(None, error)``; the function runs on a reader thread."""

        def finished(read: "asyncio.Future[Any]") -> None:
            if self._closing or read.cancelled():
                return
            error = read.exception()
            done(None if error is not None else read.result(), error)

        try:
            self._loop.run_in_executor(self._readers, function, self._store).add_done_callback(finished)
        except RuntimeError:  # the readers are gone: the node ends
            return

    def look(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """`read` for callers from outside, who are answered in any case."""

        def finished(read: "asyncio.Future[Any]") -> None:
            error = ClosedError(_CLOSING) if read.cancelled() else read.exception()
            done(None if error is not None else read.result(), error)

        try:
            self._loop.run_in_executor(self._readers, function, self._store).add_done_callback(finished)
        except RuntimeError:  # the readers are gone
            done(None, ClosedError(_CLOSING))

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None:
        """Rows that belong to no run."""
        self.commit_plain(Batch(None, 0, (), rows), done)

    def commit_plain(self, batch: Batch, done: Callable[[AgentrtError | None], None]) -> None:
        """A batch of no run's."""
        try:
            self._store_commit(batch, done)
        except AgentrtError as error:
            self._loop.call_soon(done, error)

    def in_memory(self, run_id: str) -> RunMachine | None:
        machine = self._runs.get(run_id)
        return None if machine is None or machine.phase is Phase.ACCEPTING else machine

    def with_run(self, run_id: str, action: Action, missing: Missing) -> None:
        """Have ``action(machine)`` called with the run, which is read from the store if need be; ``missing(None)`` if
        it has ended or never was, ``missing(error)`` if it cannot be read."""
        machine = self._runs.get(run_id)
        if self._closing:
            return
        if machine is None:
            if (parked := self._parked.get(run_id)) is not None and parked.refusal is not None:
                self._loop.call_soon(missing, parked.refusal)  # it would be refused again
                return
            self._load(run_id, action, missing)
        elif Phase.ACCEPTING < machine.phase <= Phase.PARKING:
            action(machine)
        else:  # it is about to be gone, or accepted: a child that its parent spawns again may be there already
            self._later.setdefault(run_id, []).append((action, missing))

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
        found: dict[tuple[str, str], None] = {}
        for key, value in rows:
            tier, accepted_ns, run_id = parse_ready_key(key)
            if run_id not in self._runs and run_id not in self._loading and run_id not in self._out:
                version, agent = parse_ready_value(value)
                self._count_out(run_id, tier, agent)
                self._plan.add(tier, accepted_ns, run_id, version, agent)
                found[version, agent] = None
        for version, agent in found:
            self._versions.found(version, agent)
        if len(rows) == _READY_PAGE:
            self._scan(rows[-1][0])
        else:
            self._scanned = True
            self._loop.call_later(self.limits.register_grace_ns / 1e9, self._grace_ends)
            self._wake_waiting()
        self._recover_soon()
        self._check_idle()

    def _recover_soon(self) -> None:
        if self._tick is None and self._plan.ready and not self._closing:
            self._tick = self._loop.call_later(0, self._recover_some)

    def _recover_some(self) -> None:
        self._tick = None
        if self._closing:
            return
        for taken in self._plan.take(self._monotonic_ns(), _LOADS_MAX - len(self._loading)):
            if isinstance(taken, str):
                self._load(taken)
            else:
                taken()
        if self._plan.ready:
            self._tick = self._loop.call_later(_TICK_S, self._recover_some)

    def _grace_ends(self) -> None:
        """Journal that runs wait for somebody to register their agent."""
        if self._closing:
            return
        self._versions.end_grace()
        for run_id in self._plan.take_kept(_LOADS_MAX - len(self._loading)):
            self._load(run_id)
        if self._plan.kept:
            self._loop.call_later(_TICK_S, self._grace_ends)

    def _load_later(self, run_id: str, delay_s: float) -> None:
        """Whoever wants something of the run until then waits as well."""

        def load() -> None:
            actions = self._backing_off.pop(run_id)
            self._load(run_id)
            for action, missing in actions:
                self._load(run_id, action, missing)

        self._backing_off[run_id] = []
        self._loop.call_later(delay_s, load)

    def _load(self, run_id: str, action: Action | None = None, missing: Missing | None = None) -> None:
        """Read a run from the store and go on with it (``action`` is applied first), unless it still waits then."""
        if self._closing or run_id in self._runs:
            return
        if run_id in self.moving.leaving:
            if missing is not None:
                self._loop.call_soon(missing, leaving(run_id))
            self._answer_cancels(run_id, leaving(run_id))
            return
        if (backing_off := self._backing_off.get(run_id)) is not None:
            if action is not None:
                backing_off.append((action, missing))
            return
        if not self.flow.ready():
            self._load_later(run_id, _AGAIN_S)
            if action is not None:
                self._backing_off[run_id].append((action, missing))
            return
        self._forget_place(run_id)
        actions = self._loading.get(run_id)
        if actions is None:
            actions = self._loading[run_id] = []
            self._read_for_loading(run_id)
        if action is not None:
            actions.append((action, missing))

    def _read_for_loading(self, run_id: str) -> None:
        began = self.flow.reading()
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
        history = history._replace(frame=self.frames.read(run_id, history.run))
        root = history.run.run().root or run_id
        done = None if self._gates is None else self._gates.read_loops(self._store, root)
        return history, self.flow.read(self._store, root), done

    def _loaded(self, run_id: str, began: int, read: "asyncio.Future[Any]") -> None:
        actions = self._loading.pop(run_id, [])
        if self._closing or read.cancelled():
            return
        if run_id in self.moving.leaving:
            for _, missing in actions:
                if missing is not None:
                    missing(leaving(run_id))
            self._answer_cancels(run_id, leaving(run_id))
            self.moving.gone(run_id)
            self.flow.done_reading()
            return
        error = read.exception()
        rows, done = EnsembleRows(), None
        if error is None and not isinstance(read.result(), Head):
            history, rows, done = read.result()
            if self.flow.stale(history.run.run().root or run_id, began):
                self.flow.done_reading()
                self._loading[run_id] = actions
                self._read_for_loading(run_id)
                return
        self.flow.done_reading()
        if error is not None:
            self._unreadable(run_id, error)
            gone = None if isinstance(error, UnknownRunError) else error
            for _, missing in actions:
                if missing is not None:
                    missing(gone)
            return
        if isinstance(read.result(), Head):  # it ended meanwhile
            self._reloads.pop(run_id, None)
            self._uncount(run_id)
            self._answer_cancels(run_id, None)
            self._waiters.look(run_id)
            for _, missing in actions:
                if missing is not None:
                    missing(None)
            return
        machine = RunMachine(run_id, history.run.run(), self, history)
        self._runs[run_id] = machine
        self.flow.loaded(machine, rows)
        if self._gates is not None:
            self._gates.loaded(machine, history, done)
        machine.place = self._intake.adopt(self._applicant(machine))
        if (out := self._out.pop(run_id, None)) is not None:
            self._intake.withdraw(out)
        self._recovered += 1
        agent = self._versions.of(machine)
        machine.unwinds = agent is not None and agent.program.unwinds
        if machine.tier != machine.accepted.base_tier or self._locks.lent(run_id) is not None:
            self._have_tier(machine)
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
        if not self.may_go_on(machine):
            return
        self._versions.go_on(machine)
        if ARMED:
            hit("recover.after_start")

    # --- runs that move (moving.Runs) -------------------------------------------------------

    def machine_of(self, run_id: str) -> RunMachine | None:
        return self._runs.get(run_id)

    def let_go(self, machine: RunMachine) -> None:
        if self.frames.is_worth(machine) and self.frames.park(machine):
            self._loop.call_later(_FRAMES_S, machine.halt)  # of no effect once it is parked
        else:
            machine.halt()

    def is_loading(self, run_id: str) -> bool:
        return run_id in self._loading

    def forget(self, run_id: str) -> None:
        self._forget_place(run_id)
        self._backing_off.pop(run_id, None)
        self._uncount(run_id)

    def give_up(self, run_id: str, version: int, error: AgentrtError) -> None:
        self._locks.left(run_id)
        self._give_up(run_id, error)
        self.flow.exported(run_id)
        self.watches.grown(run_id, version)

    def take_up(self, run_id: str) -> None:
        def look(store: Store) -> tuple[Head, tuple[Row, ...]] | None:
            head = store.read_head(run_id)
            if head is None or head.state in TERMINAL or head.state == RunState.EXPORTED:
                return None
            return head, rows_of(run_id, fold(store.read_records(run_id)))

        def found(read: Any, error: BaseException | None) -> None:
            if error is not None:
                self._read_again(f"run {run_id}", error, partial(self.take_up, run_id))
                return
            if read is None:
                return
            head, rows = read
            for row in rows:
                if row.table == TIMERS:
                    due_ns, _, path = parse_timer_key(row.key)
                    self._timers.arm(due_ns, run_id, path)
                elif row.table == WAITS:
                    address, since_ns, _, path = parse_wait_key(row.key)
                    if row.value == b"lock":
                        self._locks.recovered(address, run_id, path, head.base_tier, since_ns)
                    else:
                        self._mailbox.match(address)
            self._load(run_id)

        self.read(look, found)

    def _let_out(self, machine: RunMachine) -> None:
        """The run goes on without a machine."""
        assert machine.place is not None
        self._out[machine.run_id] = self._intake.adopt(msgspec.structs.replace(machine.place, size_bytes=0))
        self._intake.gone(machine)

    def _count_out(self, run_id: str, tier: int, agent: str) -> None:
        """A run of the store that will start; whose it is, is seen then."""
        self._out[run_id] = self._intake.adopt(Applicant(tier, "", self._class_of(agent)))

    def _uncount(self, run_id: str) -> None:
        if (out := self._out.pop(run_id, None)) is not None:
            self._intake.leave(out)
        self._check_idle()

    def _unreadable(self, run_id: str, error: BaseException) -> None:
        if isinstance(error, StoreError) and not isinstance(error, StoreCorruptError):
            # It is read again: here, or by whoever wakes it. Who waits for its end waits on.
            self._answer_cancels(run_id, error)
            if run_id in self._out:
                self._load_later(run_id, _AGAIN_S)
            return
        self._reloads.pop(run_id, None)
        self._uncount(run_id)
        if isinstance(error, StoreCorruptError):
            # It keeps its READY row: whoever repairs the store gets it back.
            self._broken.add(run_id)
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
                raise ClosedError(_CLOSING)
        except AgentrtError as error:
            done(error)
            return
        machine = self._runs.get(run_id)
        if machine is None:
            self._cancels.setdefault(run_id, []).append(done)
            self._load(run_id, lambda machine: machine.cancel(reason))
            return
        if machine.cancel_reason is not None and machine.phase < Phase.ENDED:
            # Its request may still be on its way; the end follows it in any case.
            self._cancels.setdefault(run_id, []).append(done)
        elif machine.phase is Phase.ACCEPTING:  # see `with_run`
            self._cancels.setdefault(run_id, []).append(done)

            def missing(error: BaseException | None) -> None:
                gone = UnknownRunError(f"there is no run {run_id}", run=run_id)
                self._answer_cancels(run_id, gone if error is None else error)

            self.with_run(run_id, lambda machine: machine.cancel(reason), missing)
        else:
            self._cancels.setdefault(run_id, []).append(done)
            machine.cancel(reason)

    def resume(self, run_id: str, done: Plain) -> None:
        """An operator lets a parked run go on: its exhausted step gets one more attempt. ``done`` as for `cancel`."""
        parked = self._parked.get(run_id)
        if self._closing or parked is None:
            hint = "Look at what it waits for; a run that has ended is begun again by submitting it"
            gone = InputError(f"run {run_id} does not wait for an operator", run=run_id, hint=hint)
            done(ClosedError(_CLOSING) if self._closing else gone)
            return
        done = self._callers.add(done, done)
        self._load(run_id, lambda machine: machine.allow_retry(done), done)

    def decide(self, run_id: str, path: str, done: Plain, *, ok: bool | None, payload: bytes = b"null") -> None:
        """An operator settles a step whose outcome nobody saw: with its result, with an error, or (``ok`` None) by
        letting it run once more. ``done(StepSettledError)`` if the step does not wait for that."""
        parked = self._parked.get(run_id)
        if self._closing or parked is None:
            gone = StepSettledError(f"run {run_id} does not wait for an operator", run=run_id, step=path)
            done(ClosedError(_CLOSING) if self._closing else gone)
            return
        done = self._callers.add(done, done)

        def decided(machine: RunMachine) -> None:
            try:
                machine.decide(path, ok, payload, done)
            except AgentrtError as error:
                done(error)

        self._load(run_id, decided, done)

    def send(
        self,
        tenant: str,
        event: EventSend,
        done: Callable[[str | None, BaseException | None], None],
    ) -> None:
        """An event from outside; ``done(id, None)`` once it is durable, or was before under the same id."""
        if self._closing:
            done(None, ClosedError(_CLOSING))
            return
        done = self._callers.add(done, partial(done, None))
        event_id = event.id or new_run_id(self.now_ns() // 1_000_000, self._random_bytes(10)).replace("run_", "evt_")

        def written(fresh: bool, error: BaseException | None) -> None:
            done(None if error is not None else event_id, error)

        def write(rows: tuple[Row, ...], told: Callable[[AgentrtError | None], None]) -> bool:
            self.commit_rows(rows, told)
            return True

        self._mailbox.publish(send_address(tenant, event), event_id, bytes(event.data), write, written)

    def approve(
        self, run_id: str, path: str | None, answer: bytes, done: Callable[[str | None, BaseException | None], None]
    ) -> None:
        """Answer an approval; ``done(path, None)`` once that is durable. Without a path the run must wait for exactly
        one. ``done(None, error)``: InputError if it waits for several, StepSettledError if it waits for none any
        more."""

        def give(machine: RunMachine) -> None:
            open_paths = [step[0] for step in machine.open_steps() if step[1] == "approval.request"]
            if path is None and len(open_paths) > 1:
                done(None, InputError(f"run {run_id} waits for {len(open_paths)} approvals", hint="Name the step"))
                return
            chosen = path if path is not None else (open_paths[0] if open_paths else "")

            def told(error: AgentrtError | None) -> None:
                done(None if error is not None else chosen, error)

            # A guest that may not go on does not get its answer. One that is not there is asked about when it is.
            there = machine.guest is not None and machine.phase <= Phase.LIVE
            verdict = self._revalidation.verdict(machine) if there and chosen in open_paths else Go()
            goes = isinstance(verdict, Go)
            if chosen not in open_paths or not machine.answer(chosen, True, answer, (), told, deliver=goes):
                done(None, StepSettledError("the approval is gone, answered, or too late", run=run_id, step=path))
            elif there:
                self._follow(machine, verdict)

        def missing(error: BaseException | None) -> None:
            gone = StepSettledError("the run has ended, or there is none", run=run_id, step=path)
            done(None, error if error is not None else gone)

        try:
            parse_run_id(run_id)
            if self._closing:
                raise ClosedError(_CLOSING)
        except AgentrtError as error:
            done(None, error)
            return
        done = self._callers.add(done, partial(done, None))
        self.with_run(run_id, give, missing)

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
        live = self.in_memory(run_id) is not None
        if not live:
            try:
                parse_run_id(run_id)
            except AgentrtError as error:
                done(None, error)
                return
        self._waiters.add(run_id, done, live=live, last=ClosedError(_CLOSING) if self._closing else None)

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

    async def describe(self, run_id: str) -> RunInfo:
        """Raises UnknownRunError, InputError."""
        parse_run_id(run_id)
        machine = self._runs.get(run_id)
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
        return info if run is None else with_fold(info, run, Around(self._locks.holder, self._downtime.moved))

    def _info_of_machine(self, machine: RunMachine) -> RunInfo:
        run_id = machine.run_id
        suspect = self._stuck.since(run_id)
        awaited = self._versions.awaited_by(run_id)
        around = Around(self._locks.holder, self._downtime.moved)
        return info_of_machine(machine, around, awaited, None if suspect is None else suspect[0])

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
            machine = self._runs.get(head.run_id)
            info = self._info_of_head(head) if machine is None else self._info_of_machine(machine)
            if info.wait_reason == "operator" and info.detail is None:
                try:  # it is just being read; nobody decides without knowing what
                    info = await self.describe(head.run_id)
                except UnknownRunError:
                    continue
            runs.append(info)
        return RunsPage(runs, going_on)

    def _info_of_head(self, head: Head) -> RunInfo:
        if (parked := self._parked.get(head.run_id)) is not None:
            return info_of_head(head, "operator", parked.detail)
        if (version := self._plan.version_of(head.run_id)) is None:
            return info_of_head(head)
        if self._plan.runnable(version):
            turn = f"waits for its turn to start again: {place(head.tier, head.tenant)}, limits.rehydrate_per_s"
            return info_of_head(head, "pool", turn)
        if self._versions.get(head.agent) is not None:
            return info_of_head(head, "pool", "its module is being made ready")
        return info_of_head(head, "operator", f"{UNCLAIMED} {head.agent} (version {version})")

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            accepted=self._accepted,
            refused=self._intake.refused,
            duplicates=self._duplicates,
            ended={state.value: count for state, count in self._ended.items()},
            live=len(self._runs),
            queued_bytes=self._intake.admission.bytes,
            parked=len(self._parked),
            recovering=len(self._plan) + len(self._loading),
            recovered=self._recovered,
            unclaimed=self._plan.kept,
            discarded=self._discarded,
            commits=self._commits,
            commits_alone=self._flusher.alone,
            tool_calls=self._tool_calls,
            log_lines_dropped=self._logs.dropped,
            stuck=self._stuck.found,
            decisions={"/".join(key): count for key, count in self.flow.decisions.counted.items()},
            frames=self.frames.statistics(),
        )

    def flow_view(self) -> FlowView:
        return flow_view(self.flow, self._gates, self.profiles.known)

    def observe(self, observer: Observer, activations: bool = False) -> None:
        """``observer(event, data)`` on the loop: ("accepted", RunInfo), ("ended", RunResult), ("parked", RunInfo),
        ("emitted", Emitted), ("streamed", Streamed), ("callback", CallbackDue).
        With ``activations`` ("begun", run id) and ("left", Activation) as well. It must not block; one that raises is
        reported and dropped."""
        self._observers.append(observer)
        self._activations.wanted |= activations

    def _streamed(self, text: Streamed) -> None:
        self._tell("streamed", text)
        self.texts.grown(text.run_id, text)

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

    @property
    def accepting(self) -> bool:
        """Whether new runs are taken. Any thread."""
        return self._accepting

    @property
    def parked(self) -> bool:
        """Whether `park` is through. Any thread."""
        return self._parking is not None and self._parking.done()

    def stop_accepting(self) -> None:
        """Refuse what comes from now on; what was accepted goes on."""
        self._accepting = False
        self._intake.close()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait until no run is under way (parked ones do not count). False: time was up."""
        self.stop_accepting()
        return await self._wait_idle(timeout_s)

    async def park(self, timeout_s: float) -> None:
        """Stop all guests, tell the tools and record the steps in flight within the time-out, end what still runs, and
        leave the runs to the next start. Afterwards the store can be read; what would change a run is refused."""
        if self._parking is None:
            self._parking = asyncio.ensure_future(self._park_all(timeout_s))
        await asyncio.shield(self._parking)

    async def _park_all(self, timeout_s: float) -> None:
        self.stop_accepting()
        self._closing = True
        if self._tick is not None:
            self._tick.cancel()
        self._timers.close()
        self._downtime.close()
        self._stuck.close()
        self._locks.close()
        self._foreign.close()
        self._retention.close()
        if self._gates is not None:
            self._gates.close()
        self._idle_guests.close()
        self._flusher.flush_all()
        framed = {machine for machine in self._runs.values() if self.frames.is_worth(machine)}
        for machine in [*self._runs.values()]:
            if machine not in framed:
                machine.halt()
        self._tools.stop()
        await self.frames.take_all(framed, min(timeout_s, _FRAMES_S))
        for machine in [*self._runs.values()]:
            machine.halt()
        if not await self._wait_idle(timeout_s):
            self._tools.evict()
            await self._wait_idle(_EVICT_S)
        self._flusher.flush_all()
        closed = ClosedError(_CLOSING)
        self._waiters.fail_all(closed)
        self._callers.fail_all(closed)
        for run_id in [*self._cancels]:
            self._answer_cancels(run_id, closed)

    async def close(self, timeout_s: float) -> None:
        """`park`, and let go of everything.

        The caller closes tools, backends and the store afterwards, in this order."""
        if self._closed:
            return
        self._closed = True
        await self.park(timeout_s)
        await self.frames.close()
        self._waiters.fail_all(ClosedError(_CLOSING))  # who came meanwhile
        self._flusher.close()
        await asyncio.get_running_loop().run_in_executor(None, self._logs.close)
        self._versions.clear()
        self._door.close()
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

    def _park(self, machine: RunMachine, detail: str, refusal: AgentrtError | None = None) -> None:
        accepted = machine.accepted
        path = machine.wait.path if machine.wait is not None else None
        self._parked[machine.run_id] = _Parked(
            accepted.base_tier, accepted.at_ns, accepted.tenant, accepted.agent, detail, path, refusal
        )

    def _drop(self, machine: RunMachine) -> None:
        del self._runs[machine.run_id]
        if self._activations.wanted:
            self._activations.gone(machine)
        if self._foreign:
            self._foreign.forget(machine.run_id)
        self._idle_guests.forget(machine)
        self.frames.forget(machine)
        if self._later:
            self._do_later(machine.run_id)
        self._check_idle()

    def _do_later(self, run_id: str) -> None:
        for action, missing in self._later.pop(run_id, ()):
            self._loop.call_soon(self.with_run, run_id, action, missing)

    def _check_idle(self) -> None:
        if self._idle is not None and not self._busy():
            self._idle.set()


def _enough() -> bool:
    return False


def _unhold(machine: RunMachine) -> None:
    machine.unhold()
