"""A run as `RunInfo`, from its machine or from its head."""

from agentrt.engine.info import RunInfo, StepInfo
from agentrt.engine.machine import RunMachine
from agentrt.engine.steps import WAIT_REASON
from agentrt.states import RunState
from agentrt.stores.base import Head


def info_of_machine(machine: RunMachine) -> RunInfo:
    """A run in memory."""
    accepted = machine.accepted
    steps = tuple(StepInfo(step.path, step.op, step.tool, step.attempt) for step in machine.open.values())
    wait_reason, detail = None, None
    if machine.wait is not None:
        wait_reason, detail = machine.wait.reason, machine.wait.detail
    elif steps:
        first = steps[0]
        wait_reason, detail = WAIT_REASON.get(first.op, "step"), f"{first.path} {first.tool or first.op}"
    return RunInfo(
        machine.run_id,
        machine.state,
        accepted.tenant,
        accepted.agent,
        machine.agent_version,
        machine.tier,
        accepted.base_tier,
        machine.version,
        accepted.at_ns,
        wait_reason=wait_reason,
        detail=detail,
        cancel_requested=machine.cancel_reason is not None,
        scheduler=getattr(machine.guest, "scheduler_state", None),
        steps=steps,
    )


def info_of_head(head: Head, wait_reason: str | None = None, detail: str | None = None) -> RunInfo:
    """A run in the store; the head's own reason to wait goes before ``wait_reason``."""
    return RunInfo(
        head.run_id,
        RunState(head.state),
        head.tenant,
        head.agent,
        head.agent_version,
        head.tier,
        head.base_tier,
        head.version,
        head.accepted_ns,
        head.ended_ns,
        head.wait_reason or wait_reason,
        detail,
        head.cancel_requested,
    )
