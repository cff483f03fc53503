"""From Python to what models read: tools by their functions, schemas by their types. Runs in agents' hosts."""

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from agentrt.errors import InputError
from agentrt.tools.declare import declaration_of

#: Parameters of tools that the runtime fills in.
_OWN: Final = frozenset({"idempotency_key", "attempt"})


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type (msgspec's, dataclasses, TypedDict, …), or the schema itself. Raises InputError."""
    if isinstance(kind, Mapping):
        return dict(kind)
    try:
        schema = msgspec.json.schema(kind)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{kind!r} has no JSON schema: {error}") from None
    reference = schema.get("$ref", "")
    if reference.startswith("#/$defs/"):  # providers want to see what the whole is
        schema = schema["$defs"][reference.removeprefix("#/$defs/")] | {"$defs": schema["$defs"]}
        if "#/$defs/" not in msgspec.json.encode({key: schema[key] for key in schema if key != "$defs"}).decode():
            del schema["$defs"]
    return schema


def tool_definition(tool: Callable[..., Any] | Mapping[str, Any]) -> dict[str, Any]:
    """What a model is told of a tool: of a function decorated with `@tool` its name, its docstring and its parameters;
    a mapping with ``name``, ``description`` and ``parameters`` as it is. Raises InputError."""
    if isinstance(tool, Mapping):
        return dict(tool)
    declaration = declaration_of(tool)
    if declaration is None:
        raise InputError(f"{tool!r} is no tool", hint="Decorate it with @tool(kind=…), or give name and parameters")
    hints = typing.get_type_hints(tool, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name in _OWN:
            continue
        hint = hints.get(name, Any)
        if parameter.default is parameter.empty:
            fields.append((name, hint))
        else:
            fields.append((name, hint, msgspec.field(default_factory=partial(_same, parameter.default))))
    kind = msgspec.defstruct(declaration.name, fields, forbid_unknown_fields=True, kw_only=True)
    definition: dict[str, Any] = {"name": declaration.name, "parameters": schema_of(kind)}
    definition["parameters"].pop("title", None)
    if tool.__doc__:
        definition["description"] = inspect.cleandoc(tool.__doc__)
    return definition


def _same(value: Any) -> Any:
    return value
