"""Identities: run ids and idempotency keys, as text and as bytes.

A run id is ``run_`` and a ULID in its canonical spelling: 26 upper-case characters of Crockford's base 32, 48 bits of
milliseconds and 80 bits of randomness, so that ids sort by creation. Everything that comes from outside passes
`parse_run_id` first; no other spelling of an id exists inside.
"""

import os
import re
import time
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from ulid import base32

from agentrt.errors import InputError

_PREFIX: Final = "run_"
_RUN_ID: Final = re.compile(r"run_[0-7][0-9A-HJKMNP-TV-Z]{25}")  # a first digit over 7 would be more than 128 bits
# Crockford's digits to those int() takes in base 32; decoding this way takes a third of the library's time.
_TO_INT_DIGITS: Final = str.maketrans("ABCDEFGHJKMNPQRSTVWXYZ", "abcdefghijklmnopqrstuv")
_MS_MAX: Final = 2**48 - 1


def new_run_id(now_ms: int | None = None, randomness: bytes | None = None) -> str:
    """A fresh run id. ``now_ms``: Unix milliseconds, by default now; ``randomness``: 10 bytes, by default the OS's."""
    if now_ms is None:
        now_ms = time.time_ns() // 1_000_000
    if randomness is None:
        randomness = os.urandom(10)
    if not 0 <= now_ms <= _MS_MAX or len(randomness) != 10:
        raise InputError("a run id is made of 48 bits of milliseconds and 10 bytes of randomness")
    return _PREFIX + base32.encode(now_ms.to_bytes(6, "big") + randomness)


def parse_run_id(text: object) -> str:
    """``text`` itself if it is a run id. Raises InputError: nothing else may name a run, however close it comes."""
    if isinstance(text, str) and _RUN_ID.fullmatch(text):
        return text
    shown = repr(text) if len(repr(text)) <= 80 else repr(text)[:80] + "…"
    raise InputError(f"{shown} is no run id", hint="A run id is run_ and 26 characters, as submit returned it")


@lru_cache(maxsize=65_536)  # a run's id is converted at each of its commits; 1.3 us otherwise
def run_id_to_bytes(run_id: str) -> bytes:
    """The 16 bytes of a valid run id; they sort as the text does."""
    return int(run_id[4:].translate(_TO_INT_DIGITS), 32).to_bytes(16, "big")


def run_id_from_bytes(raw: bytes) -> str:
    """The run id of 16 bytes."""
    return _PREFIX + base32.encode(raw)


def child_run_id(parent: str, path: str) -> str:
    """The id of the run that ``parent``'s step ``path`` spawns: always the same one, however often it is asked for.

    It carries the parent's time, so an ensemble lies together in the store, and 80 bits of a hash of (parent, path).
    """
    digest = blake2b(f"{parent}/{path}".encode(), digest_size=10, person=b"agentrt child").digest()
    return run_id_from_bytes(run_id_to_bytes(parent)[:6] + digest)


def idempotency_key(run_id: str, path: str, tool: str) -> str:
    """The key under which a tool must do a step at most once: ``run_id/path/tool``.

    Neither a run id nor a path contains a slash, so no two steps share a key. Made once, when the step is prepared;
    ever after it is read from the journal.
    """
    return f"{run_id}/{path}/{tool}"
