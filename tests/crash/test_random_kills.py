"""200 random kill -9 of the node under the demo's whole workload: accepted = finished, no effect twice."""

import asyncio
from pathlib import Path

import pytest

from agentrt.demo.supervisor import Options, run_demo

KILLS = 200
SECONDS_PER_KILL = 1.0


@pytest.mark.sweep
@pytest.mark.timeout(1500)
def test_200_random_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    options = Options(
        seconds=KILLS * SECONDS_PER_KILL,
        hogs=8,
        store=tmp_path / "store",
        hog_rounds=20_000_000,  # hogs replay from their start, so they must fit between two kills
        kills=KILLS,
        seed=20261129,
    )
    result = asyncio.run(run_demo(options, lambda progress: None))
    assert result.verdict.findings == []
    assert result.verdict.passed
    assert result.progress.kills == KILLS
    assert result.verdict.finished > KILLS  # it did work in between
