"""What a guest says to the engine: a request of any op, or any output. The run ends, with what the journal says."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.fold import head_of
from agentrt.states import TERMINAL
from agentrt.stores.memory import MemoryDisk
from agentrt.syscalls import BY_NUMBER
from agentrt.tools.binding import failure
from agentrt.tools.outcome import Done, ToolOutcome

from .kit import JSON, target

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from engine_kit import Ctx, Node, World

_RUNS_PER_NODE = 500  # its store is memory
_PATIENCE_S = 0.3
_given = b""


def _agent(ctx: Ctx, input: Any) -> Any:
    if input:
        handle = ctx.submit(input, _given)
        yield ctx.wait(handle)
        ctx.close(handle)
        return "done"
    return _given
    yield ()


def _outcome(args: bytes) -> ToolOutcome:
    """Of a tool that takes any JSON, and gives it back."""
    try:
        return ToolOutcome(True, msgspec.json.encode(msgspec.json.decode(args)), None, 1, False)
    except UNREADABLE as error:
        payload, code = failure("tool_args", str(error))
        return ToolOutcome(False, payload, code, 1, False)


class _Life:
    """A loop and a node on it, for some runs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.runs = 0
        self.node = self.loop.run_until_complete(self._start())
        self.errors: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

    async def _start(self) -> Node:
        node = Node(MemoryDisk(), World())
        node.register("agent", _agent)
        node.engine._effects._tools_call = self._call  # type: ignore[assignment]
        return node

    def _call(self, name: str, args: bytes, *, done: Done, **how: Any) -> None:
        self.loop.call_soon(done, _outcome(args))

    async def one(self, op: int) -> None:
        run_id = await self.node.submit("agent", op)
        waits, cancelled = op in BY_NUMBER and BY_NUMBER[op].waits, False
        async with asyncio.timeout(10):
            ended = self.node.result(run_id)
            if waits and not (await asyncio.wait({ended}, timeout=_PATIENCE_S))[0]:
                cancelled = True  # what was asked for may take for ever
                await self.node.cancel(run_id)
            result = await ended
        state = self.node.fold(run_id)
        assert state.state == result.state and state.state in TERMINAL, state.state
        assert op == 0 or result.state == "SUCCEEDED" or (cancelled and result.state == "CANCELLED"), result
        assert head_of(state, run_id) == self.node.store.read_head(run_id)

    def end(self) -> None:
        self.loop.run_until_complete(self.node.close())
        self.loop.close()


_life: _Life | None = None


def _run(op: int, payload: bytes) -> None:
    global _life, _given
    if _life is None or _life.runs >= _RUNS_PER_NODE:
        if _life is not None:
            _life.end()
        _life = _Life()
    _life.runs += 1
    _given = payload
    life, ended = _life, False
    try:
        life.loop.run_until_complete(life.one(op))
        ended = True
    finally:
        _life = life if ended and not life.errors else None
        assert not life.errors, life.errors  # says more than the time-out that follows from it


@target(JSON)
def tool_call(data: bytes) -> None:
    """The request of a tool.call."""
    _run(1, data)


@target()
def requests(data: bytes) -> None:
    """The request of any op but those without an answer; the first byte picks it. 0 is the run's output."""
    op = data[0] % 15 if data else 0
    if op in BY_NUMBER and not BY_NUMBER[op].step:
        return
    _run(op, data[1:])
