import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from agentrt import ids
from agentrt.errors import InputError
from agentrt.ids import (
    RandomBlocks,
    child_run_id,
    idempotency_key,
    new_run_id,
    parse_run_id,
    run_id_from_bytes,
    run_id_to_bytes,
)

raw_ids = st.binary(min_size=16, max_size=16)


@given(raw_ids)
def test_bytes_and_back_as_the_library_does_it(raw: bytes) -> None:
    run_id = run_id_from_bytes(raw)
    assert run_id == f"run_{ULID(raw)}"
    assert run_id_to_bytes(run_id) == raw
    assert parse_run_id(run_id) == run_id


@given(raw_ids, raw_ids)
def test_text_sorts_as_bytes(a: bytes, b: bytes) -> None:
    assert (run_id_from_bytes(a) < run_id_from_bytes(b)) == (a < b)


def test_new_ids_sort_by_time_and_differ() -> None:
    early, late = new_run_id(now_ms=1_000), new_run_id(now_ms=1_001)
    assert early < late
    assert len({new_run_id(now_ms=5) for _ in range(1000)}) == 1000
    assert new_run_id(0, b"\0" * 10) == "run_" + "0" * 26
    assert new_run_id(2**48 - 1, b"\xff" * 10) == "run_7" + "Z" * 25


@pytest.mark.parametrize(("now_ms", "randomness"), [(-1, b"x" * 10), (2**48, b"x" * 10), (0, b"x" * 9)])
def test_what_makes_no_id(now_ms: int, randomness: bytes) -> None:
    with pytest.raises(InputError):
        new_run_id(now_ms, randomness)


GOOD = "run_01J5ZK3Q8W0000000000000000"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run_",
        GOOD[4:],
        GOOD.lower(),
        GOOD[:-1],
        GOOD + "0",
        GOOD + "\n",
        " " + GOOD,
        GOOD[:-1] + "I",  # not in the alphabet, though ULID readers take it for 1
        GOOD[:-1] + "U",
        GOOD[:-1] + "٣",  # a decimal digit, but no ASCII one
        GOOD[:-1] + "\0",
        "run_8" + "0" * 25,  # more than 128 bits
        "job_" + GOOD[4:],
        "../" + GOOD,
        GOOD.encode(),
        None,
        7,
        "x" * 10_000,
    ],
)
def test_fault_D07_only_a_run_id_is_a_run_id(text: object) -> None:
    with pytest.raises(InputError) as caught:
        parse_run_id(text)
    assert len(caught.value.message) < 150


@given(st.text(max_size=40))
def test_fault_D07_what_passes_the_door_is_stored_unchanged(text: str) -> None:
    try:
        parsed = parse_run_id(text)
    except InputError:
        return
    assert run_id_from_bytes(run_id_to_bytes(parsed)) == text


def test_a_childs_id_is_a_function_of_parent_and_path() -> None:
    parent, other = new_run_id(), new_run_id()
    child = child_run_id(parent, "1:3")
    assert child == child_run_id(parent, "1:3") == parse_run_id(child)
    assert len({child, child_run_id(parent, "1:30"), child_run_id(parent, "13:"), child_run_id(other, "1:3")}) == 4
    assert run_id_to_bytes(child)[:6] == run_id_to_bytes(parent)[:6]
    # Fixed for good: children already journaled must be found again.
    assert child_run_id("run_" + "0" * 26, "1:1") == "run_00000000000G0N0SHJQ4R0ZXCW"


def test_idempotency_keys_are_unique_to_the_step() -> None:
    run_id = new_run_id()
    keys = {idempotency_key(run_id, path, tool) for path in ("1:3", "1:3.1", "2:3") for tool in ("t", "a/t", "1/t")}
    assert len(keys) == 9
    assert idempotency_key(GOOD, "1:3", "mail.send") == f"{GOOD}/1:3/mail.send"


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_a_new_id_is_spelt_as_the_library_does_it(now_ms: int, randomness: bytes) -> None:
    raw = now_ms.to_bytes(6, "big") + randomness
    run_id = new_run_id(now_ms, randomness)
    assert run_id == f"run_{ULID(raw)}" == run_id_from_bytes(raw)
    assert run_id_to_bytes(run_id) == raw


def test_ids_are_converted_rightly_however_many_were_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_RAW_MAX", 4)
    monkeypatch.setattr(ids, "_raw", {})
    monkeypatch.setattr(ids, "_raw_older", {})
    raws = [bytes([number]) * 16 for number in range(20)]
    texts = [run_id_from_bytes(raw) for raw in raws]
    for text, raw in [*zip(texts, raws, strict=True)] * 3:
        assert run_id_to_bytes(text) == raw
        assert len(ids._raw) + len(ids._raw_older) <= 8


@given(st.lists(st.integers(0, 400), max_size=60))
def test_every_random_byte_is_given_out_once(sizes: list[int]) -> None:
    numbers = iter(range(10**9))
    blocks = RandomBlocks(lambda size: b"".join(next(numbers).to_bytes(4, "big") for _ in range(size // 4)))
    words: list[bytes] = []
    for size in sizes:
        taken = blocks.take(4 * size)
        assert len(taken) == 4 * size
        words += [taken[at : at + 4] for at in range(0, len(taken), 4)]
    assert len(set(words)) == len(words)


def test_random_blocks_are_the_oss() -> None:
    assert len({RandomBlocks().take(26) for _ in range(50)}) == 50
