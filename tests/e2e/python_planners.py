"""Agents that plan: many children within limits. Imported by hosts."""

import asyncio
from typing import Any

from agentrt import tool
from agentrt.agents import Context, EnsembleFullError, SpawnLimitError, Task, agent


@tool(kind="keyed")
def look(page: int) -> int:
    return page


@agent
async def read(ctx: Context, pages: list[int]) -> list[int]:
    return [await ctx.tool("look", page=page) for page in pages]


@agent
async def slow(ctx: Context, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def together(tasks: list[Task]) -> Task:
    return Task("read", [page for task in tasks for page in task.input])


@agent
async def plan(ctx: Context, pages: list[int], when_full: str) -> dict[str, Any]:
    merge = together if when_full == "consolidate" else None
    tasks = [(read, [page]) for page in pages]
    try:
        spawned = await ctx.spawn_many(tasks, when_full=when_full, merge=merge)
    except EnsembleFullError as error:
        return {"refused": len(error.details["started"])}
    return {
        "results": await spawned.results(),
        "deferred": [task.input for task in spawned.deferred],
        "children": len(spawned.children),
    }


@agent
async def watch(ctx: Context) -> list[Any]:
    before = await ctx.capacity()
    await ctx.tool(look, page=1)
    after = await ctx.capacity()
    return [before.tool_calls, after.tool_calls, after.tokens, after.depth_left, after.fan_out, after.limited_by]


@agent
async def deep(ctx: Context) -> str:
    try:
        await ctx.spawn(deep)
    except SpawnLimitError as error:
        return str(error.code)
    return "spawned"
