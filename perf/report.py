"""What every benchmark prints: one JSON object with figures, baselines of the same run, and the machine."""

import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from agentrt.demo.figures import percentile
from agentrt.stores.place import file_system_of

_SYNCS = 20


class Report(msgspec.Struct):
    """``figures`` are agentrt's, ``baselines`` what a user would pick instead, measured in the same run."""

    name: str
    figures: dict[str, float]
    baselines: dict[str, float]
    machine: dict[str, Any]


def machine(notes: Iterable[str] = ()) -> dict[str, Any]:
    """The command, where it ran, how busy that machine was at the end, and what the reader should know."""
    return {
        "command": shlex.join(["python", "-m", "perf", *sys.argv[1:]]),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": proc_field("/proc/cpuinfo", "model name"),
        "memory_mib": int(proc_field("/proc/meminfo", "MemTotal").split()[0] or 0) // 1024,
        "kernel": platform.release(),
        "max_map_count": int(Path("/proc/sys/vm/max_map_count").read_text()),
        "python": platform.python_version(),
        "libraries": " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("wasmtime", "uvloop", "lmdb")),
        "load_1m": round(os.getloadavg()[0], 2),
        "notes": list(notes),
    }


def disk() -> dict[str, Any]:
    """The disk under the stores: file system, and the median time of a 4 KiB write with fdatasync."""
    folder = Path(tempfile.gettempdir())
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_SYNCS):
            start = time.perf_counter_ns()
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fdatasync(file.fileno())
            times.append((time.perf_counter_ns() - start) / 1000)
    return {"file_system": file_system_of(folder), "fdatasync_us": round(percentile(times, 50), 1)}


def proc_field(path: str, name: str) -> str:
    """A value of a file with lines of ``name : value``, "" if it is not there."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
