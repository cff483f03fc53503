"""``agentrt agents``."""

import click
from rich.markup import escape
from rich.table import Table

from agentrt.cli.main import console, print_json
from agentrt.cli.node_runs import plain
from agentrt.cli.remote import connected, node_options


@click.command(name="agents")
@node_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per agent and line.")
def command(url: str | None, key: str | None, as_json: bool) -> None:
    """List the agents that a node knows."""
    with connected(url, key) as client:
        agents = client.agents().agents
    if as_json:
        for agent in agents:
            print_json(plain(agent))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("agent", "version", "backend", "tier", "short"):
        table.add_column(name, no_wrap=True)
    for agent in agents:
        table.add_row(
            escape(agent.name), agent.version[:12], agent.backend, str(agent.tier), "yes" if agent.short else ""
        )
    console().print(table)
