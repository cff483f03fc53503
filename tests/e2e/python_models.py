"""Agents for test_python_models.py and their tools; imported by hosts."""

import asyncio
from typing import Any

import msgspec

from agentrt import Context, agent, tool
from agentrt.agents import ModelSchemaError, ModelStepError


class City(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    people: int


@tool(kind="pure")
def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{city}: sun for {days} days"


@agent
async def ask(ctx: Context, question: str) -> dict[str, Any]:
    answer = await ctx.model("work", question)
    return {"text": answer.text, "cost": answer.cost_micro_usd, "tokens": answer.usage.tokens, "model": answer.model}


@agent
async def typed(ctx: Context, question: str) -> list[Any]:
    answer = await ctx.model("work", question, schema=City)
    assert isinstance(answer.data, City)
    try:
        await ctx.model("work", question, schema=City)
    except ModelSchemaError as error:
        return [answer.data.name, answer.data.people, error.details["text"]]
    return []


@agent
async def react(ctx: Context, question: str) -> str | None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(5):
        answer = await ctx.model("work", messages, tools=[weather])
        messages.append(answer.message)
        if not answer.tool_calls:
            return answer.text
        for use in answer.tool_calls:
            result = await ctx.tool(use.name, **use.arguments)
            messages.append({"role": "tool", "tool_call_id": use.id, "content": result})
    return None


@agent
async def careful(ctx: Context, question: str) -> list[Any]:
    answer = await ctx.model("work", question)
    approval = await ctx.approval("publish?")
    more = await ctx.model("work", "more")
    return [answer.text, bool(approval), more.text]


@agent
async def streams(ctx: Context, question: str) -> str | None:
    return (await ctx.model("work", question, stream=True)).text


@agent
async def impatient(ctx: Context, seconds: float) -> str:
    try:
        await asyncio.wait_for(ctx.model("work", "slow"), seconds)
    except TimeoutError:
        return "gave up"
    return "answered"


@agent
async def fails(ctx: Context, profile: str) -> list[str]:
    try:
        await ctx.model(profile, "hello")
    except ModelStepError as error:
        return [error.code, error.kind]
    except Exception as error:
        return [type(error).__name__, getattr(error, "code", "")]
    return []


ALL = (ask, typed, react, careful, streams, impatient, fails)
