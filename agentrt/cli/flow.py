"""``agentrt budgets`` and ``agentrt breakers``."""

import click

from agentrt.cli.remote import clock, connected, node_options
from agentrt.cli.tables import json_lines_option, show


@click.command()
@node_options
@json_lines_option
def budgets(url: str | None, key: str | None, as_json: bool) -> None:
    """List the limits of accounts above runs, the fullest first. Needs a key with the scope node:read."""
    with connected(url, key) as client:
        found = client.budgets().budgets
    show(
        found,
        as_json,
        {
            "of": lambda each: f"{each.scope} {each.name}".strip(),
            "limit": lambda each: each.key,
            "used": lambda each: f"{each.used:,}",
            "held": lambda each: f"{each.held:,}",
            "at most": lambda each: f"{each.limit:,}",
        },
    )


@click.command()
@node_options
@json_lines_option
def breakers(url: str | None, key: str | None, as_json: bool) -> None:
    """List the breakers that are not closed. Needs a key for any tenant with the scope node:read."""
    with connected(url, key) as client:
        found = client.breakers().breakers
    show(
        found,
        as_json,
        {
            "of": lambda each: f"{each.scope} {each.name}",
            "state": lambda each: each.state.replace("_", " "),
            "until": lambda each: clock(each.until_at),
        },
    )
