"""What a tool is: the `tool` decorator, its `ToolSpec`, and the registry of the tools of a node."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from agentrt.errors import InputError, UnknownToolError

#: Kinds that this release settles after a crash (DESIGN: kinds). The others are refused when the tool is declared.
SERVED_KINDS: Final = ("pure", "keyed")
UNSERVED_KINDS: Final = ("reconcilable", "at_most_once")

#: Keyword-only parameters that the runtime fills in; a guest cannot set them.
RUNTIME_PARAMETERS: Final = ("idempotency_key", "attempt")

TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MAX_S: Final = 24 * 3600.0

_ATTRIBUTE: Final = "__agentrt_tool__"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")

Function = TypeVar("Function", bound=Callable[..., Any])


class ToolSpec(msgspec.Struct, frozen=True):
    """One tool. ``ref`` is ``module:qualname`` or ``/path/to/file.py:qualname``, from which a host imports it."""

    name: str
    kind: str  # pure, keyed
    timeout_ns: int  # of one execution, waiting for a host not counted
    is_async: bool
    ref: str
    key_ttl_ns: int = 24 * 3600 * 10**9  # how long after its first attempt the callee knows an idempotency key
    reconcile: bool = False  # it can say what became of a call


class _Declaration(msgspec.Struct, frozen=True):
    """What the decorator attaches; `spec_of` adds where the function is found."""

    name: str
    kind: str
    timeout_ns: int


def tool(
    *,
    kind: Literal["pure", "keyed"],
    timeout: float = TIMEOUT_DEFAULT_S,
    name: str | None = None,
) -> Callable[[Function], Function]:
    """Declare a function, sync or async, as a tool. The function itself is returned unchanged.

    ``kind`` says what makes a repetition safe: ``pure`` has no effect; ``keyed`` has one that the callee deduplicates
    by the ``idempotency_key``, which the tool gets if it has a keyword-only parameter of that name; ``attempt``
    likewise (an int, from 1). ``timeout`` is in seconds. Arguments are checked against the type hints; the result must
    be something that msgspec can turn into JSON. Raises InputError.
    """
    if kind in UNSERVED_KINDS:
        raise InputError(
            f"tools of kind {kind!r} are not served by this release", hint="Use pure, or keyed with an idempotency_key"
        )
    if kind not in SERVED_KINDS:
        raise InputError(f"{kind!r} is no kind of tool", hint="Use " + " or ".join(SERVED_KINDS))
    if not 0 < timeout <= TIMEOUT_MAX_S:
        raise InputError(f"a tool's timeout is more than 0 and at most {TIMEOUT_MAX_S:g} seconds, not {timeout!r}")

    def declare(function: Function) -> Function:
        if not callable(function) or not hasattr(function, "__qualname__"):
            raise InputError(f"{function!r} is no function")
        title = name if name is not None else function.__name__
        if not _NAME.fullmatch(title):
            raise InputError(f"{title!r} is no tool name", hint="Letters, digits, _ . -, a letter first")
        _check_parameters(title, kind, function)
        setattr(function, _ATTRIBUTE, _Declaration(title, kind, round(timeout * 1e9)))
        return function

    return declare


def _check_parameters(title: str, kind: str, function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(f"tool {title}: a generator cannot be a tool")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InputError(
                f"tool {title}: parameter {parameter} cannot be given by name", hint="Arguments come as a JSON object"
            )
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name == "idempotency_key" and kind == "pure":
            raise InputError(f"tool {title}: a pure tool gets no idempotency_key", hint="Declare it keyed")


def declaration_of(function: object) -> _Declaration | None:
    """What `tool` attached to the function, or None."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, _Declaration) else None


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
        inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(function),
        f"{_source_of(declaration.name, function.__module__)}:{qualname}",
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
    """The tools of a node, by name. Grows only; the position of a tool is its number in the protocol with hosts."""

    def __init__(self, tools: Iterable[Callable[..., Any] | ToolSpec] = ()) -> None:
        self._specs: list[ToolSpec] = []
        self._numbers: dict[str, int] = {}
        for item in tools:
            self.add(item)

    def add(self, item: Callable[..., Any] | ToolSpec) -> ToolSpec:
        """Register a decorated function or a spec, twice is fine. Raises InputError if the name is taken."""
        spec = item if isinstance(item, ToolSpec) else spec_of(item)
        number = self._numbers.get(spec.name)
        if number is not None:
            if self._specs[number] != spec:
                raise InputError(f"two tools are called {spec.name}: {self._specs[number].ref} and {spec.ref}")
            return spec
        self._numbers[spec.name] = len(self._specs)
        self._specs.append(spec)
        return spec

    def get(self, name: str) -> ToolSpec:
        """Raises UnknownToolError."""
        return self._specs[self.number(name)]

    def number(self, name: str) -> int:
        """Raises UnknownToolError."""
        try:
            return self._numbers[name]
        except KeyError:
            known = ", ".join(sorted(self._numbers)[:20]) or "none"
            raise UnknownToolError(f"there is no tool {name!r}", hint=f"Registered: {known}") from None

    def specs_from(self, number: int) -> list[ToolSpec]:
        return self._specs[number:]

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[ToolSpec]:
        return iter(tuple(self._specs))
