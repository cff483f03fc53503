"""Tools of the tests of kinds, batches, secrets and workers; effects are lines of a file."""

import asyncio
import os
import signal
import time
from typing import Any

from agentrt.errors import ToolError
from agentrt.tools import NOT_FOUND, UNKNOWN, BatchItem, Found, tool


def note(file: str, line: str) -> None:
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(out, f"{line}\n".encode())
    finally:
        os.close(out)


def lines(file: str) -> list[str]:
    try:
        with open(file) as stream:
            return stream.read().splitlines()
    except FileNotFoundError:
        return []


def find(file: str, *, idempotency_key: str, attempt: int) -> Any:
    for line in lines(file):
        if line == "cannot tell":
            return UNKNOWN
        if line.startswith(f"{idempotency_key} "):
            return Found({"line": line, "asked_at": attempt})
    return NOT_FOUND


async def find_async(file: str, *, idempotency_key: str, attempt: int) -> Any:
    await asyncio.sleep(0)
    return find(file, idempotency_key=idempotency_key, attempt=attempt)


@tool(kind="reconcilable", reconcile=find, timeout=5)
def charge(file: str, cents: int, die: bool = False, *, idempotency_key: str) -> str:
    note(file, f"{idempotency_key} {cents}")
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    return "charged"


@tool(kind="keyed", key_ttl=60, reconcile=find_async, timeout=5)
async def charge_async(file: str, cents: int, *, idempotency_key: str) -> str:
    note(file, f"{idempotency_key} {cents}")
    return "charged"


def find_badly(how: str) -> Any:
    if how == "raise":
        raise ValueError("no connection")
    if how == "die":
        os._exit(3)
    if how == "slow":
        time.sleep(60)
    return {"big": "x" * 200_000} if how == "big" else {"found": "yes"}


@tool(kind="reconcilable", reconcile=find_badly, timeout=0.3)
def badly(how: str) -> None: ...


# --- batches


def double_all(items: list[BatchItem]) -> list[Any]:
    if any(item.args["x"] == -2 for item in items):
        raise ValueError("one of them is -2")
    return [ToolError("negative") if item.args["x"] < 0 else [item.args["x"] * 2, len(items)] for item in items]


@tool(kind="pure", batch=double_all, max_batch=8, max_wait_ms=50)
def double(x: int) -> list[int]:
    if x < 0:
        raise ValueError(f"{x} alone")
    return [x * 2, 1]


async def add_all(items: list[BatchItem]) -> list[Any]:
    await asyncio.sleep(0.01)
    return [{"key": item.idempotency_key, "attempt": item.attempt, "n": len(items)} for item in items]


@tool(kind="keyed", batch=add_all, max_batch=100)
async def add(x: int, *, idempotency_key: str) -> dict[str, Any]:
    return {"key": idempotency_key, "attempt": 0, "n": 1}


def once_all(items: list[BatchItem]) -> Any:
    for item in items:
        note(item.args["file"], f"{item.idempotency_key} batch")
    how = items[0].args["how"]
    if how == "raise":
        raise ValueError("half done")
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os._exit(1)
    return "none" if how == "none" else items[1:]


@tool(kind="at_most_once", batch=once_all, max_batch=3, max_wait_ms=100, timeout=0.4)
def once(file: str, how: str) -> None:
    note(file, "alone")


# --- stopping


@tool(kind="pure", timeout=0.02)
def overrun() -> None:
    time.sleep(60)


@tool(kind="keyed", timeout=30)
async def wait_then_note(file: str, seconds: float, *, idempotency_key: str) -> str:
    note(file, f"{idempotency_key} began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note(file, f"{idempotency_key} cancelled")
        raise
    note(file, f"{idempotency_key} done")
    return "done"


@tool(kind="keyed", timeout=30)
async def cleans_up(file: str, how: str, *, idempotency_key: str) -> str:
    note(file, f"{idempotency_key} began")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        if how == "result":
            return "settled all the same"
        if how == "tool_error":
            raise ToolError("taken back") from None
        raise KeyError("lost") from None
    return ""


@tool(kind="pure", timeout=30)
async def ignores_cancel(file: str) -> str:
    note(file, "began")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            await asyncio.sleep(deadline - time.monotonic())
        except asyncio.CancelledError:
            continue
    return "late"


@tool(kind="pure", timeout=30)
def pure_sync(file: str, seconds: float) -> int:
    note(file, str(os.getpid()))
    time.sleep(seconds)
    return os.getpid()


@tool(kind="keyed", timeout=30)
def keyed_sync(file: str, seconds: float, *, idempotency_key: str) -> str:
    note(file, str(os.getpid()))
    time.sleep(seconds)
    note(file, "done")
    return "done"


@tool(kind="at_most_once", timeout=5)
def dies(how: str) -> None:
    if how == "exit":
        os._exit(9)
    os.kill(os.getpid(), signal.SIGSEGV)


@tool(kind="pure")
def pids() -> dict[str, int]:
    return {"pid": os.getpid(), "parent": os.getppid(), "threads": len(os.listdir("/proc/self/task"))}


@tool(kind="pure")
async def host_pid() -> int:
    return os.getpid()


# --- classes


@tool(kind="pure", cls="code")
async def code_pid() -> int:
    return os.getpid()


@tool(kind="pure", cls="code", timeout=30)
async def code_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


# --- secrets


@tool(kind="pure", secrets=["token", "other"])
async def use_secret(token: str, how: str = "hash", more: Any = None) -> Any:
    if how == "raise":
        raise ValueError(f"refused: {token!r}")
    if how == "echo":
        return {"sent": f"Bearer {token}", token: [token], "more": more}
    return [len(token), sum(token.encode()), more]


@tool(kind="pure", secrets=["token"])
def use_secret_sync(token: str, level: int) -> int:
    return len(token)


@tool(kind="pure")
async def no_secret(token: str) -> str:
    return token


@tool(kind="pure")
def environment_names() -> dict[str, str]:
    with open("/proc/self/environ", "rb") as stream:
        born_with = stream.read().decode(errors="replace")
    with open(f"/proc/{os.getppid()}/environ", "rb") as stream:
        born_with += stream.read().decode(errors="replace")
    return {"now": " ".join(os.environ), "born_with": born_with}
