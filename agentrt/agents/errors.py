"""What an agent can catch.

A step that was answered with a failure raises a `StepFailedError`, whose ``code`` is that of the answer; the commonest
codes have classes of their own. What an agent does wrong by itself raises `NotReplayableError` or `ValueRefusedError`.
"""

from typing import Any, Final

import msgspec

from agentrt.errors import (
    AgentrtError,
    BreakerOpenError,
    InputError,
    ModelError,
    ToolConflictError,
    ToolError,
    ToolHostDiedError,
    ToolTimeoutError,
)


class StepFailedError(AgentrtError):
    """A step failed. ``code`` says how, ``details`` holds what else its answer said."""

    code = "step_failed"

    def __init__(
        self, message: str, *, code: str | None = None, details: dict[str, Any] | None = None, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.details = details or {}
        if code is not None:  # of the class otherwise
            vars(self)["code"] = code


class ToolStepError(StepFailedError, ToolError):
    """A tool raised, or could not be called."""

    code = "tool_failed"


class ToolStepTimeoutError(ToolStepError, ToolTimeoutError):
    code = "tool_timeout"


class ToolStepHostDiedError(ToolStepError, ToolHostDiedError):
    code = "tool_host_died"


class ModelStepError(StepFailedError, ModelError):
    """A call to a model failed; ``code`` says how (docs/models.md)."""

    code = "model_failed"

    @property
    def kind(self) -> str:
        """transport, rate, conflict or fatal; empty if nothing was sent."""
        return str(self.details.get("kind", ""))


class ModelSchemaError(ModelStepError):
    """The answer was paid for and is not what the schema asks for; ``details["text"]`` is its beginning."""

    code = "model_schema"


class ModelContextError(ModelStepError):
    """The conversation is longer than what the model reads."""

    code = "model_context"


class ToolStepConflictError(ToolStepError, ToolConflictError):
    """The tool says that the world is not as the agent thought."""

    code = "tool_conflict"


class BreakerOpenStepError(StepFailedError, BreakerOpenError):
    """What was called, or the agent that was to be started, has failed too often and is left alone for now."""

    code = "breaker_open"


class WaitTimeoutError(StepFailedError, TimeoutError):
    """The event did not come, or the lock was not had, in time."""

    code = "timeout"


class ChildFailedError(StepFailedError):
    """A child run ended in another state than SUCCEEDED: ``state``, and its ``error`` as plain data."""

    code = "child_failed"

    @property
    def state(self) -> str:
        return str(self.details.get("state", ""))

    @property
    def error(self) -> Any:
        return self.details.get("error")


class SpawnLimitError(StepFailedError):
    """The run may not start that child: it is too deep in its family, or has started too many. The run goes on."""

    code = "limit_reached"


class EnsembleFullError(SpawnLimitError):
    """The queue of the run's ensemble has no place for another child now."""

    code = "ensemble_full"


class DeadlockError(StepFailedError):
    """Waiting for the lock would have closed a circle of runs that wait for each other."""

    code = "deadlock"


class LockLostError(StepFailedError):
    """The lock was taken away, because it was held for too long while others waited."""

    code = "lock_lost"


class NotReplayableError(AgentrtError):
    """The agent did what cannot be repeated when its run is replayed; the hint names what to use instead."""

    code = "not_replayable"


class ValueRefusedError(InputError):
    """A value given to the runtime is nothing that JSON can carry unchanged, or is too big."""

    code = "value"


class GuestEndedError(AgentrtError):
    """The run's program was stopped; whatever still runs of it cannot ask for anything."""

    code = "guest_ended"


_CLASSES: Final[dict[str, type[StepFailedError]]] = {
    kind.code: kind
    for kind in (
        ToolStepError,
        ToolStepTimeoutError,
        ToolStepHostDiedError,
        ModelStepError,
        ModelSchemaError,
        ModelContextError,
        ToolStepConflictError,
        BreakerOpenStepError,
        WaitTimeoutError,
        ChildFailedError,
        SpawnLimitError,
        EnsembleFullError,
        DeadlockError,
        LockLostError,
    )
}


def step_error(payload: bytes) -> StepFailedError:
    """The exception for the answer of a failed step."""
    try:
        answer = msgspec.json.decode(payload)
        code, message = str(answer.pop("code")), str(answer.pop("message", ""))
    except (msgspec.DecodeError, AttributeError, KeyError):
        return StepFailedError(payload[:500].decode(errors="replace"))
    kind = _CLASSES.get(code)
    if kind is None:
        kind = StepFailedError
        if code.startswith("tool_"):
            kind = ToolStepError
        elif code.startswith("model_"):
            kind = ModelStepError
    return kind(message, code=code, details=answer)
