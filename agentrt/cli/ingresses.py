"""``agentrt ingresses``."""

import click
from rich.markup import escape
from rich.table import Table

from agentrt.cli.main import console, print_json
from agentrt.cli.node_runs import plain
from agentrt.cli.remote import connected, node_options


@click.command(name="ingresses")
@node_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per source and line.")
def command(url: str | None, key: str | None, as_json: bool) -> None:
    """List the buses' topics whose events become runs (docs/plugins/ingress.md). Needs an admin key."""
    with connected(url, key) as client:
        sources = client.ingresses().sources
    if as_json:
        for source in sources:
            print_json(plain(source))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("source", "accepted", "repeated", "dead", "held", "paused", "state"):
        table.add_column(name, no_wrap=name != "state")
    for source in sources:
        counts = (source.accepted, source.repeated, source.dead, source.held, len(source.paused))
        table.add_row(escape(source.name), *(str(count) for count in counts), escape(source.state))
    console().print(table)
