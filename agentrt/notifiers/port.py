"""What notifiers and observers are to a node. Plugins bring them (agentrt/hooks.py)."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec


class Notification(msgspec.Struct, frozen=True):
    """What somebody may want to know of a run. ``event``: ``ended`` or ``waiting`` (for a person: an approval, or an
    operator). ``state`` as docs/durable-runs.md has it; ``detail``: the error's code of a run that ended otherwise
    than SUCCEEDED, or what it waits for."""

    event: str
    run_id: str
    tenant: str
    agent: str
    state: str
    detail: str = ""


class Notifier(Protocol):
    """Made, used and closed on the loop of the notifier thread. One notification at a time, in order."""

    async def notify(self, notification: Notification) -> None:
        """Tell somebody. It is cancelled after 30 s."""

    async def close(self) -> None:
        """Nothing is told from now on."""


#: ``observer(event, data)``: ("accepted", `RunInfo`), ("parked", `RunInfo`), ("emitted", `Emitted`),
#: ("ended", `RunResult`); see `agentrt.engine.info`. More events may come with later releases.
Observer = Callable[[str, Any], None]
