"""A call between `ToolPool.call` and its outcome."""

import asyncio
from typing import TYPE_CHECKING

from agentrt.tools.outcome import Done
from agentrt.tools.spec import ToolSpec

if TYPE_CHECKING:
    from agentrt.tools.hostpool import Domain
    from agentrt.tools.link import HostLink


class Batch:
    """Calls that are given to a tool at once. The first one, the leader, stands for them in queues and takes one place
    in a host."""

    __slots__ = ("calls", "left", "timer")

    def __init__(self, leader: "PendingCall") -> None:
        self.calls = [leader]
        self.left = 0  # calls that its host has not answered
        self.timer: asyncio.TimerHandle | None = None  # while it waits for company


class PendingCall:
    """``deadline_ns`` is on the loop's clock, set when a host has the call."""

    __slots__ = (
        "args", "attempt", "batch", "cancelled", "deadline_ns", "domain", "done", "ended", "host", "id", "is_sync",
        "key", "number", "queued", "reconcile", "secrets", "spec", "timeout_ns",
    )  # fmt: skip

    deadline_ns: int

    def __init__(
        self,
        id: int,
        number: int,
        spec: ToolSpec,
        args: bytes,
        key: str | None,
        attempt: int,
        timeout_ns: int,
        done: Done,
        domain: "Domain",
        reconcile: bool,
    ) -> None:
        self.id = id
        self.number = number
        self.spec = spec
        self.is_sync = not spec.is_async
        self.args = args
        self.key = key
        self.attempt = attempt
        self.timeout_ns = timeout_ns
        self.done = done
        self.domain = domain
        self.reconcile = reconcile
        self.secrets: dict[str, str] | None = None
        self.host: HostLink | None = None
        self.ended = False  # its outcome is known, whatever still runs
        self.cancelled = False
        self.queued = False  # it is in a lane or a batch
        self.batch: Batch | None = None

    def live(self) -> "list[PendingCall]":
        """Of what stands in a lane: its calls that still want an outcome."""
        if self.batch is None:
            return [] if self.ended else [self]
        return [call for call in self.batch.calls if not call.ended]
