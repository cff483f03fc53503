"""Agents of the python backend's tests, good ones and bad ones. Imported by hosts, not by the tests' process."""

import asyncio
import ctypes
import datetime
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import uuid
from typing import Any

import msgspec

from agentrt import tool
from agentrt.agents import Context, StepFailedError, agent

COUNTER = [0]


@tool(kind="pure")
def double(x: int) -> int:
    return 2 * x


class Lead(msgspec.Struct):
    domain: str
    score: int = 0


@agent(tier="critical", budget={"tool_calls": 20}, name="qualify")
async def qualify(ctx: Context, lead: Lead) -> dict[str, Any]:
    a, b = await asyncio.gather(ctx.tool(double, x=lead.score), ctx.tool("double", x=1))
    await asyncio.sleep(3600)
    return {"domain": lead.domain, "sum": a + b, "run": ctx.run_id, "tenant": ctx.tenant}


@agent
async def steps(ctx: Context, count: int) -> int:
    total = 0
    for n in range(count):
        total += await ctx.tool("double", x=n)
    return total


@agent
async def own_globals(ctx: Context) -> int:
    COUNTER[0] += 1
    await ctx.tool("double", x=1)
    return COUNTER[0]


@agent
async def computed(ctx: Context) -> list[Any]:
    out: list[Any] = [time.time_ns(), time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat()]
    out += [random.random(), random.Random().random(), str(uuid.uuid4()), str(uuid.uuid1()), os.urandom(4).hex()]
    out += [
        secrets.token_hex(4),
        secrets.randbelow(10**9),
        datetime.date.today().isoformat(),
        time.strftime("%H:%M:%S"),
    ]
    out.append([str(each) for each in {"a", "b", "c", "d", "e", "f"}])
    await ctx.tool("double", x=1)
    out += [time.time_ns(), random.random()]
    return out


@agent
async def printer(ctx: Context) -> None:
    print("hello", 1)
    ctx.log("careful", "warning")
    ctx.emit({"at": 1})
    await ctx.tool("double", x=1)


# --- bad ones ----------------------------------------------------------------------------


@agent
async def spin(ctx: Context) -> None:
    await ctx.tool("double", x=1)
    while True:
        pass


@agent
async def catch_all(ctx: Context) -> None:
    await ctx.tool("double", x=1)
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue


@agent
async def busy(ctx: Context, ms: float) -> str:
    """Works too long, but ends."""
    await ctx.tool("double", x=1)
    until = clock() + ms / 1000
    while clock() < until:
        pass
    await ctx.tool("double", x=2)
    return "done"


def clock() -> float:
    """Real CPU time: agents' own clocks stand still."""
    now = Timespec()
    ctypes.CDLL(None).clock_gettime(2, ctypes.byref(now))
    return now.seconds + now.nanoseconds / 1e9


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@agent
async def cooperates(ctx: Context) -> str:
    """Saves itself when it is told that it works too long."""
    if ctx.restored is not None:
        return f"from {ctx.restored}"
    await ctx.tool("double", x=1)
    while not ctx.overrun:
        pass
    await ctx.checkpoint("half")
    return "never"


@agent
async def forges(ctx: Context, what: str) -> None:
    """Writes to its host's socket itself."""
    await ctx.tool("double", x=1)
    messages: dict[str, list[Any]] = {
        "op": [1, 1, [[2, 99, b"{}"]], [], 0, b""],
        "handle": [1, 1, [[7, 1, b"{}"]], [], 0, b""],
        "time": [1, 1, [], [], -(10**15), b""],
        "reason": [2, 1, [], [], 0, "odd", 0, None, "", b""],
        "number": [1, 99, [], [], 0, b""],
        "shape": [9, "x"],
    }
    body = msgspec.msgpack.encode([messages[what]])
    os.write(3, len(body).to_bytes(4, "little") + body)
    while True:
        pass


@agent
async def leave(ctx: Context) -> None:
    await ctx.tool("double", x=1)
    os._exit(3)


@agent
async def exits(ctx: Context) -> None:
    sys.exit("enough")


@agent
async def crash(ctx: Context) -> None:
    await ctx.tool("double", x=1)
    ctypes.string_at(0)


@agent
async def memory(ctx: Context) -> None:
    await ctx.tool("double", x=1)
    hold = []
    while True:
        hold.append(bytearray(1 << 20))


@agent
async def hoard(ctx: Context, mib: int) -> int:
    """Holds memory and waits."""
    hold = bytearray(mib << 20)
    await ctx.tool("double", x=1)
    return len(hold)


@agent
async def blocks(ctx: Context) -> None:
    """A C call that never returns and uses no CPU."""
    await ctx.tool("double", x=1)
    while True:  # the notice interrupts it once
        ctypes.CDLL(None).poll(None, 0, -1)


@agent
async def big_result(ctx: Context) -> str:
    return "x" * (8 << 20)


@agent
async def odd_result(ctx: Context, which: str) -> Any:
    return {"object": object(), "nan": float("nan"), "huge": 2**80, "surrogate": "\ud800", "wrong": 1}[which]


@agent
async def promised(ctx: Context) -> int:
    return "text"  # type: ignore[return-value]


@agent
async def forbidden(ctx: Context, what: str) -> str:
    """What the guard-rails refuse, as the agent sees it."""
    try:
        match what:
            case "thread":
                threading.Thread(target=int).start()
            case "socket":
                socket.socket()
            case "sleep":
                time.sleep(1)  # noqa: ASYNC251
            case "write":
                open("/tmp/agentrt-agent-was-here", "w")  # noqa: ASYNC230, SIM115
            case "fork":
                os.fork()
            case "exec":
                os.execv("/bin/true", ["true"])
            case "to_thread":
                await asyncio.to_thread(int)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "allowed"


@agent
async def forbidden_for_real(ctx: Context, what: str) -> int:
    """The same without Python's guard-rails: the errno of the system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    match what:
        case "socket":
            done = libc.socket(1, 1, 0)
        case "fork":
            done = libc.fork()
        case "kill":
            done = libc.kill(os.getppid(), 0)
        case "ptrace":
            done = libc.ptrace(16, os.getppid(), 0, 0)
        case "passwd":
            done = libc.open(b"/etc/passwd", 0)
        case "write":
            done = libc.open(b"/tmp/agentrt-agent-was-here", 0o101, 0o600)
        case "self":
            done = libc.open(__file__.encode(), 0)
        case "prctl":
            done = libc.prctl(1, 0, 0, 0, 0)
        case "memfd":
            done = libc.memfd_create(b"x", 0)
        case _:
            raise ValueError(what)
    return ctypes.get_errno() if done < 0 else 0


@agent
async def environment(ctx: Context) -> dict[str, Any]:
    descriptors = []
    for fd in range(64):
        try:
            os.fstat(fd)
        except OSError:
            continue
        descriptors.append(fd)
    kept = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1)  # Python's own two, and the notice
    return {
        "variables": dict(os.environ),
        "descriptors": descriptors,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "handlers": [
            int(number)
            for number in signal.valid_signals()
            if number not in kept and signal.getsignal(number) not in (signal.SIG_DFL, None)
        ],
    }


@agent
async def unstable(ctx: Context) -> None:
    """Another request each time it is brought back."""
    moment = Timespec()
    ctypes.CDLL(None).clock_gettime(1, ctypes.byref(moment))
    await ctx.tool("double", x=moment.nanoseconds)
    await ctx.tool("double", x=1)


@agent
async def tidy(ctx: Context, how: str) -> str:
    @ctx.on_unwind
    async def last() -> None:
        await ctx.tool("double", x=100)

    @ctx.on_unwind
    def first() -> None:
        ctx.emit("unwinding")
        if how == "leave twice":
            os._exit(4)

    try:
        await ctx.tool("double", x=1)
        for _ in range(10**7 if how == "leave late" else 0):
            pass
        if how.startswith("leave"):
            os._exit(3)
        while how == "spin":
            pass
        await ctx.event("never")
    finally:
        await ctx.tool("double", x=999)
    return "never"


@agent
async def stubborn(ctx: Context) -> str:
    """Holds on when it is dropped."""
    while True:
        try:
            await ctx.event("never")
        except StepFailedError:
            return "failed"
        except BaseException:
            continue
