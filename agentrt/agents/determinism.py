"""What an agent's code, and libraries that it calls, find in place of clocks, randomness, threads and I/O.

`install` changes the process once, in a template before it forks. While a run's code is executing, the functions of
``time``, ``random``, ``uuid``, ``os.urandom`` and ``secrets`` answer from the run's clock and seed, and what cannot
be replayed raises NotReplayableError. Between activations all is as it was. ``datetime`` cannot be changed in place:
agents import a copy with classes of its own, which make ordinary datetimes.

This keeps honest code deterministic. It is no security boundary: that is agentrt.agents.confine.
"""

import _thread
import asyncio
import datetime
import functools
import os
import random
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import date as _RealDate
from datetime import datetime as _RealDatetime
from types import ModuleType
from typing import Any, Final

from agentrt.agents.bundle import replacements
from agentrt.agents.current import current
from agentrt.agents.errors import NotReplayableError
from agentrt.agents.loop import close_generator

_CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_OF_NOW: Final = ("localtime", "gmtime", "ctime")
_real_strftime: Final = time.strftime
_real_asctime: Final = time.asctime
_real_urandom: Final = os.urandom
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_TOOL: Final = "Do it in a tool and call it with ctx.tool"

#: Audit events that an agent's code may not cause, by their first part or whole.
_REFUSED_EVENTS: Final = {
    **dict.fromkeys(("socket", "subprocess", "ftplib", "http", "smtplib", "urllib", "imaplib", "poplib"), _TOOL),
    **dict.fromkeys(("shutil", "tempfile", "fcntl", "pty", "signal", "syslog", "winreg", "webbrowser"), _TOOL),
    **dict.fromkeys(
        ["os." + name for name in ("system", "exec", "fork", "forkpty", "posix_spawn", "spawn", "kill", "killpg")]
        + ["os." + name for name in ("remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate", "utime")]
        + ["os." + name for name in ("chmod", "chown", "chflags", "lockf", "putenv", "unsetenv", "startfile", "chdir")]
        + ["os." + name for name in ("setxattr", "removexattr", "fchmod")],
        _TOOL,
    ),
    **dict.fromkeys(("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys._current_frames"), "Leave it"),
}


def install() -> None:
    """Change this process. Once, before any agent's code runs in an activation; it cannot be undone."""
    _install_time()
    _install_random()
    _install_threads()
    _install_asyncio()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=close_generator)
    replacements["datetime"] = _datetime_module()
    sys.addaudithook(_audit)


def refuse(what: str, hint: str) -> None:
    """Raise NotReplayableError if an agent's code is executing."""
    if current.run is not None:
        raise NotReplayableError(f"an agent cannot use {what}", hint=hint)


def _refused(original: Callable[..., Any], what: str, hint: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **keywords: Any) -> Any:
        if current.run is not None:
            raise NotReplayableError(f"an agent cannot use {what}", hint=hint)
        return original(*args, **keywords)

    return guarded


# --- time ---------------------------------------------------------------------------------


def _install_time() -> None:
    for name in _CLOCKS:
        setattr(time, name, _clock(getattr(time, name), 1e-9))
        setattr(time, name + "_ns", _clock(getattr(time, name + "_ns"), 1))
    for name in _OF_NOW:
        setattr(time, name, _of_now(getattr(time, name)))
    time.strftime = _strftime
    time.asctime = _asctime
    time.sleep = _refused(time.sleep, "time.sleep", "await asyncio.sleep(…), a durable timer")


def _clock(original: Callable[[], Any], unit: float) -> Callable[[], Any]:
    def now() -> Any:
        run = current.run
        return original() if run is None else run.now_ns() * unit

    now.__name__ = now.__qualname__ = original.__name__
    return now


def _of_now(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(seconds: float | None = None, /) -> Any:
        return original(time.time() if seconds is None else seconds)

    return convert


def _strftime(format: str, moment: Any = None, /) -> str:
    return str(_real_strftime(format, time.localtime() if moment is None else moment))


def _asctime(moment: Any = None, /) -> str:
    return str(_real_asctime(time.localtime() if moment is None else moment))


def _datetime_module() -> ModuleType:
    """A copy of the module whose ``datetime.now`` and ``date.today`` read the run's clock."""

    class _Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            real = _REAL.get(cls)
            return isinstance(value, real) if real is not None else type.__instancecheck__(cls, value)

        def __subclasscheck__(cls, kind: type) -> bool:
            real = _REAL.get(cls)
            return issubclass(kind, real) if real is not None else type.__subclasscheck__(cls, kind)

    class _DateTime(_RealDatetime, metaclass=_Kind):
        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            return _RealDatetime.__new__(_RealDatetime if cls is _DateTime else cls, *args, **keywords)

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(time.time())

    class _Date(_RealDate, metaclass=_Kind):
        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            return _RealDate.__new__(_RealDate if cls is _Date else cls, *args, **keywords)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(time.time())

    _REAL: dict[type, type] = {_DateTime: _RealDatetime, _Date: _RealDate}
    for kind, real in _REAL.items():
        kind.__name__, kind.__qualname__, kind.__module__ = real.__name__, real.__qualname__, "datetime"
        kind.__doc__ = real.__doc__
    module = ModuleType("datetime", datetime.__doc__)
    module.__dict__.update(vars(datetime))
    module.__dict__.update(datetime=_DateTime, date=_Date)
    return module


# --- randomness -----------------------------------------------------------------------------


def _install_random() -> None:
    drawn = random.Random
    hidden = random._inst
    for name in random.__all__:
        value = getattr(random, name)
        if getattr(value, "__self__", None) is hidden:
            setattr(random, name, _drawing(name, value))
    seed = drawn.seed

    @functools.wraps(seed)
    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        run = current.run
        if a is None and run is not None:
            a = int.from_bytes(run.random_bytes(32), "little")
        seed(self, a, version)

    drawn.seed = seeded  # type: ignore[method-assign]
    os.urandom = _urandom
    random._urandom = _urandom  # type: ignore[attr-defined]  # of SystemRandom, and so of the secrets module
    if hasattr(os, "getrandom"):
        os.getrandom = _getrandom
    uuid.uuid1 = _uuid1


def _drawing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **keywords: Any) -> Any:
        run = current.run
        return (original if run is None else getattr(run.generator, name))(*args, **keywords)

    return draw


def _urandom(size: int, /) -> bytes:
    run = current.run
    return _real_urandom(size) if run is None else run.random_bytes(size)


def _getrandom(size: int, flags: int = 0) -> bytes:
    return _urandom(size)


def _uuid1(node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
    """As uuid.uuid1, without asking the machine who it is: the node is random, as RFC 9562 allows."""
    ticks = time.time_ns() // 100 + 0x01B21DD213814000
    drawn = int.from_bytes(_urandom(8), "little")
    node = (drawn & 0xFFFF_FFFF_FFFF) | 0x0100_0000_0000 if node is None else node
    sequence = (drawn >> 48) & 0x3FFF if clock_seq is None else clock_seq & 0x3FFF
    return uuid.UUID(
        fields=(
            ticks & 0xFFFFFFFF,
            (ticks >> 32) & 0xFFFF,
            (ticks >> 48) & 0x0FFF,
            sequence >> 8,
            sequence & 0xFF,
            node,
        ),
        version=1,
    )


# --- threads, waiting, tasks -------------------------------------------------------------------


def _install_threads() -> None:
    guarded = _refused(_thread.start_new_thread, "threads", _TOOL)
    for module, name in ((_thread, "start_new_thread"), (_thread, "start_new"), (threading, "_start_new_thread")):
        if hasattr(module, name):
            setattr(module, name, guarded)
    for name in ("start_joinable_thread", "_start_joinable_thread"):  # 3.13
        for module in (_thread, threading):
            if hasattr(module, name):
                setattr(module, name, _refused(getattr(module, name), "threads", _TOOL))
    for module, name in ((select, "select"), (select, "poll"), (select, "epoll"), (os, "pipe"), (os, "pipe2")):
        setattr(module, name, _refused(getattr(module, name), f"{module.__name__}.{name}", _TOOL))
    for name in ("signal", "pthread_sigmask", "pause", "sigwait", "setitimer", "alarm", "set_wakeup_fd"):
        setattr(signal, name, _refused(getattr(signal, name), f"signal.{name}", "Use ctx.on_unwind"))


def _install_asyncio() -> None:
    original = asyncio.all_tasks

    @functools.wraps(original)
    def all_tasks(loop: Any = None) -> Any:
        # asyncio keeps the tasks of all loops in one set, so its order would depend on other runs.
        tasks = sorted(original(loop), key=lambda task: getattr(task, "number", 0))
        return set(tasks)

    asyncio.all_tasks = asyncio.tasks.all_tasks = all_tasks


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if current.run is None:
        return
    hint = _REFUSED_EVENTS.get(event) or _REFUSED_EVENTS.get(event.partition(".")[0])
    if hint is not None:
        raise NotReplayableError(f"an agent cannot do this: {event}", hint=hint)
    if event == "open":
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and any(letter in mode for letter in "wax+")) or (
            isinstance(flags, int) and flags & _WRITING
        ):
            raise NotReplayableError("an agent cannot write files", hint=_TOOL)
