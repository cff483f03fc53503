"""Agents that call native commands. Imported by hosts."""

from typing import Any

from agentrt.agents import Context, agent
from agentrt.tools.commands import command_tool

count_words = command_tool("count_words", ["wc", "-w"], kind="pure", input="text")


@agent(name="counts")
async def counts(ctx: Context, text: str) -> dict[str, Any]:
    return {"words": await ctx.tool("count_words", text=text)}


count_lines = command_tool("count_lines", ["sh", "-c", "sleep 1; printf '1\\n2\\n3\\n' | wc -l"], kind="pure")


@agent(name="counts_lines")
async def counts_lines(ctx: Context, seconds: float) -> dict[str, Any]:
    return {"lines": await ctx.tool("count_lines")}
