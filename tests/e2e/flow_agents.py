"""Agents for tests of flow control."""

from typing import Any

from agentrt.agents import Context, StepFailedError, agent


@agent
async def asks(ctx: Context, cities: list[str]) -> list[Any]:
    """The forecast for each, or the code of the failure."""
    answers: list[Any] = []
    for city in cities:
        try:
            answers.append(await ctx.tool("forecast", city=city))
        except StepFailedError as error:
            answers.append(error.code)
    return answers


@agent
async def breaks(ctx: Context, input: Any) -> None:
    raise ValueError("never works")


@agent
async def works(ctx: Context, input: Any) -> str:
    return "done instead"


@agent
async def delegates(ctx: Context, times: int) -> list[str]:
    """What becomes of children that break, with another agent to fall back on."""
    found = []
    for _ in range(times):
        child = await ctx.spawn(breaks, fallback_agent=works)
        try:
            found.append(await child.result())
        except StepFailedError as error:
            found.append(error.code)
    return found
