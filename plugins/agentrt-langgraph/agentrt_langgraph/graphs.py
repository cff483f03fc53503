"""Graphs as agents: the graph runs in the agent, each node is a step, an interrupt is a wait.

An agent runs `run_graph`; a keyed tool runs `run_node`. What is remembered is the run's journal, so the graph needs no
checkpointer: a run that is brought back goes through the graph again and gets the answers of the nodes it has had.
"""

import base64
import copy
import itertools
from typing import Any, Final, TypedDict

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command

from agentrt import Context

#: The most interrupts of one call of a node.
INTERRUPTS_MAX: Final = 1_000
_SERDE: Final = JsonPlusSerializer()
_INNER: Final[RunnableConfig] = {"configurable": {"thread_id": "node"}}


class _Nothing(TypedDict, total=False):
    """The state of the graph around a node in its tool: none."""

    nothing: int


def packed(value: Any) -> dict[str, str]:
    """A value of a graph as JSON, with LangGraph's own serializer."""
    kind, data = _SERDE.dumps_typed(value)
    return {"type": kind, "data": base64.b64encode(data).decode()}


def unpacked(value: dict[str, str]) -> Any:
    """The value that was `packed`."""
    return _SERDE.loads_typed((value["type"], base64.b64decode(value["data"])))


async def run_graph(
    ctx: Context, builder: "StateGraph[Any, Any, Any, Any]", input: Any, *, tool: Any, recursion_limit: int = 25
) -> Any:
    """The graph's final state for ``input``, its nodes executed by ``tool``: one that calls `run_node`.

    A node that interrupts waits for an event: what it says is emitted as ``{"interrupt": {"node", "value", "topic",
    "key"}}``, and whoever sends an event to that topic and key resumes it with the event's data. Nodes are retried as
    the tool says; retry and cache policies of the graph are not used. Raises what graphs raise, and StepFailedError
    kinds for nodes that failed.
    """
    asked = itertools.count(1)

    async def ask(name: str, value: Any) -> Any:
        topic, key = f"langgraph.{ctx.run_id}", str(next(asked))
        ctx.emit({"interrupt": {"node": name, "value": value, "topic": topic, "key": key}})
        return (await ctx.event(topic, key)).data

    def stub(name: str) -> "RunnableLambda[Any, Any]":
        async def call(state: Any) -> Any:
            resumes: list[Any] = []
            for _ in range(INTERRUPTS_MAX):
                answer = await ctx.tool(tool, node=name, state=packed(state), resumes=resumes)
                if "interrupt" not in answer:
                    return unpacked(answer["output"])
                resumes.append(await ask(name, answer["interrupt"]))
            raise RuntimeError(f"node {name} has interrupted {INTERRUPTS_MAX} times")

        return RunnableLambda(call, name=name)

    graph = _with_nodes(builder, stub).compile()
    return await graph.ainvoke(input, {"recursion_limit": recursion_limit})


async def run_node(
    builder: "StateGraph[Any, Any, Any, Any]", node: str, state: dict[str, str], resumes: list[Any]
) -> dict[str, Any]:
    """What the node makes of the state (``output``), or the value of its interrupt (``interrupt``) when it has one more
    of them than there are ``resumes``. Raises what the node raises, KeyError if there is no such node."""
    runnable = builder.nodes[node].runnable
    value, outputs = unpacked(state), []

    async def call(_: Any, config: RunnableConfig) -> dict[str, Any]:
        outputs.append(await runnable.ainvoke(value, config))
        return {}

    # interrupt() works inside a graph only.
    around: StateGraph[Any, Any, Any, Any] = StateGraph(_Nothing)
    around.add_node(node, call)
    around.add_edge(START, node)
    around.add_edge(node, END)
    graph = around.compile(checkpointer=InMemorySaver())
    found = await graph.ainvoke({"nothing": 0}, _INNER)
    for resume in resumes:
        found = await graph.ainvoke(Command(resume=resume), _INNER)
    if asked := found.get("__interrupt__"):
        return {"interrupt": asked[0].value}
    return {"output": packed(outputs[-1])}


def _with_nodes(builder: "StateGraph[Any, Any, Any, Any]", stub: Any) -> "StateGraph[Any, Any, Any, Any]":
    """The same graph with other nodes, and with choices of edges that need no threads."""
    made = copy.copy(builder)
    made.compiled = False
    made.nodes = {}
    for name, spec in builder.nodes.items():
        other = copy.copy(spec)
        for field, value in (("runnable", stub(name)), ("retry_policy", None), ("cache_policy", None)):
            object.__setattr__(other, field, value)
        made.nodes[name] = other
    made.branches = type(builder.branches)(builder.branches.default_factory)
    for start, branches in builder.branches.items():
        made.branches[start] = {
            name: branch._replace(path=_without_threads(branch.path)) for name, branch in branches.items()
        }
    return made


def _without_threads(path: Any) -> "RunnableLambda[Any, Any]":
    """The choice of an edge, made on the loop: a function that is no coroutine would be given to a thread."""
    function = getattr(path, "func", None)

    async def choose(state: Any, config: RunnableConfig) -> Any:
        return path.invoke(state, config) if function is not None else await path.ainvoke(state, config)

    return RunnableLambda(choose)
