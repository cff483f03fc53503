"""The C core's declarations against what they must agree with: wasmtime's own ctypes declarations, the syscall table,
the binding. Headers are read as text, so none of this needs a built package.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wasmtime import TrapCode
from wasmtime import _bindings as capi

from agentrt import errors, syscalls

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CC = os.environ.get("CC", "cc").split()


def header(name: str) -> str:
    """A header without comments and line continuations."""
    text = (CSRC / name).read_text()
    return re.sub(r"\\\n", " ", re.sub(r"/\*.*?\*/", " ", text, flags=re.S))


# --- wasmtime's functions -------------------------------------------------------

#: What CFUNCTYPE makes is derived from it.
FUNCTION_POINTER: Any = ctypes.CFUNCTYPE(None).__mro__[1]

SCALARS = {
    "void": None,
    "bool": ctypes.c_bool,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "char": ctypes.c_char,
}


def split(arguments: str) -> list[str]:
    """At the commas that are in no parentheses."""
    parts, depth = [""], 0
    for c in arguments:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def declared() -> dict[str, tuple[str, list[str]]]:
    """ART_WASMTIME_API: name -> (return type, argument types)."""
    text = header("wasmtime_api.h")
    start = text.index("#define ART_WASMTIME_API(X)")
    table = text[start : text.index("typedef struct art__wasmtime", start)]
    rows: dict[str, tuple[str, list[str]]] = {}
    for match in re.finditer(r"\bX\(", table[len("#define ART_WASMTIME_API(X)") :]):
        at = match.end() + len("#define ART_WASMTIME_API(X)")
        depth, end = 1, at
        while depth:
            depth += (table[end] == "(") - (table[end] == ")")
            end += 1
        result, name, arguments = split(table[at : end - 1])
        listed = split(arguments.strip()[1:-1])
        rows[name] = (result, [] if listed == ["void"] else listed)
    return rows


def same_struct(c: str, ctype: Any) -> bool:
    return c.removesuffix("_t") == str(ctype.__name__).removesuffix("_t")


def agree(c: str, ctype: Any) -> bool:
    """Is the C type what the ctypes type says?"""
    c = re.sub(r"\bconst\b", " ", c).strip()
    if "(*)" in c or c.endswith("_callback_t"):  # a function pointer
        return isinstance(ctype, type) and issubclass(ctype, FUNCTION_POINTER)
    if c.endswith("*"):
        inner = c[:-1].strip()
        if inner == "void":
            return ctype is ctypes.c_void_p
        if not (isinstance(ctype, type) and issubclass(ctype, ctypes._Pointer)):
            return False
        target: Any = ctype._type_
        return agree(inner, target) if inner.endswith("*") or inner in SCALARS else same_struct(inner, target)
    if c in SCALARS:
        return ctype is SCALARS[c]
    return same_struct(c, ctype)


API = declared()


@pytest.mark.parametrize("name", API)
def test_signature_is_wasmtimes(name: str) -> None:
    result, arguments = API[name]
    function = getattr(capi, "_" + name)
    assert agree(result, function.restype), f"{name} returns {result}, wasmtime says {function.restype}"
    assert len(arguments) == len(function.argtypes), name
    for c, ctype in zip(arguments, function.argtypes, strict=True):
        assert agree(c, ctype), f"{name}: {c}, wasmtime says {ctype}"


def test_the_comparison_compares() -> None:
    assert len(API) > 60
    assert not agree("uint32_t", ctypes.c_uint64)
    assert not agree("wasm_engine_t *", ctypes.POINTER(capi.wasm_config_t))
    assert not agree("wasm_engine_t **", ctypes.POINTER(capi.wasm_engine_t))
    assert not agree("uint8_t *", ctypes.POINTER(ctypes.c_char))
    assert not agree("size_t", ctypes.c_bool)


def test_fault_W48_W55_no_epochs_are_used() -> None:
    """A deadline that nobody advances cannot wedge the pool, nor a junk result be read, where epochs are not used:
    micro-slices are of fuel alone. Whoever adds them has to add the self-test at start."""
    assert not [name for name in declared() if "epoch" in name]
    assert "epoch" in "".join(vars(capi))  # wasmtime still calls them so


def test_async_callback_is_wasmtimes() -> None:
    match = re.search(r"typedef void \(\*wasmtime_func_async_callback_t\)\((.*?)\);", header("wasmtime_api.h"), re.S)
    assert match
    arguments = split(match[1])
    expected = capi.wasmtime_func_async_callback_t._argtypes_
    assert len(arguments) == len(expected)
    assert all(agree(c, ctype) for c, ctype in zip(arguments, expected, strict=True))


STRUCTS = {
    "wasm_byte_vec_t": ("size", "data"),
    "wasm_valtype_vec_t": ("size", "data"),
    "wasm_importtype_vec_t": ("size", "data"),
    "wasm_exporttype_vec_t": ("size", "data"),
    "wasmtime_func_t": ("store_id",),
    "wasmtime_memory_t": (),
    "wasmtime_instance_t": ("store_id",),
    "wasmtime_extern_t": ("kind", "of"),
    "wasmtime_val_t": ("kind", "of"),
    "wasmtime_async_continuation_t": ("callback", "env", "finalizer"),
}


def test_structs_have_wasmtimes_layout(tmp_path: Path) -> None:
    program = '#include "wasmtime_api.h"\n#include <stdio.h>\nint main(void) {\n'
    expected = []
    for name, fields in STRUCTS.items():
        ctype = getattr(capi, name)
        program += f'printf("{name} %zu\\n", sizeof({name}));\n'
        expected.append(f"{name} {ctypes.sizeof(ctype)}")
        for field in fields:
            program += f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));\n'
            expected.append(f"{name}.{field} {getattr(ctype, field).offset}")
    source = tmp_path / "layout.c"
    source.write_text(program + "return 0; }\n")
    subprocess.run([*CC, "-I", str(CSRC), "-o", str(tmp_path / "layout"), str(source)], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


def test_out_of_fuel_is_the_trap_code_we_compare_with() -> None:
    match = re.search(r"ART_WASM_TRAP_OUT_OF_FUEL = (\d+)", header("wasmtime_api.h"))
    assert match
    code = int(match[1])
    # The package's enumeration ends before it; what it has must not be taken for it.
    assert code not in {int(known.value) for known in TrapCode} or TrapCode(code).name == "OUT_OF_FUEL"


# --- the guest ABI ----------------------------------------------------------------


def numbers(prefix: str, block: str) -> dict[str, int]:
    match = re.search(rf"enum {block} \{{(.*?)\}}", header("agentrt_guest.h"), re.S)
    assert match
    return {name: int(value) for name, value in re.findall(rf"{prefix}(\w+) = (-?\d+)", match[1])}


def test_ops_are_the_syscall_table() -> None:
    expected = {row.op.replace(".", "_").upper(): row.number for row in syscalls.TABLE}
    assert numbers("AGENTRT_", "agentrt_op") == expected


def test_statuses_are_negative_and_distinct() -> None:
    statuses = numbers("AGENTRT_", "agentrt_status")
    assert len(set(statuses.values())) == len(statuses) == 7
    assert max(statuses.values()) < 0
    assert statuses["EFAILED"] == -1


def test_sent_ops_are_those_without_an_import_of_their_own() -> None:
    computed = [row.number for row in syscalls.TABLE if row.replay == "computed"]
    sent = [row.number for row in syscalls.TABLE if row.replay != "computed"]
    assert computed == [15, 16]
    assert sent == [*range(1, 15), 17]  # what abi.c lets through
    assert "op < AGENTRT_TOOL_CALL || op > AGENTRT_CAPACITY_GET" in (CSRC / "abi.c").read_text()


def test_imports_are_those_of_the_header() -> None:
    def code(c: str) -> str:
        return "l" if "int64_t" in c else "i"

    in_header = {
        name: ("".join(code(argument) for argument in split(arguments) if argument != "void"), code(result))
        for result, name, arguments in re.findall(
            r"AGENTRT_IMPORT\(\w+\)\s*(\w+) agentrt_(\w+)\((.*?)\);", header("agentrt_guest.h"), re.S
        )
    }
    named = re.findall(r"AGENTRT_IMPORT\((\w+)\)\s*\w+ agentrt_(\w+)\(", header("agentrt_guest.h"))
    assert len(named) == len(in_header) == 10
    assert all(name == function for name, function in named)
    in_core = {
        name: (params, result)
        for name, params, result in re.findall(r"X\((\w+), \"(\w*)\", '(\w)'\)", (CSRC / "abi.c").read_text())
    }
    assert in_core == in_header


# --- the binding ------------------------------------------------------------------


def test_every_error_code_is_known_to_the_binding() -> None:
    codes = dict(re.findall(r"X\((\w+), (-\d+),", header("art_err.h")))
    assert len(codes) == len(set(codes.values()))
    declared_codes = set(re.findall(r"\bART_E(\w+)", (ROOT / "pyx" / "core.pxd").read_text()))
    assert set(codes) <= declared_codes
    translated = dict(re.findall(r"ART_E(\w+): (\S+?),", (ROOT / "pyx" / "_core.pyx").read_text()))
    internal = {"BUSY", "STATE", "SYS", "NOENT"}  # only a bug brings these to Python: InternalError
    assert set(translated) == set(codes) - internal
    for name in translated.values():
        assert name == "MemoryError" or issubclass(getattr(errors, name.removeprefix("errors.")), errors.AgentrtError)


def test_abi_version_is_the_headers() -> None:
    from agentrt import _core

    match = re.search(r"#define AGENTRT_ABI_VERSION (\d+)", header("agentrt_guest.h"))
    assert match
    assert _core.abi_version() == int(match[1])


def test_guests_of_the_c_tests_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(CSRC / "tests" / "make_guests.py"), "--check"], check=True)
