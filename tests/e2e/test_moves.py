"""Runs move from one node to another while both go on with others."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from python_durable import trip_book

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import InputError, RunExistsError, RunExportedError, StepSettledError
from agentrt.http.sse import describe
from agentrt.records import Exported
from agentrt.states import RunState
from agentrt.stores.base import ACCOUNTS, scan_all
from agentrt.transfer.offline import export_offline
from agentrt.upkeep.verify import verify

GUEST = Path(__file__).parents[2] / "examples" / "guests" / "sequence.wasm"
TOOL, SLEEP, EVENT, APPROVAL, SPAWN, JOIN = 1, 3, 4, 5, 6, 7


@contextmanager
def node(store: Path | None, hot_ms: int = 0) -> Iterator[Runtime]:
    arguments: dict[str, Any] = {"limits.hot_ms": hot_ms}
    if store is None:
        arguments["store.kind"] = "memory"
    config = load_config(arguments=arguments)
    with Runtime(store=store, config=config, tools=[trip_book]) as runtime:
        runtime.register_sync("sequence", GUEST)
        yield runtime


@pytest.fixture(params=["memory to lmdb", "lmdb to memory"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path | None, Path | None]:
    folder = tmp_path / "store"
    return (None, folder) if request.param == "memory to lmdb" else (folder, None)


def until(condition: Callable[[], bool]) -> None:
    over_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < over_s
        time.sleep(0.005)


def waits(runtime: Runtime, run_id: str, reason: str) -> Callable[[], bool]:
    return lambda: runtime.describe_run_sync(run_id).wait_reason == reason


@pytest.mark.parametrize("hot_ms", [0, 60_000], ids=["cold", "hot"])
def test_a_run_that_waits_goes_on_elsewhere(
    stores: tuple[Path | None, Path | None], hot_ms: int, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    with ExitStack() as stack:
        here, there = (stack.enter_context(node(store, hot_ms)) for store in stores)
        steps = [[APPROVAL, {"question": "go?"}], [EVENT, {"topic": "t"}], [SLEEP, {"seconds": 0.05}]]
        run = here.submit_sync("sequence", steps, idempotency_key="k")
        other = here.submit_sync("sequence", steps)
        until(waits(here, run.run_id, "approval"))
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                run.wait_sync(30)
            except BaseException as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert here.export_run_sync(run, file) == [run.run_id]
        waiter.join(30)
        assert [type(error) for error in errors] == [RunExportedError]
        assert here.describe_run_sync(run.run_id).state is RunState.EXPORTED
        with pytest.raises(RunExportedError):
            run.wait_sync(5)
        with pytest.raises(RunExportedError):
            run.cancel_sync()
        with pytest.raises(StepSettledError):
            run.approve_sync()
        with pytest.raises(RunExportedError):
            here.export_run_sync(run, tmp_path / "second")
        assert here.submit_sync("sequence", steps, idempotency_key="k").run_id == run.run_id  # none is started again
        (come,) = there.import_run_sync(file)
        assert come.run_id == run.run_id
        until(waits(there, run.run_id, "approval"))
        with pytest.raises(RunExistsError):
            there.import_run_sync(file)
        come.approve_sync(comment="yes")
        there.send_sync({"n": 1}, topic="t")
        answers = come.result_sync(30)
        assert len(answers) == 3
        other.approve_sync()
        here.send_sync(1, topic="t")
        other.result_sync(30)
    for store in stores:
        if store is not None:
            assert verify(store).sound


@pytest.mark.parametrize("how", ["live", "offline"])
def test_an_exported_run_leaves_no_account_behind_and_what_it_used_stays_counted(tmp_path: Path, how: str) -> None:
    limits = tmp_path / "flow.toml"
    limits.write_text('[base.limits]\n"tenant:*" = {"tool_calls/day" = 5}\n')
    arguments = {"limits.hot_ms": 0, "flow.file": str(limits), "store.path": str(tmp_path / "store")}
    call = [TOOL, {"tool": "trip_book", "args": {"order": str(tmp_path / "order"), "part": "a"}}]

    def rows(runtime: Runtime) -> dict[bytes, int]:
        found = runtime.read_store_sync(lambda store: [key[:1] for key, _ in scan_all(store, ACCOUNTS)])
        return {kind: found.count(kind) for kind in found}

    def used(runtime: Runtime) -> int:
        (view,) = [view for view in asyncio.run(runtime.flow_view()).budgets if view.scope == "tenant"]
        return view.used + view.held

    config = load_config(env={}, arguments=arguments)
    with Runtime(config=config, tools=[trip_book]) as runtime:
        runtime.register_sync("sequence", GUEST)
        child = [call, [EVENT, {"topic": "never"}]]
        steps = [call, [SPAWN, {"agent": "sequence", "input": child}], [EVENT, {"topic": "t"}]]
        run = runtime.submit_sync("sequence", steps, budget={"tool_calls": 3})
        until(lambda: len(runtime.list_runs_sync(state="WAITING")) == 2)
        assert rows(runtime)[b"e"] == 2 and used(runtime) == 2
        if how == "live":
            assert len(runtime.export_run_sync(run, tmp_path / "file")) == 2
            until(lambda: b"e" not in rows(runtime) and b"s" not in rows(runtime))
            assert used(runtime) == 2
    if how == "offline":
        assert len(asyncio.run(export_offline(config.store, [run.run_id], tmp_path / "file", "1"))) == 2
    with Runtime(config=config, tools=[trip_book]) as runtime:
        runtime.register_sync("sequence", GUEST)
        until(lambda: b"e" not in rows(runtime) and b"s" not in rows(runtime))
        assert used(runtime) == 2
        other = runtime.submit_sync("sequence", [call] * 3)
        other.result_sync(30)
        assert used(runtime) == 5
    assert verify(tmp_path / "store").sound


def test_timers_and_children_go_along(stores: tuple[Path | None, Path | None], tmp_path: Path) -> None:
    file = tmp_path / "file"
    with ExitStack() as stack:
        here, there = (stack.enter_context(node(store)) for store in stores)
        child = [[SLEEP, {"seconds": 0.3}]]
        spawn = [[SPAWN, {"agent": "sequence", "input": child}], [SLEEP, {"seconds": 0.4}]]
        run = here.submit_sync("sequence", spawn)
        until(waits(here, run.run_id, "timer"))
        moved = here.export_run_sync(run.run_id, file)
        assert len(moved) == 2
        with pytest.raises(InputError, match="belongs to|was exported"):
            here.export_run_sync(moved[1], tmp_path / "second")
        there.import_run_sync(file)
        there.run(run.run_id).result_sync(30)
        assert there.describe_run_sync(moved[1]).state in (RunState.SUCCEEDED, RunState.CANCELLED)


def test_effects_happen_once_whenever_a_run_leaves(tmp_path: Path) -> None:
    """In the middle of its tool calls, to and fro."""
    order = tmp_path / "order"
    steps = [[TOOL, {"tool": "trip_book", "args": {"order": str(order), "part": f"p{n}"}}] for n in range(40)]
    with node(tmp_path / "a") as one, node(tmp_path / "b") as two:
        run_id = one.submit_sync("sequence", steps).run_id
        places = [one, two]
        moves = 0
        for number in range(6):
            until(lambda: order.exists() and len(order.read_text().splitlines()) > 5 * number)  # noqa: B023
            file = tmp_path / f"file{number}"
            try:
                places[0].export_run_sync(run_id, file)
            except InputError as error:
                assert "has ended" in error.message
                break
            places[1].import_run_sync(file)
            places.reverse()
            moves += 1
        places[0].run(run_id).result_sync(60)
        assert moves > 1
    assert sorted(order.read_text().splitlines()) == sorted(f"book p{n}" for n in range(40))
    assert verify(tmp_path / "a").sound and verify(tmp_path / "b").sound


def test_a_run_that_cannot_leave_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    with node(tmp_path / "store") as runtime:
        run = runtime.submit_sync("sequence", [[APPROVAL, {"question": "go?"}], [SLEEP, {"seconds": 0.01}]])
        sleeper = runtime.submit_sync("sequence", [[SLEEP, {"seconds": 0.5}]])
        until(waits(runtime, run.run_id, "approval"))
        with pytest.raises(InputError, match="exists"):
            runtime.export_run_sync([run, sleeper], file)
        assert file.read_bytes() == b"mine"
        run.approve_sync()
        run.result_sync(30)
        sleeper.result_sync(30)
        with pytest.raises(InputError, match="has ended"):
            runtime.export_run_sync(run, tmp_path / "second")
    assert verify(tmp_path / "store").sound


def test_from_a_loop_and_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "file"

    async def main() -> None:
        async with Runtime(store=tmp_path / "a") as runtime:
            await runtime.register("sequence", GUEST)
            run = await runtime.submit("sequence", [[APPROVAL, {"question": "go?"}]])
            for _ in range(1000):
                if (await run.describe()).wait_reason == "approval":
                    break
                await asyncio.sleep(0.01)
            records: list[Any] = []
            left = asyncio.Event()

            def look(store: Any) -> list[Any]:
                return store.read_records(run.run_id)  # type: ignore[no-any-return]

            stop = await runtime.watch_run(run.run_id, left.set)
            await runtime.export_run([run], file)
            while not records or not isinstance(records[-1], Exported):  # who watches hears of it
                await asyncio.wait_for(left.wait(), 30)
                left.clear()
                records = await runtime.read_store(look)
            stop()
            assert describe(records[-1])[0] == "exported"
        async with Runtime(store=tmp_path / "a") as runtime:
            await runtime.register("sequence", GUEST)
            assert (await run_info(runtime, run.run_id)) is RunState.EXPORTED
            (back,) = await runtime.import_run(file)
            for _ in range(1000):
                if (await back.describe()).wait_reason == "approval":
                    break
                await asyncio.sleep(0.01)
            await back.approve()
            await back.result()

    async def run_info(runtime: Runtime, run_id: str) -> RunState:
        return (await runtime.describe_run(run_id)).state

    asyncio.run(main())


def test_what_a_run_has_used_of_its_budget_goes_along(tmp_path: Path) -> None:
    """And counts once: for the tenant where it was used, for the run wherever it is."""
    limits = tmp_path / "flow.toml"
    limits.write_text('[base.limits]\n"tenant:*" = {"tool_calls/day" = 100, "fuel/day" = 1000000000000000}\n')

    def call(part: str) -> list[Any]:
        return [TOOL, {"tool": "trip_book", "args": {"order": str(tmp_path / "order"), "part": part}}]

    def used(runtime: Runtime, limit: str) -> tuple[int, int]:
        views = asyncio.run(runtime.flow_view()).budgets
        found = [view for view in views if view.scope == "tenant" and view.key.startswith(limit)]
        return (found[0].used, found[0].held) if found else (0, 0)  # nothing of the tenant is in memory

    with ExitStack() as stack:
        here, there = (
            stack.enter_context(
                Runtime(
                    config=load_config(
                        env={},
                        arguments={"limits.hot_ms": 0, "flow.file": str(limits), "store.path": str(tmp_path / name)},
                    ),
                    tools=[trip_book],
                )
            )
            for name in ("here", "there")
        )
        for runtime in (here, there):
            runtime.register_sync("sequence", GUEST)
        child = [call("child"), [EVENT, {"topic": "child"}], call("child again"), call("too many")]
        ended = [call("ended")]
        steps = [
            call("a"),
            [SPAWN, {"agent": "sequence", "input": ended}],
            [SPAWN, {"agent": "sequence", "input": child, "detached": True}],
            [EVENT, {"topic": "t"}],
            call("b"),
        ]
        run = here.submit_sync("sequence", steps, budget={"tool_calls": 5})
        until(lambda: len(here.list_runs_sync(state="WAITING")) == 2)
        until(lambda: len(here.list_runs_sync(state="SUCCEEDED")) == 1)
        assert used(here, "tool_calls") == (3, 0)
        held = used(here, "fuel")[1]
        assert held > 0
        file = tmp_path / "file"
        (run_id, *_) = here.export_run_sync(run, file)
        until(lambda: used(here, "fuel")[1] == 0)
        assert used(here, "tool_calls") == (3, 0)
        there.import_run_sync(file)
        until(lambda: len(there.list_runs_sync(state="WAITING")) == 2)
        until(lambda: used(there, "fuel")[1] == held)
        assert used(there, "tool_calls") == (0, 0)
        there.send_sync(1, topic="t")
        there.run(run_id).result_sync(30)  # the fourth call
        there.send_sync(1, topic="child")
        until(lambda: len(there.list_runs_sync(state="BUDGET_EXHAUSTED")) == 1)  # the fifth, and one too many
        assert used(there, "tool_calls") == (2, 0) and used(here, "tool_calls") == (3, 0)
        assert used(there, "fuel")[1] == 0
        assert not [
            key for key, _ in there.read_store_sync(lambda store: scan_all(store, ACCOUNTS)) if key[:1] in b"es"
        ]
    assert len((tmp_path / "order").read_text().splitlines()) == 5
    assert verify(tmp_path / "here").sound and verify(tmp_path / "there").sound
