"""Where each run of the node is that has not ended. Loop thread only.

It is in one place: a machine in ``runs``, on its way from the store (``loading``), in the recovery plan, or ``parked``.
``out`` names those that admission counts and that have no machine; one that waits in the store is nowhere.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from agentrt.engine.machine import Phase, RunMachine
from agentrt.errors import AgentrtError
from agentrt.flow.admission import Applicant

Action = Callable[[RunMachine], None]
Missing = Callable[[BaseException | None], None]


class Parked(msgspec.Struct, frozen=True):
    """A run that waits for an operator; nothing else of it is in memory."""

    tier: int
    accepted_ns: int
    tenant: str
    agent: str
    detail: str
    path: str | None  # the step that somebody has to look at; None: it is about the whole run
    refusal: AgentrtError | None = None  # of the store, as long as nobody has stepped in


class Places:
    """Written by the engine and its loader."""

    def __init__(self) -> None:
        self.runs: Final[dict[str, RunMachine]] = {}
        #: Those read just now, and what is to be done with them.
        self.loading: Final[dict[str, list[tuple[Action, Missing | None]]]] = {}
        self.parked: Final[dict[str, Parked]] = {}
        self.out: Final[dict[str, Applicant]] = {}  # and as what they are counted

    def knows(self, run_id: str) -> bool:
        """Whether it is in memory, or comes back by itself."""
        return run_id in self.runs or run_id in self.loading or run_id in self.out

    def in_memory(self, run_id: str) -> RunMachine | None:
        """The machine of a run that is durable."""
        machine = self.runs.get(run_id)
        return None if machine is None or machine.phase is Phase.ACCEPTING else machine
