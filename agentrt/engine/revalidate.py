"""Whether a run may go on after a wait or a restart: much may have changed since it was accepted.

Asked whenever a run has been brought back and its guest is about to start, and when an approval is answered whose guest
is still there. In this order: is its tenant enabled, has its deadline passed, does it still hold the locks that it
believes to hold, does the policy let it. Runs that were told to end are not asked: they only unwind.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from agentrt.engine.machine import RunMachine
from agentrt.engine.tenants import Tenants, shown
from agentrt.errors import DeniedError
from agentrt.policy import Allow, Deny, Policies


class LockView(Protocol):
    def lost_by(self, run_id: str, tenant: str, held: dict[str, int]) -> list[tuple[str, int]]:
        """Of the locks that a run believes to hold, those that it does not: (name, token)."""


class Go(msgspec.Struct, frozen=True):
    """It may go on; ``lost``: but not with these locks."""

    lost: tuple[tuple[str, int], ...] = ()


class TimedOut(msgspec.Struct, frozen=True):
    """Its deadline has passed."""


class Hold(msgspec.Struct, frozen=True):
    """It waits for an operator."""

    detail: str


class Refuse(msgspec.Struct, frozen=True):
    """It ends."""

    error: DeniedError


Verdict = Go | TimedOut | Hold | Refuse
_GO = Go()


class Revalidation:
    """Loop thread only."""

    def __init__(self, tenants: Tenants, policies: Policies, locks: LockView, now_ns: Callable[[], int]) -> None:
        self._tenants = tenants
        self._policies = policies
        self._locks = locks
        self._now_ns = now_ns

    def verdict(self, machine: RunMachine) -> Verdict:
        """Nothing is changed by asking."""
        accepted = machine.accepted
        if machine.ending is not None:
            return _GO
        why = self._tenants.why_off(accepted.tenant)
        if why is not None:
            return Hold(shown(accepted.tenant, why))
        if accepted.deadline_ns and self._now_ns() >= accepted.deadline_ns:
            return TimedOut()
        if self._policies:
            decision = self._policies.decide(
                "run.resume",
                {
                    "run": machine.run_id,
                    "tenant": accepted.tenant,
                    "agent": accepted.agent,
                    "version": machine.agent_version,
                    "tier": machine.tier,
                    "pins": dict(machine.pins),
                },
            )
            if isinstance(decision, Deny):
                return Refuse(
                    DeniedError(decision.reason, run=machine.run_id, hint="Change the policy, and submit it again")
                )
            if not isinstance(decision, Allow):
                return Hold(f"{decision.reason}; resume it when it may go on")
        if machine.locks:
            lost = self._locks.lost_by(machine.run_id, accepted.tenant, machine.locks)
            return Go(tuple(lost)) if lost else _GO
        return _GO
