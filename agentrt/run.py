"""`Run`: a handle on one run, for whoever has its id."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrt.engine.accept import check_text
from agentrt.engine.control import Done, Operation
from agentrt.engine.info import RunInfo, RunResult
from agentrt.errors import ClosedError

if TYPE_CHECKING:
    from agentrt.runtime import Runtime


class Run:
    """A handle on a run; it holds nothing, so keep or drop it as you like."""

    __slots__ = ("_runtime", "run_id")

    def __init__(self, runtime: "Runtime", run_id: str) -> None:
        self._runtime = runtime
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"<Run {self.run_id}>"

    async def result(self) -> Any:
        """The run's result as plain data, once it has ended, durably. Raises what it ended with: RunError kinds."""
        return (await self.wait()).value()

    def result_sync(self, timeout_s: float | None = None) -> Any:
        """`result` for plain threads. Raises TimeoutError as well."""
        return self.wait_sync(timeout_s).value()

    async def wait(self) -> RunResult:
        """How the run ended. Raises UnknownRunError, and ClosedError if the runtime closes before."""
        runtime, run_id = self._runtime, self.run_id
        if (recent := runtime._recent(run_id)) is not None:
            return recent
        control, engine = runtime._control, runtime._engine
        future, done = control.future()
        control.post(engine.queries.wait_ended, run_id, done)
        try:
            result: RunResult = await future
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                control.post(engine.queries.stop_waiting, run_id, done)
            raise
        return result

    def wait_sync(self, timeout_s: float | None = None) -> RunResult:
        """`wait` for plain threads. Raises TimeoutError as well."""
        if (recent := self._runtime._recent(self.run_id)) is not None:
            return recent
        result: RunResult = self._runtime._control.ask_sync(self._wait, timeout_s)
        return result

    def _wait(self, done: Done) -> Callable[[], None]:
        engine = self._runtime._engine
        engine.queries.wait_ended(self.run_id, done)
        return partial(engine.queries.stop_waiting, self.run_id, done)

    async def cancel(self, reason: str = "cancelled by request") -> None:
        """Ask for the run's end; returns once the request is durable or the run has ended. The guest goes at once,
        steps in flight are recorded first. Raises UnknownRunError."""
        await self._runtime._control.ask(self._cancel(reason))

    def cancel_sync(self, reason: str = "cancelled by request", timeout_s: float | None = None) -> None:
        """`cancel` for plain threads."""
        self._runtime._control.ask_sync(self._cancel(reason), timeout_s)

    def _cancel(self, reason: str) -> Operation:
        check_text("the reason of a cancel", reason, 1000, empty=True)
        return lambda done: self._runtime._engine.orders.cancel(self.run_id, partial(done, None), reason)

    async def resume(self) -> None:
        """Let a run that waits for an operator go on. All its steps whose outcome nobody saw run once more, whatever
        their kind and attempts: `RunInfo.detail` says which; `settle` and `retry` decide about one. Raises InputError
        if it does not wait."""
        orders = self._runtime._engine.orders
        await self._runtime._control.ask(lambda done: orders.resume(self.run_id, partial(done, None)))

    async def describe(self) -> RunInfo:
        """The run now. Raises UnknownRunError."""
        return await self._runtime.describe_run(self.run_id)

    def describe_sync(self) -> RunInfo:
        """`describe` for plain threads."""
        return self._runtime.describe_run_sync(self.run_id)

    async def approve(
        self, approved: bool = True, *, step: str | None = None, by: str | None = None, comment: str | None = None
    ) -> str:
        """Answer the approval that the run waits for, and return its step; durable when this returns. With several open
        ``step`` must name one. Raises InputError, StepSettledError: it is gone, answered, or too late."""
        path: str = await self._runtime._control.ask(self._approving(approved, step, by, comment))
        return path

    def approve_sync(
        self, approved: bool = True, *, step: str | None = None, by: str | None = None, comment: str | None = None
    ) -> str:
        """`approve` for plain threads."""
        path: str = self._runtime._control.ask_sync(self._approving(approved, step, by, comment))
        return path

    def _approving(self, approved: bool, step: str | None, by: str | None, comment: str | None) -> Operation:
        if step is not None:
            check_text("a step", step, 1000)
        answer = self._runtime._small("the answer", {"approved": bool(approved), "by": by, "comment": comment})
        return lambda done: self._runtime._engine.orders.approve(self.run_id, step, answer, done)

    async def settle(self, step: str, result: Any) -> None:
        """An operator knows the outcome of a step that nobody saw (wait reason ``operator``): it had this result.
        Durable when this returns. Raises StepSettledError."""
        await self._runtime._control.ask(self._deciding(step, True, result))

    async def settle_failed(self, step: str, message: str, code: str = "operator") -> None:
        """An operator knows that the step failed, or gives it up; the agent gets the error."""
        await self._runtime._control.ask(self._deciding(step, False, {"code": code, "message": message}))

    async def retry(self, step: str) -> None:
        """An operator lets the step run once more, whatever its kind and attempts."""
        await self._runtime._control.ask(self._deciding(step, None, None))

    def _deciding(self, step: str, ok: bool | None, value: Any) -> Operation:
        check_text("a step", step, 1000)
        payload = self._runtime._small("the outcome", value)
        engine = self._runtime._engine
        return lambda done: engine.orders.decide(self.run_id, step, partial(done, None), ok=ok, payload=payload)
