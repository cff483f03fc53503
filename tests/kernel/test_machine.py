"""What agentrt sees of a real kernel with two NUMA nodes and cgroup v2: the VM's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrt.machine import read_machine

pytestmark = pytest.mark.kernel


def test_both_numa_nodes_and_their_cpus_are_seen() -> None:
    machine = read_machine()
    online = Path("/sys/devices/system/node/online").read_text().strip()
    assert online == "0-1"
    assert set(machine.nodes) == {0, 1}
    assert all(machine.nodes.values())
    assert sorted(cpu for cpus in machine.nodes.values() for cpu in cpus) == sorted(os.sched_getaffinity(0))


def test_doctor_finds_every_cgroup_v2_controller() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from agentrt.cli.main import main; main()", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(said.stdout.splitlines()[-1])
    states = {check["name"]: check["state"] for check in report["checks"]}
    for controller in ("cpu", "cpuset", "memory", "pids"):
        assert states[f"cgroup {controller}"] == "works", said.stdout
