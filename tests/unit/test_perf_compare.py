"""Figures that became worse are found, and what differs by chance is not."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.__main__ import main
from perf.compare import compare, read
from perf.report import Report


def runs(**figures: list[float]) -> list[str]:
    """What a benchmark prints in several runs; keys that start with ``base_`` are baselines."""
    return [
        msgspec.json.encode(
            Report(
                "made",
                {key: values[run] for key, values in figures.items() if not key.startswith("base_")},
                {key: values[run] for key, values in figures.items() if key.startswith("base_")},
                {},
            )
        ).decode()
        for run in range(len(next(iter(figures.values()))))
    ]


def verdicts(before: list[str], after: list[str], tolerance_pct: float = 10) -> dict[str, str]:
    return {change.key: change.verdict for change in compare(read(before), read(after), tolerance_pct)}


def test_more_of_a_rate_is_better_and_of_a_time_worse() -> None:
    before = runs(p99_ms=[10, 11, 12], runs_per_s=[100, 110, 120], clone_speedup=[20, 21, 22])
    after = runs(p99_ms=[20, 21, 22], runs_per_s=[200, 210, 220], clone_speedup=[10, 11, 12])
    assert verdicts(before, after) == {"p99_ms": "worse", "runs_per_s": "better", "clone_speedup": "worse"}


def test_runs_that_overlap_tell_nothing() -> None:
    assert verdicts(runs(p99_ms=[10, 11, 30]), runs(p99_ms=[20, 21, 22])) == {"p99_ms": "same"}


@given(st.lists(st.floats(1, 1e6), min_size=3, max_size=3), st.floats(1.5, 9))
def test_one_side_is_worse_where_the_other_is_better(values: list[float], factor: float) -> None:
    slow = [value * factor for value in values]
    there = verdicts(runs(p99_ms=values), runs(p99_ms=slow))["p99_ms"]
    back = verdicts(runs(p99_ms=slow), runs(p99_ms=values))["p99_ms"]
    apart = min(slow) > max(values)
    assert (there, back) == (("worse", "better") if apart else ("same", "same"))
    assert verdicts(runs(p99_ms=values), runs(p99_ms=values)) == {"p99_ms": "same"}


@pytest.mark.parametrize(
    ("after", "status", "said"),
    [
        ({"p99_ms": [10.0, 10.2], "base_us": [9.0, 9.0]}, 0, "worse  baseline made base_us: 3 -> 9 (200 %)"),
        ({"p99_ms": [15.0, 15.0], "base_us": [3.0, 3.0]}, 1, "1 figures worse"),
        ({"p50_ms": [1.0, 1.0]}, 2, "no benchmark is in both files"),
    ],
)
def test_the_command_says_it_with_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: dict[str, list[float]], status: int, said: str
) -> None:
    one, two = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    one.write_text("a line of something else\n" + "\n".join(runs(p99_ms=[10.0, 10.1], base_us=[3.0, 3.0])))
    two.write_text("\n".join(runs(**after)))
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(one), str(two)])
    assert ended.value.code == status
    assert said in capsys.readouterr().out
