"""One run's program inside a host: its mini loop, its steps, its clock and randomness, and how it ends.

    start -> (complete …) -> exit            unwind: the program never runs again, its handlers do, then exit
                                             drop: closes what is suspended, which can ask for nothing any more

Each of `start`, `complete`, `unwind` and `drop` is one activation. What the program asked for meanwhile is in
`requests` and `abandoned` afterwards, for the host to take; `exit` is set when there will be no further activation.
"""

import asyncio
import inspect
import random
import traceback
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from agentrt.agents import values
from agentrt.agents.context import Context
from agentrt.agents.current import current
from agentrt.agents.declare import Entry
from agentrt.agents.errors import GuestEndedError, StepFailedError, step_error
from agentrt.agents.loop import DurableTimer, MiniLoop, RunFuture
from agentrt.agents.protocol import Answer, Ask, HostLimits, Start
from agentrt.agents.randomness import RandomStream
from agentrt.errors import AgentrtError
from agentrt.syscalls import BY_OP

_SLEEP: Final = BY_OP["timer.sleep"].number
_LOG: Final = BY_OP["log"].number

MESSAGE_CHARS_MAX: Final = 4_000
#: What reading the clock adds to it, so that time passes for code that measures it.
TICK_NS: Final = 1_000


class Exit(NamedTuple):
    """See agentrt.backends.base.Exit. Reasons here: returned, failed, memory, unwound."""

    reason: str
    code: int
    output: bytes | None
    message: str


class Program(Protocol):
    """An agent as a host has it."""

    def entry(self, run: "AgentRun") -> Entry:
        """The function for this run, made of its own copy of the agent's modules. May raise what their code raises."""


class AgentRun:
    """The state of one run in its host."""

    def __init__(self, program: Program, start: Start, limits: HostLimits) -> None:
        self.number: Final = start.number
        self.limits: Final = limits
        self.requests: list[Ask] = []
        self.abandoned: list[int] = []
        self.exit: Exit | None = None
        self.handlers: list[Callable[..., Any]] = []
        self.notified = False  # the activation has overrun
        self.modules: Any = None  # the program's, for this run
        self._program = program
        self._start = start
        self._handle = 0
        self._open: dict[int, RunFuture | DurableTimer | None] = {}
        self._clock_ns = start.clock_ns
        self._read_ns = 0  # the last reading, which the next one exceeds
        self._stream = RandomStream(start.seed)
        self._random: random.Random | None = None
        self._entry: Entry | None = None
        self._main: asyncio.Task[Any] | None = None
        self._unwinding = False
        self.loop = MiniLoop(self, int.from_bytes(blake2b(self._stream.seed, digest_size=8).digest(), "little"))
        self._stopped: list[Any] = []  # what an unwound program has left suspended
        restored = None if start.restored is None else values.decode(start.restored)
        self.context = Context(self, start.run_id, start.tenant, restored)

    # --- activations ------------------------------------------------------------------

    def start(self) -> None:
        """Run the program from its top."""
        self._activate(self._begin)

    def complete(self, answer: Answer) -> None:
        """Give the answer of one step. One that is abandoned or unknown is ignored."""
        if self.exit is not None or answer.handle not in self._open:
            return
        waiter = self._open.pop(answer.handle)
        if answer.clock_ns > self._clock_ns:
            self._clock_ns = answer.clock_ns
        if waiter is None:
            return
        if isinstance(waiter, DurableTimer):
            if answer.status:
                error = step_error(answer.payload)
                self._end_failed(error, f"a timer was refused: {error}")
                return
            self.loop.fire(waiter)
        elif not waiter.done():
            if answer.status:
                waiter.set_exception(step_error(answer.payload))
            else:
                waiter.set_result(values.decode(answer.payload))
        self._activate(None)

    def unwind(self, reason: str) -> None:
        """Stop the program where it is and run its handlers."""
        if self.exit is not None:
            return
        self.abandoned.extend(self._open)
        self._stopped += [self.loop, self._main, *self._open.values()]
        self._open.clear()
        self.loop.kill()
        handlers = self.handlers
        self.handlers = []
        declared = self._entry.declaration.on_unwind if self._entry is not None else None
        self.loop = MiniLoop(self, self.loop.salt + 1)
        self._unwinding = True
        if not handlers and declared is None:
            self.exit = Exit("unwound", 0, None, reason)
            return
        self._main = None
        self._activate(lambda: self._begin_main(self._run_handlers(handlers, declared, reason)))

    def drop(self) -> None:
        """Let go of what is suspended. Its ``finally`` blocks run, here and not at some later moment, and everything
        they ask for is refused."""
        loops = [*(each for each in self._stopped if isinstance(each, MiniLoop)), self.loop]
        tasks = [task for loop in loops for _, task in sorted(loop.tasks.items()) if not task.done()]
        for loop in loops:
            loop.kill()
        if self.exit is None:
            self.exit = Exit("killed", 0, None, "")
        self._open.clear()

        def close() -> None:
            for task in tasks:
                task._log_destroy_pending = False
                coroutine = task.get_coro()
                try:
                    if coroutine is not None:
                        coroutine.close()
                except BaseException:  # whatever it is, nobody asked for it
                    continue

        if tasks:
            self._activate(close)
        self.requests.clear()
        self.abandoned.clear()
        # Whatever it holds goes now, and not when the collector next comes by.
        self._stopped.clear()
        self.handlers.clear()
        self._main = self._entry = self.modules = None

    def _activate(self, first: Callable[[], None] | None) -> None:
        assert current.run is None
        current.run = self
        try:
            if first is not None:
                first()
            if self.exit is None:
                self.loop.run()
        except (SystemExit, KeyboardInterrupt) as error:
            self._end_failed(error, f"the agent raised {type(error).__name__}")
        except MemoryError as error:
            self._end_memory(error)
        finally:
            current.run = None
            self.notified = False
        if self.exit is None and self._main is not None and self._main.done():
            self._end(self._main)

    def _begin(self) -> None:
        try:
            self._entry = entry = self._program.entry(self)
            arguments = entry.arguments(self._start.input)
        except msgspec.MsgspecError as error:
            self._end_failed(error, f"the input does not fit the agent: {error}", code="input")
            return
        except MemoryError:
            raise
        except Exception as error:
            self._end_failed(error, f"the agent's module raised {described(error)}")
            return
        self._begin_main(entry.function(self.context, **arguments))

    def _begin_main(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._main = self.loop.create_task(coroutine, name="main")

    async def _run_handlers(
        self, handlers: list[Callable[..., Any]], declared: Callable[..., Any] | None, reason: str
    ) -> None:
        calls: list[Callable[[], Any]] = list(reversed(handlers))
        if declared is not None:
            calls.append(lambda: declared(self.context, reason))
        for call in calls:
            try:
                made = call()
                if inspect.isawaitable(made):
                    await made
            except (Exception, asyncio.CancelledError) as error:
                self.log("error", f"an unwinding handler raised {described(error)}")

    # --- the end ------------------------------------------------------------------------

    def _end(self, main: asyncio.Task[Any]) -> None:
        if self._unwinding:
            self.exit = Exit("unwound", 0, None, "")
            return
        if main.cancelled():
            self._end_failed(asyncio.CancelledError(), "the agent cancelled itself")
            return
        error = main.exception()
        if isinstance(error, MemoryError):
            self._end_memory(error)
            return
        if error is not None:
            self._end_failed(error, described(error))
            return
        assert self._entry is not None
        try:
            data = values.encode(main.result(), "the result", self.limits.result_bytes_max)
            self._entry.check_result(data)
        except MemoryError as problem:
            self._end_memory(problem)
        except AgentrtError as problem:
            self._end_failed(problem, str(problem), code="result")
        except msgspec.MsgspecError as problem:
            self._end_failed(problem, f"the result is not what the agent promised: {problem}", code="result")
        else:
            self.exit = Exit("returned", 0, data, "")

    def _end_memory(self, error: BaseException) -> None:
        self.exit = Exit("memory", 0, None, "the agent ran out of memory")

    def _end_failed(self, error: BaseException, message: str, code: str | None = None) -> None:
        if isinstance(error, AgentrtError):
            known: dict[str, Any] = error.to_dict()
            if isinstance(error, StepFailedError) and error.details:
                known["details"] = error.details
        else:
            known = {"code": "agent_raised", "message": message}
        if code is not None:
            known["code"] = code
        known["message"] = _cut(message)
        known["type"] = type(error).__name__
        try:
            output = values.encode(known, "the error", self.limits.result_bytes_max)
        except AgentrtError:
            known = {"code": known["code"], "message": printable(_cut(message)), "type": known["type"]}
            output = values.encode(known, "the error", self.limits.result_bytes_max)
        self.exit = Exit("failed", 1, output, _cut(_trace(error)))

    # --- steps --------------------------------------------------------------------------

    @property
    def waiting(self) -> tuple[int, ...]:
        """Handles of steps that are not answered."""
        return tuple(self._open)

    def ask(self, op: int, request: Any) -> RunFuture:
        """Ask for a step. Raises ValueRefusedError, StepFailedError (too many unanswered), GuestEndedError."""
        handle = self._ask(op, request)
        future = self.loop.create_future()
        future.step = handle
        self._open[handle] = future
        return future

    def ask_without_answer(self, op: int, request: Any) -> None:
        """Ask for a step whose answer nobody takes."""
        self._open[self._ask(op, request)] = None

    def _ask(self, op: int, request: Any) -> int:
        if current.run is not self or self.loop.dead:
            raise GuestEndedError("only code of the run itself, while it runs, can ask for something")
        if len(self._open) >= self.limits.inflight_max:
            raise StepFailedError(f"{len(self._open)} steps of the run wait for their answers already")
        payload = values.encode(request, f"the request of {_OPS[op]}", self.limits.request_bytes_max)
        self._handle = handle = self._handle + 1
        self.requests.append(Ask(handle, op, payload))
        return handle

    def log(self, level: str, message: str) -> None:
        """Not a step: no handle, no answer. Cut, if it is long."""
        if current.run is self:
            payload = values.encode(
                {"level": level, "message": printable(_cut(message))}, "the line", self.limits.request_bytes_max
            )
            self.requests.append(Ask(0, _LOG, payload))

    # --- for the loop -----------------------------------------------------------------------

    @property
    def time_s(self) -> float:
        return (self._clock_ns - self._start.clock_ns) / 1e9

    def ask_timer(self, seconds: float, timer: DurableTimer) -> int:
        handle = self._ask(_SLEEP, {"seconds": seconds})
        self._open[handle] = timer
        return handle

    def abandon(self, handle: int) -> None:
        if current.run is self and handle in self._open:
            del self._open[handle]
            self.abandoned.append(handle)

    def on_loop_error(self, message: str, error: BaseException | None) -> None:
        if current.run is self:
            self.log("error", message if error is None else f"{message}: {described(error)}")

    # --- computed ------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The run's clock: the time of the last record, and a little more at each reading."""
        self._read_ns = max(self._read_ns, self._clock_ns) + TICK_NS
        return self._read_ns

    @property
    def generator(self) -> random.Random:
        """What the functions of the random module draw from."""
        if self._random is None:
            self._random = random.Random()
            self._random.seed(int.from_bytes(self._stream.block(b"random", 0), "little"))
        return self._random

    def random_bytes(self, count: int) -> bytes:
        """The next bytes of the run's stream."""
        return self._stream.take(count)


_OPS: Final = {row.number: row.ctx for row in BY_OP.values()}


def described(error: BaseException) -> str:
    """The exception as one line."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: str) -> str:
    """The text without lone surrogates, which JSON cannot carry."""
    return text.encode(errors="replace").decode()


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 1] + "…"


def _trace(error: BaseException) -> str:
    """Where it was raised, the agent's end of it last."""
    try:
        lines = traceback.format_exception(error, limit=-8)
    except Exception:
        return described(error)
    return printable("".join(lines))[-MESSAGE_CHARS_MAX:]
