"""``python.exec`` and ``js.exec``: code that a model wrote, run in WebAssembly. What it brings; the work is in
`provider`."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from agentrt.hooks import hookimpl
from agentrt_sandbox.settings import SandboxSettings

if TYPE_CHECKING:
    from agentrt.config import Config
    from agentrt.engine.ports import Tools
    from agentrt.tools.spec import ToolRegistry

AGENTRT_HOOKS = 2


@hookimpl
def agentrt_settings() -> dict[str, type[msgspec.Struct]]:
    return {"sandbox": SandboxSettings}


@hookimpl
def agentrt_tool_providers() -> dict[str, Any]:
    return {"sandbox": _make}


def _make(config: "Config", registry: "ToolRegistry", loop: asyncio.AbstractEventLoop) -> "Tools":
    from agentrt_sandbox.provider import SandboxTools

    return SandboxTools(config, registry, loop)
