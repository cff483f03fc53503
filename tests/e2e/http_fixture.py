"""Agents and tools behind the HTTP tests."""

import asyncio
import time
from pathlib import Path
from typing import Any

from agentrt import Context, agent, tool


@tool(kind="pure")
def title(name: str) -> str:
    """A greeting."""
    return f"hello {name}"


@agent(short=True)
async def greet(ctx: Context, name: str) -> str:
    """Calls one tool."""
    return str(await ctx.tool(title, name=name))


@agent
async def count(ctx: Context, to: int) -> int:
    """Emits numbers."""
    for number in range(to):
        ctx.emit(number)
    return to


@agent
async def chatter(ctx: Context, lines: int) -> int:
    """Emits more than a socket holds."""
    for number in range(lines):
        ctx.emit(f"{number} {'x' * 8_000}")
        if number % 50 == 49:
            await ctx.tool(title, name=str(number))
    return lines


@agent
async def ask(ctx: Context, data: Any = None) -> dict[str, Any]:
    """Waits for a person."""
    approval = await ctx.approval("go on?", timeout="1h")
    return {"approved": bool(approval), "by": approval.by}


@agent(short=True)
async def nap(ctx: Context, seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "awake"


@tool(kind="keyed", timeout=3600)
def toil(folder: str, *, idempotency_key: str, attempt: int) -> str:
    """Ends when there is a file "enough", and heeds no notice; says where it was begun."""
    with Path(folder, "begun").open("a") as book:
        book.write(f"{idempotency_key} {attempt}\n")
    while not Path(folder, "enough").exists():
        time.sleep(0.01)
    return "done"


@agent
async def toiler(ctx: Context, folder: str) -> str:
    """Toils."""
    return str(await ctx.tool(toil, folder=folder))


AGENTS = (greet, count, chatter, ask, nap, toiler)
TOOLS = (title, toil)
