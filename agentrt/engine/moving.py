"""Runs that leave this node for another store, or came from one. Loop thread only.

A run that leaves is let go first: its guest is dropped where it is, as a frame if it is worth one, what is
in flight is recorded, and from then on nobody brings it back to memory until it is fenced or stays. What came is
taken up as after a restart.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from agentrt.engine.machine import Phase, RunMachine
from agentrt.errors import AgentrtError, InputError, RunExportedError


class Runs(Protocol):
    """What it needs of the engine."""

    def machine_of(self, run_id: str) -> RunMachine | None: ...

    def let_go(self, machine: RunMachine) -> None:
        """Have it leave memory, as a frame if it is worth one; `Moving.gone` follows."""

    def is_loading(self, run_id: str) -> bool: ...

    def forget(self, run_id: str) -> None:
        """The run is in the store, and this node does not go on with it."""

    def take_up(self, run_id: str) -> None:
        """The run is in the store, and goes on here."""

    def give_up(self, run_id: str, version: int, error: AgentrtError) -> None:
        """The run ends here with that record: tell those who wait for its end or watch it."""


class Moving:
    """``leaving``: runs that nobody may load."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.leaving: set[str] = set()
        self._waiting: list[tuple[set[str], Callable[[BaseException | None], None]]] = []

    def release(self, run_ids: Iterable[str], done: Callable[[BaseException | None], None]) -> None:
        """Let the runs go; ``done(None)`` once none of them is in memory, ``done(error)`` and they go on."""
        ids = [*run_ids]
        machines = {run_id: self._runs.machine_of(run_id) for run_id in ids}
        for run_id, machine in machines.items():
            if run_id in self.leaving:
                done(InputError("the run is leaving already", run=run_id))
                return
            if machine is not None and machine.phase is Phase.ACCEPTING:
                done(InputError("the run is being accepted", run=run_id, hint="Try again in a moment"))
                return
        self.leaving.update(ids)
        left = {run_id for run_id in ids if machines[run_id] is not None or self._runs.is_loading(run_id)}
        for run_id in ids:
            if run_id not in left:
                self._runs.forget(run_id)
        if not left:
            done(None)
            return
        self._waiting.append((left, done))
        for machine in machines.values():
            if machine is not None:
                self._runs.let_go(machine)

    def gone(self, run_id: str) -> None:
        """The machine of a leaving run is gone, or the run could not be read."""
        self._runs.forget(run_id)
        for left, done in [*self._waiting]:
            left.discard(run_id)
            if not left:
                self._waiting.remove((left, done))
                done(None)

    def left(self, versions: Mapping[str, int]) -> None:
        """The runs are fenced, each with the record of that number."""
        for run_id, version in versions.items():
            self.leaving.discard(run_id)
            self._runs.give_up(run_id, version, exported(run_id))

    def stay(self, run_ids: Iterable[str]) -> None:
        """The runs did not leave."""
        for run_id in run_ids:
            self.leaving.discard(run_id)
            self._runs.take_up(run_id)


def leaving(run_id: str) -> InputError:
    """What is said of a run that may be about to leave."""
    return InputError("the run is being exported", run=run_id, hint="Try again in a moment")


def exported(run_id: str) -> RunExportedError:
    """What is said of a run that has left."""
    return RunExportedError("the run was exported", run=run_id, hint="It goes on where its file was imported")
