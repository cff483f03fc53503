"""A plugin for benchmarks: tools that are answered inside the process, or never, so that the journal and the memory of
runs can be measured without tool hosts. Everything else is the built-in one's."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrt.builtin import agentrt_backends as agentrt_backends
from agentrt.builtin import agentrt_stores as agentrt_stores
from agentrt.hooks import HOOKS_VERSION, ToolProviderFactory, hookimpl
from agentrt.tools import tool
from agentrt.tools.outcome import Done, ToolOutcome
from agentrt.tools.spec import ToolRegistry

if TYPE_CHECKING:
    from agentrt.config import Config

AGENTRT_HOOKS = HOOKS_VERSION

_ANSWER = ToolOutcome(True, b"null", None, 0, False)


@tool(kind="keyed")
async def echo() -> None:
    """The tool of the benchmarks' guests."""


class InlineTools:
    """Answers in the loop's next turn, or never."""

    #: Set before the runtime starts, in the process that measures.
    answers = True

    def __init__(self, registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> None:
        self.registry = registry
        self._loop = loop
        self._calls = 0

    def call(
        self, name: str, args: bytes, *, key: str | None, tenant: str, tier: int, attempt: int, done: Done,
        timeout_ns: int | None = None, reconcile: bool = False,
    ) -> object:  # fmt: skip
        self._calls += 1
        if self.answers:
            self._loop.call_soon(done, _ANSWER)
        return None

    def cancel(self, call: object) -> None:
        """What is not answered never will be, and the rest is as good as answered."""

    def start(self) -> None:
        """Nothing is to be started."""

    def stop(self) -> None:
        """Nothing runs that could be told."""

    def evict(self) -> None:
        """Nothing runs that could be ended."""

    def statistics(self) -> Any:
        return {"calls": self._calls}

    async def close(self) -> None:
        """Nothing is under way."""


@hookimpl
def agentrt_tool_providers() -> Mapping[str, ToolProviderFactory]:
    return {"python": _make}


def _make(config: "Config", registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> InlineTools:
    return InlineTools(registry, loop)
