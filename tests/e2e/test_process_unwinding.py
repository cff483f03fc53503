"""Programs that cannot go on: their handlers run all the same, as things were when they waited last."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_process_runtime import children_of_this, script, until

from agentrt import RunState, Runtime, load_config, tool
from agentrt.engine.info import RunResult
from agentrt.records import Ending, StepAborted, StepCommitted, StepPrepared


@tool(kind="keyed", timeout=10)
def note(x: int) -> int:
    """What is noted is in the journal."""
    return x


@contextmanager
def node(store: Path, **settings: Any) -> Iterator[Runtime]:
    arguments = {"limits.hot_ms": 60_000, "programs.confined": False} | settings
    with Runtime(store=store, config=load_config(arguments=arguments), tools=[note]) as runtime:
        yield runtime


#: A number that says whose step it is: 1, 2, … the program's, 100, 101, … its handlers', in the order set.
BODY = """
import os, signal, time


def agent(ctx, input):
    for number in (100, 101):
        ctx.on_unwind(lambda number=number: ctx.tool("note", x=number))
    ctx.tool("note", x=1)
    ctx.on_unwind(lambda: ctx.tool("note", x=102))
    ctx.tool("note", x=2)
    ctx.on_unwind(lambda: ctx.tool("note", x=103))  # set, and lost with what followed the last wait
    handles = [ctx.submit("tool.call", {"tool": "note", "args": {"x": x}}) for x in range(3, 3 + input["asks"])]
    ctx._flush()
    if input["how"] == "waits":
        ctx.event(key="never")
    if input["how"] == "dies" or (input["how"] == "dies once" and not os.path.exists(input["mark"])):
        open(input["mark"], "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        pass
"""


def done(runtime: Runtime, run_id: str) -> tuple[list[int], list[int], list[Ending]]:
    """What its program has had done, what its handlers have, and how it was told to end."""
    records = runtime._store.read_records(run_id)
    endings = [record for record in records if isinstance(record, Ending)]
    results = [
        msgspec.json.decode(record.result)
        for record in records
        if isinstance(record, StepCommitted) and record.op == "tool.call" and record.ok and record.result
    ]
    return sorted(x for x in results if x < 100), [x for x in results if x >= 100], endings


def never_begun(runtime: Runtime, run_id: str) -> list[int]:
    """What was to be done, and the run's end came before it was durable that it is."""
    records = runtime._store.read_records(run_id)
    aborted = {record.path for record in records if isinstance(record, StepAborted)}
    asked = [record for record in records if isinstance(record, StepPrepared) and record.path in aborted]
    return [msgspec.json.decode(record.request)["args"]["x"] for record in asked]


def code_of(result: RunResult) -> Any:
    return msgspec.json.decode(result.error or b"{}").get("code")


@pytest.mark.parametrize("asks", [0, 2])
@pytest.mark.parametrize("how", ["dies", "dies once", "spins"])
def test_who_cannot_go_on_unwinds_from_where_it_waited_last(how: str, asks: int, tmp_path: Path) -> None:
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("ends", script(tmp_path / "agent.py", BODY))
        fuel = 10**9 if how == "spins" else 10**12  # a second of CPU time
        input = {"how": how, "asks": asks, "mark": str(tmp_path / "mark")}
        run = runtime.submit_sync("ends", input, fuel=fuel)
        result = run.wait_sync(60)
        if how == "spins":
            assert (result.state, code_of(result)) == (RunState.BUDGET_EXHAUSTED, "budget_exhausted")
            assert result.cost.fuel >= fuel  # and not only what its unwinding took
        else:
            assert (result.state, code_of(result)) == (RunState.FAILED, "trap")
        program, handlers, endings = done(runtime, run.run_id)
        given_up = never_begun(runtime, run.run_id)
        assert sorted(program + given_up) == [1, 2, *range(3, 3 + asks)] and handlers == [102, 101, 100]
        assert not set(given_up) & {1, 2} and not (given_up and how == "spins")
        assert [(ending.answers, ending.steps) for ending in endings] == [(1, 2 + asks)]


def test_who_never_comes_to_its_unwinding_is_brought_back_for_it(tmp_path: Path) -> None:
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("ends", script(tmp_path / "agent.py", BODY))
        run = runtime.submit_sync("ends", {"how": "spins", "asks": 1})
        while done(runtime, run.run_id)[0] != [1, 2, 3]:
            time.sleep(0.005)
        run.cancel_sync()
        assert run.wait_sync(60).state is RunState.CANCELLED
        program, handlers, endings = done(runtime, run.run_id)
        assert program == [1, 2, 3] and handlers == [102, 101, 100]
        assert [ending.answers for ending in endings] == [-1, 1]  # told to end, and then where


def test_who_is_killed_too_often_unwinds_where_it_waited(tmp_path: Path) -> None:
    with node(tmp_path / "store", **{"programs.kills_max": 1}) as runtime:
        runtime.register_sync("ends", script(tmp_path / "agent.py", BODY))
        run = runtime.submit_sync("ends", {"how": "waits", "asks": 0})
        until(runtime, run.run_id, "event")
        killed: set[int] = set()
        while len(killed) < 2:
            for pid in [pid for pid in programs(tmp_path) if pid not in killed]:
                until(runtime, run.run_id, "event")
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.005)
        result = run.wait_sync(60)
        assert (result.state, code_of(result)) == (RunState.FAILED, "host_died")
        # It waited for its event: the handler that it had set before that counts.
        assert done(runtime, run.run_id)[1] == [103, 102, 101, 100]


def test_who_is_killed_while_it_unwinds_goes_on_with_that(tmp_path: Path) -> None:
    body = """
import os


def undo(ctx):
    ctx.tool("note", x=101)
    if not os.path.exists(ctx.input):
        open(ctx.input, "w").close()
        os.kill(os.getpid(), 9)  # as if from outside
    ctx.tool("note", x=102)


def agent(ctx, input):
    ctx.on_unwind(lambda: ctx.tool("note", x=103))
    ctx.on_unwind(lambda: undo(ctx))
    ctx.tool("note", x=1)
    ctx.event(key="never")
"""
    with node(tmp_path / "store") as runtime:
        runtime.register_sync("undoes", script(tmp_path / "agent.py", body))
        run = runtime.submit_sync("undoes", str(tmp_path / "mark"))
        until(runtime, run.run_id, "event")
        run.cancel_sync()
        assert run.wait_sync(60).state is RunState.CANCELLED
        assert done(runtime, run.run_id)[:2] == ([1], [101, 102, 103])
        assert (tmp_path / "mark").exists()


def programs(folder: Path) -> list[int]:
    """Processes of the script there."""
    found = []
    for pid in children_of_this(b"agent.py"):
        try:
            if str(folder).encode() in Path("/proc", str(pid), "cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
