"""The run's deadline bounds the tools that it has called."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import timeout_agents as agents

from agentrt import Runtime
from agentrt.errors import RunTimedOutError


@pytest.mark.parametrize("how", [{"timeout_s": 0.5}, {"budget": {"wall_s": 0.5}}, {"budget": {"active_s": 0.5}}])
def test_a_tool_is_stopped_with_its_run(how: dict[str, Any], tmp_path: Path) -> None:
    """It would run for ten minutes, and its own time-out is longer."""

    async def main() -> None:
        told: list[Any] = []
        async with Runtime(store=tmp_path / "store", tools=[agents.endless]) as runtime:
            await runtime.register(agents.patient)
            runtime.observe(lambda event, data: told.append(data) if event == "decision" else None)
            start_s = time.monotonic()
            run = await runtime.submit("patient", None, **how)
            with pytest.raises(RunTimedOutError):
                await run.result()
            assert time.monotonic() - start_s < 60  # a hang guard: it is half a second and some
        (ended,) = [each for each in told if each.control == "timeout"]
        assert (ended.action, ended.limit, ended.run) == (
            "end",
            next(iter(how["budget"])) if "budget" in how else "deadline",
            run.run_id,
        )

    asyncio.run(main())
