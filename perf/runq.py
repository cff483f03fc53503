"""The run queue: ns per push and pop, and the worst push of a control plane beside busy workers.

Load (runq_bench.h): 64 queued items, each pair picks one and queues it again at a random tier for one of 16 random
tenants; tiers, tenants, aging and cancel work, parking and admission are not counted (`everything_*` counts them,
charging and a cancel every 16th pair). `pair_2t` is wall time over the pairs of both threads on one queue. `push_*`: a
thread at nice -10 pushes beside workers at nice 19 that are in the queue half of their time; `push_max_running_us`
leaves out pushes during which the thread itself lost its CPU. The peers keep four tiers in order and nothing else.
"""

import asyncio
import heapq
import threading

from perf import native
from perf.report import Report, machine
from perf.timing import clock, median_ns

_QUEUED = 64
_PEERS = {
    "mutex": ("runq_mutex.c", None, ""),
    "moodycamel": ("runq_moodycamel.cc", "concurrentqueue/concurrentqueue.h", "libconcurrentqueue-dev"),
    "ck_ring": ("runq_ck.c", "ck_ring.h", "libck-dev"),
}
_PEER_KEYS = ("pair_1t_ns", "pair_2t_ns", "pair_1p1c_ns", "push_max_us")


def _heapq_pairs(loops: int, heap: list[tuple[int, int]], lock: threading.Lock) -> None:
    for sequence in range(loops):
        with lock:
            _, item = heapq.heappop(heap)
        with lock:
            heapq.heappush(heap, (sequence * 2654435761 >> 7 & 3, item))


def _filled_heap() -> list[tuple[int, int]]:
    heap = [(number & 3, number) for number in range(_QUEUED)]
    heapq.heapify(heap)
    return heap


def heapq_1t(loops: int) -> float:
    """Seconds for ``loops`` pairs of a heap behind a lock, on one thread."""
    heap, lock = _filled_heap(), threading.Lock()
    start = clock()
    _heapq_pairs(loops, heap, lock)
    return clock() - start


def heapq_2t(loops: int) -> float:
    """The same by two threads, half of the pairs each."""
    heap, lock = _filled_heap(), threading.Lock()
    threads = [threading.Thread(target=_heapq_pairs, args=((loops + 1) // 2, heap, lock)) for _ in range(2)]
    start = clock()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clock() - start


def asyncio_1t(loops: int) -> float:
    """Seconds for ``loops`` pairs of `asyncio.PriorityQueue`, without a wait among them."""
    queue: asyncio.PriorityQueue[tuple[int, int]] = asyncio.PriorityQueue()
    for number in range(_QUEUED):
        queue.put_nowait((number & 3, number))
    start = clock()
    for sequence in range(loops):
        _, item = queue.get_nowait()
        queue.put_nowait((sequence * 2654435761 >> 7 & 3, item))
    return clock() - start


def run(tiny: bool) -> Report:
    arguments = (3, 1000, 0.05, 0.1) if tiny else (201, 8_000, 1.5, 5.0)
    notes = []
    figures = native.run("runq.c", *arguments, csrc=("runq.c",))
    if "pair_2t_ns" not in figures:
        notes.append("one CPU: figures of two threads are left out")
    baselines = {
        "heapq_pair_1t_ns": median_ns(heapq_1t, tiny=tiny),
        "heapq_pair_2t_ns": median_ns(heapq_2t, tiny=tiny),
        "asyncio_pair_1t_ns": median_ns(asyncio_1t, tiny=tiny),
    }
    for name, (source, header, package) in _PEERS.items():
        cxx = source.endswith(".cc")
        if header is not None and not native.has_header(header, cxx=cxx):
            notes.append(f"{name} is left out: no {header} (Debian: {package})")
            continue
        found = native.run(source, *arguments)
        baselines |= {f"{name}_{key}": found[key] for key in _PEER_KEYS if key in found}
    if figures["push_nice"] > -10:
        notes.append(f"the pushing thread could not go below nice {figures['push_nice']:g}")
    kept = {key.removesuffix("_kept"): value for key, value in figures.items() if key.endswith("_kept")}
    if disturbed := [name for name, count in kept.items() if not count]:
        notes.append(f"no trial without a lost CPU, so all count: {', '.join(disturbed)}")
    figures = {key: value for key, value in figures.items() if not key.endswith(("_kept", "_nice", "_count"))}
    return Report("runq", figures, baselines, machine(notes) | {"trials": arguments[0], "trials_kept": kept})
