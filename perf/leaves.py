"""How late does a thread like the control thread wake up beside native processes that compute without end?

A thread of niceness -10 (0 where that is not permitted) sleeps for 1 to 5 ms, again and again, beside 16 shells that
count, which the launcher has started for tier 2: in leaves with weights where there is a cpu controller, else ranked by
policy and niceness. ``wake_p50_us``, ``wake_p99_us``: by how much it wakes up too late; ``delay_us``: how long it stood
in the kernel's queue each time, on average (schedstat), which is also true where time itself is not, as in an emulated
machine. ``alone_…``: without the shells. Whether there are weights is in the notes.

Baseline: the same shells under plain ``nice -n 19`` in the node's own group (``nice_…``).
"""

import asyncio
import os
import random
import threading
import time
from pathlib import Path

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.process import Ended, Order
from agentrt.backends.process.settings import ProcessConfig
from agentrt.demo.figures import percentile
from perf.hogs import COUNT, nice_hogs, report_beside
from perf.report import Report
from perf.timing import isolated

_HOGS = 16
_NICE = -10
_SETTLE_S = 1.0


def _queued_ns() -> int:
    """How long this thread has stood in the kernel's queue so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def _wakes(count: int, said: dict[str, float], prefix: str) -> None:
    """On a thread of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except PermissionError:
        pass
    rng = random.Random(1)
    late_us = []
    queued_ns = _queued_ns()
    for _ in range(count):
        due_ns = time.monotonic_ns() + int(rng.uniform(1e6, 5e6))
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        late_us.append((time.monotonic_ns() - due_ns) / 1e3)
    said[f"{prefix}delay_us"] = (_queued_ns() - queued_ns) / count / 1e3
    said[f"{prefix}wake_p50_us"] = percentile(late_us, 50)
    said[f"{prefix}wake_p99_us"] = percentile(late_us, 99)


async def _measure(count: int, said: dict[str, float], prefix: str) -> None:
    await asyncio.sleep(_SETTLE_S)
    thread = threading.Thread(target=_wakes, args=(count, said, prefix))
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 - nothing else is to be done meanwhile
        await asyncio.sleep(0.1)


async def _all(hogs: int, count: int) -> tuple[dict[str, float], bool]:
    said: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    await _measure(count, said, "alone_")
    launcher = Launcher(loop, ProcessConfig(allow_unsandboxed=True))
    await launcher.open()  # the node is in its place before anything is started beside it
    with nice_hogs(hogs):
        await _measure(count, said, "nice_")
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        ends: list[asyncio.Future[Ended]] = [loop.create_future() for _ in range(hogs)]
        begun = [asyncio.Event() for _ in range(hogs)]
        order = Order(argv=("sh", "-c", COUNT), domain="perf", tier=2)
        for end, begin in zip(ends, begun, strict=True):
            launcher.start(order, (null,) * 3, end.set_result, begin.set)
        for begin in begun:
            await begin.wait()
        await _measure(count, said, "")
        return said, launcher.tree is not None and "cpu" in launcher.tree.controllers
    finally:
        await launcher.close()
        os.close(null)


def latencies(hogs: int, count: int) -> tuple[dict[str, float], bool]:
    """Figures and baselines, and whether the leaves have shares of the CPU."""
    return asyncio.run(_all(hogs, count))


def run(tiny: bool) -> Report:
    said, shares = isolated(latencies, 2 if tiny else _HOGS, 3 if tiny else 500)
    return report_beside("leaves", said, shares)
