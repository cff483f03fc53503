"""Agents and tools of test_bad_input.py."""

import asyncio
import json
from typing import Any

from agentrt import Context, agent, tool
from agentrt.agents.errors import StepFailedError
from agentrt.errors import AgentrtError

NAN = float("nan")


@tool(kind="keyed", timeout=10)
def strict(number: int, *, idempotency_key: str) -> int:
    return number


@tool(kind="keyed", timeout=10)
def returns(what: str) -> Any:
    return {
        "nan": NAN,
        "infinity": {"deep": [-float("inf")]},
        "huge": 2**70,
        "object": object(),
        "surrogate": "\ud800",
        "big": "x" * (5 << 20),
        "fine": 1,
    }[what]


def _values() -> dict[str, Any]:
    loop: list[Any] = []
    loop.append(loop)
    return {
        "nan": NAN,
        "huge": 2**70,
        "object": object(),
        "surrogate": "\ud800",
        "loop": loop,
        "big": "x" * (2 << 20),
    }


@agent
async def asks(ctx: Context, step: tuple[str, str]) -> str:
    """Gives a bad value, by its name, to a call; answers with the code of what it raises."""
    call, what = step
    value = _values().get(what, what)
    try:
        if call == "tool":
            await ctx.tool(strict, number=value)
        elif call == "returns":
            await ctx.tool(returns, what=what)
        elif call == "unknown":
            await ctx.tool(what)
        elif call == "spawn":
            await (await ctx.spawn(what if what == "nobody" else "asks", value)).result()
        elif call == "budget":
            await ctx.spawn("asks", ["returns", "fine"], budget=json.loads(what))
        elif call == "send":
            await ctx.send(value, topic="t")
        elif call == "topic":
            await ctx.send(1, topic=value)
        elif call == "approval":
            await ctx.approval("?", data=value, timeout=0.01)
        elif call == "checkpoint":
            await ctx.checkpoint(value)
        elif call == "sleep":
            await asyncio.sleep(float(what))
        elif call == "emit":
            ctx.emit(value)
        elif call == "lock":
            async with ctx.lock(value):
                pass
        elif call == "join":
            child = await ctx.spawn("asks", ["returns", "fine"])
            child.run_id = what
            await child.result()
    except (AgentrtError, StepFailedError) as error:
        return error.code
    return "fine"


@agent
async def hinted(ctx: Context, count: int, names: list[str]) -> list[str]:
    return names * count


@agent
async def gives(ctx: Context, what: str) -> int:
    values: dict[str, Any] = _values() | {"fine": 1, "text": "1"}
    result: int = values[what]
    return result


@agent
async def patient(ctx: Context) -> list[bool]:
    return [bool(await ctx.approval("one?")), bool(await ctx.approval("two?", timeout=0.2))]
