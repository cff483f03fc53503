"""Callers whose answers the engine owes: whoever asked gets one, also when the node stops in between."""

from collections.abc import Callable
from typing import Any

from agentrt.errors import AgentrtError


class Callers:
    """Loop thread only."""

    def __init__(self) -> None:
        self._open: dict[Callable[..., None], Callable[[AgentrtError], None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, done: Callable[..., None], failed: Callable[[AgentrtError], None]) -> Callable[..., None]:
        """What to call in place of ``done``, which is called once: by that, or by ``failed`` in `fail_all`."""

        def answer(*arguments: Any) -> None:
            if self._open.pop(answer, None) is not None:
                done(*arguments)

        self._open[answer] = failed
        return answer

    def fail_all(self, error: AgentrtError) -> None:
        """Nobody else will answer them."""
        callers, self._open = self._open, {}
        for failed in callers.values():
            failed(error)
