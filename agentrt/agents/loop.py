"""The deterministic mini loop: asyncio for one run, driven by the answers of its steps and by nothing else.

What must hold:
- The same answers in the same order give the same callbacks in the same order. There is no clock, no selector and no
  thread: `run` executes what is ready until nothing is, which is one activation.
- A timer is a step: `call_later` asks for it, and cancelling one that has not fired abandons it.
- Sets of tasks and futures iterate in an order that depends on the run only: their hashes are counted per run and
  mixed with a salt of the run, since asyncio keeps the tasks of all runs of a process in one set.
- A dead loop runs and accepts nothing.
"""

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, NoReturn, Protocol, TypeVar

from agentrt.agents.errors import GuestEndedError, NotReplayableError

_T = TypeVar("_T")
_MASK: Final = (1 << 64) - 1


class LoopPort(Protocol):
    """What the loop needs of its run."""

    @property
    def time_s(self) -> float:
        """Seconds since the segment's start, as of the last record; never goes back."""

    def ask_timer(self, seconds: float, timer: "DurableTimer") -> int:
        """Ask for a timer step. Returns its handle."""

    def abandon(self, handle: int) -> None:
        """The answer to this step will not be taken. Ignored if it was answered."""

    def on_loop_error(self, message: str, error: BaseException | None) -> None:
        """A callback raised, or a task failed and nobody asked for its exception."""


class RunFuture(asyncio.Future[Any]):
    """The answer to a step, or a future that the agent made. Few are ever hashed: those are counted as they are."""

    step = 0  # its handle
    _hash = 0

    def __hash__(self) -> int:
        if not self._hash:
            loop = self.get_loop()
            assert isinstance(loop, MiniLoop)
            self._hash = mixed(loop.salt + loop.next_number())
        return self._hash

    def cancel(self, msg: Any = None) -> bool:
        done = super().cancel(msg)
        if done and self.step:
            loop = self.get_loop()
            assert isinstance(loop, MiniLoop)
            loop.port.abandon(self.step)
        return done


class RunTask(asyncio.Task[Any]):
    """A task of a run. ``number`` counts them in order of creation."""

    _log_destroy_pending: bool

    def __init__(self, coro: Any, *, loop: "MiniLoop", name: str | None, context: contextvars.Context | None) -> None:
        self.number = loop.next_number()
        self._hash = mixed(loop.salt + self.number)  # asyncio asks for it at once
        # asyncio's own names count over all runs of the process.
        super().__init__(coro, loop=loop, name=name or f"Task-{self.number}", context=context)

    def __hash__(self) -> int:
        return self._hash


class DurableTimer(asyncio.TimerHandle):
    """A timer that is a step."""

    __slots__ = ("step",)

    step: int


def mixed(value: int) -> int:
    """splitmix64's finaliser: neighbours end up far apart."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 4


def close_generator(generator: Any) -> None:
    """For sys.set_asyncgen_hooks: an asynchronous generator of the run that executes was dropped before its end."""
    loop = asyncio._get_running_loop()
    if isinstance(loop, MiniLoop) and not loop.dead:
        loop.create_task(generator.aclose())


class MiniLoop(asyncio.AbstractEventLoop):
    """One run's loop. Only `run` executes anything."""

    def __init__(self, port: LoopPort, salt: int) -> None:
        self.port = port
        self.salt = salt
        self.dead = False
        self.tasks: weakref.WeakValueDictionary[int, RunTask] = weakref.WeakValueDictionary()
        self._ready: deque[asyncio.Handle] = deque()
        self._numbers = 0
        self._running = False

    # --- for the run ----------------------------------------------------------------

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def run(self) -> None:
        """One activation: execute until nothing is ready. The agent's SystemExit and KeyboardInterrupt come through."""
        ready = self._ready
        asyncio._set_running_loop(self)
        self._running = True
        try:
            while ready:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def fire(self, timer: DurableTimer) -> None:
        """The timer's step was answered."""
        if not timer.cancelled():
            self._ready.append(timer)

    def kill(self) -> None:
        """Nothing runs or begins from now on."""
        self.dead = True
        self._ready.clear()

    def _check(self) -> None:
        if self.dead:
            raise GuestEndedError("the run's program was stopped")

    # --- asyncio ----------------------------------------------------------------------

    def time(self) -> float:
        return self.port.time_s

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self.dead

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        pass

    def create_future(self) -> RunFuture:
        return RunFuture(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[_T]:
        if self.dead:
            coro.close()
            self._check()
        task = RunTask(coro, loop=self, name=None if name is None else str(name), context=context)
        self.tasks[task.number] = task
        return task

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:  # a future of a stopped program that is cancelled tells nobody
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._check()
        if delay <= 0:
            return self.call_soon(callback, *args, context=context)
        seconds = round(delay, 6)
        timer = DurableTimer(self.time() + delay, callback, args, self, context)
        timer.step = self.port.ask_timer(seconds, timer)
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if isinstance(handle, DurableTimer):
            self.port.abandon(handle.step)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.port.on_loop_error(str(context.get("message")), context.get("exception"))

    default_exception_handler = call_exception_handler

    def get_exception_handler(self) -> None:
        return None

    def get_task_factory(self) -> None:
        return None

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        pass

    # --- what cannot be replayed --------------------------------------------------------

    def _refuse_thread(self, *args: Any, **keywords: Any) -> NoReturn:
        raise NotReplayableError("an agent has no threads", hint="Do it in a tool and call it with ctx.tool")

    def _refuse_io(self, *args: Any, **keywords: Any) -> NoReturn:
        raise NotReplayableError("an agent has no sockets, pipes or processes", hint="Use them in a tool: ctx.tool")

    def _refuse_control(self, *args: Any, **keywords: Any) -> NoReturn:
        raise NotReplayableError("an agent cannot run, stop or change its event loop", hint="await, or asyncio.gather")

    run_in_executor = set_default_executor = call_soon_threadsafe = _refuse_thread  # type: ignore[assignment]
    run_forever = run_until_complete = stop = close = _refuse_control
    set_task_factory = set_exception_handler = _refuse_control
    add_signal_handler = remove_signal_handler = _refuse_control  # type: ignore[assignment]
    getaddrinfo = getnameinfo = create_connection = create_server = start_tls = _refuse_io
    sendfile = create_unix_connection = create_unix_server = connect_accepted_socket = _refuse_io
    create_datagram_endpoint = connect_read_pipe = connect_write_pipe = _refuse_io
    subprocess_shell = subprocess_exec = add_reader = remove_reader = _refuse_io  # type: ignore[assignment]
    add_writer = remove_writer = sock_recv = sock_recv_into = sock_recvfrom = _refuse_io  # type: ignore[assignment]
    sock_recvfrom_into = sock_sendall = sock_sendto = sock_connect = sock_accept = _refuse_io
    sock_sendfile = _refuse_io
