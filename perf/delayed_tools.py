"""A plugin for benchmarks: one tool, ``io``, which is answered by the loop's clock, and when each answer was given and
the next call came. Everything else is the built-in one's."""

import asyncio
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrt.builtin import agentrt_backends as agentrt_backends
from agentrt.builtin import agentrt_stores as agentrt_stores
from agentrt.hooks import HOOKS_VERSION, ToolProviderFactory, hookimpl
from agentrt.tools import tool
from agentrt.tools.outcome import Done, ToolOutcome
from agentrt.tools.spec import ToolRegistry
from perf import inline_tools

if TYPE_CHECKING:
    from agentrt.config import Config

AGENTRT_HOOKS = HOOKS_VERSION

_AGAIN = ToolOutcome(True, b"false", None, 0, False)
_ENOUGH = ToolOutcome(True, b"true", None, 0, False)


@tool(kind="pure")
async def io(number: int) -> bool:
    """Waits; whether that is enough."""
    raise NotImplementedError  # answered by `DelayedTools`


class Activation(NamedTuple):
    """From an answer to the next call of the same agent: ``at_ns`` (CLOCK_MONOTONIC) and how long."""

    number: int
    at_ns: int
    delay_ns: int


class _Args(msgspec.Struct):
    number: int


_decode_args = msgspec.json.Decoder(_Args).decode


class DelayedTools(inline_tools.InlineTools):
    """``quick`` calls of each agent are answered at once, the others after a random time with the mean ``mean_s``; when
    ``enough`` is set all are told so. Set and read from other threads between rounds."""

    current: "DelayedTools"

    def __init__(self, registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(registry, loop)
        DelayedTools.current = self
        self.quick = 0
        self.mean_s = 0.03
        self.enough = False
        self.answered_ns: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.activations: list[Activation] = []
        self._random = random.Random(1)

    def call(
        self, name: str, args: bytes, *, key: str | None, tenant: str, tier: int, attempt: int, done: Done,
        timeout_ns: int | None = None, reconcile: bool = False,
    ) -> object:  # fmt: skip
        now = time.monotonic_ns()
        number = _decode_args(args).number
        answered_ns = self.answered_ns.get(number)
        if answered_ns is not None:
            self.activations.append(Activation(number, answered_ns, now - answered_ns))
        count = self.counts[number] = self.counts.get(number, 0) + 1
        if count <= self.quick:
            self._loop.call_soon(self._answer, number, done)
        else:
            self._loop.call_later(self._random.uniform(0, 2 * self.mean_s), self._answer, number, done)
        return None

    def _answer(self, number: int, done: Done) -> None:
        self.answered_ns[number] = time.monotonic_ns()
        done(_ENOUGH if self.enough else _AGAIN)

    def begin(self, quick: int) -> None:
        """A new round of agents."""
        self.quick, self.enough = quick, False
        self.answered_ns, self.counts, self.activations = {}, {}, []

    def statistics(self) -> Any:
        return {"calls": sum(self.counts.values())}


@hookimpl
def agentrt_tool_providers() -> Mapping[str, ToolProviderFactory]:
    return {"python": _make}


def _make(config: "Config", registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> DelayedTools:
    return DelayedTools(registry, loop)
