"""Binding a process to a NUMA node: which one, what it inherits to threads and children, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from agentrt._sys import ffi, lib
from hypothesis import given
from hypothesis import strategies as st

from agentrt.errors import ConfigError
from agentrt.machine import Machine, number_list, read_machine
from agentrt.node import numa

MAIN = "from agentrt.cli.main import main; main()"


def machine(**nodes: tuple[int, ...]) -> Machine:
    found = {int(name[1:]): cpus for name, cpus in nodes.items()}
    return msgspec.structs.replace(read_machine(), nodes=found)


def meminfo(root: Path, node: int, free_kib: int) -> None:
    folder = root / "sys/devices/system/node" / f"node{node}"
    folder.mkdir(parents=True)
    (folder / "meminfo").write_text(f"Node {node} MemTotal: 99 kB\nNode {node} MemFree:   {free_kib} kB\n")


def test_auto_is_the_node_with_the_most_free_memory_that_may_be_used(tmp_path: Path) -> None:
    for node, free in ((0, 10), (1, 30), (2, 20), (3, 30)):
        meminfo(tmp_path, node, free)
    assert numa.choose("auto", machine(n0=(0,), n1=(1,), n2=(2,), n3=(3,)), str(tmp_path)) == 1
    assert numa.choose("auto", machine(n0=(0,), n2=(2,)), str(tmp_path)) == 2
    assert numa.choose("auto", machine(n5=(0,), n7=(2,)), str(tmp_path)) == 5, "nothing is known of them"
    assert numa.choose("2", machine(n0=(0,), n2=(2,)), str(tmp_path)) == 2


@pytest.mark.parametrize("wanted", ["1", "-1", "x", "", "0 ", "\u0660"])
def test_what_is_no_node_is_refused_with_those_there_are(wanted: str) -> None:
    with pytest.raises(ConfigError, match="auto, or one of 0, 2"):
        numa.choose(wanted, machine(n0=(0,), n2=(2,)))


def test_threads_and_children_inherit_it() -> None:
    code = """
import json, os, subprocess, sys, threading
from agentrt.machine import memory_nodes
from agentrt.node import numa
placed = numa.bind("auto")
seen = []
def look():
    seen.append([sorted(os.sched_getaffinity(0)), memory_nodes()])
thread = threading.Thread(target=look)
thread.start()
thread.join()
child = "import os; from agentrt.machine import memory_nodes as m; print([sorted(os.sched_getaffinity(0)), list(m())])"
said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
print(json.dumps([placed.node, placed.cpus, placed.bound, seen[0], json.loads(said)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    node, cpus, bound, thread, child = json.loads(done.stdout)
    assert cpus == list(read_machine().nodes[node])
    assert thread == child == [cpus, [node] if bound else []]


@given(st.sets(st.integers(0, 1023)))
def test_numbers_are_listed_as_the_kernel_reads_and_writes_them(numbers: set[int]) -> None:
    text = number_list(numbers)
    found = ffi.new("art_cpuset *")
    assert lib.art_cpuset_parse(text.encode(), len(text), found) == 0
    assert {n for n in range(1024) if lib.art_cpuset_has(found, n)} == numbers
    edges = [int(n) for n in text.replace("-", ",").split(",") if n]
    assert edges == sorted(set(edges)), "the shortest there is"


def test_serve_refuses_a_node_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "serve", "--store", str(tmp_path / "store"), "--numa-node", "63"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "is no NUMA node" in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_move_into_another_cpuset_does_not_undo_what_threads_were_bound_to() -> None:
    code = """
import os, threading
from agentrt.cgroup.affinity import kept_affinity
every = os.sched_getaffinity(0)
one, last = {min(every)}, {max(every)}
began, go = threading.Event(), threading.Event()
def bound():
    os.sched_setaffinity(0, last)
    began.set()
    go.wait()
    seen.append(os.sched_getaffinity(0))
seen = []
threads = [threading.Thread(target=bound)]
threads[0].start()
began.wait()
os.sched_setaffinity(0, one)
with kept_affinity(os.getpid()):
    for tid in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(tid, every)  # what the kernel does to all threads
    late = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0))))
    late.start()
assert os.sched_getaffinity(0) == one
go.set()
for thread in (threads[0], late):
    thread.join()
assert sorted(map(sorted, seen)) == sorted(map(sorted, (one, last))), seen
with kept_affinity(2**22 + 1):
    pass  # nobody
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
