"""``python -m tests.sim --seeds A..B [--runs N] [--trace] [--jobs N]``"""

import argparse
import gc
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.sim.world import Report, run_seed

_CHUNK = 50


def run_seeds(first: int, last: int) -> list[Report]:
    """Seeds first to last, both included."""
    gc.disable()  # worlds are small and go as a whole
    reports = [run_seed(seed) for seed in range(first, last + 1)]
    gc.collect()
    return reports


def sweep(
    first: int, last: int, runs: int, jobs: int, failures_max: int = 10
) -> tuple[int, int, dict[str, int], list[Report]]:
    """Until the seeds are done, ``runs`` runs were made, or enough failed: (seeds, runs, ends by state, failures)."""
    seeds = made = 0
    states: dict[str, int] = {}
    failures: list[Report] = []
    chunks = [(start, min(last, start + _CHUNK - 1)) for start in range(first, last + 1, _CHUNK)]
    with ProcessPoolExecutor(jobs) as pool:
        under_way = []
        left = iter(chunks)
        for _ in range(2 * jobs):
            if (chunk := next(left, None)) is not None:
                under_way.append(pool.submit(run_seeds, *chunk))
        while under_way:
            for report in under_way.pop(0).result():
                seeds += 1
                made += report.runs
                for state, count in report.states.items():
                    states[state] = states.get(state, 0) + count
                if report.failure is not None:
                    failures.append(report)
            enough = made >= runs or len(failures) >= failures_max
            if not enough and (chunk := next(left, None)) is not None:
                under_way.append(pool.submit(run_seeds, *chunk))
    return seeds, made, states, failures


def show(report: Report) -> str:
    """One or two lines about it."""
    what = f"seed {report.seed}: {report.failure or 'every law holds'}"
    return f"{what}\n  hash {report.hash}, {report.runs} runs, {report.events} events, {report.lives} lives"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Look for a seed that breaks a law.")
    parser.add_argument("--seeds", default="0..999", help="first..last, both included")
    parser.add_argument("--runs", type=int, default=10**9, help="stop once so many runs were made")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trace", action="store_true", help="print every event that matters")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("..")
    low, high = int(first), int(last or first)
    if options.trace:
        reports = [run_seed(seed, print) for seed in range(low, high + 1)]
        print("\n".join(map(show, reports)))
        return 1 if any(report.failure is not None for report in reports) else 0
    began = time.monotonic()
    seeds, runs, states, failures = sweep(low, high, options.runs, options.jobs)
    took = time.monotonic() - began
    print(f"{seeds} seeds, {runs} runs, {took:.1f} s, {runs / took:.0f} runs/s; {states}")
    for report in failures:
        print(show(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
