"""Leaves and native processes on a real cgroup v2 with every controller: the VM's.

Emulation is slow and its clock stretches: what is asserted are counters, events and ratios on one CPU.
"""

import asyncio
import ctypes
import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from command_kit import begin, launcher_with, run

from agentrt.backends.process import launcher as launcher_module
from agentrt.backends.process.spawn import Plan, spawn
from agentrt.cgroup.files import CgroupError, KernelFiles
from agentrt.cgroup.layout import read_layout
from agentrt.cgroup.leaf import Leaf, LeafLimits
from agentrt.cgroup.tree import Tree

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

prctl = ctypes.CDLL(None).prctl
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
BUSY = "while :; do :; done"


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = Tree(read_layout())
    made.open()
    yield made
    made.close()
    assert ours() == []
    assert Path("/proc/self/cgroup").read_text() == "0::/\n"


def ours() -> list[str]:
    return [path.name for path in CGROUPS.iterdir() if path.name.startswith(("agentrt-", "leaf-", "node"))]


def start(leaf: Leaf, script: str) -> tuple[int, int]:
    """A shell born in the leaf: (pid, pidfd)."""
    group = os.open(leaf.path, os.O_PATH | os.O_DIRECTORY)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        argv = ["/bin/sh", "-c", script]
        plan = Plan(path="/bin/sh", argv=argv, environment={}, fds=[null] * 3, folder="/", cgroup_fd=group)
        return spawn(plan)
    finally:
        os.close(group)
        os.close(null)


def end(tree: Tree, leaf: Leaf, pidfd: int) -> None:
    assert leaf.kill()
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
    until(lambda: tree.remove(leaf))


def until(condition: object, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_controller_is_there_and_the_node_has_a_leaf(tree: Tree) -> None:
    assert tree.controllers == {"cpu", "cpuset", "io", "memory", "pids"}
    assert tree.missing == {}
    assert Path("/proc/self/cgroup").read_text() == f"0::/{tree.group.name}/node\n"
    assert (tree.group / "node/cpu.weight").read_text() == "10000\n"


def test_fault_G63_controllers_cannot_be_enabled_where_a_process_lives(tree: Tree) -> None:
    """What the driver's order avoids is there on this kernel."""
    leaf, _ = tree.make(2, LeafLimits())
    _, pidfd = start(leaf, "sleep 1000")
    with pytest.raises(OSError) as caught:
        (leaf.path / "cgroup.subtree_control").write_text("+memory")
    assert caught.value.errno in (errno.EBUSY, errno.ENOTSUP)
    end(tree, leaf, pidfd)


def test_a_process_is_born_in_its_leaf(tree: Tree) -> None:
    leaf, _ = tree.make(2, LeafLimits())
    pid, pidfd = start(leaf, "sleep 1000")
    assert leaf.processes() == [pid]
    end(tree, leaf, pidfd)


def shared_as(leaves: list[Leaf], expected: float) -> None:
    """Wait until their CPU time has been in this proportion, within a fifth: a busy host gives the VM its time in
    chunks, which even out."""
    before = [leaf.cpu_us() or 0 for leaf in leaves]

    def is_so() -> bool:
        first, second = ((leaf.cpu_us() or 0) - then for leaf, then in zip(leaves, before, strict=True))
        return first + second > 3_000_000 and 0.8 * expected <= first / max(1, second) <= 1.2 * expected

    until(is_so)


def test_weights_of_10_to_1_give_10_to_1(tree: Tree) -> None:
    leaves = [tree.make(tier, LeafLimits(cpus="0"))[0] for tier in (2, 3)]
    assert [leaf.weight for leaf in leaves] == [100, 10]
    pidfds = [start(leaf, BUSY)[1] for leaf in leaves]
    shared_as(leaves, 10)
    tree.change_tier(leaves[1], 1)  # a tier is a weight: the lower one is raised in place, and has the larger part now
    shared_as(leaves, 0.1)
    for leaf, pidfd in zip(leaves, pidfds, strict=True):
        end(tree, leaf, pidfd)


def test_a_disk_is_shared_by_weight(tree: Tree) -> None:
    """Of the iocost policy, with a model of a disk that is slower than what the VM is given."""
    device = Path("/sys/block/vda/dev")
    if not device.exists():
        pytest.skip("the VM has no disk (--disk)")
    number = device.read_text().strip()
    rates = "rbps=20000000 rseqiops=300 rrandiops=300 wbps=20000000 wseqiops=300 wrandiops=300"
    (CGROUPS / "io.cost.qos").write_text(
        f"{number} enable=1 ctrl=user rpct=95 rlat=5000 wpct=95 wlat=5000 min=50 max=150"
    )
    (CGROUPS / "io.cost.model").write_text(f"{number} ctrl=user model=linear {rates}")
    leaves = [tree.make(tier, LeafLimits())[0] for tier in (1, 2)]
    reads = "while :; do dd if=/dev/vda of=/dev/null bs=64k iflag=direct skip={} count=1000 2>/dev/null; done"
    pidfds = [start(leaf, reads.format(1000 * place))[1] for place, leaf in enumerate(leaves)]
    try:
        before = [read_bytes(leaf) for leaf in leaves]

        def is_so() -> bool:
            first, second = (read_bytes(leaf) - then for leaf, then in zip(leaves, before, strict=True))
            return second > 4 * MIB and first / second > 3

        until(is_so)
    finally:
        (CGROUPS / "io.cost.qos").write_text(f"{number} enable=0")
        for leaf, pidfd in zip(leaves, pidfds, strict=True):
            end(tree, leaf, pidfd)


def read_bytes(leaf: Leaf) -> int:
    fields = (leaf.path / "io.stat").read_text().split()
    return sum(int(field.removeprefix("rbytes=")) for field in fields if field.startswith("rbytes="))


def test_limits_hold_as_the_kernel_tells_them(tree: Tree) -> None:
    limits = LeafLimits(
        memory_high_bytes=10 * MIB, memory_max_bytes=12 * MIB, swap_max_bytes=0, pids_max=5, cpu_max_pct=50,
        cpus="1", memory_nodes="1",
    )  # fmt: skip
    leaf, missing = tree.make(2, limits)
    assert missing == {}
    read = {name: (leaf.path / name).read_text().strip() for name in (
        "memory.high", "memory.max", "pids.max", "cpu.max", "cpuset.cpus.effective", "cpuset.mems.effective"
    )}  # fmt: skip
    assert read == {
        "memory.high": str(10 * MIB), "memory.max": str(12 * MIB), "pids.max": "5", "cpu.max": "50000 100000",
        "cpuset.cpus.effective": "1", "cpuset.mems.effective": "1",
    }  # fmt: skip
    with pytest.raises(CgroupError, match="cpuset"):
        tree.make(2, LeafLimits(cpus="4000"))
    assert tree.remove(leaf)


def test_a_process_has_the_bounds_of_the_settings() -> None:
    async def go() -> None:
        settings = {"cpu_pct_max": 50, "pids_max": 7, "memory_high_bytes": 20 * MIB, "memory_max_bytes": 24 * MIB}
        async with launcher_with(**settings) as launcher:
            running = begin(launcher, "sh", "-c", "sleep 1000")
            await running.started.wait()
            leaf = running.process.leaf
            assert leaf is not None
            names = ("cpu.max", "pids.max", "memory.high", "memory.max", "memory.swap.max", "memory.oom.group")
            read = [(leaf.path / name).read_text().strip() for name in names if (leaf.path / name).exists()]
            assert read[:4] == ["50000 100000", "7", str(20 * MIB), str(24 * MIB)]
            assert read[4:] in (["0", "1"], ["1"]), "no swap at all, where it is counted"
            running.process.kill()
            await running.output()

    asyncio.run(go())


#: Reads a line without an end, which it must keep.
EATS = ("sh", "-c", "head -c 200000000 /dev/zero | tail -n 1 | wc -c")


def test_an_oom_kill_ends_one_call_and_tells_its_numbers() -> None:
    async def go() -> None:
        settings = {"memory_high_bytes": 24 * MIB - 4096, "memory_max_bytes": 24 * MIB, "stall_ms": 600_000}
        async with launcher_with(**settings) as launcher:
            assert launcher.refusal is None
            other = begin(launcher, "sh", "-c", "sleep 1000")
            await other.started.wait()
            ended, _ = await run(launcher, *EATS)
            assert ended.status == -9 and not ended.stalled and ended.out_of_memory
            assert ended.memory is not None and ended.memory.oom_kill >= 1
            assert ended.memory.limit_bytes == 24 * MIB
            assert f"memory.max {24 * MIB}" in ended.describe()
            assert not other.ended.done()
            other.process.kill()
            await other.output()

    asyncio.run(go())


def test_fault_G68_memory_high_without_swap_never_livelocks() -> None:
    async def go() -> None:
        settings = {"memory_high_bytes": 16 * MIB, "memory_max_bytes": 900 * MIB, "stall_ms": 2_000}
        async with launcher_with(**settings) as launcher:
            ended, _ = await run(launcher, *EATS)
            assert ended.status == -9 and ended.stalled and ended.out_of_memory
            assert ended.memory is not None and ended.memory.high > 0 and ended.memory.oom_kill == 0
            assert "memory.high" in ended.describe()

    asyncio.run(go())


#: A shell that hears while another process of its leaf stands still.
HANDS_OVER = ("sh", "-c", "trap 'echo 41; exit 75' USR1; (head -c 200000000 /dev/zero | tail -n 1 | wc -c) & wait")


def test_fault_G68_a_state_comes_out_before_the_kill() -> None:
    async def go() -> None:
        settings = {"memory_high_bytes": 16 * MIB, "memory_max_bytes": 900 * MIB, "stall_ms": 2_000}
        async with launcher_with(**settings) as launcher:
            launcher_module._STATE_OUT_S = 60.0  # emulation is slow
            running = begin(launcher, *HANDS_OVER)
            running.process.on_stall = running.process.notice
            ended, text = await running.output()
            assert (ended.status, text) == (75, "41\n") and ended.stalled
            assert ended.memory is not None and ended.memory.high > 0 and ended.memory.oom_kill == 0

    asyncio.run(go())


def test_a_thousand_freezes_and_thaws_lose_no_work(tree: Tree) -> None:
    reader, writer = os.pipe()
    leaf, _ = tree.make(2, LeafLimits())
    group = os.open(leaf.path, os.O_PATH | os.O_DIRECTORY)
    count = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; done"
    argv = ["/bin/sh", "-c", count]
    plan = Plan(path="/bin/sh", argv=argv, environment={}, fds=[0, writer, writer], folder="/", cgroup_fd=group)
    _, pidfd = spawn(plan)
    os.close(writer)
    os.set_blocking(reader, False)
    got = b""
    for _ in range(1000):
        assert leaf.freeze()
        until(leaf.is_frozen)
        assert leaf.thaw()
        try:
            got += os.read(reader, 65536)
        except BlockingIOError:
            continue
    os.set_blocking(reader, True)
    while chunk := os.read(reader, 65536):
        got += chunk
    assert got.split() == [str(number).encode() for number in range(1, 3001)]
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert ended is not None and ended.si_status == 0
    for fd in (reader, pidfd, group):
        os.close(fd)
    until(lambda: tree.remove(leaf))


ORPHANS = "trap '' TERM; (setsid sh -c \"trap '' TERM; sleep 4242\" &); sleep 4242 & echo up; sleep 4242"


def test_500_killed_calls_leave_nothing() -> None:
    """Grandchildren that ignore SIGTERM and call setsid: no process, cgroup, namespace, descriptor or folder stays."""

    async def go() -> None:
        async with launcher_with(processes_max=8) as launcher:
            assert launcher.tree is not None and launcher.means.namespaces
            for batch in range(63):
                running = [begin(launcher, "sh", "-c", ORPHANS, domain=f"d{batch % 3}") for _ in range(8)]
                for each in running:
                    if batch % 2:  # killed at any moment
                        await each.started.wait()
                    each.process.kill()
                for each in running:
                    ended, _ = await each.output()
                    assert ended.status == -9 or ended.error is None
            assert launcher.tree.leaves == {}
            kept = {leaf.path.name for leaf, _ in launcher.tree.ahead.values()}  # made for the next ones
            assert {path.name for path in launcher.tree.group.iterdir() if path.is_dir()} == {"node"} | kept
            assert os.listdir(launcher._mount_point) == []

    before = (sleepers(), namespaces(), len(os.listdir("/proc/self/fd")))
    asyncio.run(go())
    assert (sleepers(), namespaces()) == before[:2]
    assert len(os.listdir("/proc/self/fd")) <= before[2]
    assert ours() == []
    assert list(Path("/tmp").glob(f"agentrt-processes-{os.getpid()}-*")) == []


def sleepers() -> int:
    return sum("4242" in text for text in command_lines())


def command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def namespaces() -> int:
    """Of processes and of networks that some process is in."""
    seen = set()
    for entry in Path("/proc").iterdir():
        for kind in ("pid", "net", "mnt"):
            try:
                seen.add(os.readlink(entry / "ns" / kind))
            except OSError:
                continue
    return len(seen)


async def confined_as_a_user() -> None:
    async with launcher_with() as launcher:
        assert launcher.tree is not None, launcher.no_tree
        assert launcher.refusal is None, launcher.refusal
        _, text = await run(launcher, "sh", "-c", "id -u; echo x > y; cat y; cat /etc/shadow")
        assert text.splitlines()[:2] == ["1000", "x"] and "enied" in text, text


def as_a_user_with_a_group() -> None:
    """In a process of its own: an ordinary user in a group that was delegated to it."""
    layout = read_layout()
    assert layout.usable and not layout.whole, layout
    tree = Tree(layout)
    tree.open()
    assert {"memory", "pids"} <= tree.controllers, (tree.controllers, tree.missing)
    leaf, missing = tree.make(2, LeafLimits(memory_max_bytes=8 * MIB, pids_max=4))
    assert not missing
    pid, pidfd = start(leaf, "sleep 1000")
    assert leaf.processes() == [pid]
    assert leaf.freeze() and leaf.thaw()
    end(tree, leaf, pidfd)
    other, _ = tree.make(2, LeafLimits())
    with pytest.raises(CgroupError, match="denied|permitted"):
        other.enter(1)  # from outside: this one is refused
    tree.close()
    assert layout.group is not None
    assert [path.name for path in layout.group.iterdir() if path.is_dir()] == []
    asyncio.run(confined_as_a_user())


def test_fault_G67_a_delegated_subtree_works_without_root() -> None:
    group = CGROUPS / "delegated"
    group.mkdir()
    for path in (group, group / "cgroup.procs", group / "cgroup.subtree_control", group / "cgroup.threads"):
        os.chown(path, 1000, 1000)
    (CGROUPS / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    reader, writer = os.pipe()
    # Forked, not executed: the interpreter may be where only root can read it.
    pid = os.fork()
    if not pid:
        said = b"ok"
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            os.setgroups([])
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
            prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as after an exec, or its own /proc is not its own
            as_a_user_with_a_group()
        except BaseException:
            said = traceback.format_exc().encode()
        os.write(writer, said[-4000:])
        os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 4000).decode() == "ok"
        os.waitpid(pid, 0)
    finally:
        os.close(reader)
        (group / "cgroup.kill").write_text("1")
        until(Leaf(KernelFiles(), group, frozenset(), 0).remove)
