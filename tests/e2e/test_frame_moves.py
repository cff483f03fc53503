"""Runs that move to another node as frames and go on there without a replay."""

import json
from pathlib import Path
from typing import Any

import pytest
from frames_kit import counters, files, go, in_memory, loop, parked, runtime, until

from agentrt.capture.instrument import Preempt, instrument
from agentrt.engine import frames as engine_frames
from agentrt.states import RunState

PLAIN = (Path(__file__).parents[1] / "guests" / "works.wasm").read_bytes()
WORK: dict[str, Any] = {"work": "sort", "size": 60, "every": 150, "wait": 1}


@pytest.fixture(scope="module")
def module() -> bytes:
    return instrument(PLAIN, Preempt.SYSCALLS)


async def alone(folder: Path, module: bytes) -> tuple[bytes | None, int, int]:
    async with runtime(folder, **{"limits.hot_ms": 60_000}) as made:
        await made.register("works", module)
        run = await made.submit("works", WORK)
        for _ in range(40):
            await go(made, run)
        end = await run.wait()
        assert end.state is RunState.SUCCEEDED
        return end.result, end.cost.fuel, json.loads(end.result or b"")["asked"]


@pytest.mark.parametrize("how", ["cold", "hot", "delta", "its module is not there yet"])
def test_a_run_takes_its_frame_along(tmp_path: Path, module: bytes, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "delta":
        monkeypatch.setattr(engine_frames, "_DELTA_BYTES_MIN", 1)

    async def main() -> None:
        result, fuel, waits = await alone(tmp_path / "alone", module)
        hot = {"limits.hot_ms": 60_000} if how == "hot" else {}
        async with runtime(tmp_path / "a", **hot) as here, runtime(tmp_path / "b") as there:
            await here.register("works", module)
            if how != "its module is not there yet":
                await there.register("works", module)
            run = await here.submit("works", WORK)
            if how == "hot":
                await until(lambda: in_memory(here, run.run_id) and here._engine._runs[run.run_id].may_be_framed)
            else:
                await parked(here, run.run_id)
            if how == "delta":
                await go(here, run)
                await parked(here, run.run_id, 1)
                waits -= 1
            await here.export_run(run, tmp_path / "file")
            assert counters(here).taken == (2 if how == "delta" else 1)
            (come,) = await there.import_run(tmp_path / "file")
            assert [path.name for path in files(tmp_path / "b", run.run_id)] == [
                path.name for path in files(tmp_path / "a", run.run_id)
            ]
            await there.register("works", module)
            for _ in range(waits):
                await go(there, come)
            end = await come.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(there).used >= 1 and counters(there).refused == 0
            await until(lambda: not files(tmp_path / "b", run.run_id))

    loop(main)


def test_a_store_without_room_for_frames_replays_what_comes(tmp_path: Path, module: bytes) -> None:
    async def main() -> None:
        result, fuel, waits = await alone(tmp_path / "alone", module)
        no_room = runtime(tmp_path / "b", **{"wasm.frames_bytes_max": 0})
        async with runtime(tmp_path / "a") as here, no_room as there:
            await here.register("works", module)
            await there.register("works", module)
            run = await here.submit("works", WORK)
            await parked(here, run.run_id)
            await here.export_run(run, tmp_path / "file")
            (come,) = await there.import_run(tmp_path / "file")
            for _ in range(waits):
                await go(there, come)
            end = await come.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)

    loop(main)
