"""What does a native process cost, confined or not?

``spawn_us``: from asking the launcher for a process to the first byte it writes, unconfined, in a leaf where there is
one; ``sandboxed_us``: the same with all that confines it (namespaces, a file system of its own, landlock, seccomp, a
user of its own). The program is ``/bin/echo``; figures are medians of calls made one after the other, taken in turns
with the baselines. ``spawn_ratio`` is the first over plain ``posix_spawn``, ``sandboxed_vs_bwrap`` the second over
bubblewrap. ``ended_us`` and ``sandboxed_ended_us``: until nothing of it is left. ``reweigh_100_us``: a pass over 100
leaves which all change, each written and read back, on files of a real file system (it needs no controller).

Baselines: ``os.posix_spawn``, ``subprocess.Popen`` with its own session and descriptors closed, and bubblewrap with
namespaces for users' processes, network and mounts, if it is installed. All to the first byte, and all with the
environment that the launcher gives: `LANG` alone makes the program open a dozen files more.
"""

import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from agentrt.backends.process.launcher import Launcher, environment
from agentrt.backends.process.process import Ended, Order
from agentrt.backends.process.settings import ProcessConfig
from agentrt.cgroup.layout import Layout
from agentrt.cgroup.leaf import Leaf
from agentrt.cgroup.tree import Tree
from perf.report import Report, machine
from perf.timing import isolated

_ARGV = ("/bin/echo", "hello")
_BWRAP = (
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--new-session"),
    *("--ro-bind", "/usr", "/usr", "--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"),
)
_ENVIRONMENT = environment("/tmp")
_LEAVES = 100


def _first_byte(start: Callable[[int], Callable[[], None]]) -> float:
    """Microseconds from ``start(its standard output)`` to the first byte; what it returns waits for the end."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    began = time.perf_counter_ns()
    wait = start(writer)
    os.close(writer)
    os.read(reader, 1)
    took = time.perf_counter_ns() - began
    os.close(reader)
    wait()
    return took / 1000


def _posix_spawn(out: int) -> Callable[[], None]:
    pid = os.posix_spawn(_ARGV[0], _ARGV, _ENVIRONMENT, file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)])

    def wait() -> None:
        os.waitpid(pid, 0)

    return wait


def _popen(argv: tuple[str, ...], out: int) -> Callable[[], None]:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, env=_ENVIRONMENT, start_new_session=True)

    def wait() -> None:
        process.wait()

    return wait


async def _ours(launcher: Launcher, confined: bool) -> tuple[float, float]:
    """Microseconds to the first byte, and until nothing is left."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Ended] = loop.create_future()
    heard: asyncio.Future[int] = loop.create_future()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def on_readable() -> None:
        heard.set_result(time.perf_counter_ns())
        loop.remove_reader(reader)

    loop.add_reader(reader, on_readable)
    began = time.perf_counter_ns()
    order = Order(argv=_ARGV, domain="perf", tier=1, confined=confined)
    launcher.start(order, (null, writer, writer), ended.set_result)
    first = await heard - began
    error = (await ended).error
    last = time.perf_counter_ns() - began
    for fd in (reader, writer, null):
        os.close(fd)
    if error is not None:
        raise error
    return first / 1000, last / 1000


async def _spawns(rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        taken.setdefault(name, []).append(value)

    launcher = Launcher(asyncio.get_running_loop(), ProcessConfig(nice=0))
    await launcher.open()
    bwrap = shutil.which("bwrap")
    try:
        for _ in range(rounds):
            note("posix_spawn_us", _first_byte(_posix_spawn))
            note("subprocess_us", _first_byte(partial(_popen, _ARGV)))
            if bwrap is not None:
                note("bubblewrap_us", _first_byte(partial(_popen, (bwrap, *_BWRAP, "--", *_ARGV))))
            first, last = await _ours(launcher, False)
            note("spawn_us", first)
            note("ended_us", last)
            if launcher.refusal is None:
                first, last = await _ours(launcher, True)
                note("sandboxed_us", first)
                note("sandboxed_ended_us", last)
    finally:
        await launcher.close()
    return taken


def spawns(rounds: int) -> dict[str, float]:
    """Medians."""
    return {name: statistics.median(values) for name, values in uvloop.run(_spawns(rounds)).items()}


def reweigh_us(rounds: int) -> float:
    """A pass over the leaves of one tier in which every weight changes."""
    with tempfile.TemporaryDirectory() as folder:
        group = Path(folder)
        (group / "cgroup.subtree_control").write_text("cpu")
        layout = Layout("v2", group, False, True, "", frozenset({"cpu"}), {})
        tree = Tree(layout, tier_weights=(10_000, 10_000, 10_000, 10_000))
        tree.controllers = frozenset({"cpu"})
        leaves = []
        for number in range(_LEAVES):
            path = group / f"leaf-{tree._mark}-{number + 1}"
            path.mkdir()
            (path / "cpu.weight").write_text("")
            leaves.append(Leaf(tree._files, path, tree.controllers, 2))
            tree.leaves[path.name] = leaves[-1]
        taken = []
        for turn in range(rounds):
            for leaf in leaves:
                leaf.tier, leaf.weight = 2 + turn % 2, 0
            began = time.perf_counter_ns()
            written = tree._reweigh()
            taken.append((time.perf_counter_ns() - began) / 1000)
            assert written == _LEAVES
        return statistics.median(taken)


def run(tiny: bool) -> Report:
    taken = isolated(spawns, 3 if tiny else 200)
    others: tuple[str, ...] = ("posix_spawn_us", "subprocess_us", "bubblewrap_us")
    baselines = {name: taken.pop(name) for name in others if name in taken}
    figures = taken | {"reweigh_100_us": isolated(reweigh_us, 3 if tiny else 200)}
    figures["spawn_ratio"] = figures["spawn_us"] / baselines["posix_spawn_us"]
    notes = []
    if "sandboxed_us" in figures and "bubblewrap_us" in baselines:
        figures["sandboxed_vs_bwrap"] = figures["sandboxed_us"] / baselines["bubblewrap_us"]
    else:
        notes.append("sandboxed_vs_bwrap: bubblewrap is not installed, or nothing can be confined here")
    return Report("process", figures, baselines, machine(notes))
