"""Runs that hold locks elsewhere, which they have declared.

Nobody here knows who waits for those, so it is taken that somebody of the run's own tier does: the run is not demoted
from it, and a host that it was given for itself takes its turns there, until it holds none any more or has run for a
grace since. Why it is so: docs/decisions/0011-foreign-locks.md.
"""

import asyncio
from collections.abc import Callable

from agentrt.engine.grace import Grace
from agentrt.engine.machine import RunMachine


class ForeignHolds:
    """Loop thread only. Knows of the runs that have a guest and hold such locks; ``changed(machine)`` when the `floor`
    of one may be another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grace_ns: int, changed: Callable[[RunMachine], None]) -> None:
        self._loop = loop
        self._grace_ns = grace_ns
        self._changed = changed
        self._graces: dict[str, Grace] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._graces)

    def floor(self, run_id: str, base_tier: int) -> int | None:
        """The tier below which the run should not be for that; None if there is none."""
        grace = self._graces.get(run_id)
        return base_tier if grace is not None and grace.used_ns < self._grace_ns else None

    def look(self, machine: RunMachine) -> None:
        """It holds another number of them, or has another guest, or time has passed."""
        run_id = machine.run_id
        planned = self._looks.pop(run_id, None)
        if planned is not None:
            planned.cancel()
        before = self.floor(run_id, 0)
        if not machine.foreign or machine.guest is None:
            self._graces.pop(run_id, None)
        else:
            grace = self._graces.setdefault(run_id, Grace())
            grace.look(machine.guest)
            if grace.used_ns < self._grace_ns:
                self._looks[run_id] = self._loop.call_later(grace.next_s(self._grace_ns), self.look, machine)
        if self.floor(run_id, 0) != before:
            self._changed(machine)

    def forget(self, run_id: str) -> None:
        """It has left memory."""
        self._graces.pop(run_id, None)
        planned = self._looks.pop(run_id, None)
        if planned is not None:
            planned.cancel()

    def close(self) -> None:
        for look in self._looks.values():
            look.cancel()
