"""Windows of the calendar and quotas, against models that count by looking at every call or every day."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentrt.errors import InputError, StoreCorruptError
from agentrt.flow.decisions import Action, Scope
from agentrt.flow.quotas import Counter, CounterRow, Full, Quota, Quotas, decode_counter, encode_counter
from agentrt.flow.windows import DAY_NS, HOUR_NS, NOW_NS_MAX, SHORTEST_NS, Span, later_window, window_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOON = 20_000 * DAY_NS + 12 * HOUR_NS


def start_of(span: Span, at: datetime) -> datetime:
    """As the standard library's calendar has it."""
    if span is Span.HOUR:
        return at.replace(minute=0, second=0, microsecond=0)
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    return day if span is Span.DAY else day.replace(day=1)


@given(st.sampled_from(Span), st.integers(0, 4 * 10**9), st.data())
def test_windows_are_those_of_the_calendar(span: Span, at_s: int, data: st.DataObject) -> None:
    reset_s = data.draw(st.integers(0, min(at_s, SHORTEST_NS[span] // 10**9 - 1)))
    start, end = window_of(span, at_s * 10**9, reset_s * 10**9)
    at = EPOCH + timedelta(seconds=at_s - reset_s)
    assert start == (start_of(span, at) - EPOCH) // timedelta(microseconds=1) * 1000 + reset_s * 10**9
    assert start <= at_s * 10**9 < end
    assert window_of(span, end, reset_s * 10**9)[0] == end == later_window(span, start, 1, reset_s * 10**9)
    assert window_of(span, end - 1, reset_s * 10**9)[0] == start


@given(st.sampled_from(Span), st.integers(0, 40))
def test_later_windows_follow_one_another(span: Span, count: int) -> None:
    start = at = window_of(span, NOON, 60)[0]
    for _ in range(count):
        at = window_of(span, at, 60)[1]
    assert later_window(span, start, count, 60) == at


@pytest.mark.parametrize(("now_ns", "reset_ns"), [(-1, 0), (NOW_NS_MAX + 1, 0), (5, 6), (NOON, HOUR_NS), (NOON, -1)])
def test_what_is_no_time_has_no_window(now_ns: int, reset_ns: int) -> None:
    with pytest.raises(InputError):
        window_of(Span.HOUR, now_ns, reset_ns)


TOOL, OTHER, TENANT = (Scope.TOOL, "t"), (Scope.TOOL, "u"), (Scope.TENANT, "a")
QUOTAS = st.lists(
    st.builds(
        Quota,
        st.just(Scope.TOOL),
        st.sampled_from(["t", "*"]),
        st.integers(1, 4),
        st.sampled_from(Span),
        st.sampled_from([0, 1800]),
    )
    | st.builds(Quota, st.just(Scope.TENANT), st.just("a"), st.integers(1, 6), st.sampled_from(Span)),
    max_size=4,
    unique_by=lambda quota: (quota.scope, quota.name, quota.span),
)


class Model(RuleBasedStateMachine):
    """Every call that was let in, with its time and names."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOON
        self.calls: list[tuple[int, tuple[tuple[Scope, str], ...]]] = []

    @initialize(quotas=QUOTAS)
    def begin(self, quotas: list[Quota]) -> None:
        self.rules = quotas
        self.quotas = Quotas(quotas)

    def over(self, name: tuple[Scope, str]) -> list[Quota]:
        exact = [quota for quota in self.rules if (quota.scope, quota.name) == name]
        return exact or [quota for quota in self.rules if (quota.scope, quota.name) == (name[0], "*")]

    def used(self, quota: Quota, name: tuple[Scope, str], now: int) -> int:
        start, end = window_of(quota.span, now, quota.reset_s * 10**9)
        return sum(1 for at, names in self.calls if start <= at < end and name in names)

    def pairs(self, names: tuple[tuple[Scope, str], ...]) -> Iterator[tuple[Quota, tuple[Scope, str]]]:
        yield from ((quota, name) for name in names for quota in self.over(name))

    @rule(names=st.sampled_from([(TOOL,), (OTHER,), (TOOL, TENANT), (OTHER, TENANT)]))
    def call(self, names: tuple[tuple[Scope, str], ...]) -> None:
        fits = all(self.used(quota, name, self.now) < quota.count for quota, name in self.pairs(names))
        answer = self.quotas.take(names, self.now)
        assert isinstance(answer, list) is fits
        if isinstance(answer, list):
            self.calls.append((self.now, names))
            return
        # Nothing else being let in, the call finds a place then, and not a moment before.
        for at, free in ((answer.until_ns - 1, False), (answer.until_ns, True)):
            full = [name for quota, name in self.pairs(names) if self.used(quota, name, at) >= quota.count]
            assert (not full) is free

    @rule(by_ns=st.sampled_from([1, HOUR_NS // 4, HOUR_NS, DAY_NS, 30 * DAY_NS]))
    def time_goes(self, by_ns: int) -> None:
        self.now += by_ns

    @rule()
    def start_again(self) -> None:
        rows = [
            decode_counter(encode_counter(counter.row()))
            for name in (TOOL, OTHER, TENANT)
            for counter in self.quotas.counters([name], self.now)
        ]
        self.quotas = Quotas(self.rules)
        self.quotas.adopt(rows)

    @rule()
    def configure_again(self) -> None:
        self.quotas.configure(self.rules)

    @invariant()
    def the_counts_are_those_of_the_calls(self) -> None:
        for name in (TOOL, OTHER, TENANT):
            for counter in self.quotas.counters([name], self.now):
                assert counter.used == self.used(counter.quota, name, self.now) <= counter.quota.count


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 30),
    st.integers(1, 5),
    st.sampled_from(Span),
    st.integers(0, 60),
)
def test_the_next_free_place_is_where_the_last_of_the_calls_goes(
    count: int, used: int, ahead: int, calls: int, span: Span, reset_s: int
) -> None:
    counter = Counter(Quota(Scope.TOOL, "t", count, span, reset_s), "t")
    counter.roll(NOON)
    counter.used = min(used, count)
    left, at = count - counter.used, counter.start_ns
    for _ in range(ahead + calls):  # one place after the other
        if not left:
            at, left = window_of(span, at, reset_s * 10**9)[1], count
        left -= 1
    assert counter.next_free_ns(ahead, calls) == at


def test_a_refusal_says_which_quota_and_until_when() -> None:
    quotas = Quotas([Quota(Scope.TOOL, "*", 2, Span.DAY, 9 * 3600)])
    for _ in range(2):
        assert isinstance(quotas.take([TOOL], NOON), list)
    assert isinstance(quotas.take([OTHER], NOON), list)  # every name has its own
    full = quotas.take([TOOL], NOON)
    assert isinstance(full, Full) and full.until_ns == NOON - 12 * HOUR_NS + 33 * HOUR_NS
    decision = full.decision(NOON, "r", "1:1")
    assert (decision.action, decision.who, decision.limit, decision.value, decision.bound) == (
        Action.WAIT,
        "tool:t",
        "calls/day",
        2,
        2,
    )
    never = quotas.take([TOOL], NOON, 3)
    assert isinstance(never, Full) and never.never and never.decision(NOON, None, None).action is Action.REFUSE


def test_a_name_less_is_let_go_and_what_it_counted_is_kept() -> None:
    quotas = Quotas([Quota(Scope.TOOL, "*", 1, Span.HOUR)], names_max=2)
    for name in "abcd":
        assert isinstance(quotas.take([(Scope.TOOL, name)], NOON), list)
    for name in "abcd":
        assert isinstance(quotas.take([(Scope.TOOL, name)], NOON), Full)
    assert isinstance(quotas.take([(Scope.TOOL, "a")], NOON + HOUR_NS), list)


def test_a_clock_that_is_set_back_gives_no_place_again() -> None:
    quotas = Quotas([Quota(Scope.TOOL, "t", 1, Span.HOUR)])
    counters = quotas.take([TOOL], NOON)
    assert isinstance(counters, list)
    assert isinstance(quotas.take([TOOL], NOON - HOUR_NS), Full)
    again = Quotas([Quota(Scope.TOOL, "t", 1, Span.HOUR)])
    again.adopt([counters[0].row()])
    assert isinstance(again.take([TOOL], NOON - HOUR_NS), Full)


@pytest.mark.parametrize(
    "wrong", [{"scope": Scope.RUN}, {"count": 0}, {"count": 2**53}, {"reset_s": 3600}, {"reset_s": -1}]
)
def test_quotas_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="the quota of"):
        Quota(**({"scope": Scope.TOOL, "name": "t", "count": 1, "span": Span.HOUR} | wrong))


def test_rows_that_cannot_be_are_refused() -> None:
    for row in (CounterRow("tool", "t", "week", 0, 0, 1), CounterRow("tool", "t", "day", 0, 0, -1)):
        with pytest.raises(StoreCorruptError):
            decode_counter(encode_counter(row))
    with pytest.raises(StoreCorruptError):
        decode_counter(b"\xc1")
