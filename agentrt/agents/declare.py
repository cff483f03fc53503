"""What an agent is: the `agent` decorator, and the checked form of the function that a host calls."""

import inspect
import re
import typing
from collections.abc import Callable, Container, Mapping
from typing import Any, Final, TypeVar, overload

import msgspec

from agentrt.agents.current import current
from agentrt.errors import InputError
from agentrt.tiers import Tier, parse_tier
from agentrt.tools.spec import _source_of
from agentrt.upgrading import check_upgrade

_ATTRIBUTE: Final = "__agentrt_agent__"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")

Function = TypeVar("Function", bound=Callable[..., Any])


class AgentDeclaration(msgspec.Struct, frozen=True):
    """What the decorator attaches to the function. In a run's own copy, name and ``on_unwind`` are all that counts."""

    name: str
    tier: Tier
    budget: dict[str, int | float]
    on_unwind: Callable[..., Any] | None
    on_upgrade: str | None = None
    migrate: Callable[..., Any] | str | None = None
    short: bool = False


@overload
def agent(function: Function, /) -> Function: ...


@overload
def agent(
    *,
    tier: int | str = Tier.INTERACTIVE,
    budget: Mapping[str, int | float] | None = None,
    name: str | None = None,
    on_unwind: Callable[..., Any] | None = None,
    on_upgrade: str | None = None,
    migrate: Callable[..., Any] | str | None = None,
    short: bool = False,
) -> Callable[[Function], Function]: ...


def agent(
    function: Function | None = None,
    /,
    *,
    tier: int | str = Tier.INTERACTIVE,
    budget: Mapping[str, int | float] | None = None,
    name: str | None = None,
    on_unwind: Callable[..., Any] | None = None,
    on_upgrade: str | None = None,
    migrate: Callable[..., Any] | str | None = None,
    short: bool = False,
) -> Any:
    """Declare an ``async def`` function as an agent. The function itself is returned unchanged.

    Its first parameter is the `Context`; the input of a run is the second, or an object with the others as members if
    there are several. Input and result are checked against the type hints. ``tier`` is where its runs start unless the
    caller says otherwise; ``budget`` bounds each run; ``on_unwind`` is called with the context and the reason when a
    run is ended from outside, after the handlers that the run itself has set. ``on_upgrade``, ``migrate`` and ``short``
    as in `Runtime.register`. Raises InputError.
    """
    if current.run is not None:  # each run executes its module again; it was checked when it was imported

        def declare_again(function: Function) -> Function:
            title = name if name is not None else function.__name__
            setattr(function, _ATTRIBUTE, AgentDeclaration(title, Tier.INTERACTIVE, {}, on_unwind))
            return function

        return declare_again if function is None else declare_again(function)
    parsed = parse_tier(tier)
    limits = dict(budget or {})
    for key, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise InputError(f"the budget {key!r} must be a number above 0, not {limit!r}")

    def declare(function: Function) -> Function:
        if not callable(function) or not hasattr(function, "__qualname__"):
            raise InputError(f"{function!r} is no function")
        title = name if name is not None else function.__name__
        if not _NAME.fullmatch(title):
            raise InputError(f"{title!r} is no agent name", hint="Letters, digits, _ . -, a letter first")
        if not inspect.iscoroutinefunction(function):
            raise InputError(f"agent {title}: it is no async def function")
        _parameters(title, function)
        check_upgrade(title, on_upgrade, migrate)
        setattr(function, _ATTRIBUTE, AgentDeclaration(title, parsed, limits, on_unwind, on_upgrade, migrate, short))
        return function

    return declare if function is None else declare(function)


def agent_declaration_of(function: object) -> AgentDeclaration | None:
    """What `agent` attached to the function, or None."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, AgentDeclaration) else None


def agent_reference(function: Callable[..., Any]) -> str:
    """``source:qualname`` of a decorated function, from which hosts import it. Raises InputError."""
    declaration = agent_declaration_of(function)
    if declaration is None:
        raise InputError(f"{function!r} is no agent", hint="Decorate it with @agent")
    qualname = function.__qualname__
    if "<" in qualname:
        raise InputError(
            f"agent {declaration.name}: {qualname} is inside a function, a host cannot import it",
            hint="Define it at the top of a module",
        )
    return f"{_source_of(declaration.name, function.__module__)}:{qualname}"


def _parameters(title: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those that the input fills. Raises InputError."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise InputError(f"agent {title}: its first parameter must be the context")
    for parameter in parameters[1:]:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise InputError(f"agent {title}: parameter {parameter} cannot be given by name")
    return parameters[1:]


class Entry:
    """An agent's function with its hints resolved."""

    __slots__ = ("_input", "_kinds", "_names", "_result", "declaration", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises InputError, or TypeError or NameError if a hint cannot be resolved or is nothing JSON can carry."""
        declaration = agent_declaration_of(function)
        if declaration is None:
            raise InputError(f"{function!r} is no agent", hint="Decorate it with @agent")
        self.declaration = declaration
        self.function = function
        parameters = _parameters(declaration.name, function)
        hints = typing.get_type_hints(function, include_extras=True)
        self._names = [parameter.name for parameter in parameters]
        hint: Any = Any
        if len(parameters) == 1:
            hint = hints.get(parameters[0].name, Any)
        elif parameters:
            hint = msgspec.defstruct("Input", [_field(each, hints) for each in parameters], forbid_unknown_fields=True)
        self._input: msgspec.json.Decoder[Any] = msgspec.json.Decoder(hint)
        result = hints.get("return", Any)
        self._kinds = _kinds_in([hints.get(name, Any) for name in (*self._names, "return")])
        self._result: msgspec.json.Decoder[Any] | None = None if result is Any else msgspec.json.Decoder(result)

    def of(self, function: Callable[..., Any], own_modules: Container[str]) -> "Entry":
        """The entry of the same function in another copy of its modules. Hints without classes of those are shared."""
        if self._kinds is None or any(kind.__module__ in own_modules for kind in self._kinds):
            return Entry(function)
        entry = Entry.__new__(Entry)
        declaration = agent_declaration_of(function)
        entry.declaration = self.declaration if declaration is None else declaration
        entry.function = function
        entry._names, entry._input, entry._result, entry._kinds = self._names, self._input, self._result, self._kinds
        return entry

    def arguments(self, data: bytes) -> dict[str, Any]:
        """Keyword arguments for the function. Raises msgspec.MsgspecError if the input does not fit."""
        if not self._names:
            return {}
        value = self._input.decode(data)
        if len(self._names) == 1:
            return {self._names[0]: value}
        return {name: getattr(value, name) for name in self._names}

    def check_result(self, data: bytes) -> None:
        """Raises msgspec.MsgspecError if the result, as JSON, is not what the function promised."""
        if self._result is not None:
            self._result.decode(data)


def _kinds_in(hints: list[Any]) -> list[type] | None:
    """The classes that hints are made of; None if one is something else, of which nothing is known."""
    out: list[type] = []
    while hints:
        hint = hints.pop()
        if hint is None or hint is Any or isinstance(hint, str | int):  # the last two: values of a Literal
            continue
        arguments = typing.get_args(hint)
        if arguments:
            hints.extend(each for each in arguments if each is not Ellipsis)
        elif isinstance(hint, type):
            out.append(hint)
        else:
            return None
    return out


def _field(parameter: inspect.Parameter, hints: dict[str, Any]) -> Any:
    hint = hints.get(parameter.name, Any)
    if parameter.default is parameter.empty:
        return (parameter.name, hint)
    default = parameter.default
    return (parameter.name, hint, msgspec.field(default_factory=lambda: default))
