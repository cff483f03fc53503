"""Retries: who makes them, how many, and when; time-outs of three layers."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.errors import ConfigError
from agentrt.flow.retry import Again, Attempts, Failure, GiveUp, Retries, RetryLimits, attempts_of
from agentrt.flow.timeouts import Clock, Layer, Timeouts

S = 10**9


def test_fault_B81_a_stack_of_layers_that_each_would_retry_five_times_makes_five_attempts() -> None:
    calls: list[dict[str, str]] = []

    def provider(headers: dict[str, str]) -> bool:
        calls.append(headers)
        return False

    def layer(below: Callable[[dict[str, str]], bool]) -> Callable[[dict[str, str]], bool]:
        def call(headers: dict[str, str]) -> bool:
            retries = Retries(RetryLimits(attempts_max=5), attempts_of(headers))
            number = 1
            while not below(retries.attempts(number).header()):
                verdict = retries.decide(Failure.TRANSPORT, number, 0, 0.5)
                if isinstance(verdict, GiveUp):
                    return False
                number = verdict.number
            return True

        return call

    stack = layer(layer(layer(layer(layer(provider)))))
    assert not stack({})
    assert [attempts_of(headers) for headers in calls] == [Attempts(number, 5) for number in range(1, 6)]


@given(
    st.sampled_from([Failure.TRANSPORT, Failure.RATE]),
    st.integers(1, 8),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3600 * S),
    st.none() | st.integers(-(10**12), 10**16),
)
def test_back_off_is_bounded_whatever_the_other_side_says(
    failure: Failure, number: int, draw: float, window: int, retry_after: int | None
) -> None:
    limits = RetryLimits()
    verdict = Retries(limits).decide(failure, number, 5 * S, draw, window_ns=window, retry_after_ns=retry_after)
    if number >= 5:
        assert verdict == GiveUp("attempts")
        return
    assert isinstance(verdict, Again) and verdict.number == number + 1
    delay = verdict.at_ns - 5 * S
    assert 0 <= delay <= max(limits.cap_ns, limits.retry_after_max_ns) + max(limits.base_ns, window // 5)
    if failure is Failure.RATE and retry_after is not None:
        assert delay >= min(max(0, retry_after), limits.retry_after_max_ns)


def test_fault_B83_attempts_against_a_window_are_spread_over_it() -> None:
    random_ = random.Random(1)
    for _ in range(1000):
        now, times = 0, [0]
        for number in range(1, 5):
            verdict = Retries().decide(Failure.RATE, number, now, random_.random(), window_ns=60 * S)
            assert isinstance(verdict, Again)
            now = verdict.at_ns
            times.append(now)
        assert all(later - earlier >= 12 * S for earlier, later in pairwise(times))


def test_jitter_is_full() -> None:
    draws = [0.0, 0.25, 0.5, 0.999]
    first = [Retries().decide(Failure.TRANSPORT, 1, 0, draw) for draw in draws]
    assert [v.at_ns for v in first if isinstance(v, Again)] == [int(draw * S / 2) for draw in draws]
    fourth = Retries().decide(Failure.TRANSPORT, 4, 0, 0.5)
    assert isinstance(fourth, Again) and fourth.at_ns == 2 * S


@pytest.mark.parametrize("failure", [Failure.CONFLICT, Failure.FATAL])
def test_conflicts_and_what_is_fatal_are_never_retried(failure: Failure) -> None:
    assert Retries().decide(failure, 1, 0, 0.0) == GiveUp("kind")


def test_no_attempt_is_planned_past_the_deadline() -> None:
    assert Retries().decide(Failure.TRANSPORT, 1, 0, 0.5, deadline_ns=S // 4) == GiveUp("deadline")


@given(st.text(max_size=20))
def test_headers_of_strangers_are_read_or_left(text: str) -> None:
    found = attempts_of({"Agentrt-Attempt": text})
    assert found is None or (1 <= found.number <= found.limit <= 1000)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_attempts_survive_their_header(number: int, limit: int) -> None:
    attempts = Attempts(min(number, limit), limit)
    assert attempts_of(attempts.header()) == attempts


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(ConfigError):
        RetryLimits(attempts_max=0)
    with pytest.raises(ConfigError):
        RetryLimits(base_ns=2, cap_ns=1)


def test_waiting_is_no_active_time() -> None:
    clock = Clock()
    clock.go(10)
    clock.rest(30)
    clock.rest(40)
    assert clock.spent_ns(10**9) == 20
    clock.go(100)
    clock.go(150)
    assert clock.spent_ns(160) == 80


def test_the_layer_with_least_left_bounds_the_call_and_is_named() -> None:
    timeouts = Timeouts(loop_ns=100, deadline_ns=1000)
    assert timeouts.left(0, 0, 50) == (50, Layer.TOOL)
    assert timeouts.left(60, 0, 50) == (40, Layer.LOOP)
    assert timeouts.left(60, 970, 50) == (30, Layer.LIFETIME)
    assert timeouts.left(200, 2000, 50) == (-1000, Layer.LIFETIME)
    assert Timeouts().left(10**18, 10**18, 50) == (50, Layer.TOOL)
    clock = Clock(active_ns=40, since_ns=200)
    assert timeouts.due_ns(clock) == 260
    clock.rest(210)
    assert timeouts.due_ns(clock) == 1000
