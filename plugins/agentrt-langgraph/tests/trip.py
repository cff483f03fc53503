"""A graph as an agent: what tests run on real hosts."""

import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

from agentrt_langgraph import run_graph, run_node
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

from agentrt import Context, agent, tool


class Trip(TypedDict, total=False):
    log: Annotated[list[str], operator.add]
    ledger: str
    city: str


def note(state: Trip, what: str) -> dict[str, list[str]]:
    with Path(state["ledger"]).open("a") as ledger:
        ledger.write(what + "\n")
    return {"log": [what]}


async def plan(state: Trip) -> dict[str, Any]:
    return note(state, "plan")


def look(state: Trip) -> dict[str, Any]:  # not async: on a thread of the tool's host
    return note(state, f"look {state['city']}")


def ask(state: Trip) -> Command[Any]:
    first = interrupt({"question": "book?"})
    second = interrupt({"question": f"sure about {first}?"})
    return Command(update=note(state, f"asked {first} {second}"), goto="book" if second == "yes" else END)


def book(state: Trip) -> dict[str, Any]:
    return note(state, "book")


def cities(state: Trip) -> list[Send]:
    return [Send("look", {"ledger": state["ledger"], "city": city}) for city in ("Rome", "Oslo")]


builder = StateGraph(Trip)
builder.add_node("plan", plan)
builder.add_node("look", look)
builder.add_node("ask", ask, destinations=("book", END))
builder.add_node("book", book)
builder.add_edge(START, "plan")
builder.add_conditional_edges("plan", cities, ["look"])
builder.add_edge("look", "ask")
builder.add_edge("book", END)


@tool(kind="keyed")
async def trip_node(node: str, state: dict[str, str], resumes: list[Any]) -> dict[str, Any]:
    return await run_node(builder, node, state, resumes)


@agent
async def trip(ctx: Context, ledger: str) -> list[str]:
    state = await run_graph(ctx, builder, {"log": [], "ledger": ledger}, tool=trip_node)
    return list(state["log"])
