"""How settings are declared, read and checked; what they are stands in agentrt/config.py.

A section is a frozen Struct whose fields are ``Annotated[type, setting(effect, unit, low, high)]``. Types are bool,
int, str, Literals of str, tuples of int or str; `Overrides`, tables of the section's own settings under names that the
user chooses; and `Tables`, such tables with settings of their own. A section that exists is valid: making one checks
every value.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from agentrt.errors import ConfigError

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
TIB: Final = 1024 * GIB


#: ``[section.key.NAME]``: settings of the same section that hold for NAME instead.
Overrides = dict[str, dict[str, Any]]
#: ``[section.key.NAME]``: settings of what the section's ``tables`` has for the key.
Tables = dict[str, dict[str, Any]]
_OVERRIDE_NAME: Final = re.compile(r"[a-z][a-z0-9\-]*(?:_[a-z0-9\-]+)*")
_OVERRIDE_NAME_CHARS_MAX: Final = 64
_OVERRIDES_MAX: Final = 64


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the sections. ``overridable``: the settings that its `Overrides` may name; ``tables``: what a setting of
    type `Tables` holds."""

    overridable: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[Mapping[str, "type[Section]"]] = {}

    def __post_init__(self) -> None:
        for key in types_of(type(self)):
            check_value(type(self), key, getattr(self, key), source=None)


def setting(effect: str, unit: str = "", low: int | None = None, high: int | None = None) -> msgspec.Meta:
    """What there is to know about a setting; the bounds are inclusive and hold for a tuple's items one by one."""
    return msgspec.Meta(description=effect, extra={"unit": unit, "low": low, "high": high})


class Known(msgspec.Struct, frozen=True):
    """A setting as declared."""

    kind: Any  # bool, int, str, tuple, Literal or dict
    exact: Any  # the type without its annotation
    effect: str
    unit: str
    low: int | None
    high: int | None


_known: Final[dict[type[Section], dict[str, Known]]] = {}


def types_of(section: type[Section]) -> dict[str, Known]:
    """The settings of a section by name, in the order of the file."""
    found = _known.get(section)
    if found is None:
        found = _known[section] = {}
        for key, hint in get_type_hints(section, include_extras=True).items():
            if get_origin(hint) is ClassVar:
                continue
            meta, exact = hint.__metadata__[0], hint.__origin__
            kind = get_origin(exact) or exact
            found[key] = Known(kind, exact, meta.description, **meta.extra)
    return found


def check_value(section: type[Section], key: str, value: Any, source: str | None) -> Any:
    """The value in the setting's own type. Text, as in the environment, is read as people write it.

    Raises ConfigError naming source, setting and unit.
    """
    known = types_of(section)[key]
    if known.kind is dict:
        return _checked_overrides(section, key, value, source)
    if isinstance(value, os.PathLike) and known.kind is str:
        value = os.fspath(value)
    is_text = isinstance(value, str) and known.kind is not str
    try:
        # From text, 1 and true mean the same; a TOML file or a caller has types of its own and must use them.
        value = msgspec.convert(_from_text(value, known) if is_text else value, known.exact, strict=not is_text)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # a variable may hold any bytes
        what = f"{value!r} will not do" if is_text else str(error)
        raise _refused(section, key, known, what, source) from error
    for item in value if known.kind is tuple else (value,):
        if (known.low is not None and item < known.low) or (known.high is not None and item > known.high):
            raise _refused(section, key, known, f"{item} is out of range", source)
    return value


def _checked_overrides(section: type[Section], key: str, value: Any, source: str | None) -> Overrides:
    named = f"{source + ': ' if source else ''}{section_name(section)}.{key}"
    if not isinstance(value, dict) or len(value) > _OVERRIDES_MAX:
        raise ConfigError(
            f"{named} is not at most {_OVERRIDES_MAX} tables", hint=f"Write [{section_name(section)}.{key}.NAME]"
        )
    kind = section.tables.get(key, section)
    settings = section.overridable if kind is section else tuple(types_of(kind))
    checked: Overrides = {}
    for name, table in value.items():
        if (
            not isinstance(name, str)
            or not _OVERRIDE_NAME.fullmatch(name)
            or len(name) > _OVERRIDE_NAME_CHARS_MAX
            or not isinstance(table, dict)
        ):
            raise ConfigError(
                f"{named}: {name!r:.200} is no table with a name",
                hint="Lower-case letters, digits, - and single _, a letter first",
            )
        for inner in table:
            if inner not in settings:
                raise ConfigError(
                    f"{named}.{name}: there is no setting {inner!r:.200}",
                    hint="Settings: " + ", ".join(settings),
                )
        where = f"{named}.{name}"
        checked[name] = {inner: check_value(kind, inner, item, where) for inner, item in table.items()}
    return checked


def is_section_name(name: str) -> bool:
    """Whether a table whose name the user or a plugin chooses may be called that."""
    return len(name) <= _OVERRIDE_NAME_CHARS_MAX and _OVERRIDE_NAME.fullmatch(name) is not None


def section_name(section: type[Section]) -> str:
    """As files and variables call it."""
    return section.__name__.removesuffix("Config").lower()


def _refused(section: type[Section], key: str, known: Known, what: str, source: str | None) -> ConfigError:
    bounds = describe_range(known)
    name = section_name(section)
    return ConfigError(
        f"{source + ': ' if source else ''}{name}.{key}: {what}",
        hint=f"Allowed: {bounds}" if bounds else None,
    )


_SIZE: Final = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_FACTOR: Final = {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}


def _from_text(text: str, known: Known) -> Any:
    text = text.strip()
    if known.kind is tuple:
        return [part.strip() for part in text.strip("[]").split(",") if part.strip() or known.low is not None]
    if known.unit == "bytes" and (size := _SIZE.fullmatch(text)):
        return int(size[1]) * _FACTOR[size[2].lower()]
    return text.replace("_", "") if known.kind is int else text.lower()


# --- as text -------------------------------------------------------------------


def describe_range(known: Known) -> str:
    """The allowed values, or nothing if any of the type will do."""
    if known.kind is Literal:
        return ", ".join(get_args(known.exact))
    if known.low is None or known.high is None:
        return ""
    unit = "" if known.unit in ("", "bytes") else f" {known.unit}"
    each = ", each of 4" if known.kind is tuple else ""
    return f"{describe_value(known.low, known.unit)} to {describe_value(known.high, known.unit)}{unit}{each}"


def describe_value(value: Any, unit: str) -> str:
    """A value as documentation shows it: sizes in their largest even unit, round powers as such."""
    match value:
        case bool():
            return "on" if value else "off"
        case int():
            return _describe_int(value, unit)
        case tuple() if value:
            return "[" + ", ".join(str(item) for item in value) + "]"
        case tuple() | dict():
            return "none"
        case _:
            return f"`{value}`" if value else "empty"


def _describe_int(value: int, unit: str) -> str:
    if unit == "bytes":
        for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
            if value and value % factor == 0:
                return f"{value // factor:,} {name}"
    power = len(str(value)) - 1
    if power >= 10 and value == 10**power:
        return f"10^{power}"
    if value >= 2**60 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}" if value >= 10_000 else str(value)
