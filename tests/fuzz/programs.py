"""Programs packed with what they start with, and their results."""

import msgspec

from agentrt.backends import wasi
from agentrt.backends.images import begin_of
from agentrt.capture.sections import Sections
from agentrt.errors import ModuleError

from .kit import MSGPACK, target

_HEADER = b"\0asm\x01\0\0\0"


def _check(module: bytes) -> None:
    try:
        code, packed = wasi.unpack(module)
        if packed is None:
            assert code == module
            return
        packed.image()
    except ModuleError:
        return
    try:
        inner, _ = wasi.unpack(code)  # packing replaces a section that is there
    except ModuleError:
        return
    again = wasi.pack(code, args=packed.args, env=packed.env, files=packed.files, entry=packed.entry)
    assert wasi.unpack(again) == (inner, packed)


@target()
def packed_module(data: bytes) -> None:
    """A module that may begin with the section agentrt.wasi."""
    _check(data)


@target(MSGPACK)
def packed_section(data: bytes) -> None:
    """What is in that section."""
    body = wasi._leb(12) + b"agentrt.wasi" + data
    _check(_HEADER + b"\0" + wasi._leb(len(body)) + body + b"\x01\x04\x01\x60\0\0")


@target()
def stdout_result(data: bytes) -> None:
    """What a program wrote to stdout: its result is JSON text, whatever it is."""
    result = wasi.result_of(data)
    assert (result is None) == (not data)
    if result is not None:
        result.decode()
        msgspec.json.decode(result, type=msgspec.Raw)


@target()
def module_sections(data: bytes) -> None:
    """A module whose sections are taken apart for an image, and put together again."""
    module = _HEADER + data
    try:
        sections = Sections(module)
        again = Sections(sections.write())
        assert (again.exports, again.globals, again.custom) == (sections.exports, sections.globals, sections.custom)
        sections.copy_functions([*sections.defined_functions[:1]], sections.add_flag("flag"))
        sections.set_memory(bytes(65536))
        sections.write()
        begin_of(module, None)
    except ModuleError:
        return
