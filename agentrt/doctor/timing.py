"""Checks that measure: the disk under the store, priorities, and how soon a thread wakes up beside busy workers."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeVar

from agentrt.doctor import Check, Examined, Examiner
from agentrt.errors import StorePlaceError
from agentrt.stores.place import check_place, file_system_of

_T = TypeVar("_T")

FSYNC_COUNT: Final = 64
FSYNC_BUDGET_NS: Final = 500_000_000
#: A commit group per fsync: above this a sequential agent does fewer than a hundred steps a second.
FSYNC_SLOW_US: Final = 10_000
WAKEUP_COUNT: Final = 400
WAKEUP_SLEEP_S: Final = 0.001
#: Measured with the recommended priorities: p99 14 to 67 us. Ten times that is another machine, or another load on it.
WAKEUP_SLOW_US: Final = 1_000


def percentile_us(values_ns: list[int], percent: float) -> float:
    """The nearest-rank percentile, in microseconds."""
    ordered = sorted(values_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] / 1_000


def check_fsync(examined: Examined) -> Iterator[Check]:
    if examined.config.store.kind == "memory":
        return
    folder = examined.folder
    kind = file_system_of(folder) or "unknown"
    try:
        if not examined.config.store.force_place:
            check_place(folder)
    except StorePlaceError as error:
        yield Check(name="store folder", state="refused", found=kind, why=error.message, hint=error.hint or "")
        return
    try:
        times = _fsync_times(folder)
    except OSError as error:
        yield Check(
            name="store folder",
            state="refused",
            found=str(folder),
            why=f"cannot be written: {error.strerror}",
            hint="Choose another store.path",
        )
        return
    p50, p99 = percentile_us(times, 50), percentile_us(times, 99)
    slow = p50 > FSYNC_SLOW_US
    volatile = kind in ("tmpfs", "ramfs")
    why = hint = ""
    if volatile:
        why, hint = f"{kind} does not survive a restart of the machine", "Choose a store.path on a disk"
    elif slow:
        why, hint = "every step waits for this: sequential agents will be slow", "Use a faster disk"
    yield Check(
        name="fsync",
        state="degraded" if why else "works",
        found=f"p50 {p50:,.0f} us, p99 {p99:,.0f} us on {folder} ({kind})",
        why=why,
        hint=hint,
        data={"folder": str(folder), "file_system": kind, "p50_us": p50, "p99_us": p99, "count": len(times)},
    )


def _fsync_times(folder: Path) -> list[int]:
    """Times in ns to make one appended page durable."""
    times: list[int] = []
    page = b"\xa5" * 4096
    began = time.monotonic_ns()
    with tempfile.TemporaryFile(dir=folder) as file:
        while len(times) < FSYNC_COUNT and (len(times) < 4 or time.monotonic_ns() - began < FSYNC_BUDGET_NS):
            start = time.perf_counter_ns()
            os.write(file.fileno(), page)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter_ns() - start)
    return times


def check_priorities(examined: Examined) -> Iterator[Check]:
    """Tried on a thread that ends afterwards: a raised priority cannot always be taken back."""
    wanted = examined.config.node.control_nice
    nice = _on_thread(lambda: _allowed(lambda tid: os.setpriority(os.PRIO_PROCESS, tid, wanted)))
    real_time = _on_thread(
        lambda: _allowed(
            lambda tid: os.sched_setscheduler(tid, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        )
    )
    yield Check(
        name="nice",
        state="works" if nice else "degraded",
        found=f"raising the control thread to {wanted} is {'permitted' if nice else 'not permitted'}",
        why="" if nice else "the control thread ranks above the workers only because they go to nice 19",
        hint="" if nice else "Grant CAP_SYS_NICE or raise RLIMIT_NICE (systemd: LimitNICE=-10)",
        data={"nice": wanted, "permitted": nice},
    )
    yield Check(
        name="real-time",
        state="works" if real_time else "degraded",
        found=f"SCHED_RR is {'permitted' if real_time else 'not permitted'}",
        why="" if real_time else "node.control_realtime cannot be used",
        hint="" if real_time else "Grant CAP_SYS_NICE or raise RLIMIT_RTPRIO (systemd: LimitRTPRIO=1)",
        data={"permitted": real_time},
    )


def _allowed(change: Callable[[int], None]) -> bool:
    try:
        change(threading.get_native_id())
    except OSError:
        return False
    return True


def _on_thread(function: Callable[[], _T]) -> _T:
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def check_wakeup(examined: Examined) -> Iterator[Check]:
    """A thread at the control thread's priority sleeps and wakes up, each CPU kept busy at the workers'."""
    nice, control = examined.config.scheduler.worker_nice, examined.config.node.control_nice
    with ExitStack() as stack:
        for cpu in examined.machine.cpus:
            hog = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _HOG, str(cpu), str(nice)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
            stack.callback(hog.wait)
            stack.callback(hog.kill)
            assert hog.stdout is not None
            stack.enter_context(hog.stdout)
            hog.stdout.read(1)  # it is running
        late = _on_thread(lambda: _lateness(control))
    p50, p99 = percentile_us(late, 50), percentile_us(late, 99)
    slow = p99 > WAKEUP_SLOW_US
    yield Check(
        name="wake-up",
        state="degraded" if slow else "works",
        found=f"beside busy threads at nice {nice}: p50 {p50:,.0f} us, p99 {p99:,.0f} us",
        why="answers and urgent work will be late by as much" if slow else "",
        hint="Keep other busy processes off these cores: a cpuset, or a higher cpu.weight" if slow else "",
        data={"p50_us": p50, "p99_us": p99, "max_us": max(late) / 1_000, "count": len(late)},
    )


#: Says that it runs, then keeps its CPU busy; ends by itself in case nobody ends it.
_HOG: Final = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(int(sys.argv[2]))
os.write(1, b'.')
end = time.monotonic() + 10
while time.monotonic() < end:
    for _ in range(100000):
        pass
"""


def _lateness(nice: int) -> list[int]:
    """How late, in ns, a sleeping thread comes back."""
    tid = threading.get_native_id()
    _allowed(lambda _: os.setpriority(os.PRIO_PROCESS, tid, nice))
    try:  # otherwise the kernel may add 50 us to every sleep on purpose
        Path(f"/proc/{tid}/timerslack_ns").write_text("1")
    except OSError:
        pass
    late = []
    for _ in range(WAKEUP_COUNT):
        due = time.monotonic_ns() + int(WAKEUP_SLEEP_S * 1e9)
        time.sleep(WAKEUP_SLEEP_S)
        late.append(max(0, time.monotonic_ns() - due))
    return late


EXAMINERS: Final[tuple[Examiner, ...]] = (check_fsync, check_priorities, check_wakeup)
