"""Waiting, children, locks, checkpoints and schedules through the embedding API, with a wasm agent and real stores."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from python_durable import trip_book, trip_cancel

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import InputError, RunCancelledError, RunTimedOutError, StepSettledError
from agentrt.states import RunState

GUEST = Path(__file__).parents[2] / "examples" / "guests" / "sequence.wasm"
SLEEP, EVENT, APPROVAL, SPAWN, JOIN, ACQUIRE, RELEASE, SEND, CHECKPOINT, EMIT = 3, 4, 5, 6, 7, 8, 9, 10, 11, 12


@contextmanager
def node(store: Path | None, hot_ms: int = 0) -> Iterator[Runtime]:
    arguments: dict[str, Any] = {"limits.hot_ms": hot_ms}
    if store is None:
        arguments["store.kind"] = "memory"
    config = load_config(arguments=arguments)
    with Runtime(store=store, config=config) as runtime:
        runtime.register_sync("sequence", GUEST)
        yield runtime


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "store"


def until_parked(runtime: Runtime, run_id: str, reason: str) -> None:
    for _ in range(2000):
        info = runtime.describe_run_sync(run_id)
        if info.wait_reason == reason and info.state is RunState.WAITING:
            return
        time.sleep(0.005)
    raise AssertionError(f"it waits for {info.wait_reason}")


@pytest.mark.parametrize("hot_ms", [0, 60_000])
def test_a_wasm_agent_sleeps_waits_and_is_answered(store: Path | None, hot_ms: int) -> None:
    with node(store, hot_ms) as runtime:
        steps = [
            [SLEEP, {"seconds": 0.05}],
            [EVENT, {"topic": "t", "key": "k"}],
            [APPROVAL, {"question": "go?"}],
            [EVENT, {"topic": "t", "timeout_s": 0.05}],
        ]
        run = runtime.submit_sync("sequence", steps)
        assert runtime.send_sync({"n": 1}, topic="t", key="k", id="e1") == "e1"
        runtime.send_sync({"n": 2}, topic="t", key="k", id="e1")
        for _ in range(2000):
            try:
                assert run.approve_sync(by="ann") == "1:3"
                break
            except StepSettledError:
                time.sleep(0.005)
        result = run.result_sync(20)
        assert result[:3] == [
            None,
            {"id": "e1", "data": {"n": 1}},
            {"approved": True, "by": "ann", "comment": None},
        ]
        assert result[3]["error"]["code"] == "timeout"
        with pytest.raises(StepSettledError):
            run.approve_sync()


def test_children_locks_and_emits(store: Path | None) -> None:
    with node(store) as runtime:
        emitted: list[Any] = []
        runtime.observe(lambda event, data: emitted.append(data) if event == "emitted" else None)
        child = [[ACQUIRE, {"name": "l"}], [EMIT, {"data": "held"}], [RELEASE, {"name": "l", "token": "$1.token"}]]
        steps = [
            [SPAWN, {"agent": "sequence", "input": child}],
            [SPAWN, {"agent": "sequence", "input": child}],
            [JOIN, {"run_id": "$1.run_id"}],
            [JOIN, {"run_id": "$2.run_id"}],
            [SPAWN, {"agent": "nobody"}],
        ]
        result = runtime.submit_sync("sequence", steps).result_sync(20)
        tokens = [part[0]["token"] for part in result[2:4]]
        assert len(set(tokens)) == 2 and not any(part[0]["dirty"] for part in result[2:4])
        assert [part[1:] for part in result[2:4]] == [[None, None]] * 2
        assert result[4]["error"]["code"] == "unknown_agent"
        assert sorted(data.data for data in emitted) == [b'"held"'] * 2


def test_a_run_waits_through_restarts_and_segments(tmp_path: Path) -> None:
    steps = [
        [SLEEP, {"seconds": 0}],
        [CHECKPOINT, {"state": 2}],
        [APPROVAL, {"question": "go on?"}],
        [EVENT, {}],
        [SEND, {"topic": "done", "data": "$4.data"}],
    ]
    with node(tmp_path / "store") as runtime:
        run_id = runtime.submit_sync("sequence", steps).run_id
        until_parked(runtime, run_id, "approval")
    with node(tmp_path / "store") as runtime:
        runtime.run(run_id).approve_sync()
        until_parked(runtime, run_id, "event")
    with node(tmp_path / "store") as runtime:
        runtime.send_sync({"x": 1}, run_id=run_id)
        result = runtime.run(run_id).result_sync(20)
        assert result[:2] == [None, None] and result[3]["data"] == {"x": 1}
        heard = runtime.submit_sync("sequence", [[EVENT, {"topic": "done"}]]).result_sync(20)
        assert heard[0]["data"] == {"x": 1}


def test_deadlines_and_later_starts(store: Path | None) -> None:
    with node(store) as runtime:
        late = runtime.submit_sync("sequence", [[APPROVAL, {"question": "?"}]], timeout_s=0.2)
        with pytest.raises(RunTimedOutError):
            late.result_sync(20)
        begins = time.time() + 0.3
        run = runtime.submit_sync("sequence", [], run_at=begins)
        assert runtime.describe_run_sync(run.run_id).wait_reason == "timer"
        assert run.result_sync(20) == []
        assert time.time() >= begins
        with pytest.raises(InputError):
            runtime.submit_sync("sequence", [], timeout_s=0)
        with pytest.raises(InputError):
            runtime.submit_sync("sequence", [], budget={"micro_usd": 5})
        with pytest.raises(InputError):
            runtime.send_sync(1)


def test_schedules_are_kept(store: Path | None) -> None:
    with node(store) as runtime:

        async def main() -> None:
            await runtime.schedule("nightly", "30 4 * * *", "sequence", [], tier="batch", catch_up="skip")
            await runtime.schedule("hourly", "0 * * * *", "sequence", [])
            found = {item.name: item for item in await runtime.schedules()}
            assert set(found) == {"nightly", "hourly"} and found["nightly"].catch_up == "skip"
            assert all(item.next_ns > time.time_ns() for item in found.values())
            await runtime.unschedule("hourly")
            with pytest.raises(InputError):
                await runtime.unschedule("hourly")
            with pytest.raises(InputError):
                await runtime.schedule("bad", "not cron", "sequence")
            assert [item.name for item in await runtime.schedules(tenant="default")] == ["nightly"]

        asyncio.run(main())


def test_a_wasm_agent_that_is_cancelled_undoes_what_it_did(store: Path | None, tmp_path: Path) -> None:
    trips = tmp_path / "trips"
    arguments = {"store.kind": "memory"} if store is None else {}
    config = load_config(arguments=arguments)
    with Runtime(store=store, config=config, tools=[trip_book, trip_cancel]) as runtime:
        runtime.register_sync("trip", GUEST.parent / "trip.wasm")
        run = runtime.submit_sync("trip", {"order": str(trips), "parts": ["train", "slow hotel", "car"]})
        while not trips.exists() or "slow hotel" not in trips.read_text():
            time.sleep(0.01)
        run.cancel_sync("changed their mind")
        with pytest.raises(RunCancelledError, match="changed their mind"):
            run.result_sync(30)
        done = trips.read_text().splitlines()
        assert done[:2] == ["book train", "book slow hotel"]
        assert done[2:] == ["cancel slow hotel", "cancel train"]
