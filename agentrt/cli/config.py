"""``agentrt config``."""

import json
from datetime import date, time
from typing import Any, get_args

import click
import msgspec

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.cli.tables import json_anyhow_option
from agentrt.config import PLUGINS, SECTIONS, Config, load_config
from agentrt.http.settings import parse_address
from agentrt.machine import read_machine
from agentrt.models.catalog import Catalog
from agentrt.plugins import Plugins
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
@click.option("--no-load", is_flag=True, help="Leave out agents and tools: no module of theirs is imported.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: workers, guests_max, agents, tools.")
@click.pass_obj
def check(config_file: str | None, no_load: bool, as_json: bool) -> exits.ExitCode:
    """Check the settings, also against this machine, and that the agents and tools they name can be loaded: Python
    modules are imported, each in a process of its own. Exit code 3 if something is wrong."""
    machine = read_machine()
    config = load_config(config_file)
    parameters = core_parameters(config, machine)
    provider_from(config.secrets)
    parse_address(config.http.listen)
    check_plugins(config, Plugins.load())
    from agentrt.node.check import check_files, check_sources

    check_files(config)
    found = None if no_load else check_sources(config)
    agents = None if found is None else [agent.name for agent in found.agents]
    tools = None if found is None else [tool.name for tool in found.tools]
    if as_json:
        sizes = {name: parameters[name] for name in ("workers", "guests_max")}
        print_json(sizes | {"agents": agents, "tools": tools})
        return exits.OK
    click.echo(
        f"Settings are fine: {parameters['workers']} workers, {parameters['guests_max']} guests in memory at once",
        err=True,
    )
    if agents is not None and tools is not None:
        click.echo(f"Agents: {', '.join(agents) or 'none'}. Tools: {', '.join(tools) or 'none'}.", err=True)
    return exits.OK


@command.command()
@json_anyhow_option
def schema() -> None:
    """Print a JSON schema of the settings file, for editors."""
    print_json(json_schema(Plugins.load()))


def check_plugins(config: Config, plugins: Plugins) -> None:
    """What the settings ask of plugins is there. Raises ConfigError."""
    plugins.check(config)
    plugins.store(config.store.kind)
    asked = {
        plugins.tool_provider: config.tools.providers,
        plugins.notifier: config.node.notifiers,
        plugins.observer: config.node.observers,
        plugins.policy: tuple(name.strip() for name in config.node.policies.split(",") if name.strip()),
        plugins.model_provider: tuple(found.kind for found in Catalog.of(config.models).providers.values()),
        plugins.ingress: tuple(table["kind"] for table in config.ingress.sources.values()),
    }
    for find, names in asked.items():
        for name in names:
            find(name)


def json_schema(plugins: Plugins | None = None) -> dict[str, Any]:
    """The settings as JSON schema 2020-12; ``plugins``: with their sections."""
    sections = {name: _section_schema(section) for name, section in SECTIONS.items()}
    kinds = {} if plugins is None else plugins.settings()
    schemas, definitions = msgspec.json.schema_components(kinds.values(), ref_template="#/$defs/{name}")
    own = {"type": "object", "properties": dict(zip(kinds, schemas, strict=True)), "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "agentrt configuration",
        "type": "object",
        "properties": sections | {PLUGINS: own},
        "additionalProperties": False,
        "$defs": definitions,
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
        if section == PLUGINS:
            for name, table in values.items():
                _add_table(lines, f"{section}.{name}", table)
            continue
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        _add_table(lines, section, {key: value for key, value in values.items() if key not in tables})
        for key, table in tables.items():
            for name, inner in table.items():
                _add_table(lines, f"{section}.{key}.{name}", inner)
    return "\n".join(lines[:-1]) + "\n"


def _add_table(lines: list[str], name: str, values: dict[str, Any]) -> None:
    lines += [f"[{name}]", *(f"{key} = {_literal(value)}" for key, value in values.items()), ""]


def _literal(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)} = {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, date | time):  # TOML's own
        return value.isoformat()
    # JSON's strings, numbers and booleans are TOML's, but that TOML has DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
