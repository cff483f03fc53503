"""An agent with an effect that an outside book counts."""

import asyncio
import os

from agentrt import Context, agent, tool


@tool(kind="keyed")
def book(path: str, order: str, *, idempotency_key: str) -> str:
    """Write the order down, durably, with the key that makes repeating it safe."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{order} {idempotency_key}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)
    return order


@agent
async def errand(ctx: Context, path: str, order: str) -> str:
    """Waits a moment, has the effect, waits again."""
    await asyncio.sleep(0.02)
    done = await ctx.tool(book, path=path, order=order)
    await asyncio.sleep(0.02)
    return str(done)
