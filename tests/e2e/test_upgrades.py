"""Upgrades of agents through the embedding API: wasm modules that are kept, Python bundles that change, real stores."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import NonDeterminismError, UpgradeError
from agentrt.records import StepCommitted, Upgraded
from agentrt.states import RunState

SEQUENCE = (Path(__file__).parents[2] / "examples" / "guests" / "sequence.wasm").read_bytes()
PARALLEL = (Path(__file__).parents[2] / "examples" / "guests" / "parallel.wasm").read_bytes()
EVENT, CHECKPOINT = 4, 11
PLAN = [[EVENT, {"topic": "t"}], [EVENT, {"topic": "u"}]]


def other(number: int) -> bytes:
    """The same code as another version: with a custom section."""
    content = b"\x01v" + bytes([number])
    return SEQUENCE + b"\0" + bytes([len(content)]) + content


@contextmanager
def node(store: Path, hot_ms: int = 60_000) -> Iterator[Runtime]:
    with Runtime(store=store, config=load_config(arguments={"limits.hot_ms": hot_ms})) as runtime:
        yield runtime


def until(runtime: Runtime, run_id: str, reason: str) -> str:
    for _ in range(3000):
        info = runtime.describe_run_sync(run_id)
        if info.wait_reason == reason:
            return info.detail or ""
        time.sleep(0.005)
    raise AssertionError(f"it waits for {info}")


def upgrades(runtime: Runtime, run_id: str) -> list[dict[str, str]]:
    return [record.pins for record in runtime._store.read_records(run_id) if isinstance(record, Upgraded)]


@pytest.mark.parametrize("hot_ms", [0, 60_000])
def test_a_wasm_run_goes_on_with_its_kept_module_after_the_new_one_is_registered_and_a_restart(
    tmp_path: Path, hot_ms: int
) -> None:
    store = tmp_path / "store"
    with node(store, hot_ms) as runtime:
        one = runtime.register_sync("sequence", other(1))
        run = runtime.submit_sync("sequence", PLAN)
        until(runtime, run.run_id, "event")
        two = runtime.register_sync("sequence", other(2))
        assert one.version != two.version
        runtime.send_sync(1, topic="t")
    with node(store, hot_ms) as runtime:
        runtime.register_sync("sequence", other(2))
        runtime.send_sync(2, topic="u")
        run = runtime.run(run.run_id)
        assert run.wait_sync(30).state is RunState.SUCCEEDED
        info = run.describe_sync()
        assert info.agent_version == one.version and upgrades(runtime, run.run_id) == []
        assert sorted(runtime._modules.versions()) == sorted([one.version, two.version])


def test_a_run_whose_kept_module_is_damaged_waits_and_says_what_to_do(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with node(store) as runtime:
        one = runtime.register_sync("sequence", other(1))
        run = runtime.submit_sync("sequence", PLAN)
        until(runtime, run.run_id, "event")
    path = store / "modules" / one.version
    path.write_bytes(path.read_bytes()[:-7])
    with node(store) as runtime:
        runtime.register_sync("sequence", other(2))
        assert one.version in until(runtime, run.run_id, "operator")
        runtime.register_sync("sequence", other(1))
        runtime.send_sync(1, topic="t")
        runtime.send_sync(2, topic="u")
        assert runtime.run(run.run_id).wait_sync(30).state is RunState.SUCCEEDED


@pytest.mark.parametrize("policy", ["continue", "fail", "diverges"])
def test_wasm_runs_continue_fail_or_diverge(tmp_path: Path, policy: str) -> None:
    store = tmp_path / "store"
    with node(store) as runtime:
        runtime.register_sync("sequence", other(1))
        run = runtime.submit_sync("sequence", PLAN)
        until(runtime, run.run_id, "event")
        runtime.send_sync(1, topic="t")
    with node(store) as runtime:
        module = PARALLEL if policy == "diverges" else other(2)
        new = runtime.register_sync("sequence", module, on_upgrade="fail" if policy == "fail" else "continue")
        assert new.on_upgrade in ("fail", "continue")
        runtime.send_sync(2, topic="u")
        run = runtime.run(run.run_id)
        if policy == "continue":
            assert run.wait_sync(30).state is RunState.SUCCEEDED
            assert run.describe_sync().agent_version == new.version
            assert upgrades(runtime, run.run_id) == [{"agent": new.version}]
        else:
            error: Any = UpgradeError if policy == "fail" else NonDeterminismError
            with pytest.raises(error) as caught:
                run.result_sync(30)
            assert policy == "fail" or caught.value.step


AGENT = """
from agentrt import Context, agent, tool

@tool(kind="pure")
def {module}_move(state: dict, from_version: str) -> dict:
    if state.get("stuck"):
        raise ValueError("no way from " + from_version)
    return {{"count": state["count"], "moved": True}}

@agent({how})
async def counter(ctx: Context, stuck: bool) -> dict:
    state = ctx.restored or {{"count": 0, "stuck": stuck}}
    await ctx.event("go")
    state["count"] += {step}
    if state["count"] >= 3 * {step}:
        return state
    await ctx.checkpoint(state)
"""


class Bundle:
    """A module on disk, in the version that a test writes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.name = folder / f"{name}.py", name

    def write(self, step: int, how: str = "") -> Any:
        import importlib

        self.path.write_text(AGENT.format(module=self.name, step=step, how=how))
        importlib.invalidate_caches()
        sys.modules.pop(self.name, None)
        return importlib.import_module(self.name)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bundle:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Bundle(tmp_path, f"upgraded_{abs(hash(request.node.name)) % 10**8}")


def go(runtime: Runtime, run_id: str) -> None:
    """Let it go past its next wait."""
    until(runtime, run_id, "event")
    before = taken(runtime, run_id)
    runtime.send_sync(None, topic="go")
    for _ in range(3000):
        if taken(runtime, run_id) > before:
            return
        time.sleep(0.005)
    raise AssertionError("it does not get its event")


def taken(runtime: Runtime, run_id: str) -> int:
    records = runtime._store.read_records(run_id)
    return sum(isinstance(record, StepCommitted) and record.op == "event.wait" for record in records)


def test_a_python_run_migrates_at_its_next_checkpoint(tmp_path: Path, bundle: Bundle) -> None:
    with node(tmp_path / "store") as runtime:
        runtime.register_sync(bundle.write(1).counter)
        run = runtime.submit_sync("counter", False)
        until(runtime, run.run_id, "event")
        moved = f'on_upgrade="migrate", migrate={bundle.name}_move'
        new = runtime.register_sync(bundle.write(10, moved).counter)
        for _ in range(4):  # at first the old code, which adds 1
            go(runtime, run.run_id)
        assert run.result_sync(30) == {"count": 31, "moved": True}
        assert run.describe_sync().agent_version == new.version
        assert upgrades(runtime, run.run_id) == [{"agent": new.version}]


def test_fault_D17_a_python_run_whose_migration_fails_goes_on_as_it_was(tmp_path: Path, bundle: Bundle) -> None:
    events: list[Any] = []
    with node(tmp_path / "store") as runtime:
        runtime.observe(lambda event, data: events.append(data) if event == "migration_failed" else None)
        runtime.register_sync(bundle.write(1).counter)
        run = runtime.submit_sync("counter", True)
        until(runtime, run.run_id, "event")
        runtime.register_sync(bundle.write(10, f'on_upgrade="migrate", migrate={bundle.name}_move').counter)
        for _ in range(3):
            go(runtime, run.run_id)
        assert run.result_sync(30) == {"count": 3, "stuck": True}
        assert upgrades(runtime, run.run_id) == []
        assert b"no way from" in events[0].error


def test_a_python_run_whose_bundle_is_gone_waits_and_continues_when_told(tmp_path: Path, bundle: Bundle) -> None:
    store = tmp_path / "store"
    with node(store) as runtime:
        old = runtime.register_sync(bundle.write(1).counter)
        run = runtime.submit_sync("counter", False)
        go(runtime, run.run_id)
        until(runtime, run.run_id, "event")
    with node(store) as runtime:
        changed = bundle.write(2).counter
        runtime.register_sync(changed)
        detail = until(runtime, run.run_id, "operator")
        assert old.version in detail and "continue" in detail
        new = runtime.register_sync(changed, on_upgrade="continue")
        for _ in range(3):
            go(runtime, run.run_id)
        assert runtime.run(run.run_id).result_sync(30)["count"] == 7
        assert upgrades(runtime, run.run_id) == [{"agent": new.version}]
