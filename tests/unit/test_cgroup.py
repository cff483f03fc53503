"""The cgroup driver on a kernel in memory that can be made to misbehave; on real ones: tests/kernel/test_cgroup.py."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.cgroup import shared
from agentrt.cgroup.files import CgroupError, counters
from agentrt.cgroup.layout import read_layout
from agentrt.cgroup.leaf import Leaf, LeafLimits
from agentrt.cgroup.pressure import MemorySample, StallWatch
from agentrt.cgroup.tree import Tree, started
from agentrt.cgroup.weights import TIER_WEIGHTS, weights
from tests.unit.cgroup_kit import NODE_PID, ROOT, FakeKernel

MIB = 1 << 20


def opened(kernel: FakeKernel) -> Tree:
    tree = Tree(kernel.layout(), files=kernel, pid=NODE_PID)
    tree.open()
    return tree


# --- taking the group ---------------------------------------------------------------


def test_fault_G63_the_node_moves_aside_before_controllers_are_enabled() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    assert kernel.group_of(NODE_PID) == ROOT / "node"
    assert kernel.groups[ROOT].enabled == tree.controllers == {"cpu", "cpuset", "io", "memory", "pids"}
    moved = kernel.writes.index(("node/cgroup.procs", str(NODE_PID)))
    enabled = [at for at, (file, _) in enumerate(kernel.writes) if file == "cg/cgroup.subtree_control"]
    assert moved < min(enabled)


def test_fault_G64_controllers_that_are_not_given_are_named_and_their_limits_said_not_to_hold() -> None:
    tree = opened(FakeKernel(("cpu",)))
    assert set(tree.missing) == {"cpuset", "io", "memory", "pids"}
    _, missing = tree.make(2, LeafLimits(memory_max_bytes=MIB, pids_max=8, cpu_max_pct=50))
    assert missing == {"memory.max": "no memory controller", "pids.max": "no pids controller"}


def test_fault_G65_what_is_busy_for_a_moment_is_tried_again_and_what_stays_busy_is_given_up() -> None:
    kernel = FakeKernel()
    kernel.busy = {"cgroup.subtree_control": 3, "cgroup.procs": 1}
    tree = opened(kernel)
    assert "cpu" in tree.controllers
    kernel.busy["mkdir"] = 2
    tree.make(1, LeafLimits())
    before = kernel.pauses
    kernel.busy["mkdir"] = 10**6
    with pytest.raises(CgroupError, match="busy"):
        tree.make(1, LeafLimits())
    assert kernel.pauses - before < 20
    assert len(tree.leaves) == 1


@pytest.mark.parametrize("controller", ["cpu", "memory", "pids"])
def test_one_refused_controller_does_not_take_the_others_along(controller: str) -> None:
    kernel = FakeKernel()
    real = kernel.write

    def write(path: Path, text: str) -> None:
        if text == f"+{controller}":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        real(path, text)

    kernel.write = write  # type: ignore[method-assign]
    tree = opened(kernel)
    assert tree.controllers == {"cpu", "cpuset", "io", "memory", "pids"} - {controller}
    assert "not permitted" in tree.missing[controller]


def test_fault_G67_a_process_that_may_not_be_moved_is_one_refused_attach() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    leaf, _ = tree.make(2, LeafLimits())
    kernel.refuses["cgroup.procs"] = errno.EPERM
    with pytest.raises(CgroupError, match="999"):
        leaf.enter(999)
    del kernel.refuses["cgroup.procs"]
    leaf.enter(999)
    assert leaf.processes() == [999]


def test_a_group_that_cannot_be_divided_is_left_as_it_was() -> None:
    kernel = FakeKernel()
    kernel.refuses["cgroup.procs"] = errno.EACCES
    with pytest.raises(CgroupError):
        opened(kernel)
    assert set(kernel.groups) == {ROOT}
    assert kernel.group_of(NODE_PID) == ROOT


def test_a_write_without_effect_is_noticed() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    kernel.swallows.add("memory.max")
    with pytest.raises(CgroupError, match="'max'"):
        tree.make(2, LeafLimits(memory_max_bytes=MIB))
    assert not tree.leaves
    assert set(kernel.groups) == {ROOT, ROOT / "node"}


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_taken_is_given_back(whole: bool) -> None:
    kernel = FakeKernel(whole=whole)
    tree = opened(kernel)
    leaf, _ = tree.make(3, LeafLimits())
    leaf.enter(77)
    kernel.lingers = 5
    tree.close()
    assert set(kernel.groups) == {ROOT}
    assert kernel.group_of(NODE_PID) == ROOT
    assert not any(77 in group.pids for group in kernel.groups.values())


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_killed_node_left_is_swept_and_what_lives_is_not(whole: bool) -> None:
    kernel = FakeKernel(whole=whole)
    top = ROOT / "agentrt-2147483646-1" if whole else ROOT
    living = f"{os.getpid()}-{started(os.getpid())}"
    if whole:
        kernel.make(top)
        kernel.make(ROOT / f"agentrt-{living}")
    kernel.make(top / "leaf-2147483646-1-9")
    kernel.make(ROOT / f"leaf-{living}-1")
    kernel.groups[top / "leaf-2147483646-1-9"].pids.add(5)
    tree = opened(kernel)
    assert top / "leaf-2147483646-1-9" not in kernel.groups
    assert (ROOT / f"agentrt-{living}" if whole else ROOT / f"leaf-{living}-1") in kernel.groups
    assert whole is (top not in kernel.groups)
    tree.close()


# --- leaves ---------------------------------------------------------------------------


def test_limits_are_whole_pages_and_each_is_read_back() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    limits = LeafLimits(
        memory_high_bytes=5 * MIB + 17,
        memory_max_bytes=8 * MIB,
        swap_max_bytes=0,
        pids_max=32,
        cpu_max_pct=150,
        idle=True,
        cpus="0-1",
        memory_nodes="0",
    )
    leaf, missing = tree.make(3, limits)
    assert missing == {}
    values = kernel.groups[leaf.path].values
    assert values["memory.high"] == str(5 * MIB)
    assert values["cpu.max"] == "150000 100000"
    assert values["memory.swap.max"] == "0", "no swap is not a page of it"
    assert {values[name] for name in ("pids.max", "cpuset.cpus", "cpuset.mems", "cpu.idle")} == {"32", "0-1", "0", "1"}


def test_files_that_this_kernel_lacks_are_named() -> None:
    kernel = FakeKernel()
    kernel.lacks = {"memory.swap.max", "cpu.idle", "io.weight", "cgroup.kill", "cgroup.freeze"}
    tree = opened(kernel)
    leaf, missing = tree.make(3, LeafLimits(swap_max_bytes=0, idle=True))
    assert set(missing) == {"memory.swap.max", "cpu.idle"}
    assert not leaf.freeze() and not leaf.kill()
    assert tree.remove(leaf)


def test_disks_are_shared_by_whichever_policies_the_kernel_has() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    leaves = [tree.make(tier, LeafLimits())[0] for tier in (0, 1, 2, 3, 3)]
    shares = [[kernel.groups[leaf.path].values[name] for leaf in leaves] for name in ("io.weight", "io.bfq.weight")]
    assert shares[0] == ["default 10000", "default 1000", "default 100", "default 5", "default 5"]
    assert shares[1] == ["default 1000", "default 100", "default 10", "default 1", "default 1"], "up to 1000, never 0"
    kernel.lacks = {"io.bfq.weight"}
    tree.change_tier(leaves[4], 2)
    assert kernel.groups[leaves[4].path].values["io.weight"] == "default 50"
    kernel.lacks = {"io.weight", "io.bfq.weight"}
    tree.change_tier(leaves[4], 1)
    assert leaves[4].weight == leaves[1].weight == 500
    kernel.lacks, kernel.refuses = set(), {"io.bfq.weight": errno.EINVAL}
    with pytest.raises(CgroupError, match="io.bfq.weight"):
        leaves[0].reweigh(7)


def test_fault_G69_a_change_of_tier_rewrites_weights_and_moves_nothing() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    leaf, _ = tree.make(3, LeafLimits(memory_max_bytes=MIB))
    other, _ = tree.make(3, LeafLimits())
    leaf.enter(77)
    assert (leaf.weight, other.weight) == (5, 5)
    kernel.writes.clear()
    tree.change_tier(leaf, 0)
    assert {file.partition("/")[2] for file, _ in kernel.writes} == {"cpu.weight", "io.weight", "io.bfq.weight"}
    assert (leaf.weight, other.weight) == (10_000, 10)
    assert kernel.group_of(77) == leaf.path
    assert kernel.groups[leaf.path].values["memory.max"] == str(MIB)


def test_a_leaf_made_ahead_is_bounded_already_and_counts_nowhere_until_it_is_used() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    limits = LeafLimits(memory_high_bytes=8 * MIB, memory_max_bytes=16 * MIB, pids_max=4)
    other, _ = tree.make(2, LeafLimits())
    tree.prepare(limits)
    tree.prepare(limits)
    assert len(tree.leaves) == 1 and len(tree.ahead) == 1 and other.weight == 100
    before = len(kernel.writes)
    leaf, missing = tree.make(2, limits)
    assert not missing and not tree.ahead and leaf.tier == 2
    assert {name.rpartition("/")[2] for name, _ in kernel.writes[before:]} <= {
        "cpu.weight",
        "io.weight",
        "io.bfq.weight",
    }
    assert kernel.groups[leaf.path].values["memory.max"] == str(16 * MIB)
    assert leaf.weight == other.weight == 50
    again, _ = tree.make(2, limits)  # none is left: made on the spot, with the same bounds
    assert kernel.groups[again.path].values["pids.max"] == "4"


@pytest.mark.parametrize("used", [True, False])
def test_leaves_made_ahead_are_bounded_in_number_and_go_with_the_tree(used: bool) -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    for number in range(1, 20):
        tree.prepare(LeafLimits(pids_max=number))
    assert len(tree.ahead) == 4
    assert len(kernel.groups) == 2 + 4
    if used:  # the last ones are remembered, whatever was made for the first is gone
        tree.make(2, LeafLimits(pids_max=1))
        assert len(tree.ahead) == 4
    tree.close()
    assert set(kernel.groups) == {ROOT}


def test_a_leaf_that_cannot_be_made_ahead_leaves_nothing() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    kernel.refuses["pids.max"] = errno.EPERM
    with pytest.raises(CgroupError):
        tree.prepare(LeafLimits(pids_max=1))
    assert not tree.ahead and set(kernel.groups) == {ROOT, ROOT / "node"}


def test_a_pass_over_a_hundred_leaves_writes_only_what_changes() -> None:
    kernel = FakeKernel(("cpu",))
    tree = opened(kernel)
    leaves = [tree.make(3, LeafLimits())[0] for _ in range(20)]  # 10 // n changes at 2, 3, 4, 6 and 11 leaves
    kernel.writes.clear()
    assert tree.remove(leaves.pop())
    assert kernel.writes == []


def test_freezing_and_killing() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    leaf, _ = tree.make(2, LeafLimits())
    leaf.enter(77)
    assert leaf.freeze() and leaf.frozen and leaf.is_frozen()
    assert leaf.thaw() and not leaf.is_frozen()
    assert leaf.populated() and not tree.remove(leaf)
    assert leaf.kill() and not leaf.populated() and tree.remove(leaf)
    assert tree.remove(leaf)  # again is harmless


def test_clearing_waits_until_the_kernel_has_let_go_and_no_longer_than_it_may() -> None:
    kernel = FakeKernel()
    tree = opened(kernel)
    leaf, _ = tree.make(2, LeafLimits())
    leaf.enter(77)
    kernel.lingers = 5
    assert tree.clear(leaf, 10.0) and kernel.lingers == 0 and leaf.path not in kernel.groups
    other, _ = tree.make(2, LeafLimits())
    other.enter(78)
    kernel.lingers = 10**9
    assert not tree.clear(other, 1.0) and other.path in kernel.groups


# --- weights ----------------------------------------------------------------------------


@given(st.dictionaries(st.integers(), st.integers(0, 3), max_size=300))
def test_weights_are_valid_and_a_tier_never_has_more_than_its_share(tiers: dict[int, int]) -> None:
    found = weights(tiers)
    assert found.keys() == tiers.keys()
    for tier, weight in enumerate(TIER_WEIGHTS):
        own = [found[key] for key in tiers if tiers[key] == tier]
        assert all(1 <= each <= 10_000 for each in own)
        assert len(set(own)) <= 1
        assert sum(own) <= max(weight, len(own))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["make", "remove", "tier", "share"]), st.integers(0, 3), st.integers(0, 50))))
def test_after_whatever_happens_the_weights_are_what_the_tiers_say(
    steps: list[tuple[str, int, int]],
) -> None:
    kernel = FakeKernel(("cpu",))
    tree = opened(kernel)
    leaves: list[Leaf] = []
    shares = TIER_WEIGHTS
    for what, tier, index in steps:
        if what == "share":
            shares = (10_000, 100 * (index + 1), 10 * (index + 1), 1)
            tree.share(shares)
        elif what == "make":
            leaves.append(tree.make(tier, LeafLimits())[0])
        elif leaves and what == "remove":
            assert tree.remove(leaves.pop(index % len(leaves)))
        elif leaves:
            tree.change_tier(leaves[index % len(leaves)], tier)
    expected = weights({leaf.path: leaf.tier for leaf in leaves}, shares)
    assert {path: int(kernel.groups[path].values["cpu.weight"]) for path in expected} == expected
    tree.close()
    assert set(kernel.groups) == {ROOT}


def test_the_tree_that_is_there_and_the_next_one_share_as_was_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(("cpu",))
    monkeypatch.setattr(shared, "_tree", opened(kernel))
    monkeypatch.setattr(shared, "_users", 1)
    monkeypatch.setattr(shared, "_weights", TIER_WEIGHTS)
    assert shared._tree is not None
    leaf, _ = shared._tree.make(1, LeafLimits())
    first = shared.share((10_000, 500, 50, 5))
    shared.share((10_000, 300, 30, 3))
    first()  # late, and what was said since holds
    assert leaf.weight == 300
    shared.share(())()
    assert leaf.weight == TIER_WEIGHTS[1]
    shared._tree.close()


# --- pressure ---------------------------------------------------------------------------


def samples(count: int, *, high: int = 5, full_us: int | None = 95_000, user_us: int = 1_000) -> list[MemorySample]:
    """A sample every 100 ms, with what is added in between."""
    return [
        MemorySample(at * 100_000_000, at * high, None if full_us is None else at * full_us, at * user_us)
        for at in range(count)
    ]


@pytest.mark.parametrize("full_us", [95_000, None])
def test_fault_G68_standing_still_above_memory_high_is_found_in_the_stated_time(full_us: int | None) -> None:
    watch = StallWatch(1_000_000_000)
    verdicts = [watch.feed(sample) for sample in samples(12, full_us=full_us)]
    assert verdicts == [False] * 10 + [True] * 2


def test_fault_G68_events_may_be_seconds_apart_while_it_sleeps() -> None:
    watch = StallWatch(1_000_000_000)
    rare = [MemorySample(at * 100_000_000, at // 15, at * 98_000, 0) for at in range(40)]
    verdicts = [watch.feed(sample) for sample in rare]
    assert verdicts == [False] * 15 + [True] * 25


@pytest.mark.parametrize("alive", [{"high": 0}, {"full_us": 50_000}, {"user_us": 30_000}])
def test_who_gets_on_is_left_alone(alive: dict[str, int]) -> None:
    watch = StallWatch(1_000_000_000)
    assert not any(watch.feed(sample) for sample in samples(60, **alive))


def test_a_moment_of_progress_begins_the_wait_anew() -> None:
    watch = StallWatch(1_000_000_000)
    for sample in samples(9):
        assert not watch.feed(sample)
    watch.restart()
    assert not any(watch.feed(sample) for sample in samples(10))


# --- layouts ----------------------------------------------------------------------------


def machine(tmp_path: Path, mountinfo: str, cgroup: str, groups: dict[str, str]) -> str:
    """A root with these files. ``groups``: folder -> its cgroup.controllers."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mountinfo)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for folder, controllers in groups.items():
        path = tmp_path / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.events"):
            (path / name).write_text("")
        (path / "cgroup.controllers").write_text(controllers)
    return str(tmp_path)


V2 = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def test_fault_G70_on_a_hybrid_host_controllers_of_v1_are_not_taken_for_unlimited(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 30 0:29 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n",
        "5:memory:/a\n4:blkio:/\n0::/user.slice\n",
        {"/sys/fs/cgroup/unified/user.slice": "cpu pids"},
    )
    layout = read_layout(root)
    assert layout.kind == "hybrid"
    assert layout.controllers == {"cpu", "pids"}
    assert "v1" in layout.missing["memory"] and "v1" in layout.missing["io"]
    assert "v1" not in layout.missing["cpuset"]


@pytest.mark.parametrize("named", [False, True])
def test_a_group_that_somebody_else_manages_is_used_only_if_an_operator_names_it(tmp_path: Path, named: bool) -> None:
    folder = "/sys/fs/cgroup/system.slice/foreign.service"
    root = machine(tmp_path, V2, "0::/system.slice/foreign.service\n", {folder: "cpu memory"})
    layout = read_layout(root, group=Path(root + folder)) if named else read_layout(root)
    owned = os.geteuid() != 0  # then the folder belongs to an ordinary user, to whom it was given
    assert layout.usable is (named or owned)
    assert named or owned or "not delegated" in layout.why
    assert layout.controllers == {"cpu", "memory"}


def test_a_group_marked_as_delegated_is_used(tmp_path: Path) -> None:
    folder = "/sys/fs/cgroup/agentrt.service"
    root = machine(tmp_path, V2, "0::/agentrt.service\n", {folder: "cpu"})
    try:
        os.setxattr(root + folder, "user.delegate", b"1")
    except OSError:
        pytest.skip("the file system of temporary files has no extended attributes")
    assert read_layout(root).usable


def test_fault_G64_a_container_that_may_only_read_says_so(tmp_path: Path) -> None:
    root = machine(tmp_path, V2, "0::/\n", {})
    layout = read_layout(root)
    assert not layout.usable and "no cgroup" in layout.why


def test_without_v2_there_is_nothing(tmp_path: Path) -> None:
    old = machine(tmp_path, "32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "5:memory:/a\n", {})
    assert (read_layout(old).kind, read_layout(old).usable) == ("v1", False)
    nothing = machine(tmp_path / "empty", "", "", {})
    assert (read_layout(nothing).kind, read_layout(nothing).usable) == ("none", False)


def test_counters_of_hostile_files() -> None:
    assert counters("populated 1\nfrozen x\n\nlone\nbig 12 13\n") == {"populated": 1}
