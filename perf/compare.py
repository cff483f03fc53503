"""Which figures became worse: ``python -m perf compare BEFORE AFTER``.

Each file has the JSON lines of one or more runs of one or more benchmarks; best three or more of each, the two sides in
turns:

    for _ in 1 2 3; do (cd before && python -m perf latency --json) >> before.jsonl; …; done

A figure is worse if its median is, by more than the tolerance, and if every run after was worse than every run before:
what one run says may be the hour's doing. Baselines are compared in the same way, for they say what the machine did;
they are nobody's fault. Ends with status 1 if a figure is worse, and with 2 if there is nothing to compare.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple

import msgspec

from perf.report import Report

TOLERANCE_PCT: Final = 10.0
#: More is better of these; of all others less is.
_MORE_SUFFIXES: Final = ("_per_s", "_speedup", "_vs_memcpy", "_vs_lmdb", "_peer_ratio", "saver_ratio")
#: What was set up, not what came out.
_GIVEN: Final = frozenset({"tenants", "live_guests", "queued_runs", "refused_pct", "hogs_pct", "nice_hogs_pct"})

Runs = dict[tuple[str, str, str], list[float]]  # benchmark, "figure" or "baseline", key -> a value of each run
Verdict = Literal["worse", "better", "same"]


class Change(NamedTuple):
    """``percent``: how much worse the median is, below 0 better."""

    name: str
    kind: str
    key: str
    before: float
    after: float
    percent: float
    verdict: Verdict


def read(lines: Iterable[str]) -> Runs:
    """The figures in what benchmarks have printed; other lines are passed over."""
    found: Runs = defaultdict(list)
    for line in lines:
        if line.startswith("{"):
            report = msgspec.json.decode(line, type=Report)
            for kind, values in (("figure", report.figures), ("baseline", report.baselines)):
                for key, value in values.items():
                    found[report.name, kind, key].append(value)
    return dict(found)


def compare(before: Runs, after: Runs, tolerance_pct: float = TOLERANCE_PCT) -> list[Change]:
    """What is on both sides, in the order of the first."""
    changes = []
    for name, kind, key in before:
        one, two = before[name, kind, key], after.get((name, kind, key), [])
        if key in _GIVEN or not two:
            continue
        sign = -1 if key.endswith(_MORE_SUFFIXES) else 1
        was, now = median(one), median(two)
        percent = sign * (now - was) / abs(was) * 100 if was else 0.0
        verdict: Verdict = "same"
        if percent > tolerance_pct and min(sign * value for value in two) > max(sign * value for value in one):
            verdict = "worse"
        elif percent < -tolerance_pct and max(sign * value for value in two) < min(sign * value for value in one):
            verdict = "better"
        changes.append(Change(name, kind, key, was, now, percent, verdict))
    return changes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf compare", description=str(__doc__).splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE_PCT, metavar="PERCENT")
    options = parser.parse_args(arguments)
    before, after = (read(path.read_text().splitlines()) for path in (options.before, options.after))
    changes = compare(before, after, options.tolerance)
    if not changes:
        print("no benchmark is in both files")
        return 2
    for change in changes:
        if change.verdict != "same":
            print(
                f"{change.verdict:6} {change.kind:8} {change.name} {change.key}:"
                f" {change.before:,.4g} -> {change.after:,.4g} ({abs(change.percent):.0f} %)"
            )
    worse = sum(change.verdict == "worse" and change.kind == "figure" for change in changes)
    runs = min(min(len(found) for found in side.values()) for side in (before, after))
    print(f"{len(changes)} compared, {worse} figures worse by more than {options.tolerance:g} %; runs of each: {runs}")
    return 1 if worse else 0
