"""Large payloads apart from what names them: how a batch or a row refers to blobs.

A payload of more than `INLINE_BYTES_MAX` (an input, a request, a result, a checkpoint's state, the value of a row) is a
blob: raw bytes, found by their digest. What is stored in its place:

- in a record, nothing; the batch that the record came in is stored as a msgpack map ``{"p": [[place, field, digest,
  size], …], "b": [record, …]}`` instead of the plain array ``[record, …]``;
- as a row's value, the byte 0xc1 (which no msgpack value begins with), the digest, and the size in 8 bytes. A value
  that only looks like that is stored as a blob itself.

Pure. Stores decide where blobs live; reading them back checks their digests.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from agentrt import records as r
from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.records import Record, decode_batch, decode_record

#: Larger payloads are blobs: what a page of the journal and a fold can carry without being felt.
INLINE_BYTES_MAX: Final = 16 * 2**10
DIGEST_BYTES: Final = 32

#: Fields whose bytes may be apart, by kind of record.
PAYLOADS: Final[dict[type, tuple[str, ...]]] = {
    r.RunAccepted: ("input",),
    r.StepPrepared: ("request",),
    r.StepCommitted: ("result",),
    r.Checkpoint: ("state",),
    r.RunEnded: ("result", "error"),
}
_MAP_OF_TWO: Final = b"\x82"
#: The first byte of a row's value that names a blob.
ROW_MARK: Final = 0xC1
_ROW_BYTES: Final = 1 + DIGEST_BYTES + 8


class Ref(NamedTuple):
    """A blob as it is named; ``size_bytes`` is its length."""

    digest: bytes
    size_bytes: int


#: The bytes of a blob. Raises StoreCorruptError if there are none, or other ones.
Load = Callable[[Ref], bytes]


class Large(NamedTuple):
    """A payload that will be apart: the place of its record in the batch, the field, the bytes."""

    place: int
    field: str
    data: bytes


class _Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    p: list[tuple[int, str, bytes, int]]
    b: msgspec.Raw


_decode_split: Final = msgspec.msgpack.Decoder(_Split).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def blob_digest(data: bytes) -> bytes:
    """32 bytes of BLAKE2b: blobs of all tenants lie together, so nobody may find two with one digest."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def ref_of(data: bytes) -> Ref:
    """How the blob is named. Takes about a millisecond per MiB."""
    return Ref(blob_digest(data), len(data))


def check_blob(ref: Ref, data: bytes | None) -> bytes:
    """The blob's bytes. Raises StoreCorruptError if there are none, or others than were named."""
    if data is None:
        raise StoreCorruptError(f"blob {ref.digest.hex()} is missing")
    if len(data) != ref.size_bytes or blob_digest(data) != ref.digest:
        raise StoreCorruptError(f"blob {ref.digest.hex()} is damaged")
    return data


# --- batches -------------------------------------------------------------------


def large_payloads(records: Sequence[Record]) -> list[Large]:
    """Those of the records' payloads that will be apart."""
    found: list[Large] = []
    for place, record in enumerate(records):
        for field in PAYLOADS.get(type(record), ()):
            data = getattr(record, field)
            if data is not None and len(data) > INLINE_BYTES_MAX:
                found.append(Large(place, field, data))
    return found


def split_batch(records: Sequence[Record], large: Sequence[Large], refs: Sequence[Ref]) -> bytes:
    """The batch as stored, with the ``large`` payloads named by ``refs``, one each."""
    rest: list[Record] = list(records)
    for place, field, _ in large:
        rest[place] = msgspec.structs.replace(rest[place], **{field: b""})
    places = [(payload.place, payload.field, *ref) for payload, ref in zip(large, refs, strict=True)]
    return _encode(_Split(places, msgspec.Raw(_encode(rest))))


def is_split(batch: bytes) -> bool:
    """Whether a stored batch names blobs."""
    return batch[:1] == _MAP_OF_TWO


def refs_of_batch(batch: bytes) -> list[Ref]:
    """The blobs that a stored batch names. Raises StoreCorruptError."""
    return [Ref(digest, size) for _, _, digest, size in _read_split(batch).p] if is_split(batch) else []


def read_batch(batch: bytes, load: Load) -> list[Record]:
    """The records of a stored batch, whole. Raises StoreCorruptError."""
    if not is_split(batch):
        return decode_batch(batch)
    split = _read_split(batch)
    records = decode_batch(bytes(split.b))
    for place, field, digest, size_bytes in split.p:
        if place >= len(records) or field not in PAYLOADS.get(type(records[place]), ()):
            raise StoreCorruptError(f"a batch names a blob for field {field!r} of its record {place}, which has none")
        records[place] = msgspec.structs.replace(records[place], **{field: load(Ref(digest, size_bytes))})
    return records


def read_record(stored: bytes, load: Load) -> Record:
    """A record that was stored by itself, or as a batch of its own that names blobs. Raises StoreCorruptError."""
    if not is_split(stored):
        return decode_record(stored)
    records = read_batch(stored, load)
    if len(records) != 1:
        raise StoreCorruptError(f"{len(records)} records stand where one belongs")
    return records[0]


def _read_split(batch: bytes) -> _Split:
    try:
        split = _decode_split(batch)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a batch of journal records cannot be read: {error}") from error
    for place, _, digest, size_bytes in split.p:
        if place < 0 or len(digest) != DIGEST_BYTES or size_bytes < 0:
            raise StoreCorruptError("a batch of journal records names a blob that cannot be")
    return split


# --- rows ----------------------------------------------------------------------


def is_large_value(value: bytes | None) -> bool:
    """Whether a row's value will be apart."""
    return value is not None and (len(value) > INLINE_BYTES_MAX or parse_row_ref(value) is not None)


def row_ref(ref: Ref) -> bytes:
    """What stands in the row."""
    return bytes((ROW_MARK,)) + ref.digest + ref.size_bytes.to_bytes(8, "big")


def parse_row_ref(stored: bytes) -> Ref | None:
    """The blob that a stored value names; None if it is a value itself."""
    if len(stored) != _ROW_BYTES or stored[0] != ROW_MARK:
        return None
    return Ref(stored[1 : 1 + DIGEST_BYTES], int.from_bytes(stored[1 + DIGEST_BYTES :], "big"))


def read_value(stored: bytes, load: Load) -> bytes:
    """A row's value, whole. Raises StoreCorruptError."""
    ref = parse_row_ref(stored)
    return stored if ref is None else load(ref)


def owner_of_row(table: str, key: bytes) -> bytes:
    """16 bytes that stand for the row."""
    return blake2b(b"%b\0%b" % (table.encode(), key), digest_size=16).digest()
