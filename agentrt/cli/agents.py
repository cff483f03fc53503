"""``agentrt agents``."""

import click

from agentrt.cli.remote import connected, node_options
from agentrt.cli.tables import json_lines_option, show


@click.command(name="agents")
@node_options
@json_lines_option
def command(url: str | None, key: str | None, as_json: bool) -> None:
    """List the agents that a node knows."""
    with connected(url, key) as client:
        agents = client.agents().agents
    show(
        agents,
        as_json,
        {
            "agent": lambda agent: agent.name,
            "version": lambda agent: agent.version[:12],
            "backend": lambda agent: agent.backend,
            "tier": lambda agent: agent.tier,
            "short": lambda agent: "yes" if agent.short else "",
        },
    )
