"""agentrt: a kernel for agents. Preemptive tiers, durable runs, bounded resources.

The names below are the embedding API and the client of a node. They are imported when they are used, so that a tool
host or ``agentrt --version`` does not load the engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrt.agents.context import Context
    from agentrt.agents.declare import agent
    from agentrt.agents.errors import StepFailedError
    from agentrt.backends.process.agents.command import Command
    from agentrt.client import AsyncClient, Client
    from agentrt.config import Config, load_config
    from agentrt.engine.accept import Via
    from agentrt.engine.info import RunInfo, RunResult
    from agentrt.errors import AgentrtError
    from agentrt.run import Run
    from agentrt.runtime import AgentInfo, Runtime, RuntimeStatistics
    from agentrt.states import RunState
    from agentrt.tiers import Tier
    from agentrt.tools.commands import command_tool
    from agentrt.tools.spec import tool

_PLACES = {
    "Runtime": "agentrt.runtime",
    "Run": "agentrt.run",
    "AgentInfo": "agentrt.runtime",
    "RuntimeStatistics": "agentrt.runtime",
    "RunInfo": "agentrt.engine.info",
    "RunResult": "agentrt.engine.info",
    "RunState": "agentrt.states",
    "Tier": "agentrt.tiers",
    "Via": "agentrt.engine.accept",
    "tool": "agentrt.tools.spec",
    "command_tool": "agentrt.tools.commands",
    "agent": "agentrt.agents.declare",
    "Command": "agentrt.backends.process.agents.command",
    "Context": "agentrt.agents.context",
    "StepFailedError": "agentrt.agents.errors",
    "Client": "agentrt.client",
    "AsyncClient": "agentrt.client",
    "Config": "agentrt.config",
    "load_config": "agentrt.config",
    "AgentrtError": "agentrt.errors",
}

__all__ = [
    "Runtime",
    "Run",
    "AgentInfo",
    "RuntimeStatistics",
    "RunInfo",
    "RunResult",
    "RunState",
    "Tier",
    "Via",
    "tool",
    "command_tool",
    "agent",
    "Command",
    "Context",
    "StepFailedError",
    "Client",
    "AsyncClient",
    "Config",
    "load_config",
    "AgentrtError",
]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'agentrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
