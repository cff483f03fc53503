"""Native processes stopped for urgent work: nothing is lost, time-outs wait, what is discarded begins again."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

import command_agents
from command_kit import begin, launcher_with
from tool_kit import Node, node, wait_until

from agentrt import Runtime
from agentrt.backends.process.process import Process
from agentrt.backends.process.settings import ProcessConfig
from agentrt.config import load_config
from agentrt.demo.agents import GUESTS
from agentrt.tools.commands import command_tool

pytestmark = pytest.mark.timeout(120)

COUNT = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo $i; done"
GROUPS = ["auto", "none"]


def states(process: Process) -> set[str]:
    """Of the processes of its session, as the kernel tells."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if fields[3] == str(process.pid):
            found.add(fields[0])
    return found


def stands_still(process: Process) -> bool:
    if process.leaf is not None and process.leaf.is_frozen():
        return True
    found = states(process)
    return "T" in found and found <= {"T", "D"}  # D: it waits for a child that has not executed yet, and stands still


@pytest.mark.parametrize("group", GROUPS)
def test_freezing_again_and_again_loses_no_work(group: str) -> None:
    async def go() -> None:
        async with launcher_with(cgroup=group, allow_unsandboxed=True) as launcher:
            running = begin(launcher, "sh", "-c", COUNT)
            collected = asyncio.create_task(asyncio.to_thread(read_all, running._reader))
            await running.started.wait()
            cycles = 0
            while not running.ended.done():
                running.process.freeze()
                if cycles % 10 == 0:
                    await wait_until(lambda: stands_still(running.process) or running.ended.done(), "it stands still")
                running.process.thaw()
                cycles += 1
                await asyncio.sleep(0)
            ended = await running.ended
            os.close(running._writer)
            assert ended.status == 0
            assert (await collected).split() == [str(number) for number in range(1, 20001)]
            os.close(running._reader)

    uvloop.run(go())


def read_all(fd: int) -> str:
    chunks = []
    while chunk := os.read(fd, 65536):
        chunks.append(chunk)
    return b"".join(chunks).decode()


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_frozen_can_be_killed(group: str) -> None:
    async def go() -> None:
        async with launcher_with(cgroup=group, allow_unsandboxed=True) as launcher:
            running = begin(launcher, "sh", "-c", "sleep 1000 & sleep 1000")
            running.process.freeze()  # before it runs: it is stopped once it does
            await wait_until(lambda: running.process.pid != 0 and stands_still(running.process), "it stands still")
            running.process.kill()
            assert (await running.ended).status == -9

    uvloop.run(go())


SPECS = [
    command_tool("work", ["sh", "-c", "sleep 0.3; echo done $AGENTRT_ATTEMPT"], kind="pure", output="text"),
    command_tool("online", ["sh", "-c", "sleep 0.3; echo done"], kind="pure", output="text", network=True),
    command_tool("again", ["sh", "-c", "sleep 0.3; echo done $AGENTRT_ATTEMPT"], kind="keyed", output="text",
                 preempt="discard"),
    command_tool("short", ["sh", "-c", "sleep 0.2; echo done"], kind="pure", output="text", timeout=1),
]  # fmt: skip


def commands(test: Any, group: str = "auto") -> None:
    process = ProcessConfig(allow_unsandboxed=True, cgroup=group)
    node(test, specs=SPECS, made_with={"process": process, "tier0_share_pct": 100}, spares=0, template="exec")


async def running(node: Node) -> Process:
    """The process of the only call, once it runs."""
    pool = node.pool._commands._pools["code"]
    await wait_until(lambda: any(call.began_ns for call in pool.running), "it runs")
    (call,) = pool.running
    assert call.process is not None
    return call.process


@pytest.mark.parametrize("group", GROUPS)
def test_urgent_work_stops_lower_tiers_until_it_is_done(group: str) -> None:
    async def test(node: Node) -> None:
        wanted = True
        future = node.begin("work", text="", tier=2)
        process = await running(node)
        node.pool.urgent(lambda: wanted)
        await wait_until(lambda: stands_still(process), "it stands still")
        late = node.begin("work", text="", tier=1)  # comes while there is no room: starts, and is stopped
        urgent = node.begin("work", text="", tier=0)
        assert (await urgent).ok
        assert not future.done() and not late.done()
        wanted = False
        assert msgspec.json.decode((await future).payload) == msgspec.json.decode((await late).payload) == "done 1\n"
        assert node.pool.statistics().processes["preemptions"] == 2

    commands(test, group)


def test_those_with_network_are_not_stopped_at_once() -> None:
    async def test(node: Node) -> None:
        future = node.begin("online", text="", tier=3)
        process = await running(node)
        node.pool.urgent(lambda: True)
        assert not process.preempted
        await wait_until(lambda: process.preempted or future.done(), "weights have had their second")
        assert process.preempted or future.done()

    commands(test)


def test_a_time_out_does_not_count_while_it_is_stopped() -> None:
    async def test(node: Node) -> None:
        wanted = True
        future = node.begin("short", text="", tier=2)
        await running(node)
        node.pool.urgent(lambda: wanted)
        await asyncio.sleep(1.2)  # more than its time-out: what is asserted is that it did not count
        assert not future.done()
        wanted = False
        assert (await future).ok

    commands(test)


def test_what_is_discarded_is_killed_and_begins_again_as_the_same_attempt() -> None:
    async def test(node: Node) -> None:
        wanted = True
        future = node.begin("again", text="", tier=2)
        first = await running(node)
        node.pool.urgent(lambda: wanted)
        await wait_until(lambda: first.ended, "it is gone")
        assert not future.done()
        wanted = False
        outcome = await future
        assert msgspec.json.decode(outcome.payload) == "done 1\n"
        assert node.pool.statistics().processes["started"] >= 2
        assert node.pool.statistics().queued == 0

    commands(test)


def test_a_run_of_tier_0_makes_room_for_itself(tmp_path: Path) -> None:
    async def run() -> None:
        config = load_config(
            env={}, arguments={"process.allow_unsandboxed": True, "store.path": str(tmp_path), "limits.hot_ms": 60_000}
        )
        tools = [command_agents.count_lines]
        async with Runtime(config=config, tools=tools) as runtime:
            await runtime.register(command_agents.counts_lines)
            await runtime.register("hog", GUESTS / "hog.wasm")
            slow = await runtime.submit("counts_lines", 0.5, tier=2)
            pool = runtime._tools
            await wait_until(lambda: pool.statistics().processes.get("running", 0) == 1, "the command runs")  # type: ignore[attr-defined]
            urgent = await runtime.submit("hog", {"order": "x", "rounds": 10**12}, tier=0)
            await wait_until(lambda: pool.statistics().processes["preemptions"] > 0, "it is stopped")  # type: ignore[attr-defined]
            await urgent.cancel()
            assert await slow.result() == {"lines": 3}

    asyncio.run(run())
