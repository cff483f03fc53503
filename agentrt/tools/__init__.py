"""Tools: declared with `tool`, kept in a `ToolRegistry`, run in child processes by a `ToolPool`."""

from agentrt.tools.declare import BatchItem
from agentrt.tools.importing import describe_tools
from agentrt.tools.outcome import Done, ToolLimits, ToolOutcome, ToolStatistics
from agentrt.tools.pool import ToolPool
from agentrt.tools.reconcile import NOT_FOUND, UNKNOWN, Found
from agentrt.tools.secrets import EnvironmentSecrets, FileSecrets, SecretError, SecretProvider
from agentrt.tools.spec import ToolRegistry, ToolSpec, spec_of, tool

__all__ = [
    "BatchItem",
    "Done",
    "EnvironmentSecrets",
    "FileSecrets",
    "Found",
    "NOT_FOUND",
    "SecretError",
    "SecretProvider",
    "ToolLimits",
    "ToolOutcome",
    "ToolPool",
    "ToolRegistry",
    "ToolSpec",
    "ToolStatistics",
    "UNKNOWN",
    "describe_tools",
    "spec_of",
    "tool",
]
