"""Runs of tier 0 that want the machine now, for those who make room for them."""

from collections.abc import Callable
from typing import Final

from agentrt.engine.machine import Phase, RunMachine

#: Runs that have ended are let go of when somebody asks, or when there are so many.
_MIN: Final = 64


class UrgentRuns:
    """``tell(wanted)`` is called when one begins; ``wanted()`` says whether any still computes, or waits for a slot."""

    def __init__(self, tell: Callable[[Callable[[], bool]], None] | None) -> None:
        self._tell = tell
        self._runs: set[RunMachine] = set()
        self._many = _MIN

    def began(self, machine: RunMachine) -> None:
        """The guest of a run of tier 0 is about to start."""
        if self._tell is None:
            return
        self._runs.add(machine)
        if len(self._runs) > self._many:
            self._sweep()
            self._many = max(_MIN, 2 * len(self._runs))
        self._tell(self.wanted)

    def wanted(self) -> bool:
        self._sweep()
        return any(not machine.suspended for machine in self._runs)

    def _sweep(self) -> None:
        self._runs = {machine for machine in self._runs if machine.guest is not None and machine.phase <= Phase.LIVE}
