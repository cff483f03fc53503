"""Planners through the embedding API: what is left, many children at once, limits from a file, profiles."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import python_planners as planners

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import BudgetExhaustedError, ConfigError, InputError, RunError
from agentrt.flow.profilefile import read_profiles

PAGE = Path(__file__).parents[2] / "docs" / "durable-runs.md"
PAGES = list(range(12))


@contextmanager
def node(folder: Path, limits: str = "", **settings: Any) -> Iterator[Runtime]:
    file = folder / "limits.toml"
    file.write_text(limits)
    config = load_config(arguments={"flow.file": str(file)} | settings)
    with Runtime(store=folder / "store", config=config, tools=[planners.look]) as runtime:
        for agent in (planners.read, planners.plan, planners.watch, planners.deep):
            runtime.register_sync(agent)
        yield runtime


def test_what_happens_when_the_queue_is_full(tmp_path: Path) -> None:
    with node(tmp_path, "[base.ensemble]\nqueued_max = 3\nlive_max = 2\n") as runtime:
        assert plan_of(runtime, "consolidate")["results"][-1][-1] == 11
        deferred = plan_of(runtime, "defer")
        done = [page for pages in deferred["results"] for page in pages]
        left = [page for pages in deferred["deferred"] for page in pages]
        assert len(done) >= 3 and left and sorted(done + left) == PAGES
        assert plan_of(runtime, "refuse")["refused"] >= 3
        assert plan_of(runtime, "block")["results"] == [[page] for page in PAGES]
    with node(tmp_path, "[base.ensemble]\nqueued_max = 3\nlive_max = 1\n") as runtime:
        # The planner is all that may live, and waits for a place that only its children could make.
        assert plan_of(runtime, "consolidate") == {"refused": 3}


def plan_of(runtime: Runtime, when_full: str) -> dict[str, Any]:
    result: dict[str, Any] = runtime.submit_sync("plan", {"pages": PAGES, "when_full": when_full}).result_sync(60)
    return result


def test_what_is_left_and_what_ends_it(tmp_path: Path) -> None:
    with node(tmp_path) as runtime:
        run = runtime.submit_sync("watch", budget={"tool_calls": 5, "tokens": 90, "depth": 2})
        assert run.result_sync(30) == [5, 4, 90, 2, 4, "tool_calls"]
        assert runtime.submit_sync("deep", budget={"depth": 0}).result_sync(30) == "limit_reached"
        with pytest.raises(RunError, match="when_full is no 'sometimes'"):
            runtime.submit_sync("plan", {"pages": [1], "when_full": "sometimes"}).result_sync(30)
        spender = runtime.submit_sync("read", [1, 2, 3], budget={"tool_calls": 2})
        with pytest.raises(BudgetExhaustedError) as caught:
            spender.result_sync(30)
        assert caught.value.limit == "tool_calls"


def test_limits_of_a_file_park_runs_and_a_profile_lets_them_go_on(tmp_path: Path) -> None:
    limits = """
        [base.limits]
        "tenant:acme" = {"tool_calls/month" = 2}
        [profiles.more.limits]
        "tenant:*" = {"tool_calls/month" = 1}
        "tenant:acme" = {"tool_calls/month" = 9}
    """
    with node(tmp_path, limits, **{"limits.hot_ms": 0}) as runtime:
        seen = threading.Event()
        runtime.observe(lambda event, data: seen.set() if event == "decision" else None)
        run = runtime.submit_sync("read", [1, 2, 3, 4], tenant="acme")
        assert seen.wait(30)
        change = runtime.apply_profile_sync("more", by="ann", reason="a busy month")
        assert (change.profile, change.by) == ("more", "ann")
        assert run.result_sync(30) == [1, 2, 3, 4]
    with node(tmp_path, limits) as runtime:
        assert runtime.submit_sync("read", [1, 2, 3], tenant="acme").result_sync(30) == [1, 2, 3]
        assert runtime.roll_back_profile_sync().profile == "more"
        with pytest.raises(InputError, match="is not applied"):
            runtime.roll_back_profile_sync()
        runtime.apply_profile_sync({"name": "own", "limits": {"tenant:acme": {"tool_calls/month": 8}}})
        assert runtime.submit_sync("read", [1], tenant="acme").result_sync(30) == [1]


def test_a_file_of_limits_that_cannot_be_read_is_refused_at_start(tmp_path: Path) -> None:
    for text, wrong in (("[base]\nlimit = 1", "there is no 'limit'"), ("[", "is not TOML")):
        with pytest.raises(ConfigError, match=wrong), node(tmp_path, text):
            pass
    config = load_config(arguments={"flow.file": str(tmp_path / "none.toml"), "store.kind": "memory"})
    with pytest.raises(ConfigError, match="cannot be read"), Runtime(config=config):
        pass


def test_the_file_and_the_planner_of_the_manual_are_right() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (file,) = re.findall(r"```toml\n(\[base\.limits\].*?)```", page, re.DOTALL)
    assert read_profiles(file, "manual").profiles["night"].limits == {"tenant:*": {"tokens/hour": 10_000_000}}
    (program,) = re.findall(r"```python\n(from agentrt.agents import Context, Task, agent.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    task = names["Task"]
    assert names["together"]([task("read", [1]), task("read", [2, 3])]) == task("read", [1, 2, 3])
