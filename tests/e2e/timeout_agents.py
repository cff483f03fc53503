"""An agent that waits for a tool that does not end."""

import asyncio
from typing import Any

from agentrt import Context, agent, tool


@tool(kind="keyed", timeout=600)
async def endless() -> None:
    """Sleeps."""
    await asyncio.sleep(600)


@agent
async def patient(ctx: Context, data: Any = None) -> str:
    """Waits for it."""
    await ctx.tool(endless)
    return "never"
