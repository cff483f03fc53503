"""``agentrt profiles``."""

import click

from agentrt.cli.main import print_json
from agentrt.cli.node_runs import json_option
from agentrt.cli.remote import clock, connected, node_options
from agentrt.cli.tables import plain


@click.group(name="profiles")
def command() -> None:
    """Profiles of limits (docs/durable-runs.md), of the node's file ``flow.file``. Needs an admin key."""


@command.command(name="ls")
@node_options
@json_option
def list_profiles(url: str | None, key: str | None, as_json: bool) -> None:
    """List the profiles, those in force and who put them there. A key with the scope node:read will do."""
    with connected(url, key) as client:
        found = client.profiles()
    if as_json:
        print_json(plain(found))
        return
    if not found.known and not found.applied:
        click.echo("none", err=True)
    for name in sorted({*found.known, *found.applied}):
        click.echo(f"{name}{' (in force)' if name in found.applied else ''}")
    for change in found.changes:
        click.echo(f"{clock(change.at)}  {change.action} {change.profile} by {change.by}: {change.reason}", err=True)


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
