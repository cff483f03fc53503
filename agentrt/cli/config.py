"""``agentrt config``."""

import json
from typing import Any, get_args

import click
import msgspec

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.config import SECTIONS, Config, load_config
from agentrt.http.settings import parse_address
from agentrt.machine import read_machine
from agentrt.settings import Known, Section, types_of
from agentrt.sizing import core_parameters
from agentrt.tools.secrets import provider_from


@click.group(name="config")
def command() -> None:
    """Show and check the settings (see docs/config.md)."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, section by section.")
@click.pass_obj
def show(config_file: str | None, as_json: bool) -> None:
    """Print the settings in force, as TOML that --config accepts."""
    config = load_config(config_file)
    if as_json:
        print_json(config.to_dict())
    else:
        click.echo(as_toml(config), nl=False)


@command.command()
@click.pass_obj
def check(config_file: str | None) -> exits.ExitCode:
    """Check the settings, also against this machine. Exit code 3 if something is wrong."""
    machine = read_machine()
    config = load_config(config_file)
    parameters = core_parameters(config, machine)
    provider_from(config.secrets)
    parse_address(config.http.listen)
    click.echo(
        f"Settings are fine: {parameters['workers']} workers, {parameters['guests_max']} guests in memory at once",
        err=True,
    )
    return exits.OK


@command.command()
def schema() -> None:
    """Print a JSON schema of the settings file, for editors."""
    print_json(json_schema())


def json_schema() -> dict[str, Any]:
    """The settings as JSON schema 2020-12."""
    sections = {name: _section_schema(section) for name, section in SECTIONS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "agentrt configuration",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _section_schema(section: type[Section]) -> dict[str, Any]:
    properties = {key: _setting_schema(section, key, known) for key, known in types_of(section).items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _setting_schema(section: type[Section], key: str, known: Known) -> dict[str, Any]:
    about = {"description": known.effect}
    if known.kind is dict:
        inner = section.tables.get(key)
        if inner is not None:
            return about | {"type": "object", "additionalProperties": _section_schema(inner)}
        own = {name: _setting_schema(section, name, types_of(section)[name]) for name in section.overridable}
        table = {"type": "object", "properties": own, "additionalProperties": False}
        return about | {"type": "object", "additionalProperties": table}
    found: dict[str, Any] = msgspec.json.schema(known.exact)
    bounds = {name: value for name, value in (("minimum", known.low), ("maximum", known.high)) if value is not None}
    if known.kind is tuple:
        return (
            about | found
            if known.low is None
            else about
            | {
                "type": "array",
                "items": {"type": "integer"} | bounds,
                "minItems": len(get_args(known.exact)),
                "maxItems": len(get_args(known.exact)),
            }
        )
    if known.unit == "bytes":
        return about | {"anyOf": [found | bounds, {"type": "string", "pattern": "^[0-9]+ *(B|KiB|MiB|GiB|TiB)$"}]}
    return about | found | bounds


def as_toml(config: Config) -> str:
    """The settings as a TOML file."""
    lines: list[str] = []
    for section, values in config.to_dict().items():
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        _add_table(lines, section, {key: value for key, value in values.items() if key not in tables})
        for key, table in tables.items():
            for name, inner in table.items():
                _add_table(lines, f"{section}.{key}.{name}", inner)
    return "\n".join(lines[:-1]) + "\n"


def _add_table(lines: list[str], name: str, values: dict[str, Any]) -> None:
    lines += [f"[{name}]", *(f"{key} = {_literal(value)}" for key, value in values.items()), ""]


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value, ensure_ascii=False)
