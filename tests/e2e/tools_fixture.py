"""Tools for the tests of tool hosts; imported by the hosts."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

from agentrt.errors import ToolError
from agentrt.tools import tool


class Point(msgspec.Struct):
    x: int
    y: Annotated[int, msgspec.Meta(ge=0)] = 0


@tool(kind="pure")
async def echo(value: Any) -> Any:
    return value


@tool(kind="pure")
def echo_sync(value: Any) -> Any:
    return value


@tool(kind="pure", name="geo.shift")
async def shift(point: Point, by: int = 1) -> Point:
    return Point(point.x + by, point.y)


@tool(kind="keyed")
async def whoami(*, idempotency_key: str, attempt: int) -> dict[str, Any]:
    return {"key": idempotency_key, "attempt": attempt, "pid": os.getpid(), "threads": threading.active_count()}


@tool(kind="pure", timeout=0.2)
async def sleep_async(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


@tool(kind="pure", timeout=0.2)
def sleep_sync(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@tool(kind="pure", timeout=30)
async def sleep_long(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@tool(kind="pure", timeout=0.2)
async def stubborn() -> str:
    while True:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            continue


@tool(kind="pure", timeout=0.2)
async def spin() -> None:
    while True:
        pass


@tool(kind="keyed")
async def die(status: int, *, idempotency_key: str) -> None:
    os._exit(status)


@tool(kind="pure")
async def segfault() -> None:
    ctypes.string_at(0)


@tool(kind="pure")
async def fail(text: str, how: str = "value") -> None:
    raise {
        "value": ValueError(text),
        "tool": ToolError(text),
        "exit": SystemExit(text),
        "interrupt": KeyboardInterrupt(text),
        "cancelled": asyncio.CancelledError(),
    }[how]


@tool(kind="pure")
def fail_sync(text: str) -> None:
    raise SystemExit(text)


@tool(kind="pure")
async def result_of(what: str) -> Any:
    return {"set": {1}, "object": object(), "cycle": cycle(), "surrogate": "\ud800"}[what]


@tool(kind="pure")
async def big(size: int) -> str:
    return "x" * size


@tool(kind="pure")
async def take_memory(size: int) -> int:
    return len(bytearray(size))


@tool(kind="pure")
async def environment() -> dict[str, Any]:
    print("a tool may print")
    return {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "sid": os.getsid(0),
        "pid": os.getpid(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "path": sys.path,
        "fds": [_link(name) for name in os.listdir("/proc/self/fd")],
    }


@tool(kind="pure", timeout=0.3)
def grandchild_then_hang(file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(60)


@tool(kind="keyed", timeout=60)
def hold(file: str) -> None:
    """A worker, and a process that it started, for long."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(60)


@tool(kind="pure")
async def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the listing's own
        return ""


def cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@tool(kind="keyed", timeout=60)
async def heeds_notice(file: str, *, idempotency_key: str) -> str:
    """Waits until the node says that it stops."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    os.close(os.open(file, os.O_CREAT))
    await told.wait()
    return "in time"


@tool(kind="keyed", timeout=60)
def heeds_notice_sync(file: str, heed: bool = True, *, idempotency_key: str) -> str:
    """The same in a worker; or it does not care."""
    told = threading.Event()
    if heed:
        signal.signal(signal.SIGUSR1, lambda *_: told.set())
    Path(file).touch()
    while not told.is_set():
        time.sleep(0.01)
    return "in time"
