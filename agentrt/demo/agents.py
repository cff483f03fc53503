"""The demo's agents: three modules in C, and the indexer, a script for MicroPython as its package built it.

With ``--backend process`` the hogs are native processes, which a further script asks for.
"""

from pathlib import Path
from typing import Final

from agentrt.backends import wasi
from agentrt.errors import AgentrtError, InputError

GUESTS: Final = Path(__file__).parent / "guests"
MODULES: Final = ("qualifier", "steps", "hog")
SCRIPTS: Final = ("indexer",)
#: What runs the hogs.
BACKENDS: Final = ("wasm", "process")


class DemoError(AgentrtError):
    """The demo itself could not go on."""

    code = "demo"


def interpreter() -> Path:
    """MicroPython's module. Raises DemoError."""
    try:
        return wasi.micropython()
    except InputError as error:
        raise DemoError(f"the interpreter of the indexers: {error.message}", hint=error.hint) from None


def agents(backend: str = "wasm") -> dict[str, bytes]:
    """Name and module of each, to be registered. ``backend``: one of `BACKENDS`. Raises DemoError."""
    micropython = interpreter().read_bytes()
    found = {name: (GUESTS / f"{name}.wasm").read_bytes() for name in MODULES}
    for name in SCRIPTS:
        found[name] = _script(micropython, f"{name}.py")
    if backend == "process":
        found["hog"] = _script(micropython, "native_hog.py")
    return found


def _script(micropython: bytes, file: str) -> bytes:
    return wasi.pack(micropython, args=["micropython", f"/{file}"], files={file: (GUESTS / file).read_bytes()})
