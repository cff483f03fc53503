"""``agentrt drain``."""

import click

from agentrt.cli.main import print_json
from agentrt.cli.node_runs import json_option
from agentrt.cli.remote import connected, node_options
from agentrt.cli.tables import plain


@click.command(name="drain")
@click.option("--park", is_flag=True, help="Runs that were accepted do not go on here either: the next start does.")
@node_options
@json_option
def command(park: bool, url: str | None, key: str | None, as_json: bool) -> None:
    """Have a node take no more runs, until it is started again. Needs an admin key.

    Says "draining", or "parked" once every run is at its place in the journal.
    """
    with connected(url, key) as client:
        health = client.drain(park=park)
    print_json(plain(health)) if as_json else click.echo(health.status)
