"""The agents of a node by name and by version, and how runs whose version is not the present one go on.

`upgrade.decide` says what is to be done; here it is done: kept modules are brought back, states are migrated, upgrades
are journaled. While a module or a state is on its way the run is in memory without a guest, and everything else may
happen to it as to a run that was just accepted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.accept import Door
from agentrt.engine.info import Agent, MigrationFailed
from agentrt.engine.machine import Phase, RunMachine
from agentrt.engine.ports import Tools
from agentrt.engine.recovery import RecoveryPlan
from agentrt.engine.upgrade import Bring, Fail, Migrate, Pinned, Start, There, Wait, decide
from agentrt.errors import AgentrtError, ModuleError
from agentrt.observe.labels import class_of
from agentrt.tools.outcome import ToolOutcome

#: ``bring(version, agent, done)``: look for a kept module and make it ready; ``done(agent, None)``, or
#: ``done(None, None)`` if it is not kept, or ``done(None, error)``.
Bringer = Callable[[str, str, Callable[[Agent | None, BaseException | None], None]], None]


class VersionedRuns(Protocol):
    """What it needs of the engine."""

    @property
    def closing(self) -> bool: ...

    def later(self, again: Callable[[], None]) -> None: ...

    def in_memory(self, run_id: str) -> RunMachine | None: ...

    def may_go_on(self, machine: RunMachine) -> bool:
        """Asked again after a wait for a module or a state: see revalidate.py. False: what else is to be is done."""

    def start(self, machine: RunMachine, agent: Agent) -> None:
        """Start the machine's guest."""

    def claim(self, version: str, agent: str) -> None:
        """Runs of the version can be decided about now; those of the agent's that wait for a version, again."""

    def tell(self, event: str, data: Any) -> None: ...


class Versions:
    """Loop thread only. ``bring`` may be set once, before the first agent is registered."""

    def __init__(self, runs: VersionedRuns, door: Door, plan: RecoveryPlan, tools: Tools) -> None:
        self._runs = runs
        self._door = door
        self._plan = plan
        self._tools_call = tools.call
        self.bring: Bringer | None = None
        self._agents: dict[str, Agent] = {}
        self._versions: dict[str, Agent] = {}
        self._gone: set[str] = set()  # versions that were looked for and are not kept
        self._bringing: dict[str, list[str]] = {}  # version -> runs that wait for it
        self._unclaimed: dict[str, list[str]] = {}  # agent -> runs that were woken before anybody registered it
        self._grace = False
        self._epoch = 0  # of what there is
        self._waits: dict[str, int] = {}  # runs that are on their way out of memory, to wait for a version: epoch
        self._migrating: set[str] = set()
        self._failed: dict[str, tuple[str, str]] = {}  # run -> (version it could not be migrated to, why)

    def awaited_by(self, run_id: str) -> str | None:
        """What a run in memory waits for here; None if it does not."""
        if run_id in self._migrating:
            return "its state is being migrated"
        if any(run_id in runs for runs in self._bringing.values()):
            return "its module is being made ready"
        if any(run_id in runs for runs in self._unclaimed.values()):
            return "its agent is about to be registered"
        return None

    def changed(self, run_id: str) -> bool:
        """Whether there is something new since the run was told to wait; asked once, when it is out of memory."""
        return self._waits.pop(run_id, self._epoch) != self._epoch

    def begin_grace(self) -> None:
        """The node starts: agents are about to be registered."""
        self._grace = True

    def end_grace(self) -> None:
        """Whoever is not there by now may not come."""
        self._grace = False
        unclaimed, self._unclaimed = self._unclaimed, {}
        for run_ids in unclaimed.values():
            for run_id in run_ids:
                self._resume(run_id)

    def get(self, name: str) -> Agent | None:
        """The agent of that name now."""
        return self._agents.get(name)

    def class_of(self, name: str) -> str:
        """What runs of the agent of that name are measured and counted as."""
        agent = self.get(name)
        return class_of(None if agent is None else agent.backend.name)

    def names(self) -> list[str]:
        return sorted(self._agents)

    def of(self, machine: RunMachine) -> Agent | None:
        """The agent whose guest the run had last, or will have."""
        return self._versions.get(machine.agent_version) or self._agents.get(machine.accepted.agent)

    def registered(self) -> set[str]:
        """Versions that new runs may have."""
        return {agent.version for agent in self._agents.values()}

    def register(self, agent: Agent) -> None:
        """The agent has its name from now on."""
        self._agents[agent.name] = agent
        self._versions[agent.version] = agent
        self._gone.discard(agent.version)
        self._epoch += 1
        for run_id in self._unclaimed.pop(agent.name, ()):
            self._resume(run_id)
        self._runs.claim(agent.version, agent.name)
        for version in self._plan.versions_of(agent.name):
            self.found(version, agent.name)

    def found(self, version: str, name: str) -> None:
        """The store has runs of that version of the agent."""
        current = self._agents.get(name)
        if current is None:
            return
        if version not in self._versions and current.on_upgrade in ("pin", "migrate") and self._may_be_kept(version):
            self._bring(version, name, None)
        else:
            self._runs.claim(version, name)

    def make_ready(self, version: str, name: str) -> None:
        """Runs of that version may come back: have it in memory before, if it is kept and would be asked for then."""
        current = self._agents.get(name)
        if current is None or current.on_upgrade not in ("pin", "migrate") or version in self._versions:
            return
        if self._may_be_kept(version):
            self._bring(version, name, None)

    def clear(self) -> None:
        """Let go of the agents, and of what they hold of their backends."""
        self._agents, self._versions = {}, {}

    def go_on(self, machine: RunMachine) -> None:
        """Start the machine's guest under the version that is to be; it is in memory and has none."""
        accepted = machine.accepted
        current = self._agents.get(accepted.agent)
        if current is not None and machine.pins is self._door.pins_of(current):  # accepted in this process
            self._runs.start(machine, current)
            return
        run_id = machine.run_id
        failed = self._failed.get(run_id)
        verdict = decide(
            Pinned(
                run_id,
                accepted.agent,
                machine.agent_version,
                machine.pins,
                machine.at_segment_start,
                machine.restored is not None,
                machine.ending is not None,
                failed[1] if failed is not None and current is not None and failed[0] == current.version else None,
            ),
            There(
                current,
                self._versions.get(machine.agent_version),
                self._door.node_pins,
                self._may_be_kept(machine.agent_version),
            ),
        )
        if isinstance(verdict, Start):
            if verdict.pins:
                machine.upgrade(verdict.pins)
            self._runs.start(machine, verdict.agent)
        elif isinstance(verdict, Migrate):
            self._migrate(machine, verdict)
        elif isinstance(verdict, Bring):
            self._bring(verdict.version, accepted.agent, run_id)
        elif isinstance(verdict, Wait):
            if current is None and self._grace:
                self._unclaimed.setdefault(accepted.agent, []).append(run_id)
                return
            if machine.ending is None:  # else it ends
                self._waits[run_id] = self._epoch
            machine.wait_for_operator(None, verdict.detail)
        else:
            assert isinstance(verdict, Fail)
            machine.fail(verdict.error)

    # --- kept modules ---------------------------------------------------------------------

    def _may_be_kept(self, version: str) -> bool:
        return self.bring is not None and version not in self._gone

    def _bring(self, version: str, name: str, run_id: str | None) -> None:
        waiting = self._bringing.get(version)
        if waiting is None:
            waiting = self._bringing[version] = []
            assert self.bring is not None
            self.bring(version, name, partial(self._brought, version, name))
        if run_id is not None:
            waiting.append(run_id)

    def _brought(self, version: str, name: str, agent: Agent | None, error: BaseException | None) -> None:
        if self._runs.closing:
            return
        if error is not None and not isinstance(error, ModuleError):
            # The store, or a full queue of modules: it may be better in a while.
            assert self.bring is not None
            self._runs.later(partial(self.bring, version, name, partial(self._brought, version, name)))
            return
        waiting = self._bringing.pop(version)
        if agent is None:
            self._gone.add(version)
        else:
            self._versions.setdefault(version, agent)
        self._epoch += 1
        self._runs.claim(version, name)
        for run_id in waiting:
            self._resume(run_id)

    def _resume(self, run_id: str) -> None:
        machine = self._runs.in_memory(run_id)
        if machine is None or machine.phase > Phase.LIVE or machine.guest is not None:
            return
        if self._runs.may_go_on(machine):
            self.go_on(machine)

    # --- migration --------------------------------------------------------------------------

    def _migrate(self, machine: RunMachine, verdict: Migrate) -> None:
        agent, accepted = verdict.agent, machine.accepted
        assert agent.migrate is not None
        args = {"state": msgspec.Raw(machine.restored or b"null"), "from_version": machine.agent_version}
        self._migrating.add(machine.run_id)
        done = partial(self._migrated, machine, verdict)
        try:
            self._tools_call(
                agent.migrate,
                msgspec.json.encode(args),
                key=None,
                tenant=accepted.tenant,
                tier=machine.tier,
                attempt=1,
                done=done,
            )
        except AgentrtError as error:
            done(ToolOutcome(False, msgspec.json.encode(error.to_dict()), error.code, 0, False))

    def _migrated(self, machine: RunMachine, verdict: Migrate, outcome: ToolOutcome) -> None:
        run_id = machine.run_id
        self._migrating.discard(run_id)
        if self._runs.closing or self._runs.in_memory(run_id) is not machine or machine.phase > Phase.LIVE:
            return  # whatever became of it, its journal has the old state
        if not self._runs.may_go_on(machine):
            return
        if not machine.at_segment_start or machine.ending is not None:
            self.go_on(machine)  # it was told to end meanwhile
            return
        if outcome.ok:
            self._failed.pop(run_id, None)
            machine.upgrade(verdict.pins, outcome.payload)
            self._runs.start(machine, verdict.agent)
            return
        agent = verdict.agent
        if len(self._failed) >= _FAILED_MAX:
            self._failed.pop(next(iter(self._failed)))
        self._failed[run_id] = (agent.version, _message(outcome.payload))
        self._runs.tell(
            "migration_failed",
            MigrationFailed(run_id, agent.name, machine.agent_version, agent.version, outcome.payload),
        )
        self.go_on(machine)


_FAILED_MAX: Final = 10_000  # remembered; the oldest is tried once more


def _message(error: bytes) -> str:
    told = msgspec.json.decode(error, type=dict[str, Any])
    return f"{told.get('code')}: {told.get('message')}"[:500]
