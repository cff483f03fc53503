"""The journal's records, and what is folded from them."""

from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.fold import RunFold, apply, fold, head_of
from agentrt.ids import run_id_to_bytes
from agentrt.records import Record, decode_batch, decode_record, encode_batch, encode_record
from agentrt.stores.base import Head
from agentrt.stores.lmdb_reads import filed_head as decode_head
from agentrt.stores.payloads import Ref, large_payloads, read_batch, ref_of, refs_of_batch
from agentrt.stores.payloads import split_batch as made_split
from agentrt.stores.unfiled import Unfiled, batches_of, encode_head, join, journal_rows, log_entry

from .kit import MSGPACK, target

RUN_ID: Final = "run_01ARZ3NDEKTSV4RRFFQ69G5FAV"
_RAW: Final = run_id_to_bytes(RUN_ID)
_list: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


@target(MSGPACK)
def record(data: bytes) -> None:
    """One record, as stored."""
    try:
        found = decode_record(data)
    except StoreCorruptError:
        return
    stored = encode_record(found)
    again = decode_record(stored)
    assert again == found and type(again) is type(found), f"{found} came back as {again}"
    assert encode_record(again) == stored


@target(MSGPACK)
def folds(data: bytes) -> None:
    """A list of records: what is refused changes nothing, and what is accepted folds to one state and one head."""
    try:
        parts = _list.decode(data)
    except UNREADABLE:
        return
    state, accepted = RunFold(), list[Record]()
    for part in parts:
        before = repr(state)
        try:
            found = decode_record(bytes(part))
            apply(state, found)
        except StoreCorruptError:
            assert repr(state) == before, "a refused record changed the state"
            continue
        accepted.append(found)
        assert state.version == found.seq and (state.wait is not None) == (
            "WAITING" in (state.state, state.exported_from)
        )
    assert repr(fold(accepted)) == repr(state)
    if accepted:
        assert set(state.open) <= set(state.steps)
        made = head_of(state, RUN_ID)
        assert decode_head(_RAW, msgspec.msgpack.encode(made)) == made


@target(MSGPACK)
def head(data: bytes) -> None:
    """A head row."""
    try:
        found = decode_head(_RAW, data)
    except StoreCorruptError:
        return
    assert isinstance(found, Head) and found.run_id == RUN_ID
    assert decode_head(_RAW, msgspec.msgpack.encode(found)) == found


@target(MSGPACK)
def journal_row(data: bytes) -> None:
    """A row of the journal: batches that come back as they were, or one record."""
    try:
        batches = batches_of(data)
        found = [decode_batch(batch) for batch in batches] if batches is not None else [[decode_record(data)]]
    except StoreCorruptError:
        return
    stored = [(0, encode_batch(batch)) for batch in found]
    again = [decode_batch(batch) for _, row in journal_rows(stored) for batch in batches_of(row) or ()]
    assert again == found


@target(MSGPACK)
def log_row(data: bytes) -> None:
    """A row of the log: what is loaded from it can be written and loaded again."""
    unfiled, again = Unfiled(), Unfiled()
    try:
        unfiled.load([(7, data)], lambda run_id: 0)
    except StoreCorruptError:
        return
    heads = unfiled.heads("")
    entries = []
    for made in heads:
        batches = unfiled.batches(made.run_id, -1)
        entries += [log_entry(encode_head(made), batch) for batch in batches or [encode_batch(())]]
    again.load([(7, join(entries))], lambda run_id: 0)
    assert sorted(again.heads(""), key=repr) == sorted(heads, key=repr)
    for made in heads:
        assert again.batches(made.run_id, -1) == unfiled.batches(made.run_id, -1)


@target(MSGPACK)
def split_batch(data: bytes) -> None:
    """A batch that names blobs: whatever it names is asked for once, and it comes back as it was."""
    asked: list[Ref] = []

    def load(ref: Ref) -> bytes:
        asked.append(ref)
        if ref.size_bytes > 2**16:
            raise StoreCorruptError("no such blob")
        return bytes(ref.size_bytes)

    try:
        refs = refs_of_batch(data)
        found = read_batch(data, load)
    except StoreCorruptError:
        return
    assert asked == refs
    large = large_payloads(found)
    stored = made_split(found, large, [ref_of(payload.data) for payload in large])
    by_digest = {ref_of(payload.data): payload.data for payload in large}
    assert read_batch(stored, by_digest.__getitem__) == found
