"""A node on one of two real NUMA nodes: its workers, their pages, and the programs that it starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrt.machine import number_list, read_machine

pytestmark = pytest.mark.kernel


def test_a_pinned_workers_pages_are_on_its_node() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("numa_node.py"))], capture_output=True, text=True, timeout=330
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    cpus = list(read_machine().nodes[1])
    assert (said["node"], said["cpus"], said["memory"]) == (1, cpus, "bound")
    workers = {name: where for name, where in said["threads"].items() if name.startswith("agentrt-w")}
    assert workers and all(len(where) == 1 and set(where) <= set(cpus) for where in workers.values())
    assert all(set(where) <= set(cpus) for where in said["threads"].values())
    allowed = said["program_may_use"]
    assert (allowed["Cpus_allowed_list"], allowed["Mems_allowed_list"]) == (number_list(cpus), "1"), (
        "a cpuset of its own"
    )
    for pages in (said["pages"], said["program_pages"]):
        assert pages["1"] > 1_000  # all that a process has of its own
        assert pages.get("0", 0) * 50 < pages["1"], pages  # but what the kernel could not move
