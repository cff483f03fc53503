"""The ``agentrt`` command: the group, what all commands share, and how errors become messages and exit codes.

Results go to stdout, everything about them to stderr. With ``--json`` stdout carries JSON only, errors included:
``{"error": {"code", "message", …}}``.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from agentrt.about import versions
from agentrt.cli import exits
from agentrt.errors import AgentrtError, InternalError

if TYPE_CHECKING:
    from rich.console import Console

#: Command -> module of this package that holds it (and its name there); imported when it is asked for.
COMMANDS: Final = {
    "serve": "serve",
    "run": "run",
    "runs": "runs",
    "top": "top",
    "agents": "agents",
    "budgets": "flow:budgets",
    "breakers": "flow:breakers",
    "profiles": "profiles",
    "keys": "keys",
    "drain": "drain",
    "ingresses": "ingresses",
    "dead-letters": "dead_letters",
    "store": "store",
    "pack": "pack",
    "build": "build",
    "image": "image",
    "frame": "frame",
    "demo": "demo",
    "bench": "bench",
    "doctor": "doctor",
    "config": "config",
    "plugins": "plugins",
}


class LazyGroup(click.Group):
    """Loads a command's module when it is used, so that one starts no slower for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"agentrt.cli.{module}"), attribute or "command")
        return command


def _show_versions(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        found = versions()
        click.echo(f"agentrt {found.pop('agentrt')} ({', '.join(f'{name} {each}' for name, each in found.items())})")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="The version, and those of the engine, the guest ABI, the store's schema and the hooks.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="TOML file with settings; default: AGENTRT_CONFIG.",
)
@click.pass_context
def group(ctx: click.Context, config_file: str | None) -> None:
    """A kernel for agents: preemptive tiers, durable runs, bounded resources.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 config, 4 input, 5 store, 6 engine, 7 busy, 8 unreachable, 9 refused,
    70 internal, 130 interrupted.
    """
    ctx.obj = config_file


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point; exits with one of `agentrt.cli.exits.CODES`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(given).code)


def run(arguments: Sequence[str]) -> exits.ExitCode:
    """Run one command line and say how it ended; prints, never raises."""
    try:
        outcome = group.main(list(arguments), prog_name="agentrt", standalone_mode=False)
    except click.exceptions.Exit as stop:  # of click's own
        return _known(stop.exit_code)
    except click.ClickException as error:
        error.show()
        return exits.USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted", err=True)
        return exits.INTERRUPTED
    except AgentrtError as error:
        return _report(error, as_json="--json" in arguments)
    except SystemExit:  # not standalone, click exits by itself only when the pipe is closed: the reader has seen enough
        return exits.OK
    except Exception as error:
        traceback.print_exc()
        return _report(InternalError(f"{type(error).__name__}: {error}"), as_json="--json" in arguments)
    return outcome if isinstance(outcome, exits.ExitCode) else _known(outcome if isinstance(outcome, int) else 0)


def _known(code: int) -> exits.ExitCode:
    return next((known for known in exits.CODES if known.code == code), exits.FAILED)


def _report(error: AgentrtError, as_json: bool) -> exits.ExitCode:
    if as_json:
        click.echo(json.dumps({"error": error.to_dict()}))
    click.echo(f"Error: {error} [{error.code}]", err=True)
    return exits.exit_code_of(error)


def console() -> "Console":
    """Where tables go; not cut to 80 columns when nobody looks at a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    click.echo(json.dumps(value, ensure_ascii=False, separators=(", ", ": ")))
