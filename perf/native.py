"""Small C and C++ programs, compiled when they are needed and run once."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PERF = Path(__file__).parent
CSRC = PERF.parent / "csrc"

_RUN_TIMEOUT_S = 120


def compiler(cxx: bool = False) -> str | None:
    """The compiler, from CC or CXX or by its usual name; None if there is none."""
    return shutil.which(os.environ.get("CXX" if cxx else "CC") or ("c++" if cxx else "cc"))


def has_header(header: str, *, cxx: bool = False) -> bool:
    """Whether the compiler finds a header (CPATH may add folders)."""
    command = compiler(cxx)
    if command is None:
        return False
    language = "c++" if cxx else "c"
    source = f"#include <{header}>\n".encode()
    done = subprocess.run([command, "-E", "-x", language, "-"], input=source, capture_output=True)
    return done.returncode == 0


def run(source: str, *arguments: object, csrc: tuple[str, ...] = ()) -> dict[str, float]:
    """Compile perf/``source`` with files of csrc and run it; it prints lines of a name and a number.

    Raises RuntimeError with what the compiler or the program said."""
    cxx = source.endswith(".cc")
    command = compiler(cxx)
    if command is None:
        raise RuntimeError("there is no C compiler")
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        program = Path(folder) / "program"
        standard = "-std=gnu++17" if cxx else "-std=gnu11"
        _check(
            [command, standard, "-O2", "-march=native", "-pthread", f"-I{CSRC}", str(PERF / source)]
            + [str(CSRC / name) for name in csrc]
            + ["-o", str(program)]
        )
        output = _check([str(program), *(str(argument) for argument in arguments)])
    return {name: float(value) for name, value in (line.split() for line in output.splitlines())}


def _check(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
