import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt import records as r
from agentrt.errors import StoreCorruptError

KINDS = r.Record.__args__
u64 = st.integers(0, 2**63 - 1)


def _values(field: msgspec.structs.FieldInfo) -> st.SearchStrategy[object]:
    if field.type is int:
        return u64
    if field.name == "budget":
        return st.dictionaries(st.text(max_size=20), u64, max_size=3)
    return st.from_type(field.type)


@st.composite
def any_record(draw: st.DrawFn) -> r.Record:
    kind = draw(st.sampled_from(KINDS))
    return kind(*[draw(_values(field)) for field in msgspec.structs.fields(kind)])


st.register_type_strategy(r.Cost, st.builds(r.Cost, u64, u64, u64, u64))
st.register_type_strategy(str, st.text(max_size=20))


@given(any_record())
def test_records_come_back_as_they_were(record: r.Record) -> None:
    again = r.decode_record(r.encode_record(record))
    assert again == record
    assert type(again) is type(record)


def test_tags_are_fixed_for_good() -> None:
    tags = {kind.__name__: kind.__struct_config__.tag for kind in KINDS}
    assert tags == {
        "RunAccepted": 1,
        "StepPrepared": 2,
        "StepCommitted": 3,
        "StepAborted": 4,
        "StepEvicted": 5,
        "OutcomeUnknown": 6,
        "Waiting": 7,
        "Resumed": 8,
        "Spawned": 9,
        "Checkpoint": 10,
        "FrameTaken": 11,
        "TierChanged": 12,
        "CancelRequested": 13,
        "Ending": 14,
        "LockBroken": 15,
        "Upgraded": 16,
        "RunEnded": 17,
        "Exported": 18,
        "Imported": 19,
    }


#: A journal as the first release wrote it. It must load for ever: add lines, change none.
WRITTEN = (
    (
        "9d010105a461636d65a566726f6773a27631c4027b7d02c40473656564cd03e881a3616269a131c0c0",
        r.RunAccepted(1, 5, "acme", "frogs", "v1", b"{}", 2, b"seed", 1000, {"abi": "1"}),
    ),
    (
        "9b020206a3313a31a9746f6f6c2e63616c6ca56b65796564c4027b7dc41064646464646464646464646464646464a16b019400000000",
        r.StepPrepared(2, 6, "1:1", "tool.call", "keyed", b"{}", b"d" * 16, "k", 1),
    ),
    (
        "9b030307a3313a31a9746f6f6c2e63616c6cc41064646464646464646464646464646464c3c40131c410656565"
        "65656565656565656565656565019401020304",
        r.StepCommitted(3, 7, "1:1", "tool.call", b"d" * 16, True, b"1", b"e" * 16, 1, r.Cost(1, 2, 3, 4)),
    ),
    (
        "97110408a9535543434545444544c40131c09405000000",
        r.RunEnded(4, 8, "SUCCEEDED", b"1", None, r.Cost(5)),
    ),
    # before callback_url
    (
        "dc0013010105a461636d65a566726f6773a27631c4027b7d02c40473656564cd03e881a3616269a131c0c0c0c280000000",
        r.RunAccepted(1, 5, "acme", "frogs", "v1", b"{}", 2, b"seed", 1000, {"abi": "1"}),
    ),
    # before traceparent
    (
        "dc0015010105a461636d65a566726f6773a27631c4027b7d02c40473656564cd03e881a3616269a131c0c0c0c28000000000c0",
        r.RunAccepted(1, 5, "acme", "frogs", "v1", b"{}", 2, b"seed", 1000, {"abi": "1"}),
    ),
    # before origin
    (
        "dc0016010105a461636d65a566726f6773a27631c4027b7d02c40473656564cd03e881a3616269a131c0c0c0c28000000000c0c0",
        r.RunAccepted(1, 5, "acme", "frogs", "v1", b"{}", 2, b"seed", 1000, {"abi": "1"}),
    ),
)


#: Kinds that have got fields since, as they are written now.
WRITTEN_SINCE = (
    (
        "dc0017010105a461636d65a566726f6773a27631c4027b7d02c40473656564cd03e881a3616269a131c0c0c0c28000000000c0c0c0",
        r.RunAccepted(1, 5, "acme", "frogs", "v1", b"{}", 2, b"seed", 1000, {"abi": "1"}),
    ),
    (
        "9c030307a3313a31a9746f6f6c2e63616c6cc41064646464646464646464646464646464c3c40131c410656565"
        "6565656565656565656565656501940102030400",
        r.StepCommitted(3, 7, "1:1", "tool.call", b"d" * 16, True, b"1", b"e" * 16, 1, r.Cost(1, 2, 3, 4)),
    ),
)


@pytest.mark.parametrize(("stored", "record"), WRITTEN)
def test_a_journal_of_the_first_release_loads(stored: str, record: r.Record) -> None:
    assert r.decode_record(bytes.fromhex(stored)) == record
    if record not in [since for _, since in WRITTEN_SINCE]:
        assert r.encode_record(record).hex() == stored


@pytest.mark.parametrize(("stored", "record"), WRITTEN_SINCE)
def test_what_has_been_written_since_loads(stored: str, record: r.Record) -> None:
    assert r.decode_record(bytes.fromhex(stored)) == record
    assert r.encode_record(record).hex() == stored


def test_fields_added_later_have_defaults() -> None:
    """A record without the trailing fields, as an older release wrote it."""
    short = msgspec.msgpack.encode([17, 9, 1, "SUCCEEDED", b"1", None])
    assert r.decode_record(short) == r.RunEnded(9, 1, "SUCCEEDED", b"1", None, r.Cost())


@given(st.binary(max_size=60))
def test_garbage_is_corrupt_and_nothing_else(data: bytes) -> None:
    try:
        record = r.decode_record(data)
    except StoreCorruptError:
        return
    assert r.decode_record(r.encode_record(record)) == record


@given(any_record(), st.data())
def test_a_cut_or_flipped_record_never_raises_anything_else(record: r.Record, data: st.DataObject) -> None:
    encoded = bytearray(r.encode_record(record))
    if data.draw(st.booleans()):
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        r.decode_record(bytes(encoded))
    except StoreCorruptError:
        pass


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x91\x01", b"\xc0", b"\x92\x63\x01", b"\x95\x01\x01\x01\xa0\xa0"])
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(StoreCorruptError):
        r.decode_record(data)


@given(st.lists(any_record(), max_size=4))
def test_batches_come_back_as_they_were(records: list[r.Record]) -> None:
    again = r.decode_batch(r.encode_batch(records))
    assert again == records and list(map(type, again)) == list(map(type, records))


@given(st.lists(any_record(), min_size=1, max_size=3), st.data())
def test_a_cut_or_flipped_batch_never_raises_anything_else(records: list[r.Record], data: st.DataObject) -> None:
    encoded = bytearray(r.encode_batch(records))
    if data.draw(st.booleans()):
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        r.decode_batch(bytes(encoded))
    except StoreCorruptError:
        pass
