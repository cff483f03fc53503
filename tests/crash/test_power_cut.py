"""A real power cut: the VM is killed in the middle of work, and booted again on the same disk."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_IN_VM = ROOT / "tests/kernel/vm/run-in-vm"
NODE = Path(__file__).with_name("power_node.py")
ENDED_BEFORE_CUT = 12


def boot(mode: str, folder: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, str(RUN_IN_VM), "--cpus", "2", "--memory", "2G", "--timeout", "500",
        "--disk", "256M", "--disk-file", str(folder / "disk"), "--rw", str(folder), "--cwd", str(ROOT),
        "--env", "XDG_CACHE_HOME=/tmp/cache", "--",
        sys.executable, str(NODE), mode, "/mnt/disk/store", str(folder / "ledger"),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.vm
@pytest.mark.timeout(1200)
def test_fault_D01_a_power_cut_loses_and_doubles_nothing(tmp_path: Path) -> None:
    accepted: dict[str, str] = {}  # run -> order, as the node said
    ended: set[str] = set()
    with boot("work", tmp_path) as vm:
        assert vm.stdout is not None
        for line in vm.stdout:
            words = line.split()
            if words[0] == "accepted":
                accepted[words[2]] = words[1]
            elif words[0] == "ended":
                ended.add(words[2])
            if len(ended) == ENDED_BEFORE_CUT:
                vm.kill()  # the power cut: the VM dies with it, what it had not flushed is gone
                break
    assert len(ended) == ENDED_BEFORE_CUT, "the node in the VM ended by itself"

    with boot("verify", tmp_path) as vm:
        assert vm.stdout is not None
        lines = vm.stdout.read().splitlines()
    assert vm.returncode == 0
    states: dict[str, str] = json.loads(lines[-1])
    assert set(accepted) <= set(states), "accepted runs are lost"
    assert set(states.values()) == {"SUCCEEDED"}
    effects: dict[tuple[str, int], set[str]] = defaultdict(set)
    for line in (tmp_path / "ledger").read_text().splitlines():
        key, order, place = line.split()
        effects[order, int(place)].add(key)
    assert all(len(keys) == 1 for keys in effects.values()), "an effect has two keys"
    for order in accepted.values():
        assert {place for name, place in effects if name == order} == set(range(1, 7)), f"{order} misses effects"
