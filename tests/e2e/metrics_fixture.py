"""Agents whose figures are known beforehand."""

from agentrt import Context, agent, tool
from agentrt.errors import ToolError, ToolUnavailableError


@tool(kind="keyed")
def second_time(*, idempotency_key: str, attempt: int) -> int:
    """The other side is there when it is asked again."""
    if attempt < 2:
        raise ToolUnavailableError("not now")
    return attempt


@tool(kind="keyed")
def never(*, idempotency_key: str) -> None:
    raise ToolError("no")


@agent
async def works(ctx: Context, question: str) -> str:
    """One call of a tool that is tried twice, one of a model."""
    await ctx.tool(second_time)
    return (await ctx.model("work", question)).text


@agent
async def fails(ctx: Context) -> None:
    await ctx.tool(never)


@agent(budget={"tool_calls": 1})
async def spends(ctx: Context) -> None:
    await ctx.tool(second_time)
    await ctx.tool(second_time)


@agent
async def asks(ctx: Context) -> bool:
    return bool(await ctx.approval("go on?"))
