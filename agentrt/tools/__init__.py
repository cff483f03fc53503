"""Tools: declared with `tool`, kept in a `ToolRegistry`, run in child processes by a `ToolPool`."""

from agentrt.tools.importing import describe_tools
from agentrt.tools.outcome import Done, ToolLimits, ToolOutcome, ToolStatistics
from agentrt.tools.pool import ToolPool
from agentrt.tools.spec import ToolRegistry, ToolSpec, spec_of, tool

__all__ = [
    "Done",
    "ToolLimits",
    "ToolOutcome",
    "ToolPool",
    "ToolRegistry",
    "ToolSpec",
    "ToolStatistics",
    "describe_tools",
    "spec_of",
    "tool",
]
