"""A process that is moved into another cpuset loses what its threads were bound to (before Linux 6.2): kept here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_affinity(pid: int) -> Iterator[None]:
    """Afterwards the threads of the process may use the CPUs that they could before, as far as the kernel lets them;
    threads that have begun meanwhile, those of the first thread."""
    before = _affinities(pid)
    try:
        yield
    finally:
        first = before.get(pid)
        for tid, cpus in _affinities(pid).items():
            wanted = before.get(tid, first)
            if wanted is not None and wanted < cpus:
                try:
                    os.sched_setaffinity(tid, wanted)
                except OSError:  # it has ended, or its cpuset has none of them
                    continue


def _affinities(pid: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    try:
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return found
    for tid in tids:
        try:
            found[tid] = os.sched_getaffinity(tid)
        except OSError:
            continue
    return found
