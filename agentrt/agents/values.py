"""Values between an agent and the runtime: JSON text, the same for the same value, with nothing that JSON changes."""

import math
import re
from typing import Any, Final

import msgspec

from agentrt.agents.errors import ValueRefusedError

INTEGER_MAX: Final = 2**64 - 1
INTEGER_MIN: Final = -(2**63)

_encode: Final = msgspec.json.Encoder(order="deterministic").encode
#: Only text with one of these can hold what has to be looked at: null may have been NaN, many digits a huge integer.
_SUSPECT: Final = re.compile(rb"null|[0-9]{19}")

decode: Final = msgspec.json.Decoder().decode


def encode(value: Any, what: str, bytes_max: int) -> bytes:
    """The value as JSON; objects and sets are sorted. Raises ValueRefusedError: unknown types, NaN and infinities,
    integers beyond 64 bits, lone surrogates, nesting without end, more than ``bytes_max`` bytes."""
    try:
        data = _encode(value)
        if _SUSPECT.search(data):
            _check(msgspec.to_builtins(value, order="deterministic"), what)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueRefusedError(f"{what} cannot be turned into JSON: {error}") from None
    if len(data) > bytes_max:
        raise ValueRefusedError(f"{what} has {len(data)} bytes as JSON, more than {bytes_max}")
    return data


def _check(value: Any, what: str) -> None:
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            raise ValueRefusedError(f"{what} holds {value}, which JSON has no word for")
    elif kind is int:
        if not INTEGER_MIN <= value <= INTEGER_MAX:
            raise ValueRefusedError(f"{what} holds an integer beyond 64 bits", hint="Send it as text")
    elif kind is dict:
        for key, member in value.items():
            _check(key, what)
            _check(member, what)
    elif kind is list or kind is tuple:
        for member in value:
            _check(member, what)
