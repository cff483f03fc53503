"""Layered time-outs: one execution of a tool, the run's active time, and its life since it was accepted.

A wait is no active time: a run that waits for an approval for a week has not looped for a week. Whichever layer has
least left bounds the next call, and is named when it runs out.
"""

from enum import StrEnum

import msgspec

from agentrt.flow.decisions import Action, Control, Decision, Scope


class Layer(StrEnum):
    TOOL = "tool"  # the call ends, the run goes on
    LOOP = "loop"  # the run ends: it was active for too long
    LIFETIME = "lifetime"  # the run ends: its deadline


class Clock(msgspec.Struct):
    """A run's active time. ``since_ns`` is 0 while it waits."""

    active_ns: int = 0
    since_ns: int = 0

    def go(self, now_ns: int) -> None:
        """It is active (again)."""
        if not self.since_ns:
            self.since_ns = now_ns

    def rest(self, now_ns: int) -> None:
        """It waits from now on."""
        if self.since_ns:
            self.active_ns += max(0, now_ns - self.since_ns)
            self.since_ns = 0

    def spent_ns(self, now_ns: int) -> int:
        """Active time so far."""
        return self.active_ns + (max(0, now_ns - self.since_ns) if self.since_ns else 0)


class Timeouts(msgspec.Struct, frozen=True):
    """A run's bounds, 0: none. ``loop_ns`` is active time, ``deadline_ns`` a moment."""

    loop_ns: int = 0
    deadline_ns: int = 0

    def left(self, spent_ns: int, now_ns: int, tool_ns: int) -> tuple[int, Layer]:
        """How long the next call may take, 0 or less: nothing is left; and which layer says so. Between equals the
        outermost is named, for its end is the one that will be seen."""
        left, layer = tool_ns, Layer.TOOL
        if self.loop_ns and self.loop_ns - spent_ns <= left:
            left, layer = self.loop_ns - spent_ns, Layer.LOOP
        if self.deadline_ns and self.deadline_ns - now_ns <= left:
            left, layer = self.deadline_ns - now_ns, Layer.LIFETIME
        return left, layer

    def due_ns(self, clock: Clock) -> int:
        """When a run that stays active ends by one of them; 0: never."""
        dues = [self.deadline_ns] if self.deadline_ns else []
        if self.loop_ns and clock.since_ns:
            dues.append(clock.since_ns + self.loop_ns - clock.active_ns)
        return min(dues, default=0)


def end_of(run_id: str, limit: str, took_ns: int, now_ns: int) -> Decision:
    """A run has ended by its time, as an event. ``limit``: which of them."""
    return Decision(
        at_ns=now_ns,
        control=Control.TIMEOUT,
        action=Action.END,
        scope=Scope.RUN,
        name=run_id,
        limit=limit,
        value=took_ns,
        run=run_id,
    )
