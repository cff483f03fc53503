"""Python agents: what their authors import, and what runs inside the hosts that execute them.

`agent` declares one, `Context` is its side of the runtime. The other modules are the runtime's own.
"""

from agentrt.agents.context import Approval, ChildRun, Context, Event, ForeignLock, Lock
from agentrt.agents.declare import agent
from agentrt.agents.errors import (
    ChildFailedError,
    DeadlockError,
    LockLostError,
    ModelContextError,
    ModelSchemaError,
    ModelStepError,
    NotReplayableError,
    StepFailedError,
    ValueRefusedError,
    WaitTimeoutError,
)

__all__ = [
    "agent",
    "Context",
    "Event",
    "Approval",
    "ChildRun",
    "Lock",
    "ForeignLock",
    "StepFailedError",
    "ChildFailedError",
    "DeadlockError",
    "LockLostError",
    "ModelStepError",
    "ModelSchemaError",
    "ModelContextError",
    "NotReplayableError",
    "ValueRefusedError",
    "WaitTimeoutError",
]
