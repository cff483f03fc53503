"""Runs that leave memory as frames and go on from them: what they end with, what is written, and what happens when a
frame is damaged, gone, or another's."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from frames_kit import counters, files, go, in_memory, killed_node, loop, page_at, parked, runtime, until

from agentrt import Runtime, _core
from agentrt.capture.instrument import Preempt, instrument
from agentrt.records import FrameTaken, Record
from agentrt.states import RunState

GUESTS = Path(__file__).parents[1] / "guests"
PLAIN = (GUESTS / "works.wasm").read_bytes()
#: A sort that waits for an event some times.
WORK: dict[str, Any] = {"work": "sort", "size": 60, "every": 150, "wait": 1}


@pytest.fixture(scope="module")
def module() -> bytes:
    return instrument(PLAIN, Preempt.SYSCALLS)


async def journal(made: Runtime, run_id: str) -> list[Record]:
    return await made.read_store(lambda store: store.read_records(run_id))


Expected = tuple[bytes | None, int, int]


@pytest.fixture(scope="module")
def expected(module: bytes, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Result, fuel and number of waits of a run that stays in memory."""
    found: list[Expected] = []

    async def main() -> None:
        async with runtime(tmp_path_factory.mktemp("alone"), **{"limits.hot_ms": 60_000}) as made:
            await made.register("works", module)
            run = await made.submit("works", WORK)
            for _ in range(40):
                await go(made, run)
            end = await run.wait()
            assert end.state is RunState.SUCCEEDED, end.error
            assert counters(made).taken == 0
            waits = json.loads(end.result or b"")["asked"]
            assert 4 < waits < 40
            found.append((end.result, end.cost.fuel, waits))

    loop(main)
    return found[0]


def test_a_run_goes_on_from_its_frames_and_ends_as_it_would_have(
    tmp_path: Path, module: bytes, expected: Expected
) -> None:
    async def main() -> None:
        result, fuel, waits = expected
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            run = await made.submit("works", WORK)
            for number in range(waits):
                await parked(made, run.run_id, number)
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            frames = counters(made)
            assert (frames.taken, frames.used, frames.refused, frames.failed) == (waits, waits, 0, 0)
            taken = [record.fuel for record in await journal(made, run.run_id) if isinstance(record, FrameTaken)]
            assert taken == sorted(set(taken)) and len(taken) == waits
            assert taken[0] > 0 and taken[-1] < fuel
            kept = tmp_path / "store" / "frames"
            await until(lambda: not list(kept.iterdir()))  # the run has ended

    loop(main)


@pytest.mark.parametrize("module_is", ["plain", "made"])
def test_what_is_not_worth_a_frame_is_replayed(
    tmp_path: Path, module: bytes, expected: Expected, module_is: str
) -> None:
    async def main() -> None:
        after = {"wasm.frame_after_ms": 60_000 if module_is == "made" else 0}
        async with runtime(tmp_path, **after) as made:
            await made.register("works", PLAIN if module_is == "plain" else module)
            run = await made.submit("works", WORK)
            await until(lambda: not in_memory(made, run.run_id))
            for _ in range(expected[2]):
                await go(made, run)
            end = await run.wait()
            assert end.state is RunState.SUCCEEDED
            assert end.result == expected[0]
            assert counters(made).taken == counters(made).used == 0

    loop(main)


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "truncated":
        del data[len(data) // 2 :]
    elif how == "flipped":
        data[page_at(data)] ^= 16  # found when it is restored
    elif how == "header":
        data[100] ^= 1
    elif how == "version":
        data[8] = 2
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["gone", "truncated", "flipped", "header", "version", "swapped", "older"])
def test_a_frame_that_is_of_no_use_is_refused_and_the_run_replayed(
    tmp_path: Path, module: bytes, expected: Expected, how: str
) -> None:
    async def main() -> None:
        result, fuel, waits = expected
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            other = await made.submit("works", WORK | {"every": 100})
            await parked(made, other.run_id)
            run = await made.submit("works", WORK)
            await parked(made, run.run_id, 1)
            await until(lambda: len(files(tmp_path, run.run_id)) == 1)  # on a full machine there may be two of one wait
            (path,) = files(tmp_path, run.run_id)
            if how == "swapped":
                path.write_bytes(files(tmp_path, other.run_id)[0].read_bytes())
            elif how == "older":
                first, begun = path.read_bytes(), counters(made).used
                await go(made, run)
                await until(lambda: counters(made).used > begun)  # else it may go on from what is written below
                await parked(made, run.run_id, 2)
                await until(lambda: len(files(tmp_path, run.run_id)) == 1 and not path.exists())
                files(tmp_path, run.run_id)[0].write_bytes(first)  # of the one that has taken its place
            else:
                spoil(path, how)
            used = counters(made).used
            for _ in range(waits - (how == "older")):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            frames = counters(made)
            assert (frames.refused > 0) == (how != "gone"), (frames.taken, frames.used, frames.failed)
            assert counters(made).used >= used
            await other.cancel("enough")

    loop(main)


def sealed(data: bytearray) -> bytes:
    """With the check that belongs to what it says (docs/frame-format.md)."""
    pages = page_at(data)
    rest = pages + int.from_bytes(data[192:200], "little")
    data[216:220] = bytes(4)
    data[216:220] = _core.crc32c(bytes(data[rest:]), _core.crc32c(bytes(data[:pages]))).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize("what", ["engine", "module", "ABI"])
def test_fault_W46_a_frame_of_another_engine_module_or_abi_is_refused_and_the_run_replayed(
    tmp_path: Path, module: bytes, expected: Expected, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        result, fuel, waits = expected
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            run = await made.submit("works", WORK)
            await parked(made, run.run_id)
            (path,) = files(tmp_path, run.run_id)
            data = bytearray(path.read_bytes())
            assert sealed(bytearray(data)) == data
            at, value = {"engine": (88, b"49.0.0"), "module": (24, b"other"), "ABI": (12, b"\2")}[what]
            data[at : at + len(value)] = value
            path.write_bytes(sealed(data))
            for _ in range(waits):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(made).refused == 1 and (await made.statistics()).engine.frames.refused == 1
            assert any(run.run_id in line and f"it is of {what}" in line for line in caplog.messages)

    loop(main)


def test_a_killed_node_leaves_frames_that_the_next_one_goes_on_from(
    tmp_path: Path, module: bytes, expected: Expected
) -> None:
    result, fuel, waits = expected
    run_id = killed_node(tmp_path, module, WORK)

    async def main() -> None:
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            run = made.run(run_id)
            for _ in range(waits):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(made).used > 0

    loop(main)


def test_a_node_that_stops_leaves_frames(tmp_path: Path, module: bytes, expected: Expected) -> None:
    result, fuel, waits = expected
    runs: list[str] = []

    async def before() -> None:
        async with runtime(tmp_path, **{"limits.hot_ms": 60_000}) as made:
            await made.register("works", module)
            for _ in range(20):
                runs.append((await made.submit("works", WORK)).run_id)
            machines = made._engine._runs
            await until(lambda: all(machines[run_id].may_be_framed for run_id in runs))
            assert counters(made).taken == 0

    async def after() -> None:
        async with runtime(tmp_path) as made:
            journals = [await journal(made, run_id) for run_id in runs]
            named = sum(any(isinstance(record, FrameTaken) for record in records) for records in journals)
            # One that was written when the time was over has no name.
            assert 0 < named <= len(list((tmp_path / "store" / "frames").iterdir()))
            await made.register("works", module)
            for run_id in runs:
                for _ in range(waits):
                    await go(made, made.run(run_id))
                end = await made.run(run_id).wait()
                assert (end.result, end.cost.fuel) == (result, fuel)
            assert counters(made).used >= named

    loop(before)
    loop(after)


def test_frames_of_runs_that_have_ended_are_swept(tmp_path: Path, module: bytes) -> None:
    async def main() -> None:
        async with runtime(tmp_path) as made:
            await made.register("works", module)
            gone, stays = [await made.submit("works", WORK) for _ in range(2)]
            for number, run in enumerate((gone, stays)):
                await parked(made, run.run_id, number)
            (path,), (kept,) = files(tmp_path, gone.run_id), files(tmp_path, stays.run_id)
            left = path.read_bytes()
            await gone.cancel("enough")
            await gone.wait()
            await until(lambda: not path.exists())
            path.write_bytes(left)  # as if the node had been killed before it removed it
            (path.parent / ".half-written").touch()
            made._control.loop.call_soon_threadsafe(counters(made).sweep)
            await until(lambda: [*path.parent.iterdir()] == [kept])

    loop(main)


def test_a_frame_stays_however_fast_its_run_is_parked(tmp_path: Path, module: bytes) -> None:
    """The store may have made its parking durable before the loop looks at the end of its taking."""

    async def main() -> None:
        async with runtime(tmp_path) as made:
            frames, seen = counters(made), asyncio.Event()
            loop, taken = made._control.loop, frames._taken
            here = asyncio.get_running_loop()

            def late(take: Any, done: Any) -> None:
                if in_memory(made, take.machine.run_id):
                    loop.call_soon(late, take, done)
                    return
                taken(take, done)
                frames._later(here.call_soon_threadsafe, seen.set)  # behind whatever it has removed

            frames._taken = late  # type: ignore[method-assign]
            await made.register("works", module)
            run = await made.submit("works", WORK)
            await seen.wait()
            assert len(files(tmp_path, run.run_id)) == 1

    loop(main)


def test_a_full_disk_for_frames_means_replay(tmp_path: Path, module: bytes, expected: Expected) -> None:
    async def main() -> None:
        async with runtime(tmp_path, **{"wasm.frames_bytes_max": 1000}) as made:
            await made.register("works", module)
            run = await made.submit("works", WORK)
            await until(lambda: counters(made).failed > 0 and not in_memory(made, run.run_id))
            for _ in range(expected[2]):
                await go(made, run)
            end = await run.wait()
            assert (end.result, end.cost.fuel) == expected[:2]
            assert counters(made).used == 0

    loop(main)
