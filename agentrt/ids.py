"""Identities: run ids and idempotency keys, as text and as bytes.

A run id is ``run_`` and a ULID in its canonical spelling: 26 upper-case characters of Crockford's base 32, 48 bits of
milliseconds and 80 bits of randomness, so that ids sort by creation. Everything that comes from outside passes
`parse_run_id` first; no other spelling of an id exists inside.
"""

import os
import re
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from ulid import base32

from agentrt.errors import InputError

_PREFIX: Final = "run_"
_RUN_ID: Final = re.compile(r"run_[0-7][0-9A-HJKMNP-TV-Z]{25}")  # a first digit over 7 would be more than 128 bits
# Crockford's digits to those int() takes in base 32; decoding this way takes a third of the library's time.
_TO_INT_DIGITS: Final = str.maketrans("ABCDEFGHJKMNPQRSTVWXYZ", "abcdefghijklmnopqrstuv")
_MS_MAX: Final = 2**48 - 1
#: Two of Crockford's digits for each value of 10 bits: new ids are put together of them, three times as fast.
_PAIRS: Final = [a + b for a in base32.ENCODE for b in base32.ENCODE]
_BLOCK_BYTES: Final = 1024  # the system call costs less than 64 bytes; four times as much would be felt when it comes


class RandomBlocks:
    """Randomness of the OS, fetched a block at a time; every byte is given out once. One thread; not across a fork."""

    __slots__ = ("_at", "_block", "_source")

    def __init__(self, source: Callable[[int], bytes] = os.urandom) -> None:
        self._source = source
        self._block = b""
        self._at = 0

    def take(self, size: int) -> bytes:
        """``size`` bytes."""
        at = self._at
        end = at + size
        if end > len(self._block):
            if size > _BLOCK_BYTES:
                return self._source(size)
            self._block = self._source(_BLOCK_BYTES)
            at, end = 0, size
        self._at = end
        return self._block[at:end]


def new_run_id(now_ms: int | None = None, randomness: bytes | None = None) -> str:
    """A fresh run id. ``now_ms``: Unix milliseconds, by default now; ``randomness``: 10 bytes, by default the OS's."""
    if now_ms is None:
        now_ms = time.time_ns() // 1_000_000
    if randomness is None:
        randomness = os.urandom(10)
    if not 0 <= now_ms <= _MS_MAX or len(randomness) != 10:
        raise InputError("a run id is made of 48 bits of milliseconds and 10 bytes of randomness")
    known_ms, time_text, time_raw = _time_part
    if known_ms != now_ms:
        time_text, time_raw = _time_of(now_ms)
    pairs = _PAIRS
    # 40 bits are 8 digits, and small enough for fast arithmetic.
    high, low = int.from_bytes(randomness[:5], "big"), int.from_bytes(randomness[5:], "big")
    run_id = (
        f"{time_text}{pairs[high >> 30]}{pairs[high >> 20 & 1023]}{pairs[high >> 10 & 1023]}{pairs[high & 1023]}"
        f"{pairs[low >> 30]}{pairs[low >> 20 & 1023]}{pairs[low >> 10 & 1023]}{pairs[low & 1023]}"
    )
    _remember(run_id, time_raw + randomness)
    return run_id


_time_part: tuple[int, str, bytes] = (-1, "", b"")  # of the last id: many are made in a millisecond


def _time_of(now_ms: int) -> tuple[str, bytes]:
    """The part of an id that says when, as text and as bytes."""
    global _time_part
    text = _PREFIX + "".join([_PAIRS[now_ms >> shift & 1023] for shift in (40, 30, 20, 10, 0)])
    raw = now_ms.to_bytes(6, "big")
    _time_part = (now_ms, text, raw)
    return text, raw


def parse_run_id(text: object) -> str:
    """``text`` itself if it is a run id. Raises InputError: nothing else may name a run, however close it comes."""
    if isinstance(text, str) and _RUN_ID.fullmatch(text):
        return text
    shown = repr(text) if len(repr(text)) <= 80 else repr(text)[:80] + "…"
    raise InputError(f"{shown} is no run id", hint="A run id is run_ and 26 characters, as submit returned it")


#: The bytes of ids met lately: an id is converted at each commit of its run, at 1.3 us otherwise. Two generations, the
#: older dropped when the younger is full; each step is one operation of a dict, so any thread may be here.
_RAW_MAX: Final = 32_768
_raw: dict[str, bytes] = {}
_raw_older: dict[str, bytes] = {}


def _remember(run_id: str, raw: bytes) -> None:
    global _raw, _raw_older
    if len(_raw) >= _RAW_MAX:
        _raw, _raw_older = {}, _raw
    _raw[run_id] = raw


def run_id_to_bytes(run_id: str) -> bytes:
    """The 16 bytes of a valid run id; they sort as the text does."""
    raw = _raw.get(run_id)
    if raw is None:
        raw = _raw_older.get(run_id)
        if raw is None:
            raw = int(run_id[4:].translate(_TO_INT_DIGITS), 32).to_bytes(16, "big")
        _remember(run_id, raw)
    return raw


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


def segment_seed(seed: bytes, segment: int) -> bytes:
    """16 bytes that differ with each segment of a run; the first has the run's own."""
    if segment == 1:
        return seed
    return blake2b(segment.to_bytes(8, "little"), digest_size=16, key=seed, person=b"agentrt segment").digest()
