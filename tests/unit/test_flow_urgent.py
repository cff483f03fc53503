"""How often a tenant may begin urgent runs."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agentrt.flow import urgent
from agentrt.flow.urgent import UrgentRates

MINUTE = 60 * 10**9


def test_a_tenth_at_once_then_at_the_rate_and_each_tenant_for_itself() -> None:
    rates = UrgentRates(60, {"vip": 600, "free": 0})
    assert [rates.take("acme", 0) for _ in range(6)] == [0] * 6
    assert rates.take("acme", 0) == 10**9
    assert rates.take("acme", 10**9 - 1) == 1
    assert rates.take("acme", 10**9) == 0
    assert rates.take("rival", 0) == 0
    assert [rates.take("vip", 0) for _ in range(60)] == [0] * 60 and rates.take("vip", 0)
    assert not any(rates.take("free", 0) for _ in range(1_000))


def test_without_limits_nothing_is_kept() -> None:
    rates = UrgentRates()
    assert not rates.active and not any(rates.take("a", 0) for _ in range(100)) and len(rates) == 0
    assert UrgentRates(0, {"a": 1}).active and UrgentRates(1).active


@given(st.integers(1, 10_000), st.lists(st.integers(0, MINUTE), min_size=1, max_size=300))
def test_no_minute_has_more_than_the_rate_and_a_tenth(per_minute: int, times: list[int]) -> None:
    rates = UrgentRates(per_minute)
    begun = [now for now in sorted(times) if rates.take("t", now) == 0]
    assert 1 <= len(begun) <= per_minute + max(1, per_minute // 10) + 1


@given(st.integers(1, 1_000), st.integers(0, 10**6))
def test_the_time_that_is_told_is_enough(per_minute: int, now: int) -> None:
    rates = UrgentRates(per_minute)
    while not (wait := rates.take("t", now)):
        pass
    assert rates.take("t", now + wait - 1) > 0 and rates.take("t", now + wait) == 0


def test_tenants_that_have_been_quiet_are_forgotten() -> None:
    rates = UrgentRates(6)
    for number in range(3 * urgent.TENANTS_MAX):
        assert rates.take(f"t{number}", number * 10**7) == 0  # full again after 10 s, so after 1,000 others
    assert len(rates) <= urgent.TENANTS_MAX + 1_001


@given(st.integers(1, 500), st.lists(st.integers(0, 20 * MINUTE), max_size=100), st.booleans(), st.integers(0, MINUTE))
def test_a_restart_gives_nobody_more(per_minute: int, times: list[int], steadily: bool, pause: int) -> None:
    """Who reads what was begun lately allows nothing that the old node would not have allowed, and the same if the
    bucket was full at some time since."""
    old, new = UrgentRates(per_minute), UrgentRates(per_minute)
    if steadily:  # as fast as it may, for so long
        times = [*times, *range(0, 2 * MINUTE, MINUTE // per_minute)]
    begun = [at for at in sorted(times) if not old.take("acme", at)]
    now = max(times, default=0) + pause
    since = now - new.memory_ns
    known = [at for at in begun if at >= since]
    for at in known:
        new.recall("acme", at, since)
    rested = any(later - at > new.memory_ns // 5 for at, later in itertools.pairwise([since, *known, now]))
    for _ in range(per_minute):
        wait = old.take("acme", now)
        again = new.take("acme", now)
        assert again >= wait and (not rested or again == wait)
        if again:
            break
