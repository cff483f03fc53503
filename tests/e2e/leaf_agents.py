"""A tool that says in which cgroup it runs, and an agent that asks it. Imported by hosts."""

from typing import Any

from agentrt import tool
from agentrt.agents import Context, agent


def own_group() -> str:
    with open("/proc/self/cgroup") as file:
        return file.read().strip()


@tool(kind="pure")
def where() -> str:
    """A sync tool: a worker, which its host started."""
    return own_group()


@agent(name="asks")
async def asks(ctx: Context) -> dict[str, Any]:
    return {"tool": await ctx.tool(where)}
