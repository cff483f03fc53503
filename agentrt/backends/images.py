"""Where guests of an image begin: the section that agentrt.capture.image puts into a module. Pure."""

import hashlib
from typing import Final

from agentrt.backends.wasi import Packed, leb_at
from agentrt.errors import ModuleError

#: Digest of what the image was booted with, and what csrc/boot.c reads.
SECTION: Final = "agentrt.image"
_DIGEST_BYTES: Final = 32
_HEADER_BYTES: Final = 8


def is_image(code: bytes) -> bool:
    """Of the kind that begins in the middle of a call: at rest it is a module as any other."""
    return SECTION.encode() in code and _section(code) is not None  # a quick look first


def begin_of(code: bytes, packed: Packed | None) -> bytes | None:
    """For `Core.load`; None: the module is no image in the middle of a call. ``packed``: what its guests are given.
    Raises ModuleError: that is other than what it was booted with."""
    content = _section(code) if is_image(code) else None
    if content is None:
        return None
    if content[:_DIGEST_BYTES] != given(packed):
        raise ModuleError(
            "the image was booted with other arguments or variables than are packed with it now",
            hint="Pack the same; only files may be others. Or make the image anew",
        )
    return content[_DIGEST_BYTES:]


def given(packed: Packed | None) -> bytes:
    """A digest of what a program may have kept of what was packed with it."""
    of = packed or Packed()
    return hashlib.sha256(repr((of.args, sorted(of.env.items()), of.entry)).encode()).digest()


def _section(code: bytes) -> bytes | None:
    at, name = _HEADER_BYTES, SECTION.encode()
    while at < len(code):
        custom = code[at] == 0
        size, start = leb_at(code, at + 1)
        at = start + size
        if custom and code[start : start + 1 + len(name)] == bytes((len(name),)) + name:
            return code[start + 1 + len(name) : at]
    return None
