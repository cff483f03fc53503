"""Hosts of Python agents and tools in leaves, on the VM's kernel."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import leaf_agents
from test_own_uid import TOOLS_BASE, said_by

from agentrt import Runtime
from agentrt.cgroup import shared
from agentrt.cgroup.tree import Tree
from agentrt.config import load_config

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(340)]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def node(tree: Tree) -> list[int]:
    """What runs beside the node in its own leaf."""
    return [int(pid) for pid in (tree.group / "node/cgroup.procs").read_text().split()]


def is_host(pid: int) -> bool:
    """Templates are children of the node; hosts are children of a template."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return parent != os.getpid()


def test_hosts_of_agents_and_tools_run_in_leaves_and_leave_none_behind() -> None:
    async def run() -> None:
        slow = {"tools.start_timeout_ms": 300_000, "python.start_timeout_ms": 300_000}
        config = load_config(env={}, arguments={"store.kind": "memory"} | slow)
        async with Runtime(config=config, tools=[leaf_agents.where]) as runtime:
            tree = shared.held()
            assert tree is not None and "memory" in tree.controllers
            await runtime.register(leaf_agents.asks)
            submitted = await runtime.submit("asks", tier=2)
            try:
                found = await asyncio.wait_for(submitted.result(), 280)
            except TimeoutError:
                raise AssertionError(
                    f"{await runtime.describe_run(submitted.run_id)} {await runtime.statistics()}"
                ) from None
            assert found["tool"].startswith(f"0::/{tree.group.name}/leaf-"), found
            leaf = tree.leaves[found["tool"].rpartition("/")[2]]
            others = [each for each in tree.leaves.values() if each is not leaf]
            assert any("agentrt.agents.template" in command(pid) for each in others for pid in each.processes())
            assert not any("agentrt" in command(pid) and pid != os.getpid() and is_host(pid) for pid in node(tree))
            assert leaf.tier == 2 and int((leaf.path / "memory.max").read_text()) == config.tools.host_memory_bytes_max
            assert (leaf.path / "pids.max").read_text() == "4096\n"
        assert shared.held() is None

    asyncio.run(run())
    left = [path.name for path in Path("/sys/fs/cgroup").iterdir() if path.name.startswith(("agentrt-", "leaf-"))]
    assert left == []


def test_a_host_of_tools_in_a_leaf_is_a_user_of_its_own() -> None:
    said = said_by("own_uid_tool_node.py", "import", str(TOOLS_BASE), timeout_s=300)
    uids = []
    for plain, looped, heard in said["said"].values():
        assert heard == "the right one"
        uids += {*plain["uid"], *looped["uid"]}
        assert plain["group"] == looped["group"] and "/leaf-" in plain["group"]
        assert plain["home"] == plain["folder"] and plain["mode"] == "0o700"
    assert len(uids) == 2 and min(uids) >= TOOLS_BASE
