"""``agentrt plugins``."""

import inspect
from typing import Any

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from agentrt.cli import exits
from agentrt.cli.config import check_plugins
from agentrt.cli.main import console, print_json
from agentrt.config import load_config
from agentrt.errors import InputError
from agentrt.plugins import PluginInfo, Plugins


@click.group(name="plugins")
def command() -> None:
    """What is installed beside agentrt, and what it brings (docs/plugins)."""


@command.command(name="ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per plugin and line.")
def ls(as_json: bool) -> None:
    """List the plugins, also those that cannot be loaded."""
    found = Plugins.survey()
    if as_json:
        for info in found:
            print_json(msgspec.to_builtins(info))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("plugin", "version", "brings"):
        table.add_column(name, no_wrap=name != "brings")
    for info in found:
        table.add_row(escape(info.name), escape(info.version), escape(info.error or _brings(info)))
    console().print(table)


@command.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(name: str, as_json: bool) -> None:
    """Show one plugin: what it brings, and its settings. NAME as `plugins ls` has it, or the part before the colon."""
    info = _find(name)
    sections = _sections(info)
    if as_json:
        schemas = {name: msgspec.json.schema(kind) for name, kind in sections.items()}
        print_json(msgspec.to_builtins(info) | {"settings": schemas})
        return
    click.echo(f"{info.name} {info.version}")
    if info.error:
        click.echo(f"cannot be loaded: {info.error}")
    for kind, names in info.brings.items():
        click.echo(f"{kind}: {', '.join(names)}")
    for section, struct in sections.items():
        click.echo(f"\n[plugins.{section}]")
        if struct.__doc__ and not struct.__doc__.startswith(f"{struct.__name__}("):
            click.echo("# " + inspect.cleandoc(struct.__doc__).replace("\n", "\n# "))
        properties = msgspec.json.schema(struct)["$defs"][struct.__name__].get("properties", {})
        for field in msgspec.structs.fields(struct):
            about = properties.get(field.encode_name, {})
            if description := about.get("description"):
                click.echo("# " + description.replace("\n", " "))
            click.echo(f"{field.encode_name} = {_default(field)}")


@command.command()
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per plugin and line: name, error.")
@click.pass_obj
def check(config_file: str | None, names: tuple[str, ...], as_json: bool) -> exits.ExitCode:
    """Load plugins, together and each for itself, and hold the settings to them. Exit code 3 if something is wrong.

    Whether what they bring keeps its contract, the suites of `agentrt.testing` say.
    """
    chosen = [_find(name) for name in names] if names else Plugins.survey()
    wrong = [info for info in chosen if info.error]
    for info in chosen if as_json else ():
        print_json({"name": info.name, "error": info.error or None})
    for info in wrong:
        click.echo(info.error, err=True)
    if wrong:
        return exits.CONFIG
    config = load_config(config_file)
    check_plugins(config, Plugins.load())
    if as_json:
        return exits.OK
    click.echo(f"{len(chosen)} plugin{'' if len(chosen) == 1 else 's'} and their settings are fine", err=True)
    return exits.OK


def _find(name: str) -> PluginInfo:
    found = Plugins.survey()
    fitting = [info for info in found if info.name == name] or [
        info for info in found if info.name.partition(":")[0] == name
    ]
    if len(fitting) != 1:
        there = ", ".join(info.name for info in found)
        raise InputError(
            f"there is {'no' if not fitting else 'more than one'} plugin {name!r:.200}", hint=f"There is: {there}"
        )
    return fitting[0]


def _sections(info: PluginInfo) -> dict[str, type[msgspec.Struct]]:
    if not info.settings:
        return {}
    known = Plugins.load().settings()
    return {name: known[name] for name in info.settings}


def _brings(info: PluginInfo) -> str:
    parts = [f"{kind} {', '.join(names)}" for kind, names in info.brings.items()]
    parts += [f"settings [plugins.{name}]" for name in info.settings]
    return "; ".join(parts) or "nothing"


def _default(field: Any) -> str:
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return "…    # must be set"
    return str(msgspec.json.encode(value).decode())
