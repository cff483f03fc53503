"""Python agents in real hosts, under a scripted engine whose slots are always free."""

import asyncio
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from python_kit import CLOCK_NS, SOURCE, Hold, Node, ScriptedRun, double_tool, free_node

from agentrt.backends.base import Request
from agentrt.backends.python.pool import QuarantinedError
from agentrt.backends.python.rank import HostRanks
from agentrt.errors import InputError, ModuleError, QueueFullError

MIB = 1 << 20


def on_node(scenario: Callable[[Node], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Run a scenario on a node of its own."""

    async def run() -> None:
        async with free_node(**limits) as node:
            await asyncio.wait_for(scenario(node), 100)

    asyncio.run(run())


def hold_tools(run: ScriptedRun, request: Request) -> Any:
    raise Hold


# --- what works -----------------------------------------------------------------------------


def test_agents_run_side_by_side_in_one_host() -> None:
    async def scenario(node: Node) -> None:
        lead = {"domain": "x.org", "score": 5}
        runs = [await node.start("qualify", lead, run_id=f"run_{n}") for n in range(20)]
        for n, run in enumerate(runs):
            assert await run.result() == {"domain": "x.org", "sum": 12, "run": f"run_{n}", "tenant": "acme"}
        assert [op for op, _ in runs[0].asked()] == ["tool.call", "tool.call", "timer.sleep"]
        assert runs[0].exit is not None
        assert runs[0].exit.slot_ns > 0
        assert runs[0].exit.fuel > 0
        program = await node.program("qualify")
        assert (program.name, program.tier, program.budget) == ("qualify", 0, {"tool_calls": 20})
        assert node.statistics()["hosts_started"] <= 3

        first, second = [await node.start("own_globals") for _ in range(2)]
        assert (await first.result(), await second.result()) == (1, 1)  # no run sees another's globals

        long = await node.start("steps", 200)
        assert await long.result() == 200 * 199
        printed = await node.start("printer")
        await printed.result()
        assert printed.logs == [
            {"level": "info", "message": "hello 1"},
            {"level": "warning", "message": "careful"},
        ]
        assert ("emit", {"data": {"at": 1}}) in printed.asked()

    on_node(scenario)


def test_clocks_and_randomness_are_the_runs_own() -> None:
    async def scenario(node: Node) -> None:
        first = await (await node.start("computed")).result()
        second = await (await node.start("computed")).result()
        assert first == second
        assert first[0] // 10**9 == CLOCK_NS // 10**9
        assert first[2].startswith("2023-11-14T22:13:20")
        assert first[-2] > first[0]

    on_node(scenario)


def test_tenants_and_tiers_do_not_share_a_host() -> None:
    async def scenario(node: Node) -> None:
        pids = set()
        for tenant, tier in (("a", 1), ("b", 1), ("a", 2)):
            run = await node.start("steps", 1, tenant=tenant, tier=tier, reply=hold_tools)
            await run.until(lambda run=run: bool(run.requests))
            assert run.guest is not None
            assert run.guest.host is not None
            pids.add(run.guest.host.pid)
        assert len(pids) == 3

    on_node(scenario)


def test_input_and_result_are_checked_against_the_hints() -> None:
    async def scenario(node: Node) -> None:
        assert (await (await node.start("qualify", {"score": 1})).failure())["code"] == "input"
        assert (await (await node.start("qualify", {"domain": 1})).failure())["code"] == "input"
        assert (await (await node.start("promised")).failure())["code"] == "result"
        for which in ("object", "nan", "huge", "surrogate"):
            failure = await (await node.start("odd_result", which)).failure()
            assert failure["code"] == "result", which
        failure = await (await node.start("big_result")).failure()
        assert (failure["code"], "4194304" in failure["message"]) == ("result", True)
        assert (await (await node.start("exits")).failure())["message"] == "the agent raised SystemExit"
        assert node.statistics()["hosts_died"] == 0

    on_node(scenario)


def test_a_failed_step_is_raised_and_may_end_the_run() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("steps", 3, reply=hold_tools)
        await run.until(lambda: len(run.requests) == 1)
        run.answer(1, {"code": "tool_timeout", "message": "too slow"}, failed=True)
        failure = await run.failure()
        assert (failure["code"], failure["type"]) == ("tool_timeout", "ToolStepTimeoutError")

    on_node(scenario)


def test_versions_follow_the_code_and_only_the_code(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        here = await node.program("steps")
        copied = tmp_path / SOURCE.name
        shutil.copy(SOURCE, copied)
        assert (await node.program("steps", copied)).version == here.version
        assert (await node.program("spin")).version != here.version
        copied.write_text(SOURCE.read_text() + "\n# more\n")
        changed = await node.backend.prepare(f"{copied}:steps".encode())
        assert changed.version != here.version
        assert changed.pins == here.pins
        assert set(here.pins) == {"python", "hash_seed"}

    on_node(scenario)


def test_what_cannot_be_prepared_says_why(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        bad = tmp_path / "bad.py"
        cases = {
            "raise ValueError('at import')": "at import",
            "import threading; threading.Thread(target=int).start()": "thread",
            "import os; os._exit(0)": "ended its process",
            "def nothing(): ...": "no agent",
            "import socket; socket.socket()": "not permitted",
            "from agentrt.agents import *\n@agent\nasync def entry(ctx: Context, x: 'Missing'): ...": "Missing",
            "from agentrt.agents import *\n@agent\ndef entry(ctx): ...": "async def",
        }
        for text, why in cases.items():
            bad.write_text(text)
            with pytest.raises(ModuleError, match=why):
                await node.backend.prepare(f"{bad}:entry".encode())
        with pytest.raises(InputError):
            await node.backend.prepare(b"nothing")
        with pytest.raises(ModuleError):
            await node.backend.prepare(f"{tmp_path}/none.py:entry".encode())
        assert node.statistics()["hosts"] == 0

    on_node(scenario)


def test_a_module_that_never_ends_importing_is_refused(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        bad = tmp_path / "bad.py"
        bad.write_text("while True: pass")
        with pytest.raises(ModuleError, match="within 1.5 seconds"):
            await node.backend.prepare(f"{bad}:entry".encode())

    on_node(scenario, start_timeout_ns=1_500_000_000)


def test_packages_are_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_agents"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("VALUE = [1]\n")
    (package / "inner" / "part.py").write_text("from . import VALUE\nfrom ..shared import STATE\nVALUE.append(2)\n")
    (package / "shared.py").write_text("STATE = []\n")
    (package / "entry.py").write_text(
        "import some_agents.inner.part as part\n"
        "from some_agents.inner import VALUE\n"
        "from .shared import STATE\n"
        "from agentrt.agents import Context, agent\n"
        "@agent\n"
        "async def entry(ctx: Context) -> list[int]:\n"
        "    STATE.append(1)\n"
        "    return [*VALUE, len(part.STATE)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(node: Node) -> None:
        program = await node.backend.prepare(b"some_agents.entry:entry")
        for _ in range(2):
            run = ScriptedRun()
            run.guest = node.backend.start(
                program,
                run,
                tenant="a",
                tier=1,
                input=b"null",
                fuel=10**12,
                seed=b"0" * 16,
                clock_ns=CLOCK_NS,
                admitted=True,
                replay=False,
            )
            assert await run.result() == [1, 2, 1]
        (package / "shared.py").write_text("STATE = []  # changed\n")
        assert (await node.backend.prepare(b"some_agents.entry:entry")).version != program.version

    on_node(scenario)


# --- replay --------------------------------------------------------------------------------------


def test_a_replayed_run_asks_for_the_same() -> None:
    async def scenario(node: Node) -> None:
        live = await node.start("steps", 50)
        total = await live.result()

        def recorded(run: ScriptedRun, request: Request) -> Any:
            assert request.payload == live.requests[request.handle - 1].payload
            return double_tool(run, request)

        again = await node.start("steps", 50, reply=recorded, replay=True)
        assert await again.result() == total
        assert [waiting for waiting in again.waiting if waiting] == [waiting for waiting in live.waiting if waiting]

    on_node(scenario)


def test_runs_outlive_their_host() -> None:
    async def scenario(node: Node) -> None:
        held: list[ScriptedRun] = []

        def half(run: ScriptedRun, request: Request) -> Any:
            if request.handle == 10:
                held.append(run)
                raise Hold
            return double_tool(run, request)

        runs = [await node.start("steps", 20, reply=half) for _ in range(30)]
        async with asyncio.timeout(30):
            while len(held) < 30:
                await asyncio.sleep(0.005)
        hosts = {run.guest.host for run in runs if run.guest is not None}
        for host in hosts:
            assert host is not None
            host._signal(9)
        for run in runs:
            run.answer(10, 18)
        for run in runs:
            assert await run.result() == 20 * 19
            assert len(run.requests) == 20
        statistics = node.statistics()
        assert statistics["moves"] == 30
        assert statistics["hosts_died"] == len(hosts)
        assert statistics["quarantined"] == 0

    on_node(scenario)


def test_a_run_that_does_something_else_when_brought_back_ends() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("unstable", reply=hold_tools)
        await run.until(lambda: len(run.requests) == 1)
        assert run.guest is not None
        host = run.guest.host
        assert host is not None
        host._signal(9)
        await asyncio.wait_for(_gone(host), 20)
        run.answer(1, 1)
        exit = await run.exited()
        assert exit.reason == "non_determinism"
        assert "request 1" in exit.message

    on_node(scenario)


async def _gone(host: Any) -> None:
    while not host.gone:
        await asyncio.sleep(0.002)


# --- ends from outside --------------------------------------------------------------------------------


def test_kill_ends_a_waiting_run_and_its_host_goes_on() -> None:
    async def scenario(node: Node) -> None:
        other = await node.start("steps", 2, reply=hold_tools)
        await other.until(lambda: len(other.requests) == 1)
        run = await node.start("stubborn")
        await run.until(lambda: len(run.requests) == 1)
        assert run.guest is not None
        run.guest.kill()
        assert run.exit is None  # not from inside the call
        assert (await run.exited()).reason == "killed"
        other.answer(1, 0)
        await other.until(lambda: len(other.requests) == 2)
        other.answer(2, 2)
        assert await other.result() == 2

    on_node(scenario)


def test_unwinding_runs_the_handlers_and_nothing_else() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("tidy", "wait")
        await run.until(lambda: len(run.requests) == 2)
        assert run.guest is not None
        run.guest.unwind("cancelled")
        assert (await run.exited()).reason == "unwound"
        assert run.asked()[2:] == [
            ("emit", {"data": "unwinding"}),
            ("tool.call", {"tool": "double", "args": {"x": 100}}),
        ]
        assert run.abandoned == []  # the engine knows that an unwound program takes no answer

        plain = await node.start("steps", 1, reply=hold_tools)
        await plain.until(lambda: len(plain.requests) == 1)
        assert plain.guest is not None
        plain.guest.unwind("cancelled")
        assert (await plain.exited()).reason == "unwound"

    on_node(scenario)


@pytest.mark.parametrize(
    "on_its_way", ["answer, unwind", "answer, unwind, kill", "unwind, answer", "start, unwind", "start, unwind, kill"]
)
def test_what_is_on_its_way_to_a_run_that_ends_harms_no_neighbour(on_its_way: str) -> None:
    """Its host has the second when the first has ended the run, or the other way round."""

    async def scenario(node: Node) -> None:
        others = [await node.start("steps", 2, reply=hold_tools) for _ in range(3)]
        for each in others:
            await asked_for(each, 1)
        starts = "start" in on_its_way
        run = await node.start("steps", 1, reply=double_tool if starts else hold_tools)
        if not starts:
            await asked_for(run, 1)
        assert run.guest is not None and others[0].guest is not None
        assert run.guest.host is others[0].guest.host is not None
        for what in on_its_way.split(", "):
            if what == "answer":
                run.answer(1, 0)
            elif what == "unwind":
                run.guest.unwind("cancelled")
            elif what == "kill":
                await asyncio.sleep(0)  # the others are sent
                run.guest.kill()
        for each in others:
            each.answer(1, 0)
        reason = "killed" if "kill" in on_its_way else "returned" if on_its_way.startswith("answer") else "unwound"
        assert (await run.exited()).reason == reason
        for each in others:
            await asked_for(each, 2)
            each.answer(2, 2)
        assert [await each.result() for each in others] == [2, 2, 2]
        assert node.statistics()["hosts_died"] == node.statistics()["moves"] == 0

    on_node(scenario, spares=0, runs_per_host_good=10)


async def asked_for(run: ScriptedRun, count: int) -> None:
    await run.until(lambda: len(run.requests) == count)


def test_a_run_that_never_yields_is_unwound_from_where_it_last_waited() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("tidy", "spin")
        assert run.guest is not None
        guest = run.guest
        async with asyncio.timeout(30):
            while guest.demotions == 0:
                await asyncio.sleep(0.002)
        guest.unwind("cancelled")
        assert (await run.exited()).reason == "unwound"
        assert run.asked()[1:] == [
            ("emit", {"data": "unwinding"}),
            ("tool.call", {"tool": "double", "args": {"x": 100}}),
        ]

    on_node(scenario)


# --- bad agents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["leave", "crash"])
def test_an_agent_that_ends_its_process_ends_alone(name: str) -> None:
    async def scenario(node: Node) -> None:
        def late(run: ScriptedRun, request: Request) -> Any:
            if request.handle == 2:
                raise Hold
            return double_tool(run, request)

        others = [await node.start("steps", 5, reply=late) for _ in range(5)]
        for other in others:
            await other.until(lambda other=other: len(other.requests) == 2)
        bad = await node.start(name)
        exit = await bad.exited()
        assert exit.reason == "host_died"
        assert ("status 3" in exit.message) == (name == "leave")
        for other in others:
            other.answer(2, 2)
            assert await other.result() == 20

    on_node(scenario)


@pytest.mark.parametrize("how", ["leave", "leave twice"])
def test_a_run_that_ends_its_host_unwinds_in_another_if_it_is_told_to(how: str) -> None:
    async def scenario(node: Node) -> None:
        other = await node.start("steps", 5, reply=hold_tools)
        await other.until(lambda: len(other.requests) == 1)
        for count in (1, 2, 3):
            bad = await node.start("tidy", how, reply=hold_tools)
            bad.unwinds = True
            await bad.until(lambda bad=bad: len(bad.requests) == 1)
            bad.reply = double_tool
            bad.answer(1, 2)
            exit = await bad.exited()
            assert len(bad.deaths) == 1 and "status 3" in bad.deaths[0]
            if how == "leave":
                assert exit.reason == "unwound"
                assert bad.asked()[1:] == [
                    ("emit", {"data": "unwinding"}),
                    ("tool.call", {"tool": "double", "args": {"x": 100}}),
                ]
            else:
                assert exit.reason == "host_died" and "status 4" in exit.message and len(bad.requests) == 1
            if how == "leave" or count < 2:
                assert node.statistics()["quarantined"] == (count == 3)
        assert other.exit is None
        with pytest.raises(QuarantinedError):  # that it unwound does not make it better
            await node.start("tidy", how)

    on_node(scenario, deaths_max=3 if how == "leave" else 6)


def test_a_run_that_is_told_to_unwind_by_what_ends_its_host_unwinds_all_the_same() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("tidy", "leave late", reply=hold_tools)
        await run.until(lambda: len(run.requests) == 1)
        run.reply = double_tool
        run.answer(1, 2)
        assert run.guest is not None
        run.guest.unwind("cancelled")  # while it is at work with its last answer
        assert (await run.exited()).reason == "unwound"
        assert [op for op, _ in run.asked()[1:]] == ["emit", "tool.call"] and not run.deaths

    on_node(scenario)


def test_a_run_whose_host_others_kill_while_it_works_is_brought_back() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("tidy", "spin")
        waiting = await node.start("steps", 5, reply=hold_tools)
        await waiting.until(lambda: len(waiting.requests) == 1)
        guest = run.guest
        assert guest is not None
        async with asyncio.timeout(60):
            while run.exit is None:
                if guest.host is not None and guest.host.running == guest.number and guest.log:
                    os.kill(guest.host.pid, signal.SIGKILL)  # at work, beside another or in a host of its own
                await asyncio.sleep(0.002)
        assert (await run.exited()).reason == "host_died"
        assert guest.kills == 3
        assert len(run.requests) == 1  # nothing was asked for again
        waiting.answer(1, 0)
        await waiting.until(lambda: len(waiting.requests) == 2)
        assert await (await node.start("steps", 3)).result() == 6

    on_node(scenario, kills_max=2)


def template_pids() -> set[int]:
    """Templates of this process, also those that are still importing."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            ours = int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid()
            if ours and b"agentrt.agents.template" in stat.with_name("cmdline").read_bytes():
                found.add(int(stat.parent.name))
        except OSError:
            continue
    return found


def test_runs_go_on_when_templates_are_killed_one_after_the_other() -> None:
    async def scenario(node: Node) -> None:
        spinning = await node.start("tidy", "spin")
        others = [await node.start("steps", 40) for _ in range(5)]
        await others[0].until(lambda: len(others[0].requests) > 3)
        killed: set[int] = set()
        async with asyncio.timeout(60):
            while len(killed) < 4:  # the first has hosts, the next is killed while it imports, or soon after
                for pid in template_pids() - killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.002)
        for other in others:
            assert await other.result() == 40 * 39
        assert spinning.exit is None

    on_node(scenario)


def test_an_agent_version_that_keeps_ending_its_host_is_quarantined() -> None:
    async def scenario(node: Node) -> None:
        for _ in range(3):
            assert (await (await node.start("leave")).exited()).reason == "host_died"
        with pytest.raises(QuarantinedError):
            await node.start("leave")
        assert await (await node.start("steps", 2)).result() == 2  # another agent of the same bundle
        node.backend.release_quarantine((await node.program("leave")).version)
        assert (await (await node.start("leave")).exited()).reason == "host_died"

    on_node(scenario, deaths_max=3)


@pytest.mark.parametrize("name", ["spin", "catch_all"])
def test_a_hog_gets_a_host_of_its_own_and_the_others_go_on(name: str) -> None:
    async def scenario(node: Node) -> None:
        others = [await node.start("steps", 400) for _ in range(10)]
        hog = await node.start(name)
        for other in others:
            assert await other.result() == 400 * 399
        late = await node.start("steps", 3)
        assert await late.result() == 6
        statistics = node.statistics()
        assert hog.exit is None
        assert hog.guest is not None
        assert statistics["overruns"] >= 1
        assert hog.guest.host is not None
        assert list(hog.guest.host.guests) == [hog.guest.number]
        hog.guest.kill()
        assert (await hog.exited()).reason == "killed"
        host = hog.guest.host
        assert host is None

    on_node(scenario)


def test_code_that_works_too_long_but_ends_goes_on_where_it_was() -> None:
    async def scenario(node: Node) -> None:
        others = [await node.start("steps", 300) for _ in range(5)]
        slow = [await node.start("busy", 60) for _ in range(3)]
        for run in slow:
            assert await run.result() == "done"
        for run in others:
            assert await run.result() == 300 * 299
        assert sum(run.exit.demotions for run in slow if run.exit is not None) >= 3

    on_node(scenario)


def test_who_has_used_its_fuel_unwinds() -> None:
    async def scenario(node: Node) -> None:
        for how in ("spin", "waits"):
            hog = await node.start("tidy", how, fuel=200_000_000 if how == "spin" else 1, reply=hold_tools)
            hog.unwinds = True
            if how == "spin":  # in an activation that does not end, after the answer; else after its first activation
                await hog.until(lambda hog=hog: len(hog.requests) == 1)
                hog.reply = double_tool
                hog.answer(1, 2)
            else:
                hog.reply = double_tool
            exit = await hog.exited()
            assert exit.reason == "unwound" and hog.deaths == ["the run has used its fuel"]
            assert hog.asked()[-2:] == [
                ("emit", {"data": "unwinding"}),
                ("tool.call", {"tool": "double", "args": {"x": 100}}),
            ]

    on_node(scenario)


def test_fuel_bounds_what_never_yields() -> None:
    async def scenario(node: Node) -> None:
        other = await node.start("steps", 3, reply=hold_tools)
        await other.until(lambda: len(other.requests) == 1)
        hog = await node.start("spin", fuel=200_000_000)  # 0.2 s
        exit = await hog.exited()
        assert exit.reason == "fuel"
        assert exit.fuel >= 200_000_000
        other.answer(1, 0)
        await other.until(lambda: len(other.requests) == 2)

    on_node(scenario)


def test_a_c_call_that_never_returns_ends_with_its_host() -> None:
    async def scenario(node: Node) -> None:
        other = await node.start("steps", 30)
        blocked = await node.start("blocks")
        assert await other.result() == 30 * 29
        assert (await blocked.exited()).reason == "host_died"

    on_node(scenario, hang_ns=500_000_000)


def test_memory_is_bounded_and_the_run_that_takes_it_is_charged() -> None:
    async def scenario(node: Node) -> None:
        other = await node.start("steps", 3, reply=hold_tools)
        await other.until(lambda: len(other.requests) == 1)
        hungry = await node.start("memory")
        assert (await hungry.exited()).reason == "memory"
        other.answer(1, 0)
        await other.until(lambda: len(other.requests) == 2)
        assert node.statistics()["hosts_died"] == 0

        # A small one that gets no memory because of a big one that waits: the big one is to blame.
        hoard = await node.start("hoard", 170, reply=hold_tools)
        await hoard.until(lambda: len(hoard.requests) == 1)
        small = await node.start("hoard", 100)
        assert await small.result() == 100 << 20
        assert (await hoard.exited()).reason == "host_died"

    on_node(scenario, memory_bytes_max=256 * MIB, hosts_per_domain_max=1)


def test_what_an_agent_may_not_do_is_refused_with_a_hint() -> None:
    async def scenario(node: Node) -> None:
        for what in ("thread", "socket", "sleep", "write", "fork", "exec", "to_thread"):
            said = await (await node.start("forbidden", what)).result()
            assert said.startswith("NotReplayableError"), (what, said)
            assert "ctx.tool" in said or "asyncio.sleep" in said, said

    on_node(scenario)


def test_hosts_are_confined_by_the_kernel() -> None:
    async def scenario(node: Node) -> None:
        for what in ("socket", "fork", "kill", "ptrace", "prctl", "memfd"):
            assert await (await node.start("forbidden_for_real", what)).result() == errno.EPERM, what
        assert await (await node.start("forbidden_for_real", "passwd")).result() == errno.EACCES
        assert await (await node.start("forbidden_for_real", "write")).result() in (errno.EPERM, errno.EACCES)
        assert await (await node.start("forbidden_for_real", "self")).result() == 0

    on_node(scenario)
    assert not Path("/tmp/agentrt-agent-was-here").exists()


def test_fault_P72_hosts_inherit_nothing_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "x")
    monkeypatch.setenv("SOME_SETTING", "y")

    async def scenario(node: Node) -> None:
        with open(os.devnull) as file:  # noqa: ASYNC230
            os.set_inheritable(file.fileno(), True)
            seen = await (await node.start("environment")).result()
        assert seen["descriptors"] == [0, 1, 2, 3]
        assert seen["nice"] in (HostRanks(19).nice_at(1), 19)  # the first, where its rank is permitted
        assert seen["handlers"] == []
        assert "SOME_SECRET" not in seen["variables"]
        assert seen["variables"]["SOME_SETTING"] == "y"

    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        on_node(scenario, environment=("SOME_SETTING",))
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_templates_and_hosts_die_with_their_node() -> None:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("python_node.py"))], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in child.stdout.readline().split()]
        assert len(pidfds) >= 3  # a template, a host that spins, one that waits
    finally:
        child.kill()
        child.wait()
    for pidfd in pidfds:
        ready, _, _ = select.select([pidfd], [], [], 20)
        assert ready
        os.close(pidfd)


def test_without_confinement_only_the_guard_rails_are_left() -> None:
    async def scenario(node: Node) -> None:
        assert await (await node.start("forbidden_for_real", "socket")).result() == 0
        assert (await (await node.start("forbidden", "socket")).result()).startswith("NotReplayableError")

    on_node(scenario, allow_unsandboxed=True)


@pytest.mark.parametrize("what", ["op", "handle", "time", "reason", "number", "shape"])
def test_what_a_host_forges_ends_the_host_and_nothing_else(what: str) -> None:
    async def scenario(node: Node) -> None:
        forger = await node.start("forges", what)
        exit = await forger.exited()
        assert exit.reason == "host_died"
        assert exit.fuel >= 0
        assert await (await node.start("steps", 5)).result() == 20

    on_node(scenario)


def test_code_that_heeds_the_notice_can_save_itself() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("cooperates")
        await run.until(lambda: len(run.requests) == 2)
        assert run.asked()[1] == ("checkpoint", {"state": "half"})
        assert run.guest is not None
        run.guest.kill()
        assert await (await node.start("cooperates", restored="half")).result() == "from half"

    on_node(scenario)


# --- bounds ----------------------------------------------------------------------------------------------------


def test_guests_are_bounded() -> None:
    async def scenario(node: Node) -> None:
        runs = [await node.start("steps", 1, reply=hold_tools) for _ in range(3)]
        with pytest.raises(QueueFullError):
            await node.start("steps", 1)
        await runs[0].until(lambda: bool(runs[0].requests))
        runs[0].answer(1, 0)
        await runs[0].result()
        await node.start("steps", 1)

    on_node(scenario, guests_max=3)


def test_few_hosts_serve_many_tenants_by_taking_them_from_who_only_waits() -> None:
    async def scenario(node: Node) -> None:
        runs = [await node.start("steps", 3, tenant=f"t{n}", reply=hold_tools) for n in range(8)]
        for handle in (1, 2, 3):
            for run in runs:
                await run.until(lambda run=run, handle=handle: len(run.requests) == handle)
            assert node.statistics()["hosts"] <= 3
            for run in runs:
                run.answer(handle, handle)
        for run in runs:
            assert await run.result() == 6
        assert node.statistics()["moves"] > 0

    on_node(scenario, hosts_max=3)


def test_the_end_of_a_template_is_the_end_of_its_hosts_and_of_no_run() -> None:
    async def scenario(node: Node) -> None:
        runs = [await node.start("steps", 4, reply=hold_tools) for _ in range(3)]
        for run in runs:
            await run.until(lambda run=run: len(run.requests) == 1)
        assert runs[0].guest is not None
        host = runs[0].guest.host
        assert host is not None
        host.template.close()
        await asyncio.wait_for(_gone(host), 20)
        for run in runs:
            run.reply = double_tool
            run.answer(1, 0)
        for run in runs:
            assert await run.result() == 2 + 4 + 6
        assert node.statistics()["quarantined"] == 0

    on_node(scenario)


def test_answers_may_be_big() -> None:
    async def scenario(node: Node) -> None:
        run = await node.start("steps", 1, reply=hold_tools)
        await run.until(lambda: bool(run.requests))
        run.answer(1, {"code": "tool_failed", "message": "y" * (3 * MIB)}, failed=True)
        failure = await run.failure()
        assert failure["code"] == "tool_failed"
        assert len(msgspec.json.encode(failure)) < 20_000

    on_node(scenario)
