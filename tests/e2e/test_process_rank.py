"""How native processes rank where leaves have no share of the CPU."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command_kit import begin, launcher_with
from tool_kit import wait_until

from agentrt.backends.process import launcher as launcher_module
from agentrt.backends.process.rank import (
    NODE_NICE,
    PROCESS_NICE,
    NodeGroup,
    may_rank_sessions,
    rank_session,
    sessions_are_groups,
)

pytestmark = pytest.mark.timeout(120)


def group_nice(pid: int) -> int:
    """Of its session's group, which it has: see `may_rank_sessions`."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])


@pytest.mark.parametrize(("tier", "in_slot", "policy"), [
    (0, False, os.SCHED_OTHER), (1, False, os.SCHED_OTHER), (2, False, os.SCHED_IDLE), (3, False, os.SCHED_IDLE),
    (3, True, os.SCHED_OTHER),
])  # fmt: skip
def test_lower_tiers_give_way_unless_the_core_ranks_them(tier: int, in_slot: bool, policy: int) -> None:
    async def go() -> None:
        async with launcher_with(cgroup="none", allow_unsandboxed=True) as launcher:
            running = begin(launcher, "sh", "-c", "sleep 1000; true", tier=tier, in_slot=in_slot)
            await running.started.wait()
            pid = running.process.pid
            assert os.sched_getscheduler(pid) == policy
            assert os.getpriority(os.PRIO_PROCESS, pid) == launcher.config.nice
            if sessions_are_groups() and may_rank_sessions():
                assert group_nice(pid) == (0 if in_slot else PROCESS_NICE[tier])
                assert group_nice(os.getpid()) != 19, "its own session's group only"
            running.process.kill()
            await running.output()

    asyncio.run(go())


@pytest.mark.skipif(not (sessions_are_groups() and may_rank_sessions()), reason="sessions are no groups here")
def test_a_change_of_tier_ranks_the_session_anew() -> None:
    async def go() -> None:
        async with launcher_with(cgroup="none", allow_unsandboxed=True) as launcher:
            running = begin(launcher, "sh", "-c", "sleep 1000; true", tier=3)
            await running.started.wait()
            pid = running.process.pid
            running.process.change_tier(1)
            await wait_until(lambda: group_nice(pid) == PROCESS_NICE[1], "it is raised")
            running.process.change_tier(3)
            await wait_until(lambda: group_nice(pid) == PROCESS_NICE[3], "it is lowered")
            running.process.kill()
            await running.output()

    asyncio.run(go())


def test_what_cannot_be_ranked_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(groups: bool, may: bool) -> bool:
        monkeypatch.setattr(launcher_module, "sessions_are_groups", lambda: groups)
        monkeypatch.setattr(launcher_module, "may_rank_sessions", lambda: may)
        async with launcher_with(cgroup="none", allow_unsandboxed=True) as launcher:
            return launcher._preemption.outranked

    assert [asyncio.run(go(*case)) for case in ((True, False), (True, True), (False, False))] == [False, True, True]


def test_who_has_gone_or_has_no_group_is_not_ranked(tmp_path: Path) -> None:
    assert not rank_session(2**22 + 1, 2)
    assert not sessions_are_groups(str(tmp_path)) and not may_rank_sessions(str(tmp_path))
    own = tmp_path / "proc/self/autogroup"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert not may_rank_sessions(str(tmp_path))


@pytest.mark.skipif(not (sessions_are_groups() and may_rank_sessions()), reason="sessions are no groups here")
def test_the_node_ranks_above_its_processes_as_long_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "_RAISED_S", 0.0)
    before = group_nice(os.getpid())

    async def go() -> None:
        async with launcher_with(cgroup="none", allow_unsandboxed=True) as launcher:
            assert group_nice(os.getpid()) == before
            running = [begin(launcher, "sh", "-c", "sleep 1000; true", tier=tier) for tier in (1, 2)]
            await wait_until(lambda: group_nice(os.getpid()) == min(before, NODE_NICE), "it is raised")
            for each in running:
                each.process.kill()
                await each.output()
            await wait_until(lambda: group_nice(os.getpid()) == before, "it is as it was")
            last = begin(launcher, "sh", "-c", "sleep 1000; true", tier=3)
            await wait_until(lambda: group_nice(os.getpid()) == min(before, NODE_NICE), "it is raised again")
        await last.output()
        assert group_nice(os.getpid()) == before

    asyncio.run(go())


def test_two_nodes_of_one_process_raise_it_once_and_the_last_one_lowers_it(tmp_path: Path) -> None:
    file = tmp_path / "autogroup"
    file.write_text("/autogroup-17 nice 3\n")
    group = NodeGroup(str(file))
    group.raised()
    group.raised()
    assert file.read_text() == str(NODE_NICE)
    group.lowered()
    assert file.read_text() == str(NODE_NICE)
    group.lowered()
    assert file.read_text() == "3"


def test_who_is_higher_already_or_may_not_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "autogroup"
    file.write_text("/autogroup-17 nice -15\n")
    empty = tmp_path / "empty"  # as that of a machine's first session, which is no group
    empty.write_text("")
    for path in (file, empty, tmp_path / "none", tmp_path):
        group = NodeGroup(str(path))
        group.raised()
        group.lowered()
    assert file.read_text() == "/autogroup-17 nice -15\n" and empty.read_text() == ""
