"""A call between `ToolPool.call` and its outcome."""

from agentrt.tools.outcome import Done


class PendingCall:
    """``deadline_ns`` is on the loop's clock, 0 until a host has the call."""

    __slots__ = ("args", "attempt", "deadline_ns", "done", "id", "is_sync", "key", "number", "timeout_ns")

    def __init__(
        self,
        id: int,
        number: int,
        args: bytes,
        key: str | None,
        attempt: int,
        timeout_ns: int,
        is_sync: bool,
        done: Done,
    ) -> None:
        self.id = id
        self.number = number
        self.args = args
        self.key = key
        self.attempt = attempt
        self.timeout_ns = timeout_ns
        self.is_sync = is_sync
        self.done = done
        self.deadline_ns = 0
