"""Hosts in leaves on this machine's own cgroups, whatever controllers it has; with all of them: tests/kernel."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import leaf_agents
from tool_kit import wait_until

from agentrt import Runtime
from agentrt.cgroup import hosts, shared
from agentrt.cgroup.files import CgroupError
from agentrt.cgroup.tree import Tree
from agentrt.config import load_config
from agentrt.spawn import enter_leaf

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """The tree, which is said to have controllers: leaves then have no limits, and all else is real."""
    try:
        made = shared.acquire("auto")
    except CgroupError as error:
        pytest.skip(f"no cgroup of our own here: {error}")
    made.controllers = made.controllers or frozenset({"none"})
    yield made
    made.controllers = made.controllers - {"none"}
    shared.release()


def in_leaf(tree: Tree, pid: int) -> bool:
    return any(pid in leaf.processes() for leaf in tree.leaves.values())


@pytest.mark.parametrize("template", ["import", "exec"])
def test_hosts_enter_their_leaves_with_all_they_start_and_leave_none_behind(tree: Tree, template: str) -> None:
    async def run() -> None:
        settings = {"store.kind": "memory", "python.allow_unsandboxed": True, "tools.template": template}
        async with Runtime(config=load_config(env={}, arguments=settings), tools=[leaf_agents.where]) as runtime:
            await runtime.register(leaf_agents.asks)
            found = await (await runtime.submit("asks", tier=2)).result()
            own = found["tool"].splitlines()[-1]
            assert own.startswith("0::") and "/leaf-" in own, found
            serving = tree.leaves[own.rpartition("/")[2]]
            assert serving.tier == 2
            assert len(tree.leaves) >= 2  # the agent's host has another

    asyncio.run(run())
    asyncio.run(wait_until(lambda: not tree.leaves, "all leaves are gone"))
    assert [path.name for path in tree.group.iterdir() if path.is_dir()] == ["node"]


def test_without_controllers_there_are_none(tree: Tree) -> None:
    tree.controllers = frozenset()
    assert hosts.host_leaf(1 << 30) is None


def test_a_host_that_may_not_enter_says_so_and_goes_on(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        enter_leaf(os.dup(full.fileno()))
    assert "outside its cgroup" in capfd.readouterr().err
