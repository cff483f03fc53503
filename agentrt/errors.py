"""The error tree.

Every error has a stable ``code`` (documented, used in JSON answers and exit statuses), a message that says what
happened, and, where known, the run, step and limit it concerns and a ``hint``: what to do about it.
`InternalError` means agentrt has a bug; everything else has a cause outside it.
"""

from typing import Any, ClassVar


class AgentrtError(Exception):
    """Base of all agentrt errors; ``code`` is stable across releases."""

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        run: str | None = None,
        step: str | None = None,
        limit: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.run = run
        self.step = step
        self.limit = limit
        self.hint = hint

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in (("run", self.run), ("step", self.step)) if value]
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        return f"{text}. {self.hint}" if self.hint else text

    def to_dict(self) -> dict[str, Any]:
        """The error as plain data: code, message and what else is known."""
        known = {"run": self.run, "step": self.step, "limit": self.limit, "hint": self.hint}
        return {"code": self.code, "message": self.message} | {k: v for k, v in known.items() if v is not None}


class InternalError(AgentrtError):
    """agentrt itself is wrong; please report it."""

    code = "internal"


class ConfigError(AgentrtError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "config"


class PluginError(AgentrtError):
    """A plugin cannot be loaded; the message names it."""

    code = "plugin"


class ClosedError(AgentrtError):
    """The runtime, core or store is closed or closing."""

    code = "closed"


class QueueFullError(AgentrtError):
    """A bounded queue is full; nothing was accepted. Try again later: after ``retry_after_s`` if that is known."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.retry_after_s = retry_after_s

    def for_another(self) -> "QueueFullError":
        """The same for another caller: his traceback is put into it."""
        return QueueFullError(self.message, limit=self.limit, hint=self.hint, retry_after_s=self.retry_after_s)


class DeferredError(QueueFullError):
    """A policy does not let a run be accepted for now."""

    code = "deferred"


class UnreachableError(AgentrtError):
    """A node's HTTP API could not be reached, or what answered is none."""

    code = "unreachable"


class UnauthorizedError(AgentrtError):
    """The node does not know the API key, or there was none."""

    code = "unauthorized"


class ForbiddenError(AgentrtError):
    """The API key may not do that."""

    code = "forbidden"


class BreakerOpenError(AgentrtError):
    """What was called has failed too often and is not tried for now."""

    code = "breaker_open"


class RateTooLargeError(AgentrtError):
    """The call alone is more than a rate limit ever allows."""

    code = "rate_too_large"


class InputError(AgentrtError):
    """What the caller passed is not acceptable; nothing was changed."""

    code = "input"


class UnknownAgentError(InputError):
    code = "unknown_agent"


class UnknownRunError(InputError):
    code = "unknown_run"


class RunExportedError(UnknownRunError):
    """The run was exported: it goes on where its file is imported."""

    code = "run_exported"


class RunExistsError(InputError):
    """The store has the run that is to be imported; nothing was changed."""

    code = "run_exists"


class ExportFileError(InputError):
    """The file is no export that this agentrt can import: cut off, altered, or of another version."""

    code = "export_file"


class FrameError(InputError):
    """A frame is damaged, of another version, or of something else. The run can be replayed."""

    code = "frame"


class UnknownToolError(InputError):
    code = "unknown_tool"


class TenantDisabledError(InputError):
    """The tenant is switched off: nothing new of it is accepted."""

    code = "tenant_disabled"


class DeniedError(AgentrtError):
    """A policy does not let a run be accepted, or go on."""

    code = "denied"


class IdempotencyConflictError(InputError):
    """The idempotency key was used with another agent or input; the first run is untouched."""

    code = "idempotency_conflict"


class StepSettledError(InputError):
    """The step or wait is gone, already answered, or too late to answer; nothing was changed."""

    code = "step_settled"


# --- wasm ----------------------------------------------------------------------


class EngineError(AgentrtError):
    """The wasm engine cannot be loaded, or is not of the version agentrt needs."""

    code = "engine"


class ModuleError(InputError):
    """The bytes are not a module that agentrt can run."""

    code = "module"


class UnknownImportError(ModuleError):
    code = "unknown_import"


class NoEntryError(ModuleError):
    code = "no_entry"


class ModuleLimitError(ModuleError):
    """The module declares, or its compilation takes, more than a limit allows."""

    code = "module_limit"


# --- store ---------------------------------------------------------------------


class StoreError(AgentrtError):
    code = "store"


class StoreInUseError(StoreError):
    code = "store_in_use"


class StoreCorruptError(StoreError):
    code = "store_corrupt"


class StoreFullError(StoreError):
    code = "store_full"


class StoreVersionError(StoreError):
    """The store was written by a newer agentrt."""

    code = "store_version"


class StorePlaceError(StoreError):
    """The folder is on a file system that does not keep LMDB's promises."""

    code = "store_place"


class StaleWriteError(StoreError):
    """The append does not follow the run's current state_version, or its session is over."""

    code = "stale_write"


class DuplicateError(StoreError):
    """A row that must be new exists; ``value`` is what it holds."""

    code = "duplicate"

    def __init__(self, message: str, value: bytes = b"", **where: Any) -> None:
        super().__init__(message, **where)
        self.value = value


# --- how a run ends ------------------------------------------------------------


class RunError(AgentrtError):
    """A run ended in another state than SUCCEEDED."""

    code = "run_failed"


class RunCancelledError(RunError):
    code = "run_cancelled"


class BudgetExhaustedError(RunError):
    code = "budget_exhausted"


class LoopDetectedError(RunError):
    """The loop guard ended the run: it, or the ensemble that it belongs to, did the same again and again or got
    nowhere. ``evidence``: the sign, how often, and what."""

    code = "loop_detected"

    def __init__(self, message: str, *, evidence: dict[str, Any] | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.evidence = evidence

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | ({} if self.evidence is None else {"evidence": self.evidence})


class RunTimedOutError(RunError):
    """The run's deadline passed."""

    code = "run_timed_out"


class HostDiedError(RunError):
    """The run ended the process that it ran in: a crash, its memory, or an activation that nothing could stop."""

    code = "host_died"


class TrapError(RunError):
    """The guest trapped; the message holds the trap and its backtrace."""

    code = "trap"


class NonDeterminismError(RunError):
    """On replay the guest asked for something else than its journal says."""

    code = "non_determinism"


class ModelError(AgentrtError):
    """A call to a model failed; typed for the agent, which may go on."""

    code = "model_failed"


class UpgradeError(RunError):
    """The run's agent was upgraded, and its runs do not go on (``on_upgrade="fail"``)."""

    code = "upgraded"


class LimitReachedError(InputError):
    """A run wants more than a limit allows, but may go on: the step was refused, nothing was begun."""

    code = "limit_reached"


class EnsembleFullError(LimitReachedError):
    """The queue of a run's ensemble has no place for another child."""

    code = "ensemble_full"


class ToolError(AgentrtError):
    """A tool raised, timed out or its host died; typed for the guest, which may go on."""

    code = "tool_failed"


class ToolUnavailableError(ToolError):
    """For tools to raise: nobody answered, and it may be otherwise in a while. The runtime tries again, as often as the
    step may be tried, unless the tool is at_most_once or reconcilable."""

    code = "tool_unavailable"


class ToolRateLimitedError(ToolError):
    """For tools to raise: they were refused for now, without any effect. The runtime tries again, not before
    ``retry_after_s`` if that is known."""

    code = "tool_rate_limited"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        known = self.retry_after_s
        return super().to_dict() | ({} if known is None else {"retry_after_s": known})


class ToolConflictError(ToolError):
    """For tools to raise: the world is not as the caller thought. The agent decides; the runtime does not try again."""

    code = "tool_conflict"


class ToolTimeoutError(ToolError):
    code = "tool_timeout"


class ToolHostDiedError(ToolError):
    code = "tool_host_died"


def errors_by_code() -> dict[str, type[AgentrtError]]:
    """Every error there is, by its code."""
    found: dict[str, type[AgentrtError]] = {}
    pending: list[type[AgentrtError]] = [AgentrtError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__ == __name__ and "code" in vars(kind):
            found[kind.code] = kind
    return dict(sorted(found.items()))
