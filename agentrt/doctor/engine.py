"""Checks of the wasm engine: the library, its version, and guests that really run, trap and are stopped."""

import faulthandler
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from agentrt.doctor import Check, Examined, Examiner
from agentrt.errors import EngineError
from agentrt.sizing import engine_library

#: The release line that fuel positions, artifacts and the hand-declared C API belong to.
VERSION_MIN: Final = (50, 0, 1)
VERSION_BELOW: Final = (51,)
SELFTEST_TIMEOUT_S: Final = 60


def check_engine(examined: Examined) -> Iterator[Check]:
    try:
        library = examined.config.wasm.engine_lib or engine_library()
    except EngineError as error:
        yield Check(name="engine", state="refused", found="none", why=error.message, hint=error.hint or "")
        return
    version = importlib.metadata.version("wasmtime") if not examined.config.wasm.engine_lib else ""
    if version:
        numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
        if not VERSION_MIN <= numbers < VERSION_BELOW:
            yield Check(
                name="engine",
                state="refused",
                found=f"wasmtime {version}",
                why="agentrt needs wasmtime 50.0.1 or a later 50.x",
                hint="pip install 'wasmtime>=50.0.1,<51'",
                data={"library": library, "version": version},
            )
            return
    found = f"wasmtime {version or 'of unknown version'} in {library}"
    why = _selftest(library)
    yield Check(
        name="engine",
        state="refused" if why else "works",
        found=found if why else f"{found}; guests run, trap and are stopped",
        why=why,
        data={"library": library, "version": version or None},
    )


def _selftest(library: str) -> str:
    """Run guests in a child, because what is wrong with an engine may kill its process. Empty, or what went wrong."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "agentrt.doctor.selftest", library],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SELFTEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the self-test did not end within {SELFTEST_TIMEOUT_S} s"
    lines = child.stdout.decode(errors="replace").splitlines()
    if child.returncode == 0 and lines:
        outcome = json.loads(lines[-1])
        return "" if outcome["ok"] else str(outcome["why"])
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    ended = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
    return f"the self-test ended with {ended}{': ' + last[0] if last else ''}"


def check_faulthandler(examined: Examined) -> Iterator[Check]:
    """Its handlers and the engine's share signals: switched on or off once the engine exists, guests that access
    memory out of bounds kill the process instead of trapping."""
    on = faulthandler.is_enabled()
    yield Check(
        name="signal handlers",
        state="degraded" if on else "works",
        found="faulthandler is on" if on else "faulthandler is off",
        why="must not be switched on or off once a runtime exists: guests' faults would kill the process" if on else "",
        hint="Start without -X faulthandler, PYTHONFAULTHANDLER and -X dev" if on else "",
        data={"faulthandler": on},
    )


EXAMINERS: Final[tuple[Examiner, ...]] = (check_engine, check_faulthandler)
