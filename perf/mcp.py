"""What does a call of an MCP tool cost as a tool of agentrt, beside the plain client of the SDK?

The same server, a program that adds two numbers, by standard input and output: with plugins/agentrt-mcp it is confined
and a process of the node's, and each call is checked against its schema, bounded and taken to another thread and back;
baseline is `mcp.Client` on the loop that asks. Both take turns, round by round; figures are medians of means
of calls one after the other, and of calls a second, 32 at once. ``overhead_us`` is the difference of the two. The
step around the call, with its commits, is `perf.steps`' matter.

Needs the plugin's extra ``test``.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perf.report import Report, machine

_PLUGIN = Path(__file__).parents[1] / "plugins" / "agentrt-mcp"
_AT_ONCE = 32
_ARGS = {"x": 1, "y": 2}


async def _one_by_one_us(call: Callable[[], Awaitable[Any]], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        await call()
    return (time.perf_counter_ns() - start) / calls / 1000


async def _per_s(call: Callable[[], Awaitable[Any]], calls: int) -> float:
    async def some() -> None:
        for _ in range(calls // _AT_ONCE):
            await call()

    start = time.perf_counter_ns()
    await asyncio.gather(*[some() for _ in range(_AT_ONCE)])
    return calls // _AT_ONCE * _AT_ONCE / (time.perf_counter_ns() - start) * 1e9


async def _measure(rounds: int, calls: int) -> dict[str, list[float]]:
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters
    from mcp_kit import Place, config, opened

    found: dict[str, list[float]] = {}
    place = Place()
    try:
        settings = place.faulty(place.folder())
        program, *arguments = settings["command"]
        arguments[-1] = str(place.folder())
        plain = StdioServerParameters(command=program, args=arguments, env=settings["environment"])
        async with opened(config({"s": settings})) as bench, Client(plain, cache=None) as client:
            await client.list_tools()

            async def ours() -> None:
                outcome = await bench.call("s.add", _ARGS)
                assert outcome.ok, outcome

            async def theirs() -> None:
                result = await client.call_tool("add", _ARGS)
                assert not result.is_error, result

            for call in (ours, theirs):
                await _one_by_one_us(call, calls // 10)
            for _ in range(rounds):
                for name, call in (("", ours), ("client_", theirs)):
                    found.setdefault(f"{name}call_us", []).append(await _one_by_one_us(call, calls))
                    found.setdefault(f"{name}calls_per_s", []).append(await _per_s(call, calls))
    finally:
        place.close()
    return found


def run(tiny: bool) -> Report:
    sys.path[:0] = [str(_PLUGIN), str(_PLUGIN / "tests")]
    found = asyncio.run(_measure(*((1, 64) if tiny else (5, 320))))
    medians = {key: statistics.median(values) for key, values in found.items()}
    overhead = [ours - theirs for ours, theirs in zip(found["call_us"], found["client_call_us"], strict=True)]
    figures = {
        "call_us": medians["call_us"],
        "overhead_us": statistics.median(overhead),
        "calls_per_s": medians["calls_per_s"],
    }
    return Report(
        "mcp", figures, {key: value for key, value in medians.items() if key.startswith("client_")}, machine()
    )
