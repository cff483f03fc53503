"""``agentrt profiles``."""

import click

from agentrt.cli.main import print_json
from agentrt.cli.node_runs import json_option, plain
from agentrt.cli.remote import connected, node_options


@click.group(name="profiles")
def command() -> None:
    """Profiles of limits (docs/durable-runs.md), of the node's file ``flow.file``. Needs an admin key."""


@command.command()
@click.argument("name", metavar="PROFILE")
@node_options
@json_option
def apply(name: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Put PROFILE over the limits in force."""
    with connected(url, key) as client:
        change = client.apply_profile(name)
    if as_json:
        print_json(plain(change))
    else:
        click.echo(f"{change.profile} is in force")


@command.command()
@click.argument("name", metavar="PROFILE")
@node_options
@json_option
def rollback(name: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Take PROFILE off again."""
    with connected(url, key) as client:
        change = client.roll_back_profile(name)
    if as_json:
        print_json(plain(change))
    else:
        click.echo(f"{change.profile} was taken off")
