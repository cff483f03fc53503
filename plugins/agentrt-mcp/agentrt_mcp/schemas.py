"""JSON Schemas of strangers: nothing is fetched for them, and their patterns have a bound."""

from typing import Any, Final, Protocol

import jsonschema_rs
import msgspec

SCHEMA_BYTES_MAX: Final = 256 * 1024
_BACKTRACK_MAX: Final = 100_000
_ERROR_CHARS_MAX: Final = 500


class SchemaError(ValueError):
    """It is no schema that can be used; the text says why."""


class Validator(Protocol):
    def validate(self, instance: Any) -> None: ...


def compiled(schema: Any) -> Validator:
    """Raises SchemaError."""
    try:
        size = len(msgspec.json.encode(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(str(error)) from None
    if size > SCHEMA_BYTES_MAX:
        raise SchemaError(f"it has {size} bytes, more than {SCHEMA_BYTES_MAX}")
    try:
        made: Validator = jsonschema_rs.validator_for(
            schema,
            offline=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_MAX),
        )
    except Exception as error:  # what its author has thought of, and what not
        raise SchemaError(_short(str(error))) from None
    return made


def misfit(validator: Validator, value: Any) -> str:
    """Why the value does not fit; empty: it does. ``value``: decoded JSON, so that it is nested no deeper than decoders
    let through, a thousand levels; the validator's recursion is on the native stack."""
    try:
        validator.validate(value)
    except jsonschema_rs.ValidationError as error:
        where = "".join(f"[{part!r}]" for part in error.instance_path)
        return _short(f"{where}: {error.message}" if where else error.message)
    except (ValueError, RecursionError) as error:
        return _short(str(error))
    return ""


def _short(text: str) -> str:
    return text if len(text) <= _ERROR_CHARS_MAX else text[: _ERROR_CHARS_MAX - 1] + "…"
