"""Values as JSON text, with nothing that JSON would change without a word."""

import math
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

INTEGER_MAX: Final = 2**64 - 1
INTEGER_MIN: Final = -(2**63)

encode_plain: Final = msgspec.json.Encoder().encode
#: Objects and sets are sorted.
encode_sorted: Final = msgspec.json.Encoder(order="deterministic").encode
#: Only text with one of these can hold what has to be looked at: null may have been NaN, many digits a huge integer.
_SUSPECT: Final = re.compile(rb"null|[0-9]{19}")


class UnfitError(ValueError):
    """The value is nothing that JSON can carry unchanged; the text says why, and is no sentence of its own."""


def encode_exact(value: Any, encode: Callable[[Any], bytes] = encode_plain) -> bytes:
    """The value as JSON. Raises UnfitError: unknown types, NaN and infinities, integers beyond 64 bits, lone
    surrogates, nesting without end."""
    try:
        data = encode(value)
        if value is not None and _SUSPECT.search(data):
            _check(msgspec.to_builtins(value))
    except UnfitError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnfitError(f"cannot be turned into JSON: {error}") from None
    return data


def _check(value: Any) -> None:
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            raise UnfitError(f"holds {value}, which JSON has no word for")
    elif kind is int:
        if not INTEGER_MIN <= value <= INTEGER_MAX:
            raise UnfitError("holds an integer beyond 64 bits: send it as text")
    elif kind is dict:
        for key, member in value.items():
            _check(key)
            _check(member)
    elif kind is list or kind is tuple:
        for member in value:
            _check(member)
