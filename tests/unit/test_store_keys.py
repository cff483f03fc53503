import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.errors import InputError
from agentrt.ids import run_id_from_bytes
from agentrt.stores.base import KEY_BYTES_MAX
from agentrt.stores.keys import (
    idempotency_row_key,
    inbox_key,
    journal_key,
    outbox_key,
    parse_ready_key,
    ready_key,
    run_prefix,
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
    for make in (journal_key, inbox_key):
        assert (make(run, a) < make(run, b)) == (a < b)
        assert make(run, a).startswith(run_prefix(run))
        assert run == other or not make(other, a).startswith(run_prefix(run))
    assert outbox_key(run, "1:3") != outbox_key(run, "1:30")
    assert outbox_key(run, "1:3").startswith(run_prefix(run))


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
