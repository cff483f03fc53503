"""Values between an agent and the runtime: JSON text, the same for the same value, with nothing that JSON changes."""

from typing import Any, Final

import msgspec

from agentrt.agents.errors import ValueRefusedError
from agentrt.jsontext import UnfitError, encode_exact, encode_sorted

decode: Final = msgspec.json.Decoder().decode


def encode(value: Any, what: str, bytes_max: int) -> bytes:
    """The value as JSON; objects and sets are sorted. Raises ValueRefusedError: what `encode_exact` refuses, and more
    than ``bytes_max`` bytes."""
    try:
        data = encode_exact(value, encode_sorted)
    except UnfitError as error:
        raise ValueRefusedError(f"{what} {error}") from None
    if len(data) > bytes_max:
        raise ValueRefusedError(f"{what} has {len(data)} bytes as JSON, more than {bytes_max}")
    return data
