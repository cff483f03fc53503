"""Agents and tools for test_python_agents.py; imported by hosts."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from agentrt import Context, agent, tool
from agentrt.errors import ToolError


class Lead(msgspec.Struct):
    name: str
    size: int


@tool(kind="keyed")
def note(file: str, text: str, *, idempotency_key: str) -> int:
    """Effects outside: one line per key, however often it is called."""
    path = Path(file)
    known = path.read_text().splitlines() if path.exists() else []
    line = json.dumps([idempotency_key, text])
    if line not in known:
        with path.open("a") as out:
            out.write(line + "\n")
    return len(text)


@tool(kind="keyed")
def trip_book(order: str, part: str) -> str:
    with Path(order).open("a") as out:
        out.write(f"book {part}\n")
    if part.startswith("slow"):
        time.sleep(0.3)
    return part


@tool(kind="keyed")
def trip_cancel(order: str, part: str) -> str:
    with Path(order).open("a") as out:
        out.write(f"cancel {part}\n")
    return part


@tool(kind="pure")
def double(n: int) -> int:
    return 2 * n


@tool(kind="pure")
def boom() -> None:
    raise ValueError("no")


@agent(tier="interactive", budget={"tool_calls": 50})
async def qualify(ctx: Context, lead: Lead, file: str) -> dict[str, Any]:
    first, second = await asyncio.gather(ctx.tool(note, file=file, text=lead.name), ctx.tool(double, n=lead.size))
    try:
        await ctx.tool(boom)
    except ToolError as error:
        failed = error.code
    await asyncio.sleep(0.05)
    approval = await ctx.approval("send?", data={"name": lead.name}, timeout="1h")
    event = await ctx.event("news", key=lead.name)
    await ctx.tool(note, file=file, text="sent")
    return {
        "first": first,
        "second": second,
        "failed": failed,
        "approved": bool(approval),
        "by": approval.by,
        "news": event.data,
    }


@agent
async def family(ctx: Context, numbers: list[int]) -> list[int]:
    children = [await ctx.spawn(one, n) for n in numbers]
    return list(await asyncio.gather(*(child.result() for child in children)))


@agent(tier="batch")
async def one(ctx: Context, n: int) -> int:
    async with ctx.lock("shared"):
        ctx.emit({"n": n})
        return int(await ctx.tool(double, n=n))


@agent
async def careful(ctx: Context, file: str) -> None:
    async def undo() -> None:
        await ctx.tool(note, file=file, text="undone")

    await ctx.tool(note, file=file, text="done")
    ctx.on_unwind(undo)
    await ctx.event("never")


@agent
async def counting(ctx: Context, limit: int) -> list[int]:
    seen = ctx.restored or []
    seen.append(len(seen))
    if len(seen) < limit:
        await ctx.checkpoint(seen)
    return seen


@agent
async def impatient(ctx: Context) -> str:
    try:
        await asyncio.wait_for(ctx.event("never"), 0.1)
    except TimeoutError:
        return "gave up"
    return "?"


@agent
async def broken(ctx: Context, how: str) -> Any:
    if how == "raise":
        raise KeyError("lost")
    if how == "exit":
        os._exit(3)
    if how == "nan":
        return float("nan")
    if how == "type":
        return object()
    await asyncio.sleep(0)
    return how


@agent
async def spender(ctx: Context, calls: int) -> int:
    return sum([await ctx.tool(double, n=n) for n in range(calls)])
