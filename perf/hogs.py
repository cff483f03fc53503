"""Native processes that compute without end, and what benchmarks beside them report."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping

from perf.report import Report, machine

#: Of a shell.
COUNT = "i=0; while :; do i=$((i+1)); done"


@contextlib.contextmanager
def nice_hogs(count: int) -> Iterator[None]:
    """Shells that count under plain ``nice -n 19``: what a user would do."""
    command = ["nice", "-n", "19", "sh", "-c", COUNT]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()


def report_beside(name: str, said: Mapping[str, float], shares: bool) -> Report:
    """What is called ``nice_…`` are the baselines. ``shares``: whether leaves have shares of the CPU."""
    figures = {key: value for key, value in said.items() if not key.startswith("nice_")}
    baselines = {key: value for key, value in said.items() if key.startswith("nice_")}
    note = "leaves have weights" if shares else "no cpu controller: policy and niceness only"
    return Report(name, figures, baselines, machine([note]))
