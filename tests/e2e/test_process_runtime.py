"""Agents as programs in a whole runtime: registered, run, upgraded, cancelled, preempted, and brought back."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from process_kit import IMPORTS, python
from runtime_tools import double

from agentrt import Command, Run, RunState, Runtime, load_config
from agentrt.errors import ConfigError, InputError
from agentrt.node.sources import load_sources
from agentrt.records import Checkpoint, Ending, StepCommitted


@contextmanager
def node(store: Path, **settings: Any) -> Iterator[Runtime]:
    arguments = {"limits.hot_ms": 60_000, "programs.confined": False} | settings
    with Runtime(store=store, config=load_config(arguments=arguments), tools=[double]) as runtime:
        yield runtime


def until(runtime: Runtime, run_id: str, reason: str) -> str:
    for _ in range(6000):
        info = runtime.describe_run_sync(run_id)
        if info.wait_reason == reason:
            return info.detail or ""
        time.sleep(0.005)
    raise AssertionError(f"it waits for {info}")


def resume(run: Run) -> None:
    for _ in range(2000):
        try:
            asyncio.run(run.resume())
            return
        except InputError:  # it is about to wait for an operator
            time.sleep(0.005)
    raise AssertionError("it does not wait for an operator")


def children_of_this(name_part: bytes = b"process_agents.py") -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            parent = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[1]
        except OSError:
            continue
        if name_part in command and int(parent) == os.getpid():
            found.append(int(name))
    return found


def script(path: Path, body: str) -> Command:
    """A program of its own, at that path."""
    path.write_text(f"from agentrt.process_client import serve\n{body}\nserve(agent)\n")
    return Command((sys.executable, str(path)), environment=(IMPORTS,))


def test_a_run_of_a_program_is_like_any_other(tmp_path: Path) -> None:
    with node(tmp_path / "store") as runtime:
        info = runtime.register_sync("double", python("double"), tier="urgent", budget={"tool_calls": 3})
        assert (info.backend, info.tier) == ("process", 0)
        run = runtime.submit_sync("double", 21)
        assert run.result_sync(60) == 42
        records = runtime._store.read_records(run.run_id)
        assert records[0].pins["process_abi"] == "1" and records[0].pins["agent"] == info.version
        failed = runtime.submit_sync("double", "no number").wait_sync(60)
        assert failed.state is RunState.FAILED and b"StepFailed" in (failed.error or b"")
        with pytest.raises(ConfigError):
            runtime.register_sync("wrong", python("double"), backend="no_such")


def test_a_killed_process_goes_on_where_it_was(tmp_path: Path) -> None:
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("waits", script(tmp_path / "process_agents.py", WAITS))
        run = runtime.submit_sync("waits", 1)
        killed: set[int] = set()
        for turn in range(3):
            until(runtime, run.run_id, "event")
            while not (others := set(children_of_this()) - killed):
                time.sleep(0.005)
            (pid,) = others
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            runtime.send_sync(turn, topic="t")
        assert run.result_sync(60) == [0, 1, 2]
        steps = [each.path for each in runtime._store.read_records(run.run_id) if isinstance(each, StepCommitted)]
        assert steps == ["1:1", "1:2", "1:3", "1:4"], "no step was made twice"


WAITS = """
def agent(ctx, input):
    ctx.tool("double", x=input)
    return [ctx.event(topic="t")["data"] for _ in range(3)]
"""


def test_a_program_that_does_something_else_when_it_is_brought_back_is_found_out(tmp_path: Path) -> None:
    body = """
import os
def agent(ctx, input):
    ctx.tool("double", x=os.getpid())
    ctx.event(topic="t")
"""
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("other", script(tmp_path / "process_agents.py", body))
        run = runtime.submit_sync("other")
        until(runtime, run.run_id, "event")
        (pid,) = children_of_this()
        os.kill(pid, signal.SIGKILL)
        result = run.wait_sync(60)
        assert result.state is RunState.FAILED and b"non_determinism" in (result.error or b"")


def test_a_restart_brings_it_back_and_a_new_program_goes_on_if_it_may(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    with node(tmp_path / "store") as runtime:
        old = runtime.register_sync("waits", script(path, WAITS))
        runs = [runtime.submit_sync("waits", 1) for _ in range(2)]
        for run in runs:
            until(runtime, run.run_id, "event")
    for on_upgrade in ("pin", "continue"):
        with node(tmp_path / "store") as runtime:
            changed = script(path, WAITS + "\n# changed")
            assert runtime.register_sync("waits", changed, on_upgrade=on_upgrade).version != old.version
            if on_upgrade == "pin":
                for number in range(2):  # one that was kept as waiting is looked at when there is something for it
                    runtime.send_sync(number, topic="t")
            for run in runs:
                until(runtime, run.run_id, "operator" if on_upgrade == "pin" else "event")
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("waits", changed, on_upgrade="continue")
        for number in range(2, 6):
            runtime.send_sync(number, topic="t")
        results = [runtime.run(run.run_id).result_sync(60) for run in runs]
        assert sorted(number for result in results for number in result) == list(range(6))


def test_a_run_whose_program_has_changed_waits_for_an_operator(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    with node(tmp_path / "store") as runtime:
        command = script(path, WAITS)
        runtime.register_sync("waits", command)
        kept, stamp = path.read_bytes(), path.stat()
        path.write_text("raise SystemExit(1)")
        run = runtime.submit_sync("waits", 1)
        detail = until(runtime, run.run_id, "operator")
        assert str(path) in detail and "register the agent again" in detail
        path.write_bytes(kept)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        resume(run)
        for number in range(3):
            runtime.send_sync(number, topic="t")
        assert run.result_sync(60) == [0, 1, 2]


def test_a_cancelled_program_unwinds(tmp_path: Path) -> None:
    body = """
def agent(ctx, input):
    ctx.on_unwind(lambda: ctx.tool("double", x=input))
    ctx.event(key="never")
"""
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("undoes", script(tmp_path / "agent.py", body))
        run = runtime.submit_sync("undoes", 3)
        until(runtime, run.run_id, "event")
        run.cancel_sync()
        assert run.wait_sync(60).state is RunState.CANCELLED
        records = runtime._store.read_records(run.run_id)
        (ending,) = [record.seq for record in records if isinstance(record, Ending)]
        assert [record.ok for record in records if isinstance(record, StepCommitted) and record.seq > ending] == [True]


def test_urgent_work_gets_a_snapshot_out_of_a_long_computation(tmp_path: Path) -> None:
    settings = {"scheduler.workers": 1, "programs.notice_ms": 10_000}
    with node(tmp_path / "store", **settings) as runtime:
        runtime.register_sync("counts", python("counts", preempt="snapshot"), tier=2)
        runtime.register_sync("double", python("double"), tier=0)
        long = runtime.submit_sync("counts", 3_000)
        while not children_of_this() or runtime.describe_run_sync(long.run_id).state is not RunState.ACTIVE:
            time.sleep(0.01)
        records: list[Any] = []
        while not any(isinstance(record, Checkpoint) for record in records):
            assert runtime.submit_sync("double", 4).result_sync(60) == 8
            records = runtime._store.read_records(long.run_id)
        assert long.result_sync(100) == [6_000, True]


def test_a_node_loads_programs_from_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    script(path, WAITS)
    table = {"command": [sys.executable, str(path)], "preempt": "discard", "tier": 2, "environment": [IMPORTS]}
    found = load_sources(load_config(arguments={"node.agents": {"waits": table}}))
    (agent,) = found.agents
    assert (agent.name, agent.backend, agent.tier) == ("waits", "process", 2)
    with node(tmp_path / "store") as runtime:
        runtime.register_sync(agent.name, agent.module.encode(), backend=agent.backend, tier=agent.tier)
    with pytest.raises(ConfigError, match="both"):
        load_sources(load_config(arguments={"node.agents": {"waits": table | {"source": "x:y"}}}))
