"""Whether an answer keeps to a JSON schema. Pure, and bounded in steps.

Own code, because both sides are hostile: a schema comes from an agent, a value from a model, and with the libraries for
all of JSON Schema a few lines of either keep a thread busy for hours (a regular expression that backtracks, recursive
alternatives over deep nesting) or fetch addresses. Here a schema has the keywords that providers support for structured
output, anything else is refused before the call, and looking at a value costs steps, of which there are so many.

Meaning of each keyword: JSON Schema 2020-12, with ``format`` and all annotations read over.
"""

from typing import Any, Final

SCHEMA_NODES_MAX: Final = 10_000
DEPTH_MAX: Final = 64
STEPS_MAX: Final = 1_000_000

_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_INTEGERS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NOTES: Final = (
    "title", "description", "default", "examples", "format", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "contentEncoding", "contentMediaType", "discriminator",
)  # fmt: skip
_LISTS: Final = ("anyOf", "allOf", "prefixItems")
_MAPS: Final = ("properties", "$defs", "definitions")
_SINGLE: Final = ("items", "additionalProperties")


class BadSchemaError(ValueError):
    """The schema has what is not supported; the text says where and what."""


class MismatchError(ValueError):
    """The value is not what the schema says; the text says where and why."""


class _Steps:
    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, where: str, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise MismatchError(f"{where}: the schema takes too many steps to check")


class Schema:
    """A schema that can be checked against. Raises BadSchemaError."""

    def __init__(self, schema: Any) -> None:
        self.schema: Final = schema
        self._refs: dict[str, Any] = {}
        self._nodes = 0
        if not isinstance(schema, dict):
            raise BadSchemaError("a schema is an object")
        for key in ("$defs", "definitions"):
            members = schema.get(key, {})
            if isinstance(members, dict):
                self._refs |= {f"#/{key}/{_escaped(name)}": member for name, member in members.items()}
        self._refs["#"] = schema
        self._look(schema, "#", 0)

    def _look(self, schema: Any, where: str, depth: int) -> None:
        self._nodes += 1
        if self._nodes > SCHEMA_NODES_MAX or depth > DEPTH_MAX:
            raise BadSchemaError(f"{where[:100]}: the schema is too large or too deep")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise BadSchemaError(f"{where}: a schema is an object")
        for key, value in schema.items():
            self._look_at(key, value, where, depth)

    def _look_at(self, key: str, value: Any, where: str, depth: int) -> None:
        place = f"{where}/{_escaped(key)}"
        fine = True
        if key == "type":
            kinds = value if isinstance(value, list) else [value]
            fine = bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
        elif key in _MAPS:
            fine = isinstance(value, dict)
            if fine:
                for name, member in value.items():
                    self._look(member, f"{place}/{_escaped(name)}", depth + 1)
        elif key in _LISTS:
            fine = isinstance(value, list) and bool(value)
            if fine:
                for number, member in enumerate(value):
                    self._look(member, f"{place}/{number}", depth + 1)
        elif key in _SINGLE:
            self._look(value, place, depth + 1)
        elif key == "required":
            fine = isinstance(value, list) and all(isinstance(name, str) for name in value)
        elif key == "enum":
            fine = isinstance(value, list)
        elif key in _INTEGERS:
            fine = type(value) is int and value >= 0
        elif key in _NUMBERS:
            fine = type(value) in (int, float)
        elif key == "multipleOf":
            fine = type(value) is int and value > 0
        elif key == "$ref":
            fine = isinstance(value, str) and value in self._refs
        elif key != "const" and key not in _NOTES:
            raise BadSchemaError(f"{place}: {key!r} is not supported")
        if not fine:
            raise BadSchemaError(f"{place}: {value!r:.100} is not possible there")

    @property
    def strict(self) -> bool:
        """Whether providers take it as binding: all objects closed, and all their properties required."""
        return _strict(self.schema)

    def check(self, value: Any, steps_max: int = STEPS_MAX) -> None:
        """Raises MismatchError."""
        try:
            self._check(self.schema, value, "$", _Steps(steps_max), 0)
        except RecursionError:
            raise MismatchError("the value is nested too deeply") from None

    def _check(self, schema: Any, value: Any, where: str, steps: _Steps, refs: int) -> None:
        steps.take(where)
        if schema is True or schema == {}:
            return
        if schema is False:
            raise MismatchError(f"{where}: nothing is allowed here")
        ref = schema.get("$ref")
        if ref is not None:
            if refs > DEPTH_MAX:
                raise MismatchError(f"{where}: the schema refers to itself without end")
            self._check(self._refs[ref], value, where, steps, refs + 1)
        kinds = schema.get("type")
        if kinds is not None and not any(_is(value, kind) for kind in (kinds if isinstance(kinds, list) else (kinds,))):
            raise MismatchError(f"{where}: it is {_shown(value)}, not {kinds}")
        if "const" in schema and not _same(value, schema["const"], steps, where):
            raise MismatchError(f"{where}: it is not {_shown(schema['const'])}")
        if "enum" in schema and not any(_same(value, each, steps, where) for each in schema["enum"]):
            raise MismatchError(f"{where}: {_shown(value)} is none of the values")
        for each in schema.get("allOf", ()):
            self._check(each, value, where, steps, refs + 1)
        if "anyOf" in schema:
            self._any(schema["anyOf"], value, where, steps, refs)
        if isinstance(value, dict):
            self._object(schema, value, where, steps)
        elif isinstance(value, list):
            self._array(schema, value, where, steps)
        elif isinstance(value, str):
            _within(len(value), schema, "minLength", "maxLength", where, "characters")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _number(schema, value, where)

    def _any(self, schemas: list[Any], value: Any, where: str, steps: _Steps, refs: int) -> None:
        why = ""
        for each in schemas:
            try:
                self._check(each, value, where, steps, refs + 1)
            except MismatchError as error:
                if steps.left < 0:
                    raise
                why = str(error)
            else:
                return
        raise MismatchError(f"{where}: none of the alternatives fits; the last one: {why[-200:]}")

    def _object(self, schema: dict[str, Any], value: dict[str, Any], where: str, steps: _Steps) -> None:
        required = schema.get("required", ())
        steps.take(where, len(required))
        for name in required:
            if name not in value:
                raise MismatchError(f"{where}: {name!r:.100} is missing")
        _within(len(value), schema, "minProperties", "maxProperties", where, "properties")
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        for name, member in value.items():
            inner = properties.get(name, rest)
            if inner is False and name not in properties:
                raise MismatchError(f"{where}: {name!r:.100} is not one of its properties")
            if inner is not True:
                self._check(inner, member, _at(where, f".{name:.50}"), steps, 0)

    def _array(self, schema: dict[str, Any], value: list[Any], where: str, steps: _Steps) -> None:
        _within(len(value), schema, "minItems", "maxItems", where, "items")
        prefix = schema.get("prefixItems", ())
        rest = schema.get("items", True)
        for number, member in enumerate(value):
            inner = prefix[number] if number < len(prefix) else rest
            if inner is not True:
                self._check(inner, member, _at(where, f"[{number}]"), steps, 0)


def _at(where: str, part: str) -> str:
    """Deeper by a part; bounded, since it is made at every step."""
    return where + part if len(where) < 200 else where


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _strict(schema: Any) -> bool:
    if isinstance(schema, list):
        return all(_strict(each) for each in schema)
    if not isinstance(schema, dict):
        return True
    if ("properties" in schema or schema.get("type") == "object") and not (
        schema.get("additionalProperties") is False
        and set(schema.get("required", ())) == set(schema.get("properties", {}))
    ):
        return False
    inner = [value for key in _MAPS for value in schema.get(key, {}).values()]
    inner += [schema[key] for key in (*_LISTS, *_SINGLE) if key in schema]
    return all(_strict(each) for each in inner)


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, other: Any, steps: _Steps, where: str) -> bool:
    """Equal as JSON: 1 is 1.0 and not true."""
    steps.take(where)
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key], steps, where) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(_same(*pair, steps, where) for pair in zip(value, other, strict=True))
    return bool(value == other)


def _within(count: int, schema: dict[str, Any], low: str, high: str, where: str, what: str) -> None:
    if count < schema.get(low, 0):
        raise MismatchError(f"{where}: it has {count} {what}, at least {schema[low]} are needed")
    if count > schema.get(high, count):
        raise MismatchError(f"{where}: it has {count} {what}, at most {schema[high]} are allowed")


def _number(schema: dict[str, Any], value: float, where: str) -> None:
    if (
        ("minimum" in schema and value < schema["minimum"])
        or ("maximum" in schema and value > schema["maximum"])
        or ("exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"])
        or ("exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"])
    ):
        raise MismatchError(f"{where}: {value} is out of range")
    if "multipleOf" in schema and value % schema["multipleOf"] != 0:
        raise MismatchError(f"{where}: {value} is no multiple of {schema['multipleOf']}")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"an {'object' if isinstance(value, dict) else 'array'} of {len(value)}"
    return f"{value!r:.60}"
