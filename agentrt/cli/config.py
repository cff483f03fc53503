"""``agentrt config``."""

import json
from typing import Any

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.config import Config, load_config
from agentrt.machine import read_machine
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
    click.echo(
        f"Settings are fine: {parameters['workers']} workers, {parameters['guests_max']} guests in memory at once",
        err=True,
    )
    return exits.OK


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
