"""Agents for test_priority_inversion.py; imported by hosts."""

import asyncio
import time

from agentrt import Context, agent


@agent
async def worker(ctx: Context, name: str, turns: int, work_ms: int) -> str:
    """Holds the lock for so many turns, and works in each."""
    async with ctx.lock(name):
        ctx.emit("held")
        for _ in range(turns):
            await asyncio.sleep(0.001)
            until = time.thread_time_ns() + work_ms * 1_000_000
            while time.thread_time_ns() < until:
                pass
    return "done"
