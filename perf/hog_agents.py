"""The agents of perf/hog.py; imported by hosts."""

from agentrt import Context, agent


@agent
async def patient(ctx: Context, number: int) -> None:
    """Waits for one I/O after the other until it is told that this is enough."""
    while not await ctx.tool("io", number=number):
        pass


@agent
async def hog(ctx: Context) -> None:
    """Computes without end, in one activation."""
    await ctx.tool("io", number=0)
    while True:
        pass
