"""What the control plane keeps of Python agents' answers is bounded; a run that exceeds it outlives its host too."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import wiring_fixture as fixture
from python_kit import Hold, Node, Request, ScriptedRun, double_tool, free_node

from agentrt import Runtime
from agentrt.config import load_config

LIMIT = 4_000


def kept(run: ScriptedRun) -> int:
    assert run.guest is not None
    return sum(len(entry.payload) for entry in run.guest.log)


def hold_at(place: int) -> Any:
    def reply(run: ScriptedRun, request: Request) -> Any:
        if request.handle == place:
            raise Hold
        return double_tool(run, request)

    return reply


async def lose_host(node: Node, run: ScriptedRun) -> None:
    assert run.guest is not None and run.guest.host is not None
    host = run.guest.host
    host._signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        while not host.gone:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("place", [5, 60, 400])
def test_answers_are_kept_up_to_the_bound_and_a_lost_host_costs_a_replay_past_it(place: int) -> None:
    async def scenario() -> None:
        async with free_node(answers_bytes_max=LIMIT) as node:
            run = await node.start("steps", 500, reply=hold_at(place))
            other = await node.start("steps", 3, reply=hold_at(3))
            await run.until(lambda: len(run.requests) == place)
            await other.until(lambda: len(other.requests) == 3)
            assert run.guest is not None
            assert kept(run) + 200 * len(run.guest.log) <= LIMIT + 200
            await lose_host(node, run)
            run.answer(place, 0)
            other.answer(3, 4)
            assert await other.result() == 6  # its log is short: it is brought back as ever
            if place == 5:
                assert await run.result() == 500 * 499 - 8
                assert node.statistics()["evictions"] == 0
                return
            exit = await run.exited()
            assert (exit.reason, len(run.requests)) == ("evicted", place)
            assert node.statistics()["evictions"] == 1
            assert node.statistics()["guests"] == 0

    asyncio.run(scenario())


def test_an_evicted_guest_may_be_killed_first() -> None:
    async def scenario() -> None:
        async with free_node(answers_bytes_max=0) as node:
            run = await node.start("steps", 500, reply=hold_at(60))
            await run.until(lambda: len(run.requests) == 60)
            await lose_host(node, run)
            run.answer(60, 0)
            assert run.guest is not None
            run.guest.kill()
            assert (await run.exited()).reason == "killed"
            await asyncio.sleep(0)  # a second end would fail the kit's assertion

    asyncio.run(scenario())


@pytest.mark.parametrize("bound", [0, 1 << 20])
def test_runs_go_on_wherever_their_hosts_are_killed(bound: int, tmp_path: Path) -> None:
    """Through the runtime, with steps in flight, waits and unwinding; each effect once."""
    settings = {"store.path": tmp_path / "store", "python.answers_bytes_max": bound, "limits.hot_ms": 60_000}
    settings["wasm.guests_max"] = 50
    with Runtime(config=load_config(env={}, arguments=settings), tools=[fixture.put, fixture.where]) as runtime:
        runtime.register_sync(fixture.walker)
        files = [tmp_path / f"file{number}" for number in range(12)]
        runs = [runtime.submit_sync("walker", {"file": str(file), "steps": 30}) for file in files]
        cancelled = runtime.submit_sync("walker", {"file": str(tmp_path / "cancelled"), "steps": 10**6})
        seen = 0
        for _ in range(12):
            seen = wait_for_lines(files, seen + 15)
            kill_hosts(runtime)
        cancelled.cancel_sync()
        assert cancelled.wait_sync(60).state == "CANCELLED"
        assert (tmp_path / "cancelled").read_text().splitlines()[-1] == "undone"
        for run, file in zip(runs, files, strict=True):
            assert run.result_sync(60) == 30
            assert file.read_text().splitlines() == [str(n) for n in range(30)]
        statistics = runtime.statistics_sync().backends["python"]
        assert (statistics["evictions"] > 0) is (bound == 0)


def wait_for_lines(files: list[Path], lines: int) -> int:
    for _ in range(6000):
        found = sum(len(file.read_text().splitlines()) for file in files if file.exists())
        if found >= min(lines, 30 * len(files)):
            return found
        os.sched_yield()
        asyncio.run(asyncio.sleep(0.005))
    raise AssertionError(f"{found} of {lines} lines")


def kill_hosts(runtime: Runtime) -> None:
    """Those that execute nothing just now: whoever is executing is blamed for the end of its host."""

    def kill(done: Any) -> None:
        pool = runtime._backends["python"]._pool  # type: ignore[attr-defined]
        for host in tuple(pool._hosts):
            if host.domain is not None and not host.busy and not host.ending:
                os.kill(host.pid, signal.SIGKILL)
        done(None, None)

    runtime._control.ask_sync(kill)
