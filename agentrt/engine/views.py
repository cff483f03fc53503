"""A run as `RunInfo`: from its machine, from its head, or from what its journal says."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from agentrt.engine.info import RunInfo, StepInfo
from agentrt.engine.machine import START_PATH, RunMachine
from agentrt.engine.steps import (
    WAIT_REASON,
    ApprovalRequest,
    BadRequestError,
    EventWait,
    Join,
    LockAcquire,
    decode,
    registration,
)
from agentrt.engine.token import ResumeToken
from agentrt.fold import RunFold
from agentrt.records import RunAccepted
from agentrt.states import RunState, StepState
from agentrt.stores.base import Head
from agentrt.tiers import Tier


class Around(NamedTuple):
    """What a run's own journal does not say: who holds a tenant's lock, and to when an approval's deadline has moved
    that was asked at a time and due at another."""

    holder: Callable[[str, str], str | None]
    moved: Callable[[int, int], int]


_NOTHING = Around(lambda tenant, name: None, lambda since_ns, due_ns: due_ns)
_TEXT_CHARS_MAX = 200


def place(tier: int, tenant: str) -> str:
    """Where something waits for its turn."""
    return f"tier {tier} ({Tier(tier).name.lower()}), tenant {tenant}"


def wait_detail(
    accepted: RunAccepted, run_id: str, path: str, op: str, request: bytes, prepared_ns: int, around: Around
) -> str:
    """What a step waits for, in words."""
    tenant = accepted.tenant
    try:
        wanted: Any = decode(op, request)
    except (BadRequestError, KeyError):
        return f"{path} {op}"
    due_ns = registration(run_id, tenant, op, path, request, prepared_ns).due_ns
    if due_ns and op == "approval.request":
        due_ns = around.moved(prepared_ns, due_ns)
    until = f", until {_time(due_ns)}" if due_ns else ""
    if isinstance(wanted, EventWait):
        where = "its mailbox" if wanted.topic is None else f"topic {wanted.topic!r} key {wanted.key!r}"
        return f"{path} an event in {where} of tenant {tenant}{until}"
    if isinstance(wanted, ApprovalRequest):
        return f"{path} an approval: {wanted.question[:_TEXT_CHARS_MAX]!r}{until}"
    if isinstance(wanted, Join):
        return f"{path} child {wanted.run_id}"
    if isinstance(wanted, LockAcquire):
        held = around.holder(tenant, wanted.name)
        return f"{path} lock {wanted.name!r} of tenant {tenant}, held by {held or 'nobody'}{until}"
    return f"{path} a timer{until}" if op == "timer.sleep" else f"{path} {op}"


def info_of_machine(
    machine: RunMachine,
    around: Around = _NOTHING,
    awaited: str | None = None,
    stuck: str | None = None,
) -> RunInfo:
    """A run in memory. ``awaited``: what it waits for before its guest starts."""
    accepted, run_id = machine.accepted, machine.run_id
    steps = tuple(StepInfo(step.path, step.op, step.tool, step.attempt) for step in machine.open.values())
    scheduler = getattr(machine.guest, "scheduler_state", None)
    wait_reason, detail = None, None
    if machine.wait is not None:
        wait_reason, detail = machine.wait.reason, machine.wait.detail
        if detail is None and machine.wait.path == START_PATH:
            detail = f"it begins at {_time(accepted.start_ns)}"
    elif (hold := machine.holds) is not None:
        wait_reason, detail = hold.reason, hold.detail
    elif steps:
        first = next(iter(machine.open.values()))
        wait_reason, detail = WAIT_REASON.get(first.op, "step"), f"{first.path} {first.tool or first.op}"
        if first.op in WAIT_REASON:
            detail = wait_detail(
                accepted, run_id, first.path, first.op, first.request, first.prepared_ns, around
            )  # fmt: skip
        elif first.attempt > 1:
            detail += f", attempt {first.attempt}"
    elif awaited is not None:
        wait_reason, detail = "pool", awaited
    elif scheduler in ("QUEUED", "PREEMPTED"):
        wait_reason, detail = "pool", f"a CPU slot: {place(machine.tier, accepted.tenant)}"
    elif machine.awaits_children:
        wait_reason, detail = "child", "it ends when its children have ended"
    exit = machine.exit
    fuel = exit.fuel if exit is not None else getattr(machine.guest, "fuel_used", 0)
    return RunInfo(
        run_id,
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
        scheduler=scheduler,
        steps=steps,
        token=ResumeToken(run_id, machine.segment, machine.version, None, fuel, machine.tier),
        stuck=stuck,
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
        token=ResumeToken(head.run_id, head.segment, head.version, None, 0, head.tier),
    )


def with_fold(info: RunInfo, run: RunFold, around: Around) -> RunInfo:
    """A run in the store, with what its journal knows besides."""
    accepted = run.run()
    steps = tuple(
        StepInfo(step.path, step.op, "", step.attempt) for step in run.open.values() if step.state is StepState.PREPARED
    )
    frame = None if run.frame is None else run.frame.frame
    token = ResumeToken(info.run_id, run.segment, run.version, frame, run.spent.fuel, run.tier)
    detail, wait = info.detail, run.wait
    if wait is not None and detail is None:
        detail = wait.detail
        step = None if wait.path is None else run.open.get(wait.path)
        if step is not None and detail is None:
            detail = wait_detail(
                accepted, info.run_id, step.path, step.op, step.request or b"", step.prepared_ns, around
            )  # fmt: skip
        elif wait.path == START_PATH:
            detail = f"it begins at {_time(accepted.start_ns)}"
    return msgspec.structs.replace(info, detail=detail, token=token, steps=steps)


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
