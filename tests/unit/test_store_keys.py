import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.errors import InputError
from agentrt.ids import run_id_from_bytes
from agentrt.stores.base import KEY_BYTES_MAX
from agentrt.stores.keys import (
    address_of,
    event_key,
    idempotency_row_key,
    inbox_key,
    journal_key,
    outbox_key,
    parse_inbox_key,
    parse_ready_key,
    parse_timer_key,
    parse_wait_key,
    ready_key,
    run_prefix,
    timer_key,
    wait_key,
)

run_ids = st.binary(min_size=16, max_size=16).map(run_id_from_bytes)
numbers = st.integers(0, 2**64 - 1)
ready = st.tuples(st.integers(0, 3), numbers, run_ids)


@given(ready, ready)
def test_ready_keys_sort_by_tier_then_age(a: tuple[int, int, str], b: tuple[int, int, str]) -> None:
    assert (ready_key(*a) < ready_key(*b)) == (a < b)
    assert parse_ready_key(ready_key(*a)) == a


@given(run_ids, run_ids, numbers, numbers)
def test_a_runs_keys_lie_together_in_order(run: str, other: str, a: int, b: int) -> None:
    assert (journal_key(run, a) < journal_key(run, b)) == (a < b)
    assert journal_key(run, a).startswith(run_prefix(run))
    assert run == other or not journal_key(other, a).startswith(run_prefix(run))
    assert outbox_key(run, "1:3") != outbox_key(run, "1:30")
    assert outbox_key(run, "1:3").startswith(run_prefix(run))


@given(run_ids, run_ids, run_ids)
def test_the_children_of_a_run_lie_together(run: str, other: str, child: str) -> None:
    assert parse_inbox_key(inbox_key(run, child)) == (run, child)
    assert inbox_key(run, child).startswith(run_prefix(run))
    assert run == other or not inbox_key(other, child).startswith(run_prefix(run))


paths = st.from_regex(r"[1-9][0-9]{0,3}:[0-9]{1,5}", fullmatch=True)
timers = st.tuples(numbers, run_ids, paths)


@given(timers, timers)
def test_timers_sort_by_their_time(a: tuple[int, str, str], b: tuple[int, str, str]) -> None:
    assert parse_timer_key(timer_key(*a)) == a
    assert a[0] == b[0] or (timer_key(*a) < timer_key(*b)) == (a[0] < b[0])


addresses = st.tuples(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))


@given(addresses, addresses, timers, timers)
def test_waits_of_an_address_lie_together_the_oldest_first(
    here: tuple[str, str, str], there: tuple[str, str, str], a: tuple[int, str, str], b: tuple[int, str, str]
) -> None:
    try:
        address, other = address_of(*here), address_of(*there)
    except InputError:  # half a character
        return
    assert (address == other) == (here == there)
    assert parse_wait_key(wait_key(address, *a)) == (address, *a)
    assert a[0] == b[0] or (wait_key(address, *a) < wait_key(address, *b)) == (a[0] < b[0])
    assert len(event_key(address, a[0], "x" * 10_000)) <= KEY_BYTES_MAX
    assert event_key(address, a[0], "x") != event_key(address, a[0], "y")


tenants = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@given(st.tuples(tenants, st.text()), st.tuples(tenants, st.text()))
def test_idempotency_keys_do_not_meet(a: tuple[str, str], b: tuple[str, str]) -> None:
    try:
        keys = idempotency_row_key(*a), idempotency_row_key(*b)
    except InputError:  # half a character
        return
    assert (keys[0] == keys[1]) == (a == b)


def test_long_texts() -> None:
    assert len(idempotency_row_key("t" * 256, "k" * 100_000)) <= KEY_BYTES_MAX
    for tenant in ("t" * 257, "a\0b"):
        with pytest.raises(InputError):
            idempotency_row_key(tenant, "k")
