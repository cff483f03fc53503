"""What a replay may cost is bounded: frames of guests that stay, runs that are pinned, second copies, deltas."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from frames_kit import counters, files, frames_named, go, in_memory, killed_node, loop, page_at, parked, runtime, until

from agentrt.capture.instrument import Preempt, instrument
from agentrt.engine import frames as engine_frames
from agentrt.errors import StoreError
from agentrt.states import RunState

GUESTS = Path(__file__).parents[1] / "guests"
PLAIN = (GUESTS / "works.wasm").read_bytes()
#: Some seconds of computing, and nothing else.
COMPUTES: dict[str, Any] = {"work": "loop", "size": 30_000_000, "every": 0}
#: A sort that waits for an event some times.
WAITS: dict[str, Any] = {"work": "sort", "size": 60, "every": 150, "wait": 1}
BOUND = {"wasm.replay_fuel_max": 10_000_000}
#: Any work at all is beyond it.
NEXT_TO_NOTHING = {"wasm.replay_fuel_max": 1}


@pytest.fixture(scope="module")
def module() -> bytes:
    return instrument(PLAIN, Preempt.ANYWHERE)


async def ends_alone(folder: Path, module: bytes, data: dict[str, Any], **more: Any) -> tuple[Any, ...]:
    """Result and fuel of a run that nothing happens to, and how often it waited."""
    async with runtime(folder, **({"limits.hot_ms": 60_000, "wasm.replay_fuel_max": 0} | more)) as made:
        await made.register("works", module)
        run = await made.submit("works", data)
        for _ in range(40 if data.get("wait") else 0):
            await go(made, run)
        end = await run.wait()
        assert end.state is RunState.SUCCEEDED, end.error
        assert counters(made).taken == 0
        return end.result, end.cost.fuel, json.loads(end.result or b"")["asked"]


def test_a_guest_that_only_computes_has_frames_and_goes_on_from_the_last_after_a_kill(
    tmp_path: Path, module: bytes
) -> None:
    run_id = killed_node(tmp_path, module, COMPUTES, json.dumps(BOUND), "2")

    async def main() -> None:
        expected = await ends_alone(tmp_path / "alone", module, COMPUTES)
        async with runtime(tmp_path, **BOUND) as made:
            before = await frames_named(made, run_id)
            assert len(before) >= 2
            assert all(b.fuel - a.fuel > BOUND["wasm.replay_fuel_max"] for a, b in pairwise(before))
            await made.register("works", module)
            await until(lambda: counters(made).used > 0)
            end = await made.run(run_id).wait()
            assert (end.result, end.cost.fuel) == expected[:2]
            assert counters(made).refused == counters(made).failed == 0
            await until(lambda: not files(tmp_path, run_id))

    loop(main)


def test_a_guest_that_waits_and_stays_has_a_frame_when_its_replay_costs_too_much(tmp_path: Path, module: bytes) -> None:
    async def main() -> None:
        stays = {"limits.hot_ms": 60_000} | NEXT_TO_NOTHING
        result, fuel, waits = await ends_alone(tmp_path / "alone", module, WAITS)
        async with runtime(tmp_path, **stays) as made:
            await made.register("works", module)
            run = await made.submit("works", WAITS)
            for number in range(3):
                await until(lambda number=number: counters(made).taken > number)  # type: ignore[misc]
                assert in_memory(made, run.run_id)
                await go(made, run)
        async with runtime(tmp_path, **stays) as made:  # stopped, or killed: see above
            await made.register("works", module)
            for _ in range(waits):
                await go(made, made.run(run.run_id))
            end = await made.run(run.run_id).wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(made).used > 0

    loop(main)


@pytest.mark.parametrize("why", ["the module cannot be captured", "there is no room for frames"])
def test_a_run_that_can_be_neither_captured_nor_replayed_cheaply_stays_in_memory(
    tmp_path: Path, module: bytes, why: str
) -> None:
    async def main() -> None:
        room = {} if why.startswith("the module") else {"wasm.frames_bytes_max": 1000}
        code = PLAIN if why.startswith("the module") else module
        result, fuel, waits = await ends_alone(tmp_path / "alone", code, WAITS)
        async with runtime(tmp_path, **(NEXT_TO_NOTHING | room)) as made:
            await made.register("works", code)
            run = await made.submit("works", WAITS)
            await until(lambda: counters(made).pinned == 1)
            assert in_memory(made, run.run_id)
            assert made._engine._intake.admission.items == 1  # and admission counts it
            for _ in range(waits):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(made).pinned == counters(made).taken == 0

    loop(main)


@pytest.mark.parametrize("how", ["cut off", "a page", "gone"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_frame_that_a_run_needs_has_a_second_copy_and_the_journal_behind_that(
    tmp_path: Path, module: bytes, how: str, copies: int
) -> None:
    async def main() -> None:
        result, fuel, waits = await ends_alone(tmp_path / "alone", module, WAITS)
        async with runtime(tmp_path, **NEXT_TO_NOTHING) as made:
            await made.register("works", module)
            run = await made.submit("works", WAITS)
            await parked(made, run.run_id)
            await until(lambda: len(files(tmp_path, run.run_id)) == 2)
            one, two = files(tmp_path, run.run_id)
            assert one.read_bytes() == two.read_bytes()
            for path in (one, two)[:copies]:
                data = bytearray(path.read_bytes())
                if how == "cut off":
                    del data[-1:]
                else:
                    data[page_at(data)] ^= 16
                path.write_bytes(data)
                if how == "gone":
                    path.unlink()
            used = counters(made).used
            await go(made, run)
            await parked(made, run.run_id, counters(made).taken)
            assert counters(made).used - used == (1 if copies == 1 else 0) + (how == "a page") * copies
            assert counters(made).refused == (0 if how == "gone" else copies)
            for _ in range(waits):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)

    loop(main)


def test_frames_of_large_guests_are_deltas_as_long_as_that_pays(
    tmp_path: Path, module: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_frames, "_DELTA_BYTES_MIN", 1)

    async def main() -> None:
        result, fuel, waits = await ends_alone(tmp_path / "alone", module, WAITS)
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            run = await made.submit("works", WAITS)
            for number in range(waits):
                await parked(made, run.run_id, number)
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            frames = counters(made)
            assert (frames.taken, frames.used, frames.refused) == (waits, waits, 0)
            assert 0 < frames.deltas < waits
            await until(lambda: not files(tmp_path, run.run_id))

    loop(main)


def test_a_delta_without_its_base_is_refused_and_the_run_replayed(
    tmp_path: Path, module: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_frames, "_DELTA_BYTES_MIN", 1)

    async def main() -> None:
        result, fuel, waits = await ends_alone(tmp_path / "alone", module, WAITS)
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            run = await made.submit("works", WAITS)
            await parked(made, run.run_id)
            (base,) = files(tmp_path, run.run_id)
            await go(made, run)
            await parked(made, run.run_id, 1)
            base.unlink()
            for _ in range(waits):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(made).refused == 1

    loop(main)


def test_a_disk_that_fails_costs_a_frame_and_nothing_else(
    tmp_path: Path, module: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        result, fuel, waits = await ends_alone(tmp_path / "alone", module, WAITS)
        async with runtime(tmp_path) as made:

            def fails(*_: Any) -> None:
                raise StoreError("the disk has a bad day")

            monkeypatch.setattr(counters(made)._store, "put", fails)
            await made.register("works", module)
            run = await made.submit("works", WAITS)
            await until(lambda: counters(made).failed == 1 and not in_memory(made, run.run_id))
            for _ in range(waits):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)

    loop(main)
