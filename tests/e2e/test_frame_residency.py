"""More runs than memory may hold: they leave as frames, come back when what they wait for comes, and end as they would
have ended."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from frames_kit import counters, go, runtime, until

from agentrt import Runtime
from agentrt.capture.instrument import Preempt, instrument
from agentrt.states import RunState

PLAIN = (Path(__file__).parents[1] / "guests" / "works.wasm").read_bytes()
KINDS = 7
MIB = 1 << 20
_AT_ONCE = 500


def work(number: int) -> dict[str, Any]:
    """Waits once, in the middle of a sort."""
    return {"work": "sort", "size": 60 + number % KINDS, "every": 700, "wait": 1}


async def many(calls: list[Any]) -> list[Any]:
    found: list[Any] = []
    for at in range(0, len(calls), _AT_ONCE):
        found += await asyncio.gather(*calls[at : at + _AT_ONCE])
    return found


async def evict_and_resume(folder: Path, count: int, budget_bytes: int) -> None:
    module = instrument(PLAIN, Preempt.SYSCALLS)
    expected: list[tuple[bytes | None, int]] = []
    async with runtime(folder / "alone", **{"limits.hot_ms": 60_000}) as made:
        await made.register("works", module)
        for number in range(KINDS):
            run = await made.submit("works", work(number))
            for _ in range(3):
                await go(made, run)
            end = await run.wait()
            assert end.state is RunState.SUCCEEDED and json.loads(end.result or b"")["asked"] == 1
            expected.append((end.result, end.cost.fuel))
    hot = {"limits.hot_ms": 3_600_000, "limits.hot_bytes_max": budget_bytes}
    async with runtime(folder, **hot) as made:
        await made.register("works", module)
        runs = await many([made.submit("works", work(number)) for number in range(count)])
        await settled(made, budget_bytes)
        assert counters(made).taken > 0
        await many([go(made, run) for run in runs])
        ends = await many([run.wait() for run in runs])
        for number, end in enumerate(ends):
            assert (end.result, end.cost.fuel) == expected[number % KINDS]
        frames = counters(made)
        assert frames.used > 0 and frames.refused == frames.failed == 0


async def settled(made: Runtime, budget_bytes: int) -> None:
    """All wait, those within the budget in memory."""
    engine = made._engine
    idle = engine._idle_guests

    def all_wait() -> bool:
        return len(idle) == len(engine._runs) and idle.bytes <= budget_bytes

    await until(all_wait, timeout_s=1000)


def test_runs_beyond_the_budget_leave_and_come_back_right(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(evict_and_resume(tmp_path, 200, 8 * MIB), 100))


@pytest.mark.sweep
@pytest.mark.timeout(3000)
def test_fifty_thousand_runs_within_512_mib(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(evict_and_resume(tmp_path, 50_000, 512 * MIB), 2900))
