"""What a tool is to a node: its `ToolSpec`, and the registry of a node's tools."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt.errors import InputError, UnknownToolError
from agentrt.tools.declare import CLASS_DEFAULT, CLASSES_DEFAULT, KEY_TTL_DEFAULT_S, is_async
from agentrt.tools.declare import declaration_of as declaration_of
from agentrt.tools.declare import tool as tool

_KEY_TTL_DEFAULT_NS: Final = round(KEY_TTL_DEFAULT_S * 1e9)
#: The built-in one, of Python tools in tool hosts.
PROVIDER_DEFAULT: Final = "python"


class Command(msgspec.Struct, frozen=True):
    """What a native command executes for a call; see `agentrt.tools.commands.command_tool`. ``preempt``: what becomes
    of it when urgent work needs the machine: ``freeze``, it goes on afterwards; ``discard``, it is killed, and its call
    begins again; ``snapshot``, it may hand over a state that its call goes on from."""

    argv: tuple[str, ...]
    input: str = "json"
    output: str = "json"
    environment: tuple[tuple[str, str], ...] = ()
    network: bool = False
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    memory_bytes_max: int = 0  # 0: the configuration's, as below
    processes_max: int = 0
    preempt: str = "freeze"


class ToolSpec(msgspec.Struct, frozen=True):
    """One tool. ``ref`` is ``module:qualname`` or ``/path/to/file.py:qualname``, from which a host imports it; of a
    native command it says which, and of another ``provider`` than the built-in one it is whatever that wants it to be.
    """

    name: str
    kind: str  # pure, keyed, reconcilable, at_most_once
    timeout_ns: int  # of one execution, waiting for a host not counted
    is_async: bool
    ref: str
    cls: str = CLASS_DEFAULT  # whose pool of hosts
    key_ttl_ns: int = _KEY_TTL_DEFAULT_NS  # of keyed tools: how long the callee knows a key
    reconcile: bool = False  # whether it can be asked what became of a call
    attempts_max: int | None = None  # None: the runtime's
    max_batch: int = 1  # calls given to it at once; 1: it takes no batches
    max_wait_ns: int = 0  # how long a first call waits for company
    secrets: tuple[str, ...] = ()  # names that ``secret://name`` arguments may stand for
    command: Command | None = None  # a native command, which no host imports
    provider: str = PROVIDER_DEFAULT  # who executes it


def spec_of(function: Callable[..., Any]) -> ToolSpec:
    """The spec of a decorated function. Raises InputError if it is none, or cannot be imported by a host."""
    declaration = declaration_of(function)
    if declaration is None:
        raise InputError(f"{function!r} is no tool", hint="Decorate it with @tool(kind=…)")
    qualname = function.__qualname__
    if "<" in qualname:
        raise InputError(
            f"tool {declaration.name}: {qualname} is inside a function, a host cannot import it",
            hint="Define it at the top of a module",
        )
    return ToolSpec(
        declaration.name,
        declaration.kind,
        declaration.timeout_ns,
        is_async(function),
        f"{_source_of(declaration.name, function.__module__)}:{qualname}",
        declaration.cls,
        declaration.key_ttl_ns,
        declaration.reconcile is not None,
        declaration.attempts_max,
        declaration.max_batch,
        declaration.max_wait_ns,
        declaration.secrets,
    )


def _source_of(title: str, module_name: str) -> str:
    """Where a host finds the module: a file for what was loaded as one, else its name."""
    module = sys.modules.get(module_name)
    source = getattr(module, "__agentrt_source__", None)
    if isinstance(source, str):
        return source
    if module_name != "__main__":
        return module_name
    spec = getattr(module, "__spec__", None)
    if spec is not None:  # started with -m
        return str(spec.name)
    file = getattr(module, "__file__", None)
    if file is None:
        raise InputError(f"tool {title}: defined in a session without a file", hint="Put it into a module or a file")
    return str(Path(file).resolve())


class ToolRegistry:
    """The tools of a node, by name. Grows only; the position of a tool is its number in the protocol with hosts.

    ``classes``: those that tools may have; a tool of another class is refused.
    """

    def __init__(
        self, tools: Iterable[Callable[..., Any] | ToolSpec] = (), classes: Iterable[str] = CLASSES_DEFAULT
    ) -> None:
        self.classes: Final = tuple(classes)
        self._specs: list[ToolSpec] = []
        self._found: dict[str, tuple[int, ToolSpec]] = {}  # number and spec by name
        for item in tools:
            self.add(item)

    def add(self, item: Callable[..., Any] | ToolSpec) -> ToolSpec:
        """Register a decorated function or a spec, twice is fine. Raises InputError if the name is taken
        or the class is unknown."""
        spec = item if isinstance(item, ToolSpec) else spec_of(item)
        if spec.cls not in self.classes:
            raise InputError(
                f"tool {spec.name}: there is no class {spec.cls!r}",
                hint=f"Classes: {', '.join(self.classes)}; the configuration adds one by [tools.classes.{spec.cls}]",
            )
        found = self._found.get(spec.name)
        if found is not None:
            if found[1] != spec:
                raise InputError(f"two tools are called {spec.name}: {found[1].ref} and {spec.ref}")
            return spec
        self._found[spec.name] = len(self._specs), spec
        self._specs.append(spec)
        return spec

    def get(self, name: str) -> ToolSpec:
        """Raises UnknownToolError."""
        found = self._found.get(name)
        return self.find(name)[1] if found is None else found[1]

    def number(self, name: str) -> int:
        """Raises UnknownToolError."""
        return self.find(name)[0]

    def find(self, name: str) -> tuple[int, ToolSpec]:
        """The tool's number and spec. Raises UnknownToolError."""
        try:
            return self._found[name]
        except KeyError:
            known = ", ".join(sorted(self._found)[:20]) or "none"
            raise UnknownToolError(f"there is no tool {name!r}", hint=f"Registered: {known}") from None

    def importable_from(self, number: int) -> list[tuple[int, ToolSpec]]:
        """Tools that hosts import, with their numbers, from this number on."""
        return [
            (at, spec)
            for at, spec in enumerate(self._specs[number:], number)
            if spec.command is None and spec.provider == PROVIDER_DEFAULT
        ]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[ToolSpec]:
        return iter(tuple(self._specs))
