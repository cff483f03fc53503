"""Keys and values of side rows, and ids."""

from hashlib import blake2b

from agentrt.engine.accept import settle_duplicate
from agentrt.errors import DuplicateError, IdempotencyConflictError, InputError, StoreCorruptError
from agentrt.ids import child_run_id, new_run_id, parse_run_id, run_id_from_bytes, run_id_to_bytes
from agentrt.ingress.deadletters import key_of_id, letter_key, letter_row, read_letter
from agentrt.stores.base import KEY_BYTES_MAX
from agentrt.stores.keys import idempotency_row_key, parse_ready_key, ready_key

from .kit import MSGPACK, target


@target()
def ready(data: bytes) -> None:
    """The key of a READY row."""
    try:
        tier, accepted_ns, run_id = parse_ready_key(data)
    except StoreCorruptError:
        return
    assert ready_key(tier, accepted_ns, run_id) == data
    assert parse_run_id(run_id) == run_id


@target()
def ids(data: bytes) -> None:
    """Texts that may be run ids, and bytes that are."""
    text = data.decode(errors="surrogateescape")
    try:
        parse_run_id(text)
        assert run_id_from_bytes(run_id_to_bytes(text)) == text
    except InputError:
        pass
    raw = data[:16].ljust(16, b"\0")
    run_id = run_id_from_bytes(raw)
    assert parse_run_id(run_id) == run_id and run_id_to_bytes(run_id) == raw
    assert new_run_id(int.from_bytes(raw[:6], "big"), raw[6:]) == run_id
    child = parse_run_id(child_run_id(run_id, data[16:].decode(errors="replace")))
    assert run_id_to_bytes(child)[:6] == raw[:6]


@target(MSGPACK)
def duplicate(data: bytes) -> None:
    """What an idempotency key's row says."""
    found = settle_duplicate(DuplicateError("there", data), b"d" * 16)
    assert isinstance(found, str | IdempotencyConflictError | StoreCorruptError), found
    assert not isinstance(found, str) or parse_run_id(found) == found


@target(MSGPACK)
def dead_letter(data: bytes) -> None:
    """An event of a bus that became no run, as its row has it."""
    try:
        letter = read_letter(data)
    except StoreCorruptError:
        return
    row = letter_row(letter)
    assert row.value is not None and read_letter(row.value) == letter
    assert row.key == letter_key(letter.delivery) == key_of_id(letter.id)
    assert letter.size_bytes == len(letter.delivery.payload)


@target()
def idempotency_key(data: bytes) -> None:
    """A tenant and a caller's key: no two pairs share a row, and a tenant's rows lie together."""
    tenant, _, key = data.decode(errors="surrogateescape").partition("/")
    try:
        row = idempotency_row_key(tenant, key)
    except InputError:
        return
    assert row == tenant.encode() + b"\0" + blake2b(key.encode(), digest_size=32).digest()
    assert len(row) <= KEY_BYTES_MAX
