"""Agents and tools of test_wiring.py."""

import asyncio
import os

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


@tool(kind="keyed", timeout=0.2, attempts_max=3)
async def slow(file: str, good_from: int, *, idempotency_key: str, attempt: int) -> int:
    with open(file, "a") as out:
        out.write(f"{idempotency_key} {attempt}\n")
    if attempt < good_from:
        await asyncio.sleep(30)
    return attempt


@agent
async def impatient(ctx: Context, file: str, good_from: int) -> list[object]:
    try:
        return [await ctx.tool(slow, file=file, good_from=good_from)]
    except StepFailedError as error:
        return [error.code, error.details["attempts"]]
