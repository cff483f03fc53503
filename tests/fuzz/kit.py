"""What the targets share: the registry, and a mutator that knows the shape of values."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from agentrt.decoding import UNREADABLE

CORPUS: Final = Path(__file__).parent / "corpus"


class Codec(NamedTuple):
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


MSGPACK: Final = Codec(msgspec.msgpack.decode, msgspec.msgpack.encode)
JSON: Final = Codec(msgspec.json.decode, msgspec.json.encode)


class Target(NamedTuple):
    """``codec``: what most inputs are, so that they can be changed as values; None: plain bytes."""

    run: Callable[[bytes], None]
    codec: Codec | None


TARGETS: Final[dict[str, Target]] = {}


def target(codec: Codec | None = None) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Registers a function under its own name."""

    def register(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[run.__name__] = Target(run, codec)
        return run

    return register


# --- values ----------------------------------------------------------------------

_LEAVES: Final = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    16,
    17,
    -1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.5,
    1e300,
    math.nan,
    math.inf,
    "",
    "a",
    "1:1",
    "2:1",
    "1:1.2",
    "\0",
    "é",
    "9" * 5000,
    b"",
    b"{}",
    b"\xff" * 40,
    "tool.call",
    "keyed",
    "step",
    "SUCCEEDED",
)
_DEEP: Final = 3000  # more than the interpreter's stack


def mutate(data: bytes, codec: Codec, size_max: int, seed: int) -> bytes | None:
    """The input with one or a few of its values changed; None if it is no value, or grew too long."""
    rng = random.Random(seed)
    try:
        value = codec.decode(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = _changed(value, value, rng)
        made = codec.encode(value)
    except (*UNREADABLE, TypeError, ValueError, OverflowError):
        return None
    return made if len(made) <= size_max else None


def _changed(value: Any, whole: Any, rng: random.Random) -> Any:
    """``value`` with a change somewhere in it."""
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        how = rng.randrange(10)
        if how == 0:
            return value[:at] + value[at + 1 :]
        if how == 1:
            return [*value[:at], value[at], *value[at:]]
        if how == 2:
            other = rng.randrange(len(value))
            copy = list(value)
            copy[at], copy[other] = copy[other], copy[at]
            return copy
        if how == 3:
            return [*value, _some(whole, rng)]
        return [*value[:at], _changed(value[at], whole, rng), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        how = rng.randrange(6)
        rest = {k: v for k, v in value.items() if k != key}
        if how == 0:
            return rest
        if how == 1:
            return rest | {_text(key, rng): value[key]}
        return value | {key: _changed(value[key], whole, rng)}
    how = rng.randrange(8)
    if isinstance(value, int) and how < 3:
        return value + rng.choice((-1, 1, 256, -256))
    if isinstance(value, str) and how < 4:
        return _text(value, rng)
    if isinstance(value, bytes) and how < 4 and value:
        at = rng.randrange(len(value))
        return value[:at] + bytes([rng.randrange(256)]) + value[at + 1 :]
    return _some(whole, rng)


def _text(text: object, rng: random.Random) -> str:
    chars = list(str(text))
    at = rng.randrange(len(chars) + 1)
    chars[at : at + rng.randrange(2)] = rng.choice(("", "0", "1", ":", ".", "/", "\0", "_", "Z", "é", "\U0001f600"))
    return "".join(chars)


def _some(whole: Any, rng: random.Random) -> Any:
    """Any value, or a part of the input's own."""
    how = rng.randrange(12)
    if how == 0:
        return []
    if how == 1:
        return {rng.choice(("a", "tool", "args", "é")): rng.choice(_LEAVES)}
    if how == 2:
        deep: Any = None
        for _ in range(rng.choice((2, 20, 900))):  # an encoder refuses more; `deepen` gives decoders that
            deep = [deep]
        return deep
    part = whole
    while how < 6 and isinstance(part, list | dict) and part and rng.random() < 0.7:
        part = rng.choice(part if isinstance(part, list) else list(part.values()))
    return part if how < 6 else rng.choice(_LEAVES)


def deepen(data: bytes, codec: Codec | None, size_max: int, seed: int) -> bytes:
    """The input with nesting that no stack holds put in, somewhere."""
    rng = random.Random(seed)
    at = rng.randrange(len(data) + 1)
    deep = (b"\x91" if codec is MSGPACK else rng.choice((b"[", b'{"a":'))) * _DEEP
    return (data[:at] + deep + data[at + rng.randrange(2) :])[:size_max]
