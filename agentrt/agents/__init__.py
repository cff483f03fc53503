"""Python agents: what their authors import, and what runs inside the hosts that execute them.

`agent` declares one, `Context` is its side of the runtime. The other modules are the runtime's own.
"""

from agentrt.agents.context import Approval, ChildRun, Context, Event, ForeignLock, Lock
from agentrt.agents.declare import agent
from agentrt.agents.errors import (
    BreakerOpenStepError,
    ChildFailedError,
    DeadlockError,
    EnsembleFullError,
    LockLostError,
    ModelContextError,
    ModelSchemaError,
    ModelStepError,
    NotReplayableError,
    SpawnLimitError,
    StepFailedError,
    ValueRefusedError,
    WaitTimeoutError,
)
from agentrt.agents.spawning import Spawned, Task
from agentrt.flow.capacity import Capacity

__all__ = [
    "agent",
    "Context",
    "Event",
    "Approval",
    "ChildRun",
    "Lock",
    "ForeignLock",
    "Task",
    "Spawned",
    "Capacity",
    "StepFailedError",
    "BreakerOpenStepError",
    "ChildFailedError",
    "DeadlockError",
    "SpawnLimitError",
    "EnsembleFullError",
    "LockLostError",
    "ModelStepError",
    "ModelSchemaError",
    "ModelContextError",
    "NotReplayableError",
    "ValueRefusedError",
    "WaitTimeoutError",
]
