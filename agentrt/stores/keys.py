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


def ready_value(version: str, agent: str) -> bytes:
    """READY: the version and the name of the agent with which the run goes on: version | 0 | name."""
    return f"{version}\0{agent}".encode()


def parse_ready_value(value: bytes) -> tuple[str, str]:
    """(version, agent) of a READY row; the agent is empty in rows of older releases."""
    version, _, agent = value.decode().partition("\0")
    return version, agent


def parse_ready_key(key: bytes) -> tuple[int, int, str]:
    """(tier, accepted_ns, run_id) of a READY key. Raises StoreCorruptError."""
    if len(key) != 25:
        raise StoreCorruptError(f"a row of the ready table has a key of {len(key)} bytes")
    return key[0], int.from_bytes(key[1:9], "big"), run_id_from_bytes(key[9:])


def idempotency_row_key(tenant: str, key: str) -> bytes:
    """IDEMPOTENCY: tenant | 0 | hash of the key (32), for the caller may choose a key of any length."""
    return _text(tenant) + blake2b(_encode(key), digest_size=32).digest()


def origin_row_key(origin: str) -> bytes:
    """IDEMPOTENCY of what a run was made of: 1 | 0 | hash of the origin (32); no tenant is called 1, names can be
    printed."""
    return b"\x01\0" + blake2b(_encode(origin), digest_size=32).digest()


def inbox_key(run_id: str, child: str) -> bytes:
    """INBOX: run (16) | child (16)."""
    return run_id_to_bytes(run_id) + run_id_to_bytes(child)


def parse_inbox_key(key: bytes) -> tuple[str, str]:
    """(run_id, child) of an INBOX key."""
    return run_id_from_bytes(key[:16]), run_id_from_bytes(key[16:32])


def outbox_key(run_id: str, path: str) -> bytes:
    """OUTBOX: run (16) | path; one effect on other runs per step."""
    return run_id_to_bytes(run_id) + path.encode()


def decision_key(run_id: str, place: int) -> bytes:
    """DECISIONS: run (16) | place (1)."""
    return b"%b%c" % (run_id_to_bytes(run_id), place)


def run_prefix(run_id: str) -> bytes:
    """The prefix of a run's keys in INBOX, OUTBOX and DECISIONS."""
    return run_id_to_bytes(run_id)


def timer_key(due_ns: int, run_id: str, path: str) -> bytes:
    """TIMERS: due_ns (8) | run (16) | path: what is due first stands first."""
    return due_ns.to_bytes(8, "big") + run_id_to_bytes(run_id) + path.encode()


def parse_timer_key(key: bytes) -> tuple[int, str, str]:
    """(due_ns, run_id, path) of a TIMERS key."""
    return int.from_bytes(key[:8], "big"), run_id_from_bytes(key[8:24]), key[24:].decode()


def address_of(tenant: str, topic: str, key: str) -> bytes:
    """The address (16 bytes) of events under a tenant's topic and key."""
    hashed = blake2b(digest_size=16, person=b"agentrt address")
    for part in (tenant, topic, key):
        raw = _encode(part)
        hashed.update(len(raw).to_bytes(4, "big") + raw)
    return hashed.digest()


def event_key(address: bytes, sent_ns: int, event_id: str) -> bytes:
    """EVENTS: address (16) | sent_ns (8) | hash of the id (16): the oldest of an address first."""
    return address + sent_ns.to_bytes(8, "big") + _short(event_id)


def event_id_key(address: bytes, event_id: str) -> bytes:
    """EVENT_IDS: address (16) | hash of the id (16)."""
    return address + _short(event_id)


def wait_key(address: bytes, since_ns: int, run_id: str, path: str) -> bytes:
    """WAITS: address (16) | since_ns (8) | run (16) | path: who waits longest first."""
    return address + since_ns.to_bytes(8, "big") + run_id_to_bytes(run_id) + path.encode()


def parse_wait_key(key: bytes) -> tuple[bytes, int, str, str]:
    """(address, since_ns, run_id, path) of a WAITS key."""
    return key[:16], int.from_bytes(key[16:24], "big"), run_id_from_bytes(key[24:40]), key[40:].decode()


def lock_key(tenant: str, name: str) -> bytes:
    """LOCKS: tenant | 0 | hash of the name (32)."""
    return _text(tenant) + blake2b(_encode(name), digest_size=32).digest()


def schedule_key(tenant: str, name: str) -> bytes:
    """SCHEDULES: tenant | 0 | hash of the name (32)."""
    return _text(tenant) + blake2b(_encode(name), digest_size=32).digest()


def schedules_prefix(tenant: str) -> bytes:
    """What the keys of a tenant's SCHEDULES begin with."""
    return _text(tenant)


def entry_key(root: str, run_id: str) -> bytes:
    """ACCOUNTS: "e" | root (16) | run (16): its EntryRow (agentrt/flow/accounts.py)."""
    return b"e" + run_id_to_bytes(root) + run_id_to_bytes(run_id)


def below_key(root: str, run_id: str) -> bytes:
    """ACCOUNTS: "s" | root (16) | run (16): its BelowRow."""
    return b"s" + run_id_to_bytes(root) + run_id_to_bytes(run_id)


def _short(text: str) -> bytes:
    return blake2b(_encode(text), digest_size=16).digest()


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
