"""Keys of the side tables: bytes whose order is the order in which the engine wants the rows.

Parts are joined so that no two tuples make the same key and a prefix of parts is a prefix of bytes: numbers are fixed
width, big-endian; a text that something follows is ended by a zero byte and may not contain one.
"""

from hashlib import blake2b

from agentrt.errors import InputError, StoreCorruptError
from agentrt.ids import run_id_from_bytes, run_id_to_bytes


def journal_key(run_id: str, seq: int) -> bytes:
    """run (16) | seq (8)."""
    return run_id_to_bytes(run_id) + seq.to_bytes(8, "big")


def ready_key(tier: int, accepted_ns: int, run_id: str) -> bytes:
    """READY: tier (1) | accepted_ns (8) | run (16): the most urgent first, in each tier the oldest first."""
    return b"%c%b%b" % (tier, accepted_ns.to_bytes(8, "big"), run_id_to_bytes(run_id))


def parse_ready_key(key: bytes) -> tuple[int, int, str]:
    """(tier, accepted_ns, run_id) of a READY key. Raises StoreCorruptError."""
    if len(key) != 25:
        raise StoreCorruptError(f"a row of the ready table has a key of {len(key)} bytes")
    return key[0], int.from_bytes(key[1:9], "big"), run_id_from_bytes(key[9:])


def idempotency_row_key(tenant: str, key: str) -> bytes:
    """IDEMPOTENCY: tenant | 0 | hash of the key (32), for the caller may choose a key of any length."""
    return _text(tenant) + blake2b(_encode(key), digest_size=32).digest()


def inbox_key(run_id: str, number: int) -> bytes:
    """INBOX: run (16) | number (8), in order of arrival."""
    return run_id_to_bytes(run_id) + number.to_bytes(8, "big")


def outbox_key(run_id: str, path: str) -> bytes:
    """OUTBOX: run (16) | path; one effect on other runs per step."""
    return run_id_to_bytes(run_id) + path.encode()


def run_prefix(run_id: str) -> bytes:
    """The prefix of a run's keys in INBOX and OUTBOX."""
    return run_id_to_bytes(run_id)


def _text(text: str) -> bytes:
    raw = _encode(text)
    if b"\0" in raw or len(raw) > 256:
        raise InputError(f"{text[:40]!r} cannot be part of a key: it has a zero byte or more than 256 bytes")
    return raw + b"\0"


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{text[:40]!r} cannot be part of a key: {error.reason}") from error
