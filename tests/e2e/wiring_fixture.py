"""Agents and tools of test_wiring.py."""

import asyncio
import os
import time

from agentrt import Context, agent, tool
from agentrt.agents.errors import StepFailedError


@tool(kind="pure")
async def where() -> int:
    await asyncio.sleep(0.05)
    return os.getpid()


@tool(kind="pure", cls="browser")
async def where_else() -> int:
    await asyncio.sleep(0.05)
    return os.getpid()


@agent
async def caller(ctx: Context, names: list[str]) -> list[int]:
    return list(await asyncio.gather(*(ctx.tool(name) for name in names)))


@tool(kind="keyed", secrets=["stripe"], attempts_max=1)
def charge(mode: str, api_key: str) -> int | str | list[str]:
    if mode == "raise":
        raise RuntimeError(f"refused: {api_key}")
    if mode == "environment":
        return [name for name in os.environ if "SECRET" in name]
    return len(api_key) if mode == "length" else api_key


@agent
async def spender(ctx: Context, what: tuple[str, str]) -> int | str | list[str]:
    try:
        found: int | str | list[str] = await ctx.tool(charge, mode=what[0], api_key=what[1])
    except StepFailedError as error:
        ctx.log(f"failed: {error}")
        found = str(error)
    ctx.emit(found)
    return found


@tool(kind="keyed", timeout=0.5, attempts_max=3)
def slow(file: str, good_from: int, *, idempotency_key: str, attempt: int) -> int:
    with open(file, "a") as out:
        out.write(f"{idempotency_key} {attempt}\n")
    if attempt < good_from:
        time.sleep(30)
    return attempt


@agent
async def impatient(ctx: Context, file: str, good_from: int) -> list[object]:
    try:
        return [await ctx.tool(slow, file=file, good_from=good_from)]
    except StepFailedError as error:
        return [error.code, error.details["attempts"]]


@tool(kind="keyed")
def put(file: str, line: str, *, idempotency_key: str) -> str:
    """Appends the line, once for a key: what a service does that knows its keys."""
    seen = f"{file}.{idempotency_key.replace('/', '_')}"
    try:
        os.close(os.open(seen, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return line
    with open(file, "a") as out:
        out.write(line + "\n")
    return line


@agent
async def walker(ctx: Context, file: str, steps: int) -> int:
    @ctx.on_unwind
    async def undo() -> None:
        await ctx.tool(put, file=file, line="undone")

    for n in range(steps):
        await ctx.tool(put, file=file, line=str(n))
        await asyncio.sleep(0.01)
    return steps


@agent(budget={"wall_s": 0.3})
async def stuck(ctx: Context) -> None:
    while True:
        pass


@agent
async def spawns(ctx: Context, agent: str, budget: dict[str, float], detached: bool) -> str:
    child = await ctx.spawn(agent, budget=budget, detached=detached)
    return child.run_id
