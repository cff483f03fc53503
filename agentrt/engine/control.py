"""The control thread: a uvloop loop on a thread of its own, and the bridge by which other threads and loops reach it.

Both directions are batched: a burst of calls, or of answers to one loop, costs one wake-up. `post` is cheap (a deque
append, and a write to a pipe per burst). Answers go to an asyncio future of the caller's loop, or to a
concurrent.futures.Future for plain threads.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future as ThreadFuture
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, ref

import uvloop

from agentrt.errors import AgentrtError, ClosedError, InternalError

T = TypeVar("T")

#: Posted calls made in one turn of the loop: a burst of submits takes some 15 us each.
_CALLS_PER_TURN: Final = 128

#: Every so many calls one is not urgent, whoever says that his are.
_SHARED: Final = 4

#: ``done(value, error)``: how an operation on the control loop answers.
Done = Callable[[Any, BaseException | None], None]
Operation = Callable[[Done], Callable[[], None] | None]


class _Answers:
    """Answers on their way to one loop of the embedding program."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._ringing = False

    def give(self, future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
        self._queue.append((future, value, error))
        if not self._ringing:
            self._ringing = True
            # RuntimeError: that loop is closed, nobody waits there any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._ringing = False  # before the look: who appends after it rings again
        queue = self._queue
        while queue:
            future, value, error = queue.popleft()
            if future.done():  # cancelled
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)


class ControlThread:
    """Made stopped; `start` blocks until the loop runs."""

    def __init__(self, name: str = "agentrt-control") -> None:
        self.loop: Final[asyncio.AbstractEventLoop] = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._urgent: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._ringing = False
        self._answers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Answers] = WeakKeyDictionary()
        self._asked_last: tuple[ref[asyncio.AbstractEventLoop], _Answers] | None = None
        self._started = threading.Event()
        self._stopped = False

    @property
    def thread_id(self) -> int:
        """The kernel's id of the thread."""
        return self._thread.native_id or 0

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Stop the loop and join the thread; what was posted and has not run does not run. From another thread."""
        self._stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def post(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Have the loop make a call. Any thread. Raises ClosedError."""
        self._post(self._calls, call, arguments)

    def post_urgent(self, call: Callable[..., Any], *arguments: Any) -> None:
        """The same before all that was posted otherwise: for what is asked at tier 0."""
        self._post(self._urgent, call, arguments)

    def hurried(self) -> bool:
        """Whether something urgent has been posted and not been begun. Any thread."""
        return bool(self._urgent)

    def _post(
        self,
        calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]],
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        if self._stopped:
            raise ClosedError("the runtime is closed")
        calls.append((call, arguments))
        if not self._ringing:
            self._ringing = True
            try:
                self.loop.call_soon_threadsafe(self._make_calls)
            except RuntimeError as error:
                raise ClosedError("the runtime is closed") from error

    def _make_calls(self) -> None:
        self._ringing = False  # before the look: who appends after it rings again
        calls, urgent = self._calls, self._urgent
        for number in range(min(len(calls) + len(urgent), _CALLS_PER_TURN)):
            first = urgent and (not calls or number % _SHARED)
            call, arguments = urgent.popleft() if first else calls.popleft()
            try:
                call(*arguments)
            except Exception as error:
                self.loop.call_exception_handler({"message": "a posted call raised", "exception": error})
        if (calls or urgent) and not self._ringing:
            self._ringing = True
            self.loop.call_soon(self._make_calls)

    # --- asking -------------------------------------------------------------------

    def future(self) -> "tuple[asyncio.Future[Any], Done]":
        """A future of the caller's running loop, and what resolves it from the control loop."""
        loop = asyncio.get_running_loop()
        last = self._asked_last
        if last is not None and last[0]() is loop:
            answers = last[1]
        else:
            found = self._answers.get(loop)
            answers = self._answers.setdefault(loop, _Answers(loop)) if found is None else found
            self._asked_last = (ref(loop), answers)
        future: asyncio.Future[Any] = loop.create_future()
        return future, partial(answers.give, future)

    async def ask(self, operation: Operation) -> Any:
        """Run ``operation(done)`` on the control loop and await its answer on the caller's loop. If the caller is
        cancelled, what the operation returned is called on the control loop."""
        future, done = self.future()
        undo: list[Callable[[], None] | None] = []
        self.post(_begin, operation, done, undo)
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                self.post(_call_first, undo)
            raise
        finally:
            del future, done  # an error's traceback holds this frame, which would hold the error

    def ask_sync(self, operation: Operation, timeout_s: float | None = None, *, urgent: bool = False) -> Any:
        """The same for a plain thread; ``urgent`` as `post_urgent`. Raises TimeoutError."""
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError("the control thread cannot wait for itself")
        future: ThreadFuture[Any] = ThreadFuture()
        undo: list[Callable[[], None] | None] = []

        def done(value: Any, error: BaseException | None) -> None:
            if not future.done() and future.set_running_or_notify_cancel():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(value)

        (self.post_urgent if urgent else self.post)(_begin, operation, done, undo)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.cancel():
                return future.result()  # it came at the last moment, or the operation itself timed out
            with contextlib.suppress(ClosedError):
                self.post(_call_first, undo)
            raise

    def operation(self, coroutine: Callable[[], Coroutine[Any, Any, T]]) -> Operation:
        """A coroutine function as an operation for `ask`; a caller that gives up cancels it."""

        def start(done: Done) -> Callable[[], None]:
            task = self.loop.create_task(coroutine())

            def finished(task: "asyncio.Task[T]") -> None:
                if task.cancelled():
                    done(None, ClosedError("it was cancelled"))
                elif (error := task.exception()) is not None:
                    done(None, error)
                else:
                    done(task.result(), None)

            task.add_done_callback(finished)

            def cancel() -> None:
                task.cancel()

            return cancel

        return start


def _begin(operation: Operation, done: Done, undo: list[Callable[[], None] | None]) -> None:
    """Nobody waits for ever because an operation raised."""
    try:
        undo.append(operation(done))
    except AgentrtError as error:
        done(None, error)
    except Exception as error:
        done(None, InternalError(f"{type(error).__name__}: {error}"))
        raise


def _call_first(undo: list[Callable[[], None] | None]) -> None:
    if undo and undo[0] is not None:
        undo[0]()
