"""Many overruns in a row: each stops a host in the middle of an activation and lets it go on later. Nothing of that may
stay: not in what runs compute, not in the hosts, not in the node."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from python_kit import Node, ScriptedRun, core_node
from test_python_backend_slots import core_fixture

from agentrt import _core
from agentrt.backends.python.host import HostLink

STEPS = 25
OTHERS = 4
HOGS = 3
WORK_MS = 9  # of CPU time, in one activation of 5 ms


def descriptors(pid: int | str) -> list[str]:
    return sorted(os.listdir(f"/proc/{pid}/fd"), key=int)


def anonymous_kb(pid: int | str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def threads(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


async def company(node: Node, tenant: str) -> None:
    """Hogs that end after all, and others beside them: all compute what they would alone, and ask for it once."""
    others = [await node.start("steps", STEPS, tenant=tenant) for _ in range(OTHERS)]
    hogs = [await node.start("busy", WORK_MS, tenant=tenant) for _ in range(HOGS)]
    for run in others:
        assert await run.result() == STEPS * (STEPS - 1)
        assert [asked["args"]["x"] for _, asked in run.asked()] == list(range(STEPS))
    for run in hogs:
        assert await run.result() == "done"
        assert [asked["args"]["x"] for _, asked in run.asked()] == [1, 2]


async def endless(node: Node, tenant: str) -> None:
    """One that never ends, and is ended."""
    hog = await node.start("spin", tenant=tenant)
    other = await node.start("steps", STEPS, tenant=tenant)
    assert await other.result() == STEPS * (STEPS - 1)
    assert hog.guest is not None
    hog.guest.kill()
    assert (await hog.exited()).reason == "killed"


async def settled(node: Node) -> set[HostLink]:
    """The hosts that are left, once none is at work, starting or stopped."""
    pool = node.backend._pool
    assert pool is not None
    async with asyncio.timeout(60):
        while any(host.busy or host._lease is not None or not host.ready for host in pool._hosts) or any(
            bundle.starting for bundle in pool._bundles.values()
        ):
            await asyncio.sleep(0.005)
    return set(pool._hosts)


async def check_hosts(node: Node, hosts: set[HostLink]) -> None:
    for host in hosts:
        assert not host.guests and host.own is None and not host.exiled and not host.left_behind
        assert descriptors(host.pid) == ["0", "1", "2", "3"]
        assert threads(host.pid) == 1
    # every one of them still runs agents as a new one does
    runs: list[ScriptedRun] = []
    for tenant in {host.domain[0] for host in hosts if host.domain is not None}:
        runs += [await node.start("steps", STEPS, tenant=tenant) for _ in range(4 * OTHERS)]
    for run in runs:
        assert await run.result() == STEPS * (STEPS - 1)


async def overrun(node: Node, times: int, each: Callable[[], None]) -> None:
    """At least ``times`` overruns more."""
    target = node.statistics()["overruns"] + times
    number = 0
    while node.statistics()["overruns"] < target:
        number += 1
        await company(node, f"t{number % 2}")
        if number % 5 == 0:
            await endless(node, f"t{number % 2}")
        each()


async def storm(node: Node, warm: int, times: int) -> None:
    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda loop, context: raised.append(context))
    hosts_most = 0

    def look() -> None:
        nonlocal hosts_most
        hosts_most = max(hosts_most, node.statistics()["hosts"])

    await overrun(node, warm, look)
    hosts = await settled(node)
    await check_hosts(node, hosts)
    hosts = await settled(node)
    before = len(descriptors("self")) - 3 * len(hosts), anonymous_kb("self"), threads("self")
    host_kb = max(anonymous_kb(host.pid) for host in hosts)
    await overrun(node, times, look)
    hosts = await settled(node)
    await check_hosts(node, hosts)
    hosts = await settled(node)
    after = len(descriptors("self")) - 3 * len(hosts), anonymous_kb("self"), threads("self")
    assert after[0] == before[0], "descriptors (a socket, a pidfd and a page of each host not counted)"
    assert after[1] - before[1] < 4096, f"{(after[1] - before[1]) * 1024 / times} bytes an overrun"
    assert after[2] == before[2]
    assert max(anonymous_kb(host.pid) for host in hosts) < host_kb + 4096
    assert hosts_most <= 12
    assert raised == []
    statistics = node.statistics()
    assert statistics["guests"] == statistics["waiting"] == statistics["hosts_died"] == 0
    assert statistics["exiles"] > times // 4  # hosts were stopped, not only noticed
    assert node.core is not None
    assert node.core.statistics()["queued"] == [0, 0, 0, 0]


def run(warm: int, times: int, timeout_s: float) -> None:
    async def main() -> None:
        core = _core.Core(**core_fixture.core_arguments(workers=2))
        async with core_node(core, hosts_max=12, hosts_per_domain_max=2) as node:
            await asyncio.wait_for(storm(node, warm, times), timeout_s)

    asyncio.run(main())


def test_some_overruns_leave_nothing_behind() -> None:
    run(20, 40, 100)


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_1000_overruns_leave_no_corrupted_host() -> None:
    run(200, 1000, 880)
