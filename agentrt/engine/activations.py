"""When runs were in memory, for those who draw it: an `Activation` for each stay of a guest."""

from collections.abc import Callable
from typing import Any, Final

from agentrt.engine.info import Activation
from agentrt.engine.machine import RunMachine
from agentrt.states import RunState


class Activations:
    """``tell(event, data)``: ("begun", run id) when a guest has started, ("left", `Activation`) when it is gone, before
    what follows from that is told. Nothing while nobody has asked (``wanted``)."""

    def __init__(self, tell: Callable[[str, Any], None], now_ns: Callable[[], int]) -> None:
        self._tell = tell
        self._now_ns: Final = now_ns
        self._begun: dict[str, tuple[int, str]] = {}
        self.wanted = False

    def begun(self, machine: RunMachine, framed: bool) -> None:
        """Its guest has started: the first one, or the next of a new segment."""
        if machine.run_id in self._begun:
            self.gone(machine, "checkpoint")
        self._begun[machine.run_id] = (
            self._now_ns(),
            "frame" if framed else "replay" if machine.replays else "fresh",
        )
        self._tell("begun", machine.run_id)

    def gone(self, machine: RunMachine, why: str = "") -> None:
        """Its guest is gone."""
        found = self._begun.pop(machine.run_id, None)
        if found is None:
            return
        exit = machine.exit
        if not why:
            why = _why(machine)
        used = {}
        if exit is not None:
            used = {
                "fuel": exit.fuel,
                "slot_ns": exit.slot_ns,
                "queued_ns": max(0, exit.first_ns - exit.submitted_ns) if exit.first_ns else 0,
                "preemptions": exit.preemptions,
                "demotions": exit.demotions,
            }
        began_ns, begun = found
        ended_ns = max(began_ns, self._now_ns())
        self._tell(
            "left",
            Activation(machine.run_id, machine.accepted, began_ns, ended_ns, begun, why, machine.tier, **used),
        )


def _why(machine: RunMachine) -> str:
    outcome = machine.outcome
    if outcome is not None and machine.state is not RunState.WAITING:
        return str(outcome.state.value)
    if machine.wait is not None:
        return machine.wait.reason
    return machine.exit.reason if machine.exit is not None else "stopped"
