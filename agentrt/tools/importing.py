"""Import tools: in a host, from their reference; in a throw-away child, to learn what a source declares.

A source is a module name or the path of a ``.py`` file. A file is executed under a name of its own, so that its
``if __name__ == "__main__"`` part does not run, with its folder on ``sys.path`` as when it is started.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from agentrt.errors import InputError
from agentrt.tools.declare import declaration_of
from agentrt.tools.spec import ToolSpec, spec_of

DESCRIBE_TIMEOUT_S: Final = 60.0

_FRAME: Final = re.compile(r' *File "([^"]+)", line (\d+).*')
_MISSING: Final = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'")


def import_source(source: str) -> ModuleType:
    """Import a module name or a file. Raises whatever its code raises; InputError if there is no such file."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    name = f"agentrt_tools_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"there is no Python file {source}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__agentrt_source__"] = str(path)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve(name: str, ref: str) -> Callable[..., Any]:
    """The function behind a reference. Raises InputError if it is not the tool ``name``, or what the import raises."""
    source, _, qualname = ref.rpartition(":")
    found: Any = import_source(source)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    declaration = declaration_of(found)
    if declaration is None or declaration.name != name:
        raise InputError(f"{ref} is not the tool {name}")
    function: Callable[..., Any] = found
    return function


def tools_in(module: ModuleType) -> list[ToolSpec]:
    """The tools a module defines or re-exports at its top, in order of definition."""
    specs: dict[str, ToolSpec] = {}
    for value in vars(module).values():
        if isinstance(value, ToolSpec):  # a native command
            specs.setdefault(value.name, value)
        elif inspect.isroutine(value) and declaration_of(value) is not None:
            spec = spec_of(value)
            specs.setdefault(spec.name, spec)
    return list(specs.values())


def describe_tools(source: str) -> list[ToolSpec]:
    """The tools of a module or file, found in a child process so that its code does not run in this one.

    Blocks, at most `DESCRIBE_TIMEOUT_S`. Raises InputError with the child's error, or if there are no tools.
    """
    try:
        specs = msgspec.json.decode(run_describer(source, f"{__name__}:describe_main"), type=list[ToolSpec])
    except msgspec.MsgspecError as error:
        raise InputError(f"{source} ended before its tools were known") from error
    if not specs:
        raise InputError(f"{source} declares no tools", hint="Decorate functions with @tool(kind=…)")
    return specs


def run_describer(source: str, describer: str) -> bytes:
    """What ``describer`` (``module:function`` of this package; it gets the source and gives bytes) finds in a source,
    in a child process. Blocks, at most `DESCRIBE_TIMEOUT_S`. Raises InputError with the child's error."""
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise InputError(f"there is no file {source}")
        source = str(Path(source).resolve())
    request = msgspec.json.encode([sys.path, source])
    module, _, function = describer.partition(":")
    code = (
        "import sys, json; path, source = json.load(sys.stdin); sys.path[:] = path; "
        # After a NUL, so that what the module prints does no harm.
        f"import {module} as d; found = d.{function}(source); sys.stdout.flush(); "
        "sys.stdout.buffer.write(b'\\0' + found); sys.stdout.flush()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=request,
            capture_output=True,
            timeout=DESCRIBE_TIMEOUT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{source} was not imported within {DESCRIBE_TIMEOUT_S:g} seconds") from None
    if done.returncode != 0:
        raise _not_imported(source, done.stderr.decode(errors="replace"), done.returncode)
    return done.stdout.rpartition(b"\0")[2]


def _not_imported(source: str, said: str, status: int) -> InputError:
    """Where and why, of what the child said."""
    lines = said.strip().splitlines()
    why = lines[-1] if lines else f"status {status}"
    frames = [(found[1], found[2]) for line in lines if (found := _FRAME.fullmatch(line))]
    own = [frame for frame in frames if frame[0] == source] or [
        frame for frame in frames if not frame[0].startswith("<") and Path(frame[0]).suffix == ".py"
    ]
    where = ""
    if own:
        file, line = own[-1]
        where = f" (line {line})" if file == source else f" (line {line} of {file})"
    hint = None
    if (missing := _MISSING.search(why)) is not None:
        hint = (
            f"{missing[1]} must be installed in this Python, or be in a folder of PYTHONPATH"
            if missing[1] != source
            else "A module must be installed or in a folder of PYTHONPATH; a file is named with its .py"
        )
    return InputError(f"{source} cannot be imported: {why}{where}", hint=hint)


def describe_main(source: str) -> bytes:
    """In the child: the specs as JSON."""
    return msgspec.json.encode(tools_in(import_source(source)))
