"""Rates, places, adaptive limits and breakers against naive models."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrt.errors import ConfigError
from agentrt.flow.aimd import Aimd, AimdLimits
from agentrt.flow.breaker import Breaker, BreakerLimits, BreakerState
from agentrt.flow.buckets import Bucket, RateLimit
from agentrt.flow.bulkhead import Bulkhead

S = 10**9


class BucketModel(RuleBasedStateMachine):
    """A token bucket in exact fractions: tokens come continuously and are spent; below zero is debt."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = RateLimit(30, 2 * S, burst=6)
        self.bucket = Bucket(self.rate)
        self.now = 0
        self.tokens = Fraction(6)
        self.ops = 0  # each may be rounded up by 1 ns

    def _earn(self, ns: int) -> None:
        self.tokens = min(Fraction(6), self.tokens + Fraction(ns * 30, 2 * S))

    @rule(ns=st.integers(0, 3 * S))
    def time(self, ns: int) -> None:
        self.now += ns
        self._earn(ns)

    @rule(cost=st.integers(1, 30), tier=st.integers(0, 3))
    def take(self, cost: int, tier: int) -> None:
        kept = 0 if tier == 0 else 2  # 20 % of 6, rounded up
        free = self.bucket.free_ns(tier, cost, self.now)
        slack = Fraction(self.ops * 30, 2 * S)
        if free <= self.now:
            assert self.tokens >= min(cost, 6 - kept) + kept - slack
            self.bucket.take(cost, self.now)
            self.tokens -= cost
        else:
            short = min(cost, 6 - kept) + kept - self.tokens
            assert short > -slack
            wait = short * 2 * S / 30
            assert wait - 1 <= free - self.now <= wait + self.ops + 2
        self.ops += 1

    @rule(reserved=st.integers(1, 10), actual=st.integers(0, 12))
    def settle(self, reserved: int, actual: int) -> None:
        self.bucket.settle(reserved, actual, self.now)
        self.tokens = min(Fraction(6), self.tokens + reserved - actual)
        self.ops += 1

    @rule(delta=st.integers(-5 * S, 5 * S))
    def clock_is_set(self, delta: int) -> None:
        self.now += delta
        self.bucket.shift(delta)

    @invariant()
    def left(self) -> None:
        left = self.bucket.left(self.now)
        assert left <= 6
        assert self.tokens < 1 or self.tokens - 1 - Fraction(self.ops, 10**6) <= left


TestBucket = BucketModel.TestCase


@given(
    st.integers(1, 1000),
    st.integers(1, 10**11),
    st.integers(0, 50),
    st.lists(st.integers(0, 10**9), min_size=1, max_size=200),
)
def test_in_no_span_passes_more_than_burst_and_rate(limit: int, window: int, burst: int, gaps: list[int]) -> None:
    bucket = Bucket(RateLimit(limit, window, burst=min(burst, limit)))
    allowed = min(burst, limit) or max(1, limit // 10)
    now, passed = 0, []
    for gap in gaps:
        now += gap
        if bucket.free_ns(0, 1, now) <= now:
            bucket.take(1, now)
            passed.append(now)
    for first in range(0, len(passed), 7):
        for last in range(first, len(passed)):
            # One unit for the rounding of the burst's price.
            assert last - first + 1 <= allowed + 1 + (passed[last] - passed[first]) * limit / window


def test_whoever_asks_at_the_moment_that_was_named_gets_it() -> None:
    bucket = Bucket(RateLimit(60, 60 * S))
    now = 10**18
    for _ in range(200):
        now = max(now, bucket.free_ns(2, 1, now))
        assert bucket.free_ns(2, 1, now) <= now
        bucket.take(1, now)


def test_pause_lets_one_through_at_its_end_and_the_rest_at_the_limits_pace() -> None:
    bucket = Bucket(RateLimit(60, 60 * S, burst=10))
    bucket.pause(100 * S)
    assert bucket.free_ns(0, 1, 5 * S) == 100 * S
    bucket.take(1, 100 * S)
    assert bucket.free_ns(0, 1, 100 * S) == 101 * S


def test_tier_0_finds_its_share_when_the_others_have_taken_theirs() -> None:
    bucket = Bucket(RateLimit(100, 60 * S, burst=10))
    while bucket.free_ns(1, 1, 0) <= 0:
        bucket.take(1, 0)
    assert bucket.left(0) == 2
    assert bucket.free_ns(0, 1, 0) <= 0


def test_a_restored_bucket_cannot_be_shut_by_a_clock_that_was_wrong() -> None:
    bucket = Bucket(RateLimit(60, 60 * S))
    bucket.restore(10**19, 0)
    assert bucket.free_ns(0, 1, 0) <= 120 * S


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": 5, "burst": 6}, {"limit": 5, "window_ns": 0}])
def test_impossible_rates_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rate of"):
        RateLimit(**wrong)


def test_bulkhead_counts_holders_and_keeps_places_for_tier_0() -> None:
    places = Bulkhead(10)
    for _ in range(8):
        assert places.has_room(3)
        places.enter()
    assert not places.has_room(1) and places.has_room(0)
    places.resize(5)
    assert not places.has_room(0)
    for _ in range(4):
        places.leave()
    assert places.has_room(0) and not places.has_room(1)
    with pytest.raises(AssertionError, match="twice"):
        for _ in range(9):
            places.leave()


def test_an_adaptive_limit_goes_on_from_its_state_and_never_below_its_floor() -> None:
    aimd = Aimd(AimdLimits(start=8, floor=2))
    aimd.restore(5_500_000)
    assert (aimd.limit, aimd.state) == (5, 5_500_000)
    aimd.restore(0)
    assert (aimd.limit, aimd.state) == (2, 2_000_000)


class AimdModel(RuleBasedStateMachine):
    """The limit as an exact number; calls in flight with the epoch they began in."""

    def __init__(self) -> None:
        super().__init__()
        self.aimd = Aimd(AimdLimits(start=4, floor=2, cut_pct=50, latency_ns=S))
        self.limit = Fraction(4)
        self.flying: list[int] = []
        self.cuts = 0

    @precondition(lambda self: self.aimd.has_room(0))
    @rule()
    def begin(self) -> None:
        self.aimd.enter()
        self.flying.append(self.cuts)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), late=st.booleans())
    def succeed(self, data: st.DataObject, late: bool) -> None:
        index = data.draw(st.integers(0, len(self.flying) - 1))
        before = self.aimd.limit
        grew = self.aimd.succeeded(2 * S if late else S // 2)
        if not late and 2 * len(self.flying) >= before:
            self.limit += 1 / self.limit
        assert grew is (self.aimd.limit == before + 1)
        self.flying.pop(index)
        self.aimd.leave()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def overload(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.flying) - 1))
        epoch = self.flying.pop(index)
        if epoch == self.cuts:
            self.limit = max(Fraction(2), self.limit / 2)
            self.cuts += 1
            self.aimd.overloaded(epoch)
        else:
            assert not self.aimd.overloaded(epoch)
        self.aimd.leave()

    @invariant()
    def follows(self) -> None:
        assert abs(self.aimd.state - self.limit * 10**6) <= 60 * 10**2
        assert self.aimd.limit == self.aimd.state // 10**6 and self.aimd.held == len(self.flying)


TestAimd = AimdModel.TestCase


def test_aimd_finds_what_a_provider_takes_without_being_told() -> None:
    aimd, takes, seen = Aimd(), 40, []
    for _ in range(4000):
        while aimd.has_room(0):
            aimd.enter()
        epoch, held = aimd.epoch, aimd.held
        for index in range(held):
            if index < takes:
                aimd.succeeded(0)
            else:
                aimd.overloaded(epoch)
            aimd.leave()
        seen.append(aimd.limit)
    late = seen[1000:]
    assert takes * 0.65 <= min(late) and max(late) <= takes + 2
    assert sum(late) / len(late) > takes * 0.8


class BreakerModel(RuleBasedStateMachine):
    """Results kept in lists, states by the book."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = BreakerLimits(in_row=3, share_pct=50, last=8, open_ns=S, open_max_ns=5 * S)
        self.breaker = Breaker(self.limits)
        self.now = 0
        self.state, self.until, self.times = BreakerState.CLOSED, 0, 0
        self.results: list[bool] = []
        self.flying: list[tuple[int, int]] = []  # (breaker's epoch, model's era)
        self.era = 0
        self.probing = False

    @rule(ns=st.integers(0, 3 * S))
    def time(self, ns: int) -> None:
        self.now += ns

    @rule()
    def begin(self) -> None:
        if self.state is BreakerState.OPEN and self.now >= self.until:
            expected = True
        else:
            expected = self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self.probing)
        assert self.breaker.admits(self.now) is expected
        if not expected:
            return
        epoch = self.breaker.enter(self.now)
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self.era += 1
        if self.state is BreakerState.HALF_OPEN:
            self.probing = True
        self.flying.append((epoch, self.era))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["fail", "succeed", "fail", "nothing"]))
    def end(self, data: st.DataObject, how: str) -> None:
        epoch, era = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if how == "nothing":
            self.breaker.leave(epoch)
            if era == self.era:
                self.probing = False
            return
        failed = how == "fail"
        changed = self.breaker.record(epoch, failed, self.now)
        before = self.state
        if era == self.era:
            self._record(failed)
        assert changed is (None if self.state is before else self.state)

    def _record(self, failed: bool) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.probing = False
            if failed:
                self._open()
            else:
                self.state, self.results, self.times = BreakerState.CLOSED, [], 0
                self.era += 1
            return
        self.results = [*self.results, failed][-8:]
        last = self.results
        row = len(last) >= 3 and all(last[-3:])
        share = len(last) >= 4 and sum(last) * 2 >= len(last)
        if failed and (row or share):
            self._open()

    def _open(self) -> None:
        self.state, self.results = BreakerState.OPEN, []
        self.until = self.now + min(5 * S, S * 2**self.times)
        self.times += 1
        self.era += 1
        self.probing = False

    @invariant()
    def same(self) -> None:
        assert self.breaker.state is self.state
        if self.state is BreakerState.OPEN:
            assert self.breaker.until_ns == self.until

    @rule()
    def restart(self) -> None:
        """What is open stays open over a restart; calls in flight are gone."""
        until, times = self.breaker.snapshot
        self.breaker = Breaker(self.limits)
        self.breaker.restore(until, times, self.now)
        self.flying, self.results, self.probing = [], [], False
        self.era += 1
        if self.state is BreakerState.CLOSED:
            self.times = 0
        else:
            self.state, self.until = BreakerState.OPEN, min(self.until, self.now + 5 * S)


TestBreaker = BreakerModel.TestCase


def test_a_straggler_neither_closes_nor_opens_a_breaker() -> None:
    breaker = Breaker(BreakerLimits(in_row=1))
    old = breaker.enter(0)
    assert breaker.record(breaker.enter(0), True, 0) is BreakerState.OPEN
    assert breaker.record(old, False, 0) is None and breaker.state is BreakerState.OPEN
    probe = breaker.enter(breaker.until_ns)
    assert breaker.record(old, True, breaker.until_ns) is None
    assert breaker.record(probe, False, breaker.until_ns) is BreakerState.CLOSED
