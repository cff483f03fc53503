"""Durations as authors write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.agents.durations import SECONDS_MAX, parse_duration
from agentrt.errors import InputError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30), ("15m", 900), ("1h30m", 5400), ("2d", 172800), ("1w", 604800), ("1.5h", 5400)],
)
def test_text(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.floats(0, SECONDS_MAX))
def test_numbers_are_seconds(seconds: float) -> None:
    assert parse_duration(seconds) == seconds


@pytest.mark.parametrize(
    "wrong",
    ["", "2", "d", "2 d", "-1s", "1s ", "1y", "2dd", "1e3s", -1, float("nan"), float("inf"), True, "9999w"],
)
def test_what_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(InputError):
        parse_duration(wrong)  # type: ignore[arg-type]
