"""How hosts of Python agents rank for the kernel: by the tier they work at, a hog's below its neighbours'."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from python_kit import Node
from test_python_backend_slots import MS, hogging, on_core

from agentrt.backends.process.rank import GROUP_NICE, NODE_NICE, may_rank_sessions, sessions_are_groups
from agentrt.backends.python import rank as rank_module
from agentrt.backends.python.rank import SLICE_NS, HostRanks
from agentrt.backends.slices import ask_for_slice, slice_of
from agentrt.cgroup.hosts import HostLeaf

NICE = 19
GROUPS = sessions_are_groups() and may_rank_sessions()


def kernel_slices() -> bool:
    """Whether the kernel lets threads ask for them."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return ask_for_slice(child.pid, 5_000_000) and slice_of(child.pid) == 5_000_000


SLICES = kernel_slices()


def may_lower() -> bool:
    """Whether niceness may be taken back here."""
    code = "import os; os.nice(5); os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


async def ranks_at(pid: int, tier: int) -> None:
    """The process comes to rank at this tier, by whatever ranks here."""

    def seen() -> bool:
        if GROUPS:
            return Path(f"/proc/{pid}/autogroup").read_text().split()[-1] == str(GROUP_NICE[tier])
        return os.getpriority(os.PRIO_PROCESS, pid) == HostRanks(NICE).nice_at(tier)

    async with asyncio.timeout(20):
        while not seen():
            await asyncio.sleep(0.005)
    if SLICES:
        assert slice_of(pid) == (SLICE_NS[tier] or slice_of(os.getpid()))


needs_ranks = pytest.mark.skipif(not (GROUPS or may_lower()), reason="niceness cannot be taken back here")


def test_each_tier_is_nicer_than_the_one_above_and_none_outranks_the_node() -> None:
    assert [HostRanks(19).nice_at(tier) for tier in range(4)] == [10, 13, 16, 19]
    assert [HostRanks(4).nice_at(tier) for tier in range(4)] == [0, 0, 1, 4]


def test_a_slice_is_asked_for_with_all_else_as_it_was() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.setpriority(os.PRIO_PROCESS, child.pid, 7)
        own = slice_of(child.pid)
        assert ask_for_slice(child.pid, 20_000_000)
        assert slice_of(child.pid) == (20_000_000 if SLICES else own)
        assert ask_for_slice(child.pid, 0) and slice_of(child.pid) == own
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 7
        os.sched_setscheduler(child.pid, os.SCHED_BATCH, os.sched_param(0))
        assert not ask_for_slice(child.pid, 20_000_000), "it is of another policy, and stays that"
        assert os.sched_getscheduler(child.pid) == os.SCHED_BATCH
    assert not ask_for_slice(child.pid, 20_000_000) and slice_of(child.pid) == 0


def test_the_lower_the_tier_the_longer_the_slice() -> None:
    """Who wakes up with a shorter one does not wait; tier 0 has the kernel's, which is 2.8 ms at most; a tick is 4."""
    assert SLICE_NS[0] == 0 and 2_800_000 < SLICE_NS[1] < SLICE_NS[2] < SLICE_NS[3] <= 4_000_000


@needs_ranks
def test_a_host_ranks_by_its_tier_and_a_hogs_below_until_it_is_over() -> None:
    async def scenario(node: Node, core: Any) -> None:
        others = [await node.start("steps", 300, tier=1) for _ in range(5)]
        hog = await node.start("catch_all", tier=1)
        for run in others:
            assert await run.result() == 300 * 299
        late = await node.start("steps", 10, tier=1)
        assert await late.result() == 90
        assert hog.guest is not None and hog.guest.host is not None
        host = hog.guest.host
        assert host.exiled
        await ranks_at(host.pid, 2)
        pool = node.backend._pool
        assert pool is not None
        for other in pool._hosts - {host}:
            if other.domain is not None:
                await ranks_at(other.pid, 1)
        urgent = await node.start("steps", 300, tier=0)
        assert await urgent.result() == 300 * 299
        (above,) = [each for each in pool._hosts if each.domain is not None and each.domain[2] == 0]
        await ranks_at(above.pid, 0)
        hog.guest.kill()
        await hog.exited()

    on_core(scenario, core={"quantum_ns": (50 * MS, 200 * MS, 500 * MS, 1000 * MS)})


@needs_ranks
def test_a_host_that_is_lent_a_tier_ranks_there_and_back() -> None:
    async def scenario(node: Node, core: Any) -> None:
        hog = await hogging(node, 2)
        assert hog.guest is not None and hog.guest.host is not None
        pid = hog.guest.host.pid
        await ranks_at(pid, 2)
        hog.guest.lend(0)
        await ranks_at(pid, 0)
        hog.guest.lend(None)
        await ranks_at(pid, 2)
        hog.guest.kill()
        await hog.exited()

    on_core(scenario)


@pytest.mark.skipif(not GROUPS, reason="the node's session is not to be raised here")
@pytest.mark.parametrize("ends", ["itself", "killed", "with its host"])
def test_the_nodes_own_session_ranks_above_while_there_is_a_hog(ends: str) -> None:
    def rank() -> int:
        return int(Path("/proc/self/autogroup").read_text().split()[-1])

    before = rank()

    async def scenario(node: Node, core: Any) -> None:
        hog = await (node.start("busy", 2000) if ends == "itself" else node.start("spin"))
        async with asyncio.timeout(30):
            while hog.guest is None or hog.guest.host is None or hog.guest.host.own is None:
                await asyncio.sleep(0.001)
        assert rank() == min(before, NODE_NICE)
        if ends == "killed":
            hog.guest.kill()
        elif ends == "with its host":
            os.kill(hog.guest.host.pid, signal.SIGKILL)
        if ends != "with its host":
            await hog.exited()
        async with asyncio.timeout(30):
            while rank() != before:
                await asyncio.sleep(0.001)
        if ends == "with its host":
            hog.guest.kill()
            await hog.exited()

    on_core(scenario)
    assert rank() == before


@needs_ranks
def test_a_rank_that_the_kernel_does_not_take_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unprivileged may rank sessions ten times a second."""
    real, refused = HostRanks.rank, 0

    def busy(self: HostRanks, pid: int, leaf: HostLeaf | None, tier: int) -> bool:
        nonlocal refused
        refused += 1
        return refused > 3 and real(self, pid, leaf, tier)

    monkeypatch.setattr(rank_module.HostRanks, "rank", busy)

    async def scenario(node: Node, core: Any) -> None:
        hog = await hogging(node, 2)
        assert hog.guest is not None and hog.guest.host is not None
        await ranks_at(hog.guest.host.pid, 2)
        hog.guest.kill()
        await hog.exited()

    on_core(scenario)
    assert refused > 3
