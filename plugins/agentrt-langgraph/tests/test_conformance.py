"""LangGraph's own suite for checkpoint savers, all of it."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator

from agentrt_langgraph import AgentrtSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate


@checkpointer_test(name="AgentrtSaver")
async def saver() -> AsyncGenerator[AgentrtSaver, None]:
    with tempfile.TemporaryDirectory() as folder:
        async with AgentrtSaver.open(folder) as opened:
            yield opened


def test_every_capability_is_there_and_passes() -> None:
    report = asyncio.run(validate(saver))
    results = report.results
    assert len(results) == 8
    assert not {name: result.failures for name, result in results.items() if not result.passed}
    assert sum(result.tests_passed for result in results.values()) >= 60
