"""``secret://name`` in arguments: found by the node, replaced in the host, and taken out of what comes back. Pure.

Only a whole string is a reference. What is journaled, logged and shown is always the reference, never the value.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE

PREFIX: Final = "secret://"
#: Shorter values would be found everywhere in a result and could not be taken out of it.
VALUE_CHARS_MIN: Final = 8


def names_in(args: bytes) -> set[str]:
    """What the references in JSON arguments name, valid or not. Empty if the text is no JSON: the host says so."""
    found: set[str] = set()

    def note(text: str) -> str:
        if text.startswith(PREFIX):
            found.add(text[len(PREFIX) :])
        return text

    try:
        _map_strings(msgspec.json.decode(args), note, keys=False)
    except UNREADABLE:
        return set()
    return found


def substitute(args: bytes, values: Mapping[str, str]) -> bytes:
    """The arguments with each reference replaced. Raises what decoding JSON raises."""

    def put(text: str) -> str:
        return values.get(text[len(PREFIX) :], text) if text.startswith(PREFIX) else text

    return msgspec.json.encode(_map_strings(msgspec.json.decode(args), put, keys=False))


def redact(text: str, values: Mapping[str, str]) -> str:
    """The text with each value replaced by its reference, also where it stands inside a repr or JSON."""
    # The longest first: one value may contain another.
    for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
        for form in {value, repr(value)[1:-1], msgspec.json.encode(value)[1:-1].decode()}:
            text = text.replace(form, PREFIX + name)
    return text


def redact_payload(payload: bytes, values: Mapping[str, str]) -> bytes:
    """The same for JSON: in strings, in keys, and in numbers whose digits are a value."""

    def clean(text: str) -> str:
        return redact(text, values)

    def number(value: float) -> Any:
        text = repr(value)
        cleaned = clean(text)
        return value if cleaned == text else cleaned

    try:
        return msgspec.json.encode(_map_strings(msgspec.json.decode(payload), clean, keys=True, number=number))
    except UNREADABLE:
        return payload


def _map_strings(value: Any, change: Any, *, keys: bool, number: Any = None) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            (change(key) if keys else key): _map_strings(item, change, keys=keys, number=number)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_map_strings(item, change, keys=keys, number=number) for item in value]
    if number is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return value
