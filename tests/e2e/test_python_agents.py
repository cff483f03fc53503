"""Python agents through the embedding API: steps, waits, children, locks, restarts, bad behaviour."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import python_durable as agents

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import (
    BudgetExhaustedError,
    HostDiedError,
    InputError,
    RunCancelledError,
    RunError,
    StepSettledError,
)
from agentrt.states import RunState

ALL = (
    agents.qualify,
    agents.family,
    agents.one,
    agents.careful,
    agents.counting,
    agents.impatient,
    agents.broken,
    agents.spender,
)


@contextmanager
def node(store: Path | None, hot_ms: int = 1_000) -> Iterator[Runtime]:
    arguments: dict[str, Any] = {"limits.hot_ms": hot_ms}
    if store is None:
        arguments["store.kind"] = "memory"
    tools = [agents.note, agents.double, agents.boom]
    with Runtime(store=store, config=load_config(arguments=arguments), tools=tools) as runtime:
        for agent in ALL:
            runtime.register_sync(agent)
        yield runtime


def approved(runtime: Runtime, run_id: str) -> None:
    for _ in range(2000):
        try:
            runtime.run(run_id).approve_sync(by="ann")
            return
        except StepSettledError:
            time.sleep(0.01)
    raise AssertionError("it never asks")


def waiting(runtime: Runtime, run_id: str, reason: str) -> None:
    for _ in range(2000):
        info = runtime.describe_run_sync(run_id)
        if info.wait_reason == reason and info.state is RunState.WAITING:
            return
        time.sleep(0.01)
    raise AssertionError(f"it waits for {info.wait_reason}, {info.state}")


def notes(file: Path) -> list[str]:
    return [json.loads(line)[1] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("hot_ms", [0, 60_000])
def test_an_agent_steps_waits_and_ends(tmp_path: Path, hot_ms: int) -> None:
    with node(tmp_path / "store", hot_ms) as runtime:
        file = tmp_path / "notes"
        run = runtime.submit_sync("qualify", {"lead": {"name": "hooli", "size": 4}, "file": str(file)})
        approved(runtime, run.run_id)
        runtime.send_sync("good", topic="news", key="hooli")
        assert run.result_sync(30) == {
            "first": 5,
            "second": 8,
            "failed": "tool_failed",
            "approved": True,
            "by": "ann",
            "news": "good",
        }
        assert notes(file) == ["hooli", "sent"]


def test_an_agent_goes_on_after_restarts(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    with node(tmp_path / "store") as runtime:
        run_id = runtime.submit_sync("qualify", {"lead": {"name": "x", "size": 1}, "file": str(file)}).run_id
        waiting(runtime, run_id, "approval")
    with node(tmp_path / "store") as runtime:
        approved(runtime, run_id)
        waiting(runtime, run_id, "event")
    with node(tmp_path / "store") as runtime:
        runtime.send_sync(1, topic="news", key="x")
        assert runtime.run(run_id).result_sync(30)["news"] == 1
    assert notes(file) == ["x", "sent"]


def test_children_locks_emits_and_segments(tmp_path: Path) -> None:
    with node(tmp_path / "store") as runtime:
        emitted: list[Any] = []
        runtime.observe(lambda event, data: emitted.append(data.data) if event == "emitted" else None)
        assert runtime.submit_sync("family", [1, 2, 3]).result_sync(30) == [2, 4, 6]
        assert sorted(emitted) == [b'{"n":1}', b'{"n":2}', b'{"n":3}']
        assert runtime.submit_sync("counting", 3).result_sync(30) == [0, 1, 2]
        assert runtime.submit_sync("impatient").result_sync(30) == "gave up"


def test_a_cancelled_agent_unwinds(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    with node(tmp_path / "store", 0) as runtime:
        run = runtime.submit_sync("careful", str(file))
        waiting(runtime, run.run_id, "event")
        run.cancel_sync("enough")
        with pytest.raises(RunCancelledError, match="enough"):
            run.result_sync(30)
        assert notes(file) == ["done", "undone"]


def test_bad_agents_fail_alone_and_say_why() -> None:
    with node(None) as runtime:
        for how, kind, text in (
            ("raise", RunError, "lost"),
            ("exit", HostDiedError, "host"),
            ("nan", RunError, "result"),
            ("type", RunError, "result"),
        ):
            with pytest.raises(kind, match=text):
                runtime.submit_sync("broken", how).result_sync(30)
        assert runtime.submit_sync("broken", "fine").result_sync(30) == "fine"
        with pytest.raises(RunError, match="input|Expected"):
            runtime.submit_sync("spender", "many").result_sync(30)
        with pytest.raises(BudgetExhaustedError, match="3 tool calls"):
            runtime.submit_sync("spender", 10, budget={"tool_calls": 3}).result_sync(30)
        assert runtime.submit_sync("spender", 10).result_sync(30) == 90
        with pytest.raises(InputError):
            runtime.register_sync(test_bad_agents_fail_alone_and_say_why)


def test_many_agents_at_once() -> None:
    with node(None) as runtime:

        async def main() -> list[Any]:
            runs = await runtime.submit_many("spender", [10] * 200)
            assert not any(isinstance(run, BaseException) for run in runs)
            results = await runtime.wait_many(runs)  # type: ignore[arg-type]
            return [result.value() for result in results]

        assert asyncio.run(main()) == [90] * 200
