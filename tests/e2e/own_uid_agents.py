"""An agent that imports something when it runs, as whoever its host is."""

from agentrt.agents import Context, agent


@agent(name="divides")
async def divides(ctx: Context, by: int) -> str:
    from fractions import Fraction

    return str(Fraction(1, by))
