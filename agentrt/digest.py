"""Digests of requests and results, and the canonical form of JSON.

Two needs, two answers. Replay compares what a guest sends with what it sent before: the digest covers the **bytes as
sent**, nothing is parsed. Idempotent creation compares what two callers *mean*: the digest covers the RFC 8785 form.
"""

import json
from hashlib import blake2b
from typing import Any, Final

import rfc8785

from agentrt.errors import InputError

DIGEST_BYTES: Final = 16
INTEGER_MAX: Final = 2**53 - 1  # beyond it a JSON number does not survive other people's parsers


def digest(data: bytes) -> bytes:
    """16 bytes of BLAKE2b over the bytes as they are."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def request_digest(op: str, request: bytes) -> bytes:
    """16 bytes over a syscall: its op and the request's bytes as the guest sent them."""
    return blake2b((op + "\0").encode() + request, digest_size=DIGEST_BYTES).digest()


def canonical_json(value: Any) -> bytes:
    """RFC 8785 form of plain data. Raises InputError on NaN, infinities, integers beyond 2^53, lone surrogates,
    keys that are no text, other types, and nesting deeper than the interpreter's recursion limit."""
    try:
        return rfc8785.dumps(value)
    except (
        rfc8785.CanonicalizationError,
        UnicodeEncodeError,
        RecursionError,
        AttributeError,
        TypeError,
    ) as error:
        raise InputError(f"not canonical JSON: {error}") from error


def canonical_text(text: bytes) -> bytes:
    """RFC 8785 form of JSON text. Raises InputError on what `canonical_json` refuses, on text that is not JSON and on
    an object that names a key twice (which of the two is meant depends on the reader)."""
    try:
        # decoded here, for json.loads would take UTF-16 and a byte order mark
        value = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    return canonical_json(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise InputError("not canonical JSON: an object names a key twice")
    return members


def _constant(name: str) -> None:
    raise InputError(f"not JSON: {name}")


def _integer(digits: str) -> int:
    # int() takes quadratic time; 17 characters hold every integer that can pass.
    if len(digits) > 17 or not -INTEGER_MAX <= int(digits) <= INTEGER_MAX:
        raise InputError(f"not canonical JSON: {digits[:20]} is beyond 2^53")
    return int(digits)
