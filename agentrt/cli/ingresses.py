"""``agentrt ingresses``."""

import click

from agentrt.cli.remote import connected, node_options
from agentrt.cli.tables import json_lines_option, show


@click.command(name="ingresses")
@node_options
@json_lines_option
def command(url: str | None, key: str | None, as_json: bool) -> None:
    """List the buses' topics whose events become runs (docs/plugins/ingress.md). Needs an admin key."""
    with connected(url, key) as client:
        sources = client.ingresses().sources
    show(
        sources,
        as_json,
        {
            "source": lambda source: source.name,
            "accepted": lambda source: source.accepted,
            "repeated": lambda source: source.repeated,
            "dead": lambda source: source.dead,
            "held": lambda source: source.held,
            "lag": lambda source: source.lag,
            "paused": lambda source: len(source.paused),
            "state": lambda source: source.state,
        },
    )
