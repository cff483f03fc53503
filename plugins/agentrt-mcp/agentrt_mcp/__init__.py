"""Every tool of an MCP server as a tool of agentrt. What it brings; the work is in `provider`."""

from typing import TYPE_CHECKING, Any

import msgspec

from agentrt.hooks import hookimpl
from agentrt_mcp.settings import McpSettings

if TYPE_CHECKING:
    import asyncio

    from agentrt.config import Config
    from agentrt.engine.ports import Tools
    from agentrt.tools.spec import ToolRegistry

AGENTRT_HOOKS = 2


@hookimpl
def agentrt_settings() -> dict[str, type[msgspec.Struct]]:
    return {"mcp": McpSettings}


@hookimpl
def agentrt_tool_providers() -> dict[str, Any]:
    return {"mcp": _make}


def _make(config: "Config", registry: "ToolRegistry", loop: "asyncio.AbstractEventLoop") -> "Tools":
    from agentrt_mcp.provider import McpTools

    return McpTools(config, registry, loop)
