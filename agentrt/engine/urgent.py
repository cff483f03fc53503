"""Runs of tier 0 that want the machine now, for those who make room for them; and those that were begun lately."""

from collections.abc import Callable, Iterator
from typing import Final

from agentrt.engine.machine import Phase, RunMachine
from agentrt.ids import new_run_id
from agentrt.records import RunAccepted
from agentrt.stores.base import Store

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


def begun_since(store: Store, since_ns: int) -> Iterator[tuple[str, int]]:
    """(tenant, when) of the runs of tier 0 that somebody has asked for, the oldest first. Blocks. Ids begin with their
    time, so nothing older is read."""
    after = new_run_id(max(0, since_ns // 1_000_000), bytes(10))
    while heads := store.scan_heads(after):
        after = heads[-1].run_id
        for head in heads:
            if head.base_tier or head.accepted_ns < since_ns:
                continue
            records = store.read_records(head.run_id, 0, 1)
            if records and isinstance(records[0], RunAccepted) and records[0].parent is None:
                yield head.tenant, head.accepted_ns
