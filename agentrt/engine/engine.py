"""The thin shell around the machines: its parts are put together here, and here is what becomes of a run: it starts,
ends, parks or is discarded.

Who comes in is in entrance.py, what steps do in effects.py, how runs come back to memory in loading.py, what wakes them
in wakes.py, what they are told and asked from outside in orders.py and queries.py; where each of them is, in places.py.

Everything runs on the control loop and nothing blocks it: the store's writes are callbacks, its reads happen on two
reader threads (access.py). There is no asyncio task per run or step.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from agentrt.backends.base import Capture, Guest
from agentrt.engine.accept import EMBEDDED, Asked, Door, Via, settle_duplicate
from agentrt.engine.access import CLOSING, StoreAccess
from agentrt.engine.activations import Activations
from agentrt.engine.admission import Intake
from agentrt.engine.callbacks import CallbackDue
from agentrt.engine.decisionlog import DecisionLog
from agentrt.engine.downtime import Downtime
from agentrt.engine.effects import Effects
from agentrt.engine.entrance import AcceptDone, Accepting, Entrance
from agentrt.engine.family import Ended, Family
from agentrt.engine.flow import Flow
from agentrt.engine.flowview import FlowView, flow_view
from agentrt.engine.flusher import FineTimer, FineTimerMaker, Flusher
from agentrt.engine.foreign import ForeignHolds
from agentrt.engine.framelook import FrameLooks
from agentrt.engine.frames import RunFrames
from agentrt.engine.gates import Gates
from agentrt.engine.idle import Idle
from agentrt.engine.info import Agent, Emitted, EngineLimits, EngineStatistics, RunResult
from agentrt.engine.loading import Loader
from agentrt.engine.locks import Locks
from agentrt.engine.logrelay import LogRelay
from agentrt.engine.machine import DEADLINE_PATH, START_PATH, Phase, RunMachine
from agentrt.engine.mailbox import Mailbox
from agentrt.engine.modelsteps import ModelSteps, Streamed
from agentrt.engine.moving import Moving
from agentrt.engine.orders import Orders
from agentrt.engine.places import Parked, Places
from agentrt.engine.ports import Models, Tools
from agentrt.engine.preload import Preload
from agentrt.engine.profiling import APPLY_TOPIC, Profiles
from agentrt.engine.queries import Queries
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.retention import Retention
from agentrt.engine.revalidate import Go, Hold, Revalidation, TimedOut, Verdict
from agentrt.engine.rows import rows_of
from agentrt.engine.schedules import Schedules
from agentrt.engine.stuck import StuckRuns
from agentrt.engine.tenants import Tenants
from agentrt.engine.urgent import UrgentRuns
from agentrt.engine.versions import Bringer, Versions
from agentrt.engine.views import info_of_machine
from agentrt.engine.waiters import Waiters
from agentrt.engine.wakes import Wakes
from agentrt.engine.watch import Watches
from agentrt.errors import AgentrtError, ClosedError, EngineError, FrameError, StaleWriteError, StoreError
from agentrt.flow.admission import Bound
from agentrt.flow.classifier import Classifier
from agentrt.flow.decisions import Scope
from agentrt.flow.limits import GateLimits
from agentrt.flow.loopguard import LoopLimits
from agentrt.flow.profiles import InForce, Profile
from agentrt.flow.timeouts import end_of
from agentrt.flow.urgent import UrgentRates
from agentrt.fold import fold
from agentrt.observe.logs import RUNS, log_end
from agentrt.observe.meter import Meter
from agentrt.policy import Policies
from agentrt.records import Cost
from agentrt.states import TERMINAL, RunState
from agentrt.stores.base import Batch, Head, Row, Store
from agentrt.stores.frames import Frames, Kept
from agentrt.stores.keys import address_of

_logger: Final = logging.getLogger("agentrt.engine")
_runs_logger: Final = logging.getLogger(RUNS)
_STARTS_PER_TURN: Final = 64  # at 5 to 10 us each
_LEND_AGAIN_S: Final = 0.001  # a guest that is just being queued or picked
_FRAMES_S: Final = 2.0  # for frames of what waits when the node stops; the others are replayed
_EVICT_S: Final = 5.0  # for what was ended to be gone, and recorded

Observer = Callable[[str, Any], None]


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
        self._urgent = UrgentRuns(getattr(tools, "urgent", None))
        self.tool = tools.registry.get
        self._models = ModelSteps(models, limits.attempts_max, loop.call_soon, self._streamed)
        self.plan_model = self._models.plan
        self.reserve_model = self._models.reserve
        self._monotonic_ns = monotonic_ns
        self._access = access = StoreAccess(loop, store)
        self.read, self.look, self.later = access.read, access.look, access.later
        self.commit_rows, self.commit_plain, self.drop = access.commit_rows, access.commit_plain, access.drop
        bounds = msgspec.structs.replace(limits.admission, node=Bound(limits.queue_items_max, limits.queue_bytes_max))
        self._intake = Intake(
            loop, bounds, monotonic_ns, now_ns, lambda decision: self.flow.decide(decision), self._look_again
        )
        self._policies = Policies() if policies is None else policies
        self._door = Door(limits, store, {**(pins or {}), **self._policies.pins}, now_ns, random_bytes)
        self.tenants = Tenants(self)
        self._plan = RecoveryPlan(limits.rehydrate_per_s, limits.rehydrate_bytes_per_s)
        self._flusher = Flusher(loop, limits.commit_delay_ns, now_ns, lambda: store.backlog()[0] > 0, fine_timer)
        self.join_later = self._flusher.add
        self._logs = LogRelay()
        self._versions = Versions(self, self._door, self._plan, tools)
        self._preload = Preload(self, self._versions.make_ready)
        self._places = Places()
        self._runs: Final = self._places.runs
        self.in_memory = self._places.in_memory
        self._starts: tuple[deque[RunMachine], ...] = (deque(), deque(), deque(), deque())  # by tier
        self._starting = False
        self._waiters = Waiters(loop, access.readers, store)
        self._doomed: dict[str, str] = {}  # runs on their way into the store that are cancelled at once, and why
        self.frames: Final = RunFrames(loop, self, frames, limits.frames_after_ns, limits.replay_fuel_max)
        self.on_safe_point = self.frames.at_safe_point
        pressure = _enough if memory_is_short is None else memory_is_short
        bounds_of_idle = (limits.hot_ns, limits.hot_runs_max, self.frames.park, limits.hot_bytes_max, pressure)
        self._idle_guests = Idle(loop, monotonic_ns, *bounds_of_idle)
        self._downtime = Downtime(loop, self)
        self._stuck = StuckRuns(loop, self, limits.stuck_ns, monotonic_ns)
        self._mailbox = Mailbox(self, limits.event_ttl_ns)
        self._family = Family(self)
        self._locks = Locks(loop, self, limits.lock_hold_ns, limits.lock_grace_ns)
        self._revalidation = Revalidation(self.tenants, self._policies, self._locks, now_ns)
        self._foreign = ForeignHolds(loop, limits.lock_grace_ns, self._lend)
        self.moving = Moving(self)
        self._wakes = Wakes(
            loop, self, access, self._places, self._plan, self._downtime, self._family, self._mailbox, self._locks
        )
        self.arm, self.wake_late = self._wakes.arm, self._wakes.wake_late
        #: What is told to runs from outside.
        self.orders: Final = Orders(self, access, self._places, self._mailbox, self._revalidation, random_bytes)
        decisions = DecisionLog()
        #: What is asked about them.
        self.queries: Final = Queries(
            loop,
            self,
            store,
            access,
            self._places,
            self._waiters,
            self._versions,
            self._plan,
            self._stuck,
            self._locks,
            self._downtime,
            decisions,
        )
        #: What their guests are doing.
        self.frame_looks: Final = FrameLooks(loop, store, access, self._places, self.frames)
        #: Told when other profiles are in force.
        self.on_profiles: Callable[[InForce], None] | None = None
        #: None: no rates, breakers and the like, and no loop guard.
        self._gates: Gates | None = None
        self.flow: Final[Flow] = Flow(
            loop,
            self,
            store,
            Profile(name="base") if profile is None else profile,
            depth_max=limits.depth_max,
            fan_out_max=limits.fan_out_max,
            tell=self._tell,
            configured=self._configured,
            decisions=decisions,
        )
        self._door.budget_of = self.flow.budget_of
        self.profiles: Final = Profiles(self, self.flow, dict(profiles or {}))
        self.schedules: Final = Schedules(loop, self, self.profiles)
        self.fire_schedule = self.schedules.fire
        self.woken = self._intake.woken
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
        #: Who comes in.
        self.entrance: Final = Entrance(
            loop,
            self,
            self._access,
            self._places,
            self._door,
            self._intake,
            self._versions,
            self.tenants,
            self._policies,
            Classifier() if classifier is None else classifier,
            UrgentRates() if urgent_rates is None else urgent_rates,
            self.flow,
            self._gates,
        )
        self.accept_child = self.entrance.accept_child
        self._effects = effects = Effects(
            loop,
            self,
            access,
            tools,
            self._models,
            self.entrance,
            self._intake,
            self.flow,
            self._gates,
            self._family,
            self._mailbox,
            self._locks,
            self._wakes.timers,
            self._downtime,
        )
        self.admit, self.unheld, self.begin = effects.admit, effects.unheld, effects.begin
        self.call_tool, self.reconcile = effects.call_tool, effects.reconcile
        self.stop_call, self.stop_model = effects.stop_call, effects.stop_model
        self._loader = loader = Loader(
            loop,
            self,
            store,
            access,
            self._places,
            self._plan,
            self._versions,
            self._intake,
            self.entrance,
            self.orders,
            self._waiters,
            self._locks,
            self.flow,
            self._gates,
            self.frames,
            self.moving,
            limits.register_grace_ns,
            monotonic_ns,
        )
        self.with_run, self.load, self.forget = loader.with_run, loader.load, loader.stay_away
        self.has_room, self.recover_soon = loader.has_room, loader.recover_soon
        self.bring_back, self.nobody_has = loader.bring_back, loader.nobody_has
        self._retention = Retention(loop, self, limits.retention_ns)
        self._observers: list[Observer] = []
        self._activations = Activations(self._tell, now_ns)
        self._meter = Meter() if meter is None else meter
        self.count_step = self._meter.settled
        self.watches: Final[Watches[int]] = Watches()
        self.texts: Final[Watches[Streamed]] = Watches()  # who reads answers of models as they come
        self._ended: dict[RunState, int] = {}
        self._accepted = self._duplicates = self._discarded = self._commits = 0
        self._accepting = True
        self._closing = self._closed = False
        self._parking: asyncio.Future[None] | None = None
        self._idle: asyncio.Event | None = None
        self._started_ns = 0
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
        for run_id, parked in [*self._places.parked.items()]:
            if parked.path is None and parked.refusal is None and agent == parked.agent:
                del self._places.parked[run_id]
                self._plan.add(parked.tier, parked.accepted_ns, run_id, version)
        self.recover_soon()

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
        self.entrance.enter(Asked(agent_name, input, tenant, tier, idempotency_key, *bounds, via), done)

    def tenant_enabled(self, tenant: str) -> None:
        for run_id, parked in [*self._places.parked.items()]:
            agent = self._versions.get(parked.agent)
            if parked.path is None and parked.tenant == tenant and agent is not None:
                del self._places.parked[run_id]
                self._plan.add(parked.tier, parked.accepted_ns, run_id, agent.version)
        self.recover_soon()

    def may_go_on(self, machine: RunMachine) -> bool:
        """Whether the run, which was brought back, needs a guest; else what is to be is done."""
        return self.follow(machine, self._revalidation.verdict(machine))

    def follow(self, machine: RunMachine, verdict: Verdict) -> bool:
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

    # --- what machines ask for (RunPort) ------------------------------------------------

    def commit(self, machine: RunMachine, batch: Batch, done: Callable[[StoreError | None], None]) -> None:
        self._commits += 1
        if machine.phase is Phase.ENDED:
            self._tell_time_out(machine)
        if machine.run_id in self.flow.decisions.unsaved:
            batch = msgspec.structs.replace(batch, rows=batch.rows + self.flow.decisions.take(machine.run_id))
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

    def capacity(self, machine: RunMachine) -> bytes:
        """See RunPort."""
        known = self.flow.estimates.of_agent(machine.accepted.agent)
        rates = [] if self._gates is None else self._gates.headroom(machine, known)
        return self.flow.capacity(machine, known, rates)

    def _look_again(self, run_id: str) -> None:
        """What keeps a step of the run from beginning may be over."""
        self.with_run(run_id, _unhold, lambda error: None)  # if it cannot be read, its timer looks again

    # --- tiers that are lent: see `Locks` ---

    def wait_over(self, machine: RunMachine, path: str) -> None:
        self._locks.wait_over(machine.run_id, path)

    def tier_is_lent(self, run_id: str) -> None:
        lent = self._locks.lent(run_id)
        if lent is not None and self._plan.hurry(run_id, lent):
            return  # the rest as it is loaded
        if run_id not in self._places.parked and run_id not in self._plan:
            # One that only waits is read for it: what it is lent may be needed by whom it waits for.
            self.with_run(run_id, self.have_tier, partial(self._tier_not_told, run_id))

    def have_tier(self, machine: RunMachine) -> None:
        """Have the run, its guest and what it waits for know the tier that the run is lent."""
        lent, base = self._locks.lent(machine.run_id), machine.accepted.base_tier
        tier = base if lent is None else min(base, lent)
        if tier != machine.tier:
            machine.change_tier(tier, "nobody waits for it" if tier == base else "somebody of that tier waits for it")
        if lent is not None:
            self.find_joins(machine)
        self._lend(machine)

    def _tier_not_told(self, run_id: str, error: BaseException | None) -> None:
        if error is not None:  # it cannot be read now
            self.later(partial(self.tier_is_lent, run_id))

    def find_joins(self, machine: RunMachine) -> None:
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

    def log(self, machine: RunMachine, payload: bytes) -> None:
        self._logs.put(machine.run_id, payload)

    def on_accepted(self, machine: RunMachine) -> None:
        self._accepted += 1
        accepting: Accepting = machine.tag
        machine.tag = None
        accepted = machine.accepted
        self._meter.accepted(accepted.base_tier, self._versions.class_of(accepted.agent))
        if self._closing:
            machine.halt()
        elif accepted.start_ns:
            self.arm(accepted.start_ns, machine.run_id, START_PATH)
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
            self.arm(accepted.deadline_ns, machine.run_id, DEADLINE_PATH)
        if self._observers:
            self._tell("accepted", info_of_machine(machine))
        accepting.done(machine.run_id, None)
        self._loader.do_later(machine.run_id)
        if self._doomed and (reason := self._doomed.pop(machine.run_id, None)) is not None:
            machine.cancel(reason)

    def on_cancelled(self, machine: RunMachine) -> None:
        self.orders.answer_cancels(machine.run_id, None)

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
        self._loader.ended(run_id)
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
        self.orders.answer_cancels(run_id, None)

    def _tell_time_out(self, machine: RunMachine) -> None:
        """If that is how it ends; the decision goes with the record of it."""
        assert machine.outcome is not None
        if machine.outcome.state is RunState.TIMED_OUT:
            limit = msgspec.json.decode(machine.outcome.error or b"{}", type=dict[str, Any]).get("limit") or ""
            spent_ns = _took_ns(machine) if machine.clock is None or limit != "active_s" else machine.clock.active_ns
            self.flow.decide(end_of(machine.run_id, limit, spent_ns, self.now_ns()))

    def _measure(self, machine: RunMachine, state: RunState, cost: Cost) -> None:
        """Count and log a run that has ended."""
        accepted = machine.accepted
        took_ns = _took_ns(machine)
        cls = self._versions.class_of(accepted.agent)
        self._meter.ended(accepted.base_tier, cls, state._value_, took_ns, machine.tool_calls, cost.fuel)
        assert machine.outcome is not None
        log_end(_runs_logger, machine.run_id, accepted, machine.outcome, took_ns)

    def on_parked(self, machine: RunMachine) -> None:
        if machine.exit is not None and machine.exit.reason == "evicted" and machine.frame_named:
            self.frames.refuse(machine.run_id, machine.frame_named, machine.frame_copy, machine.exit.message)
        if machine.run_id in self.moving.leaving:
            self._drop(machine)
            self.flow.parked(machine)
            self._loader.let_out(machine)
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
                self._loader.let_out(machine)
                self.load(machine.run_id)
        else:
            self._loader.let_out(machine)
            if self._versions.changed(machine.run_id):  # what it waits for came while it was parked
                self.load(machine.run_id)
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

    def _not_accepted(self, machine: RunMachine, accepting: Accepting, error: AgentrtError) -> None:
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

    def on_discarded(self, machine: RunMachine, error: AgentrtError) -> None:
        if isinstance(machine.tag, Accepting):
            self._not_accepted(machine, machine.tag, error)
            return
        run_id = machine.run_id
        self._drop(machine)
        if rows := self.flow.discarded(machine):
            self.drop(rows)
        if self._gates is not None:
            self._gates.parked(run_id, waits=False)
        self._discarded += 1
        self._loader.let_out(machine)
        if self._closing or isinstance(error, ClosedError):
            return
        if run_id in self.moving.leaving:  # what the store has is what leaves
            self.moving.gone(run_id)
            return
        if not self._loader.again(machine):
            self._park(machine, f"the store refuses the run's records: {error.message}", error)
            self._loader.give_up(run_id, error)
            return
        if machine.cancel_reason is not None:
            self.orders.cancel_again(run_id, machine.cancel_reason)

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
        self._wakes.begin()
        self.watch_progress()
        self._versions.begin_grace()
        self._downtime.open(partial(self._loader.scan, b""))

    def on_scanned(self) -> None:
        """See `Loader`."""
        self._retention.open()
        self._wakes.open()

    def watch_progress(self) -> None:
        """Begin to look for runs that are stuck."""
        self._stuck.open()

    def machines(self) -> list[RunMachine]:
        return [*self._runs.values()]

    def awaited_by(self, run_id: str) -> str | None:
        return self._versions.awaited_by(run_id) or self.flow.awaited_by(run_id)

    # --- runs that move (moving.Runs) -------------------------------------------------------

    def machine_of(self, run_id: str) -> RunMachine | None:
        return self._runs.get(run_id)

    def let_go(self, machine: RunMachine) -> None:
        if self.frames.is_worth(machine) and self.frames.park(machine):
            self._loop.call_later(_FRAMES_S, machine.halt)  # of no effect once it is parked
        else:
            machine.halt()

    def is_loading(self, run_id: str) -> bool:
        return run_id in self._places.loading

    def give_up(self, run_id: str, version: int, error: AgentrtError) -> None:
        self._locks.left(run_id)
        self._loader.give_up(run_id, error)
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
                self._access.read_again(f"run {run_id}", error, partial(self.take_up, run_id))
                return
            if read is None:
                return
            self._wakes.take_up(run_id, *read)
            self.load(run_id)

        self.read(look, found)

    # --- what is told ---------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            accepted=self._accepted,
            refused=self._intake.refused,
            duplicates=self._duplicates + self.entrance.repeated,
            ended={state.value: count for state, count in self._ended.items()},
            live=len(self._runs),
            queued_bytes=self._intake.admission.bytes,
            parked=len(self._places.parked),
            recovering=len(self._plan) + len(self._places.loading),
            recovered=self._loader.recovered,
            unclaimed=self._plan.kept,
            discarded=self._discarded,
            commits=self._commits,
            commits_alone=self._flusher.alone,
            tool_calls=self._effects.tool_calls,
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
        self._access.close()
        self._loader.close()
        self._wakes.timers.close()
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
        closed = ClosedError(CLOSING)
        self._waiters.fail_all(closed)
        self.orders.fail_all(closed)

    async def close(self, timeout_s: float) -> None:
        """`park`, and let go of everything.

        The caller closes tools, backends and the store afterwards, in this order."""
        if self._closed:
            return
        self._closed = True
        await self.park(timeout_s)
        await self.frames.close()
        self._waiters.fail_all(ClosedError(CLOSING))  # who came meanwhile
        self._flusher.close()
        await asyncio.get_running_loop().run_in_executor(None, self._logs.close)
        self._versions.clear()
        self._door.close()
        self._access.end()

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
        scanning = self._started_ns and not self._loader.scanned
        return bool(self._runs or self._places.loading or self._plan.ready or scanning)

    def _park(self, machine: RunMachine, detail: str, refusal: AgentrtError | None = None) -> None:
        accepted = machine.accepted
        path = machine.wait.path if machine.wait is not None else None
        self._places.parked[machine.run_id] = Parked(
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
        self._loader.do_later(machine.run_id)
        self.check_idle()

    def check_idle(self) -> None:
        if self._idle is not None and not self._busy():
            self._idle.set()


def _enough() -> bool:
    return False


def _took_ns(machine: RunMachine) -> int:
    """How long a run took that has ended."""
    return max(0, machine.at_ns - max(machine.accepted.at_ns, machine.accepted.start_ns))


def _unhold(machine: RunMachine) -> None:
    machine.unhold()
