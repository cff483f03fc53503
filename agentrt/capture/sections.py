"""A wasm module's sections, as far as images change them: exports, globals, memory, data, and functions that are added.

Pure. Reads modules of others: every length is checked, and what is not understood is refused (ModuleError). The result
is checked by the engine, as every module is.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from agentrt.errors import ModuleError

HEADER: Final = b"\0asm\x01\0\0\0"
CUSTOM, TYPE, IMPORT, FUNCTION, MEMORY, GLOBAL, EXPORT, START, DATA_COUNT, CODE, DATA = (
    0,
    1,
    2,
    3,
    5,
    6,
    7,
    8,
    12,
    10,
    11,
)
FUNC_EXPORT, MEMORY_EXPORT, GLOBAL_EXPORT = 0, 2, 3
_EXPORT_KINDS: Final = 5  # functions, tables, memories, globals, tags
#: Where each section stands; their numbers do not go by it.
_ORDER: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 13: 6, 6: 7, 7: 8, 8: 9, 9: 10, 12: 11, 10: 12, 11: 13}
_NAMES_OF_GLOBALS: Final = 7
_END: Final = 0x0B
#: Of constant expressions: opcode -> bytes after it, or "leb".
_CONST_FIXED: Final = {0x43: 4, 0x44: 8, _END: 0, 0x6A: 0, 0x6B: 0, 0x6C: 0, 0x7C: 0, 0x7D: 0, 0x7E: 0}
_CONST_LEB: Final = frozenset((0x41, 0x42, 0x23, 0xD0, 0xD2))
_V128_CONST: Final = b"\xfd\x0c"
#: By the number of a value's kind in a frame: its type, the instruction that makes a constant of it, and its bytes.
_KINDS: Final = (
    (0x7F, b"\x41", 4),
    (0x7E, b"\x42", 8),
    (0x7D, b"\x43", 4),
    (0x7C, b"\x44", 8),
    (0x7B, _V128_CONST, 16),
)
_INTEGERS: Final = (b"\x41", b"\x42")
_PAGE: Final = 65536
#: Data that is not interrupted by 64 zeros, which are worth another segment's head.
_STRETCH: Final = re.compile(rb"[^\0](?:[^\0]++|\0{1,63}+(?=[^\0]))*+")
_SEGMENTS_MAX: Final = 100_000  # the engine's


class Cursor:
    """Reads on in a section."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    @property
    def done(self) -> bool:
        return self.at >= len(self.data)

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ModuleError("the module ends in the middle of a section")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self) -> int:
        """An unsigned number of 32 bits."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 32:
                    break
                return value
        raise ModuleError("the module has a number that is too long")

    def name(self) -> str:
        try:
            return self.take(self.number()).decode()
        except UnicodeDecodeError:
            raise ModuleError("the module has a name that is no text") from None

    def count(self) -> int:
        """Of what follows, at least a byte each."""
        value = self.number()
        if value > len(self.data) - self.at:
            raise ModuleError("the module ends in the middle of a section")
        return value

    def skip_leb(self) -> None:
        while self.byte() >= 0x80:
            pass

    def skip_const(self) -> None:
        """A constant expression."""
        while True:
            opcode = self.byte()
            if opcode in _CONST_LEB:
                self.skip_leb()
            elif opcode in _CONST_FIXED:
                self.take(_CONST_FIXED[opcode])
                if opcode == _END:
                    return
            elif bytes((opcode, self.data[self.at] if not self.done else 0)) == _V128_CONST:
                self.take(17)
            else:
                raise ModuleError(f"the module has an initial value that is not known here: opcode {opcode:#x}")


class Export(NamedTuple):
    name: str
    kind: int
    number: int


class Global(NamedTuple):
    """``mutable`` is 0 or 1; ``init``: its constant expression, as it stands."""

    type: bytes
    mutable: int
    init: bytes


class Limits(NamedTuple):
    """Of a memory: ``rest`` is its maximum, as it stands."""

    flags: int
    pages: int
    rest: bytes


def leb(value: int) -> bytes:
    """An unsigned number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed_leb(value: int) -> bytes:
    out = bytearray()
    while not -64 <= value < 64:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value & 0x7F)
    return bytes(out)


def text(name: str) -> bytes:
    """A name with its length."""
    data = name.encode()
    return leb(len(data)) + data


class Sections:
    """A module taken apart. Changes are made to it; `write` puts it together."""

    def __init__(self, wasm: bytes) -> None:
        """Raises ModuleError."""
        if not wasm.startswith(HEADER):
            raise ModuleError("this is not a wasm module: it does not begin with \\0asm and version 1")
        self.custom: list[tuple[str, bytes]] = []
        self._known: dict[int, bytes] = {}
        cursor = Cursor(wasm, len(HEADER))
        while not cursor.done:
            number = cursor.byte()
            content = cursor.take(cursor.number())
            if number == CUSTOM:
                inner = Cursor(content)
                self.custom.append((inner.name(), content[inner.at :]))
            elif number not in _ORDER or number in self._known:
                raise ModuleError(f"the module has a section {number} too many")
            else:
                self._known[number] = content
        self._imports = self._read_imports()
        self.exports = self._read_exports()
        self.globals = self._read_globals()
        self.memory = self._read_memory()

    def _cursor(self, number: int) -> Cursor:
        return Cursor(self._known.get(number, b"\0"))

    def _read_imports(self) -> list[int]:
        """The types of imported functions. Nothing else is ever there to be imported."""
        cursor, found = self._cursor(IMPORT), []
        for _ in range(cursor.count()):
            module, name = cursor.name(), cursor.name()
            if cursor.byte() != FUNC_EXPORT:
                raise ModuleError(f"the module imports {name} from {module}, which is no function")
            found.append(cursor.number())
        return found

    def _read_exports(self) -> list[Export]:
        cursor, found = self._cursor(EXPORT), []
        for _ in range(cursor.count()):
            each = Export(cursor.name(), cursor.byte(), cursor.number())
            if each.kind >= _EXPORT_KINDS:
                raise ModuleError(f"the module exports {each.name}, which is nothing known")
            found.append(each)
        return found

    def _read_globals(self) -> list[Global]:
        cursor, found = self._cursor(GLOBAL), []
        for _ in range(cursor.count()):
            start = cursor.at
            if cursor.byte() in (0x63, 0x64):  # a reference to something named
                cursor.skip_leb()
            kind = cursor.data[start : cursor.at]
            mutable, start = cursor.byte(), cursor.at
            cursor.skip_const()
            found.append(Global(kind, mutable, cursor.data[start : cursor.at]))
        return found

    def _read_memory(self) -> Limits:
        cursor = self._cursor(MEMORY)
        if cursor.count() != 1:
            raise ModuleError("the module has no memory that could be an image, or more than one")
        flags = cursor.byte()
        if flags > 1:
            raise ModuleError("the module's memory is shared, or has 64 bits")
        pages = cursor.number()
        return Limits(flags, pages, cursor.data[cursor.at :])

    def find(self, name: str, kind: int) -> Export | None:
        return next((each for each in self.exports if (each.name, each.kind) == (name, kind)), None)

    def global_names(self) -> dict[int, str]:
        """What the module's section of names calls its globals, by index, as far as it can be read."""
        names = next((content for name, content in self.custom if name == "name"), b"")
        outer, found = Cursor(names), dict[int, str]()
        with suppress(ModuleError):
            while not outer.done:
                kind, content = outer.byte(), Cursor(outer.take(outer.number()))
                for _ in range(content.count() if kind == _NAMES_OF_GLOBALS else 0):
                    index = content.number()
                    found[index] = content.name()
        return found

    @property
    def mutable_globals(self) -> list[int]:
        """Their indices, in the module's order."""
        return [index for index, each in enumerate(self.globals) if each.mutable]

    # --- functions --------------------------------------------------------------------

    def function_type(self, index: int) -> tuple[bytes, bytes]:
        """What a function takes and returns: a byte for each."""
        types = self._types()
        own = self._cursor(FUNCTION)
        numbers = self._imports + [own.number() for _ in range(own.count())]
        if index >= len(numbers) or numbers[index] >= len(types):
            raise ModuleError("the module exports a function that it does not have")
        return types[numbers[index]]

    def _types(self) -> list[tuple[bytes, bytes]]:
        cursor, found = self._cursor(TYPE), []
        for _ in range(cursor.count()):
            if cursor.byte() != 0x60:
                raise ModuleError("the module has a type that is no function's")
            found.append((self._values(cursor, cursor.count()), self._values(cursor, cursor.count())))
        return found

    @staticmethod
    def _values(cursor: Cursor, count: int) -> bytes:
        """Types of values, a byte for each."""
        found = bytearray()
        for _ in range(count):
            found.append(cursor.byte())
            if found[-1] in (0x63, 0x64):
                cursor.skip_leb()
        return bytes(found)

    @property
    def defined_functions(self) -> range:
        """Their indices; imported ones come before."""
        return range(len(self._imports), len(self._imports) + self._cursor(FUNCTION).count())

    def add_flag(self, export: str) -> int:
        """A global that is 1 at first; its index."""
        self.globals.append(Global(b"\x7f", 1, b"\x41\x01\x0b"))
        self.exports.append(Export(export, GLOBAL_EXPORT, len(self.globals) - 1))
        return len(self.globals) - 1

    def copy_functions(self, chosen: list[int], flag: int) -> int:
        """A copy of each function, which the function calls, and does nothing else, while the global is not 0; the
        first copy's index. ``chosen``: defined functions, ascending."""
        own, code = self._cursor(FUNCTION), self._cursor(CODE)
        numbers = [own.number() for _ in range(own.count())]
        bodies = [code.take(code.number()) for _ in range(code.count())]
        imported, first = len(self._imports), len(self._imports) + len(numbers)
        types = self._types()
        for number, index in enumerate(chosen):
            at = index - imported
            if not 0 <= at < first - imported or len(bodies) != len(numbers) or numbers[at] >= len(types):
                raise ModuleError("the module has no such function")
            body = bodies[at]
            numbers.append(numbers[at])
            bodies.append(body)
            locals_end = Cursor(body)
            for _ in range(locals_end.count()):
                locals_end.number()
                self._values(locals_end, 1)
            given = b"".join(b"\x20" + leb(local) for local in range(len(types[numbers[at]][0])))
            call = b"\x23" + leb(flag) + b"\x04\x40" + given + b"\x10" + leb(first + number) + b"\x0f\x0b"
            bodies[at] = body[: locals_end.at] + call + body[locals_end.at :]
        self._known[FUNCTION] = leb(len(numbers)) + b"".join(map(leb, numbers))
        self._known[CODE] = leb(len(bodies)) + b"".join(leb(len(body)) + body for body in bodies)
        return first

    def add_function(self, results: bytes, body: bytes) -> int:
        """A function without parameters and locals, ``body`` with its end; its index."""
        types, own, code = (self._cursor(number) for number in (TYPE, FUNCTION, CODE))
        count, functions, bodies = types.count(), own.count(), code.count()
        self._known[TYPE] = leb(count + 1) + types.data[types.at :] + b"\x60\0" + leb(len(results)) + results
        self._known[FUNCTION] = leb(functions + 1) + own.data[own.at :] + leb(count)
        whole = b"\0" + body
        self._known[CODE] = leb(bodies + 1) + code.data[code.at :] + leb(len(whole)) + whole
        return len(self._imports) + functions

    def drop_start(self) -> None:
        """The start function is not called any more."""
        self._known.pop(START, None)

    # --- state ------------------------------------------------------------------------

    def set_global(self, index: int, kind: int, value: bytes) -> None:
        """Its value at the beginning: ``kind`` as in a frame, ``value`` its 16 bytes. Raises ModuleError: of another
        type."""
        each = self.globals[index]
        if kind >= len(_KINDS) or each.type != bytes((_KINDS[kind][0],)):
            raise ModuleError("a global of the module is of another type than what was read of it")
        _, opcode, size = _KINDS[kind]
        const = value[:size]
        if opcode in _INTEGERS:
            const = signed_leb(int.from_bytes(const, "little", signed=True))
        self.globals[index] = each._replace(init=opcode + const + bytes((_END,)))

    def set_memory(self, memory: bytes) -> None:
        """The memory's content at the beginning, whole pages of it. Raises ModuleError: in too many pieces."""
        self.memory = self.memory._replace(pages=len(memory) // _PAGE)
        old, at = [], self._cursor(DATA)
        for _ in range(at.count()):
            old.append(self._segment(at))
        new = [b"\0\x41" + signed_leb(start) + b"\x0b" + leb(len(data)) + data for start, data in stretches(memory)]
        if len(old) + len(new) > _SEGMENTS_MAX:
            raise ModuleError(f"the memory is in {len(new)} pieces, and a module has at most {_SEGMENTS_MAX} of data")
        whole = leb(len(old) + len(new))
        self._known[DATA] = whole + b"".join(old) + b"".join(new)
        if DATA_COUNT in self._known:
            self._known[DATA_COUNT] = whole

    @staticmethod
    def _segment(cursor: Cursor) -> bytes:
        """What becomes of a segment: one that is copied at the beginning is empty afterwards; the others stay."""
        start, flags = cursor.at, cursor.number()
        if flags == 1:
            cursor.take(cursor.number())
            return cursor.data[start : cursor.at]
        if flags == 2 and cursor.number():
            raise ModuleError("the module has data for a memory that it does not have")
        if flags > 2:
            raise ModuleError("the module has data of an unknown kind")
        cursor.skip_const()
        cursor.take(cursor.number())
        return b"\0\x41\0\x0b\0"

    def write(self) -> bytes:
        """The module."""
        known = dict(self._known)
        known[EXPORT] = leb(len(self.exports)) + b"".join(
            text(each.name) + bytes((each.kind,)) + leb(each.number) for each in self.exports
        )
        if self.globals:
            known[GLOBAL] = leb(len(self.globals)) + b"".join(
                each.type + bytes((each.mutable,)) + each.init for each in self.globals
            )
        known[MEMORY] = b"\x01" + bytes((self.memory.flags,)) + leb(self.memory.pages) + self.memory.rest
        out = [HEADER]
        for number in sorted(known, key=_ORDER.__getitem__):
            out += (bytes((number,)), leb(len(known[number])), known[number])
        for name, content in self.custom:
            body = text(name) + content
            out += (b"\0", leb(len(body)), body)
        return b"".join(out)


def stretches(memory: bytes) -> Iterator[tuple[int, bytes]]:
    """Where it is not zero, and what is there: few long pieces rather than many short ones."""
    return ((found.start(), found[0]) for found in _STRETCH.finditer(memory))
