"""The errand as a Python agent: what examples/guests/errand.c does, step by step."""

import asyncio
from typing import Any

from agentrt import Context, agent
from agentrt.agents.errors import StepFailedError


@agent
async def errand(ctx: Context, order: str, place: int = 0) -> Any:
    """Twelve steps and a checkpoint; of a child, with a place: a lock and one effect."""
    if place:
        async with ctx.lock("dock"):
            await ctx.tool("errand_keyed", order=order, place=place)
        return place
    if ctx.restored is None:
        await ctx.tool("errand_keyed", order=order, place=1)
        await ctx.checkpoint("begun")
    async with ctx.lock("dock"):
        first = await ctx.spawn("errand", {"order": order, "place": 5})
        await ctx.tool("errand_reconcilable", order=order, place=2)
        await asyncio.sleep(0.06)  # long enough to leave memory
    second = await ctx.spawn("errand", {"order": order, "place": 6})
    approval = await ctx.approval("go on?")
    try:
        await ctx.tool("errand_at_most_once", order=order, place=3)
    except StepFailedError:
        pass  # who knows whether it happened is an operator, who may have given it up
    children = [await first.result(), await second.result()]
    await ctx.tool("errand_keyed", order=order, place=4)
    return {"order": order, "approved": bool(approval), "children": children}
