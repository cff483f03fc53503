"""The demo's agents: three modules in C, and the indexer, a script for MicroPython as its package built it."""

from pathlib import Path
from typing import Final

from agentrt.backends import wasi
from agentrt.errors import AgentrtError, InputError

GUESTS: Final = Path(__file__).parent / "guests"
MODULES: Final = ("qualifier", "steps", "hog")
SCRIPTS: Final = ("indexer",)


class DemoError(AgentrtError):
    """The demo itself could not go on."""

    code = "demo"


def interpreter() -> Path:
    """MicroPython's module. Raises DemoError."""
    try:
        return wasi.micropython()
    except InputError as error:
        raise DemoError(f"the interpreter of the indexers: {error.message}", hint=error.hint) from None


def agents() -> dict[str, bytes]:
    """Name and module of each, to be registered. Raises DemoError."""
    micropython = interpreter().read_bytes()
    found = {name: (GUESTS / f"{name}.wasm").read_bytes() for name in MODULES}
    for name in SCRIPTS:
        file = f"{name}.py"
        script = (GUESTS / file).read_bytes()
        found[name] = wasi.pack(micropython, args=["micropython", f"/{file}"], files={file: script})
    return found
