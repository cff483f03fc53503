"""LangGraph on agentrt: `AgentrtSaver`, a checkpoint saver; `run_graph` and `run_node`, graphs as agents."""

from agentrt_langgraph.graphs import run_graph, run_node
from agentrt_langgraph.saver import AgentrtSaver

__all__ = ["AgentrtSaver", "run_graph", "run_node"]
