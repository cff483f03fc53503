"""Which run's code this host is executing. One at a time: activations are neither nested nor concurrent."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrt.agents.run import AgentRun


class Current:
    """``run`` is set for the length of an activation and None between two."""

    __slots__ = ("run",)

    def __init__(self) -> None:
        self.run: AgentRun | None = None


current = Current()
