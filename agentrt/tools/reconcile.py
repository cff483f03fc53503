"""What a reconcile function answers, and how that travels."""

from typing import Any, Final

import msgspec

from agentrt.tools.binding import encode_result, failure

#: What `encode_found` may add to the result's own bytes.
ENVELOPE_BYTES: Final = 64


class Found(msgspec.Struct, frozen=True):
    """The call had its effect, and this is its result."""

    result: Any = None


class _Answer:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: The call had no effect and will have none: it may be done again.
NOT_FOUND: Final = _Answer("NOT_FOUND")
#: It cannot be told now.
UNKNOWN: Final = _Answer("UNKNOWN")

_NO: Final = b'{"found":"no","result":null}'
_UNKNOWN: Final = b'{"found":"unknown","result":null}'


def encode_found(answer: Any, bytes_max: int) -> tuple[bytes, str | None]:
    """(payload, code) of what a reconcile function returned: ``{"found": "yes"|"no"|"unknown", "result": any}``."""
    if answer is NOT_FOUND:
        return _NO, None
    if answer is UNKNOWN:
        return _UNKNOWN, None
    if not isinstance(answer, Found):
        return failure(
            "tool_result", f"a reconcile function returns Found, NOT_FOUND or UNKNOWN, not {type(answer).__name__}"
        )
    payload, code = encode_result(answer.result, bytes_max)
    if code is not None:
        return payload, code
    return b'{"found":"yes","result":' + payload + b"}", None
