"""What every benchmark prints: one JSON object with figures, baselines of the same run, and the machine."""

import os
import platform
from collections.abc import Sequence
from typing import Any

import msgspec


class Report(msgspec.Struct):
    """``figures`` are agentrt's, ``baselines`` what a user would pick instead, measured in the same run."""

    name: str
    figures: dict[str, float]
    baselines: dict[str, float]
    machine: dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[min(len(ordered), int(rank)) - 1]


def machine() -> dict[str, Any]:
    """Where it ran, and how busy that machine was."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }
