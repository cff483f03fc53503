"""A real power cut: the VM is killed in the middle of work, and booted again on the same disk.

Once with wasm guests of six steps, once with the twelve-step Python agent of test_errands.py.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from errand_kit import ledger_faults
from errand_tools import read_ledger

ROOT = Path(__file__).parents[2]
RUN_IN_VM = ROOT / "tests/kernel/vm/run-in-vm"
NODE = Path(__file__).with_name("power_node.py")
ERRANDS = Path(__file__).with_name("errand_vm.py")
ENDED_BEFORE_CUT = 12
ERRANDS_BEFORE_CUT = 5


def boot(node: Path, mode: str, folder: Path, ledger: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, str(RUN_IN_VM), "--cpus", "2", "--memory", "2G", "--timeout", "500",
        "--disk", "256M", "--disk-file", str(folder / "disk"), "--rw", str(folder), "--cwd", str(ROOT),
        "--env", "XDG_CACHE_HOME=/tmp/cache", "--",
        sys.executable, str(node), mode, "/mnt/disk/store", str(ledger),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def cut(node: Path, folder: Path, ledger: Path, ended_before: int) -> tuple[dict[str, str], dict[str, str]]:
    """Work until so many runs have ended, the power cut, and a second boot that lets everything end: what the first had
    accepted (order by run) and how all runs of the store ended (state by run)."""
    accepted: dict[str, str] = {}
    ended: set[str] = set()
    with boot(node, "work", folder, ledger) as vm:
        assert vm.stdout is not None
        for line in vm.stdout:
            words = line.split()
            if words[0] == "accepted":
                accepted[words[2]] = words[1]
            elif words[0] == "ended":
                ended.add(words[2])
            if len(ended) == ended_before:
                vm.kill()  # the power cut: the VM dies with it, what it had not flushed is gone
                break
    assert len(ended) == ended_before, "the node in the VM ended by itself"

    with boot(node, "verify", folder, ledger) as vm:
        assert vm.stdout is not None
        lines = vm.stdout.read().splitlines()
    assert vm.returncode == 0
    states: dict[str, str] = json.loads(lines[-1])
    assert set(accepted) <= set(states), "accepted runs are lost"
    assert set(states.values()) == {"SUCCEEDED"}
    return accepted, states


@pytest.mark.vm
@pytest.mark.timeout(1200)
def test_fault_D01_a_power_cut_loses_and_doubles_nothing(tmp_path: Path) -> None:
    accepted, _ = cut(NODE, tmp_path, tmp_path / "ledger", ENDED_BEFORE_CUT)
    effects: dict[tuple[str, int], set[str]] = defaultdict(set)
    for line in (tmp_path / "ledger").read_text().splitlines():
        key, order, place = line.split()
        effects[order, int(place)].add(key)
    assert all(len(keys) == 1 for keys in effects.values()), "an effect has two keys"
    for order in accepted.values():
        assert {place for name, place in effects if name == order} == set(range(1, 7)), f"{order} misses effects"


@pytest.mark.vm
@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_fault_D01_a_power_cut_of_a_node_with_children_locks_timers_and_approvals(tmp_path: Path) -> None:
    accepted, states = cut(ERRANDS, tmp_path, tmp_path, ERRANDS_BEFORE_CUT)
    # an acceptance may have become durable without the word of it having come out
    orders = {entry["order"] for entry in read_ledger(tmp_path)}
    assert set(accepted.values()) <= orders
    assert ledger_faults(tmp_path, orders) == []
    assert len(states) == 3 * len(orders)
