"""The entrance: who may come in as what, whether there is room, and the machine of a run that does.

Of requests from outside and of steps that spawn. Loop thread only, but where a method says otherwise.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.accept import EMBEDDED, Asked, Door, Origin, Via, ingress_of, repeat_keys, settle_repeat
from agentrt.engine.access import StoreAccess
from agentrt.engine.admission import Intake
from agentrt.engine.flow import Flow
from agentrt.engine.gates import Gates
from agentrt.engine.group import Group
from agentrt.engine.info import Agent
from agentrt.engine.machine import HOLD_PATH, RunMachine
from agentrt.engine.places import Places
from agentrt.engine.ports import Hold, Refusal, RunPort
from agentrt.engine.repeats import Repeats
from agentrt.engine.steps import Spawn, StepInFlight, decode
from agentrt.engine.tenants import Tenants
from agentrt.engine.urgent import begun_since
from agentrt.engine.versions import Versions
from agentrt.errors import (
    AgentrtError,
    ClosedError,
    DeferredError,
    DeniedError,
    InputError,
    InternalError,
    QueueFullError,
    StaleWriteError,
    StoreError,
    UnknownAgentError,
)
from agentrt.flow.admission import Applicant
from agentrt.flow.classifier import Classifier
from agentrt.flow.decisions import Action as Did
from agentrt.flow.decisions import Control, Decision, Scope
from agentrt.flow.urgent import UrgentRates
from agentrt.observe.labels import class_of
from agentrt.policy import Allow, Defer, Policies
from agentrt.stores.base import IDEMPOTENCY, Store
from agentrt.stores.keys import idempotency_row_key

_ACCEPTS_PER_TURN: Final = 32  # of one group, at 10 to 20 us each: for so long the loop does nothing else
_URGENT: Final = frozenset(("0", "urgent", "critical"))
_DEFERRED_S: Final = 10.0  # after which to ask again whether a policy lets a run in: picked by feel
_SPAWNED: Final = Via("spawn")

AcceptDone = Callable[[str | None, BaseException | None], None]


class Accepting(msgspec.Struct):
    """What a submit waits with: the tag of a machine until its run is durable."""

    done: AcceptDone
    digest: bytes | None
    origin: Origin | None = None


class EntranceRuns(RunPort[RunMachine], Protocol):
    """What it needs of the engine."""

    @property
    def accepting(self) -> bool: ...

    def arm(self, due_ns: int, run_id: str, path: str) -> None:
        """`RunMachine.fall_due` follows at that time."""


def _never() -> bool:
    return False


class Entrance:
    """Of one node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: EntranceRuns,
        access: StoreAccess,
        places: Places,
        door: Door,
        intake: Intake,
        versions: Versions,
        tenants: Tenants,
        policies: Policies,
        classifier: Classifier,
        urgent_rates: UrgentRates,
        flow: Flow,
        gates: Gates | None,
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._access = access
        self._repeats = Repeats(access.look)
        #: Whether somebody urgent waits for the loop.
        self.hurried: Callable[[], bool] = _never
        #: Requests for which there was no room, and that were answered with the run of an earlier one.
        self.repeated = 0
        self._places = places
        self._door = door
        self._intake = intake
        self._versions = versions
        self._tenants = tenants
        self._policies = policies
        self._classifier = classifier
        self._urgent_rates = urgent_rates
        self._flow = flow
        self._gates = gates

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

    def refuse_unread(self, tier: int, tenant: str, idempotency_key: str | None = None) -> QueueFullError | None:
        """Of a door at which nobody waits: see `Edge.refuse`. Any thread."""
        if self._classifier.makes_keys:  # nobody knows yet what the request repeats
            return None
        repeats = None if idempotency_key is None else partial(self._may_repeat, tenant, idempotency_key)
        return self._intake.edge.refuse(tier, tenant, repeats)

    def _may_repeat(self, tenant: str, idempotency_key: str) -> bool:
        """Whether the tenant has used the key, as far as is known. Any thread; reads a row, whose page is in memory
        as a rule."""
        try:
            return self._access.read_row(IDEMPOTENCY, idempotency_row_key(tenant, idempotency_key)) is not None
        except AgentrtError:
            return True

    def stop_entering(self, done: AcceptDone) -> None:
        """Who called `accept` with ``done`` does not wait at the door any more."""
        self._intake.give_up(done)

    def _enter(self, asked: Asked, done: AcceptDone, place: Applicant | None) -> None:
        """``place``: there is room for it, which is taken."""
        agent: Agent | None = None
        try:
            if not self._runs.accepting:
                raise ClosedError("the runtime accepts no more runs")
            if not self._flow.ready():
                raise StoreError("the accounts of flow control cannot be read", hint="Try again")
            self._door.check(asked.tenant, asked.input)
            agent, tier, key = self._classify(asked)
            self._door.check_backlog()
            self._admit(agent, asked.tenant, tier, asked.via, None)
            if place is None:
                place = self._come_in(agent, asked, tier, done)
                if place is None:
                    self._look_for_earlier(agent, asked, key, done, None)
                    return
            if not tier and self._urgent_rates.active:
                self._begin_urgent(asked)
            request = self._door.enter(agent, asked, tier, key)
            run_id = request.run_id
            machine = RunMachine(run_id, request.accepted, self._runs)
            rows = self._flow.accept(machine, None)
        except AgentrtError as error:
            if place is not None:
                self._intake.withdraw(place)
            # Its traceback holds this frame, and with it ``done``, which leads to whoever keeps the error: a circle for
            # each refusal, and a collection of garbage for each thousands of them, which urgent requests wait for.
            refused = error.with_traceback(None)
            if agent is None or not isinstance(error, QueueFullError):
                done(None, refused)
            else:
                self._look_for_earlier(agent, asked, key, done, refused)
            return
        except Exception as error:
            if place is not None:
                self._intake.withdraw(place)
            done(None, InternalError(f"the run was not accepted: {type(error).__name__}: {error}"))
            raise
        machine.tag = Accepting(done, request.digest, request.origin)
        machine.unwinds = agent.program.unwinds
        machine.place = place
        self._places.runs[run_id] = machine
        machine.accept(request.unique, rows)

    def _look_for_earlier(
        self, agent: Agent, asked: Asked, key: str | None, done: AcceptDone, refused: AgentrtError | None
    ) -> None:
        """There is no room for the request, but it may have been accepted before: then that is the answer, else it is
        ``refused``; None: it stands at the door, and stays there."""

        def looked(value: bytes | None) -> None:
            found = refused if value is None else settle_repeat(agent, asked, key, value)
            if refused is None and (found is None or not self._intake.give_up(done)):
                return  # it goes on waiting; or it was let in meanwhile, and is told the same by the store
            if isinstance(found, str):
                self.repeated += 1
                done(found, None)
            else:
                done(None, found)

        keys = repeat_keys(asked, key)
        if not (keys and self._repeats.ask(keys, looked)) and refused is not None:
            done(None, refused)

    def _classify(self, asked: Asked, *, tell: bool = True) -> tuple[Agent, int, str | None]:
        """The agent, tier and idempotency key of a request. Raises UnknownAgentError, InputError, DeniedError."""
        via, classifier = asked.via, self._classifier
        if not classifier.active:
            agent = self._agent_named(asked.agent)
            return agent, max(self._door.tier_of(agent, asked.tier), via.max_tier), asked.idempotency_key
        found = classifier.classify(ingress_of(asked, classifier), self._runs.now_ns())
        if found.decision is not None and tell:
            self._flow.decide(found.decision)
        if found.refused:
            kind = InputError if found.incomplete else DeniedError
            raise kind(found.refused, limit="rules", hint="The node's rules say so")
        agent = self._agent_named(found.agent)
        bound = max(classifier.max_tier(asked.tenant), via.max_tier)
        return agent, max(self._door.tier_of(agent, found.tier), bound), found.key

    def recall_urgent(self, store: Store) -> None:
        """Count what urgent runs tenants have begun just before this start. Blocks; before anything is accepted."""
        if self._urgent_rates.active:
            since_ns = self._runs.now_ns() - self._urgent_rates.memory_ns
            for tenant, at_ns in begun_since(store, since_ns):
                self._urgent_rates.recall(tenant, at_ns, since_ns)

    def _begin_urgent(self, asked: Asked) -> None:
        """Raises QueueFullError: the tenant has begun as many runs of tier 0 as it may."""
        now_ns = self._runs.now_ns()
        wait_ns = self._urgent_rates.take(asked.tenant, now_ns)
        if not wait_ns:
            return
        limit = "flow.urgent_per_minute"
        self._flow.decide(
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
        self._flow.child_refused(parent, path)
        self._intake.drop_child(f"{parent.run_id}/{path}")

    def _accept_child(
        self, parent: RunMachine, run_id: str, path: str, spawn: Spawn, done: Callable[[AgentrtError | None], None]
    ) -> bool:
        if not self._runs.accepting:
            raise ClosedError("the runtime accepts no more runs")
        if self._places.knows(run_id):
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

        machine = RunMachine(run_id, accepted, self._runs)
        machine.tag = Accepting(settled, None)
        machine.unwinds = agent.program.unwinds
        rows = self._flow.accept(machine, parent)
        place = self._intake.claim(f"{parent.run_id}/{path}")
        # Without one it had it in an earlier life of the node: what is journaled is not refused any more.
        machine.place = self._intake.adopt(self.applicant(machine)) if place is None else place
        self._places.runs[run_id] = machine
        self._flow.child_accepted(parent.run_id, path, machine)
        machine.accept(rows=rows)
        return True

    def _classify_child(self, spawn: Spawn, parent: RunMachine, *, tell: bool = True) -> tuple[Agent, int]:
        """The same of a child, which is never more urgent than its parent."""
        accepted = parent.accepted
        asked = Asked(spawn.agent, bytes(spawn.input), accepted.tenant, spawn.tier, via=_SPAWNED)
        agent, tier, _ = self._classify(asked, tell=tell)
        return agent, max(tier, accepted.base_tier)

    def applicant(self, machine: RunMachine) -> Applicant:
        """As what admission counts a run that is in memory."""
        accepted = machine.accepted
        return Applicant(
            accepted.base_tier, accepted.tenant, self._versions.class_of(accepted.agent), len(accepted.input)
        )

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
        many, or somebody urgent waits. The group has a part for each, which gets the run's id or the error."""
        end = min(start + _ACCEPTS_PER_TURN, len(inputs))
        for index in range(start, end):
            if index > start and self.hurried():
                end = index
                break
            key = None if idempotency_keys is None else idempotency_keys[index]
            asked = Asked(agent_name, inputs[index], tenant, tier, key, fuel_max, budget, timeout_ns, via=via)
            self.enter(asked, group.parts[index])
        if end < len(inputs):
            more = (tenant, tier, idempotency_keys, fuel_max, budget, timeout_ns, via, end)
            self._loop.call_soon(self.accept_many, group, agent_name, inputs, *more)

    def _admit(self, agent: Agent, tenant: str, tier: int, via: Via, parent: str | None) -> None:
        """Raises TenantDisabledError, DeniedError, DeferredError."""
        self._tenants.check(tenant)
        if self._policies:
            facts = {"tenant": tenant, "agent": agent.name, "version": agent.version, "tier": tier, "parent": parent}
            facts |= {"door": via.door, "source": via.source, "type": via.type}
            decision = self._policies.decide("run.accept", facts)
            if isinstance(decision, Defer):
                raise DeferredError(decision.reason, hint="Try again later", retry_after_s=_DEFERRED_S)
            if not isinstance(decision, Allow):
                raise DeniedError(decision.reason, hint="Change the policy, or what is asked for")

    def admit_child(self, machine: RunMachine, step: StepInFlight) -> Hold | Refusal | None:
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
        if isinstance(verdict, Hold):
            self._flow.keep_place(machine.run_id, step.path)
            self._runs.arm(verdict.until_ns, machine.run_id, HOLD_PATH)
        elif verdict is not None:
            self._flow.child_refused(machine, step.path)
        return verdict
