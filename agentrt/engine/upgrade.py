"""Which version of its agent a run goes on with. Pure.

A run is pinned to the versions that it was accepted under. Whenever its guest is to be started, `decide` compares them
with what there is now; the ``on_upgrade`` of the agent that has the name now says what a difference means. A guest that
runs is never touched.

- ``pin``: the run stays with its version, which is kept or registered as well; else it waits for an operator.
- ``continue``: the new version replays the old journal.
- ``migrate``: the run stays with its version until its next checkpoint; there the agent's migrate function makes the
  state from which the new version goes on. A run that has no step since it began needs no function.
- ``fail``: the run ends as FAILED.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from agentrt.engine.info import Agent
from agentrt.errors import UpgradeError

#: How `Wait.detail` begins when nobody has registered an agent of the run's name.
UNCLAIMED: Final = "nobody has registered agent"


class Pinned(msgspec.Struct, frozen=True):
    """What a run stands for when its guest is to be started."""

    run_id: str
    agent: str
    version: str
    pins: Mapping[str, str]
    at_start: bool  # of a segment: it has no steps, and its journal no answers that it must get again
    has_state: bool  # the segment began with a checkpoint
    ending: bool  # it only unwinds
    migration_failed: str | None = None  # what came of the last attempt, on this node


class There(msgspec.Struct, frozen=True):
    """What there is: the agent of the run's name now, one of the run's own version, the node's own pins, and whether a
    kept module may still be looked for."""

    current: Agent | None
    own: Agent | None
    node_pins: Mapping[str, str]
    may_be_kept: bool


class Start(msgspec.Struct, frozen=True):
    """Start ``agent``; ``pins`` are those that change, journaled as Upgraded if there are any."""

    agent: Agent
    pins: dict[str, str]


class Migrate(msgspec.Struct, frozen=True):
    """Have the state made anew, then start ``agent``."""

    agent: Agent
    pins: dict[str, str]


class Bring(msgspec.Struct, frozen=True):
    """The run's own version may be among the kept ones."""

    version: str


class Wait(msgspec.Struct, frozen=True):
    """For an operator, and why."""

    detail: str


class Fail(msgspec.Struct, frozen=True):
    error: UpgradeError


Verdict = Start | Migrate | Bring | Wait | Fail


def decide(run: Pinned, there: There) -> Verdict:
    """What to do with a run whose guest is to be started."""
    current, own = there.current, there.own
    if current is None and own is None:
        return Wait(f"{UNCLAIMED} {run.agent} (version {run.version}); register it, or cancel the run")
    if current is None or current.version == run.version:
        agent = own if current is None else current
        assert agent is not None
        return _same_version(run, agent, there)
    policy = current.on_upgrade
    if run.ending and policy != "continue":
        policy = "pin"  # its own version's handlers unwind it, or nobody
    if policy == "fail":
        return Fail(
            UpgradeError(
                f"agent {run.agent} was upgraded from {run.version} to {current.version}, and its runs do not go on",
                run=run.run_id,
                hint="Submit it again; to let runs go on, register with on_upgrade pin, continue or migrate",
            )
        )
    changed = _changed(run, current) | _noted(run, there) | {"agent": current.version}
    if policy == "continue":
        return Start(current, changed)
    if policy == "migrate" and run.at_start and run.migration_failed is None:
        return Migrate(current, changed) if run.has_state else Start(current, changed)
    if own is not None:
        return _same_version(run, own, there)
    if there.may_be_kept:
        return Bring(run.version)
    return Wait(_gone(run, current, policy))


def _same_version(run: Pinned, agent: Agent, there: There) -> Verdict:
    """The agent is the run's; what it depends on may not be."""
    changed = _changed(run, agent)
    if changed:
        what = ", ".join(f"{name} {run.pins[name]}, this node has {version}" for name, version in changed.items())
        policy = agent.on_upgrade
        if policy == "fail" and not run.ending:
            return Fail(UpgradeError(f"the run is pinned to {what}", run=run.run_id, hint="Submit it again"))
        if policy != "continue" and not (policy == "migrate" and run.at_start):
            return Wait(
                f"the run is pinned to {what}; run it there, or register agent {run.agent} with on_upgrade='continue'"
            )
    return Start(agent, changed | _noted(run, there))


def _changed(run: Pinned, agent: Agent) -> dict[str, str]:
    pins = run.pins
    return {name: version for name, version in agent.program.pins.items() if pins.get(name, version) != version}


def _noted(run: Pinned, there: There) -> dict[str, str]:
    """What replay does not depend on: it changes, and the journal says when."""
    pins = run.pins
    return {name: version for name, version in there.node_pins.items() if pins.get(name) != version}


def _gone(run: Pinned, current: Agent, policy: str) -> str:
    ways = "register that version too (before the new one), register the new one with on_upgrade='continue', or cancel"
    if run.migration_failed is not None:
        why = f"its migration to {current.version} failed ({run.migration_failed})"
        ways = "register a version that can migrate it, or the old one before the new one, or cancel"
    elif policy == "migrate":
        why = "it is between two checkpoints"
    else:
        why = "it is pinned to it"
    return f"version {run.version} of agent {run.agent} is gone and {why}: {ways}"
