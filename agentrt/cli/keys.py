"""``agentrt keys``."""

import asyncio

import click
from rich.markup import escape
from rich.table import Table

from agentrt.cli.main import console, print_json
from agentrt.cli.node_runs import json_option, plain
from agentrt.cli.remote import clock, connected, node_options
from agentrt.cli.runs import store_folder, store_option
from agentrt.config import load_config


@click.group(name="keys")
def command() -> None:
    """API keys of a node: who may do what for which tenant (docs/http.md). Needs an admin key."""


@command.command(name="ls")
@node_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per key and line.")
def list_keys(url: str | None, key: str | None, as_json: bool) -> None:
    """List the keys, without their secrets."""
    with connected(url, key) as client:
        keys = client.keys().keys
    if as_json:
        for each in keys:
            print_json(plain(each))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "tenant", "scopes", "max tier", "label", "made"):
        table.add_column(name, no_wrap=True)
    for each in keys:
        table.add_row(
            each.id,
            escape(each.tenant),
            ", ".join(each.scopes),
            str(each.max_tier),
            escape(each.label),
            clock(each.created_at),
        )
    console().print(table)


@command.command()
@click.argument("tenant", metavar="TENANT")
@click.option("--scope", "scopes", multiple=True, required=True, help="What it may do; repeatable.")
@click.option(
    "--max-tier", type=click.IntRange(0, 3), default=1, show_default=True, help="Most urgent tier of its runs."
)
@click.option("--label", default="", help="For people.")
@node_options
@json_option
def make(
    tenant: str, scopes: tuple[str, ...], max_tier: int, label: str, url: str | None, key: str | None, as_json: bool
) -> None:
    """Make a key for TENANT ("*": any) and print it, once.

    Scopes: runs:read, runs:write, runs:decide, node:read, admin.
    """
    with connected(url, key) as client:
        made = client.make_key(tenant, scopes, max_tier=max_tier, label=label)
    print_json(plain(made)) if as_json else click.echo(made.secret)


@command.command(name="rm")
@click.argument("key_id", metavar="ID")
@node_options
@json_option
def remove(key_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Remove a key; it is of no use at once."""
    with connected(url, key) as client:
        client.remove_key(key_id)
    print_json({"removed": key_id}) if as_json else click.echo(f"{key_id} removed")


@command.command()
@store_option
@json_option
@click.pass_obj
def recover(config_file: str | None, store: str | None, as_json: bool) -> None:
    """Make an admin key in a store that no node has open, and print it, once."""
    config = load_config(config_file, arguments={"store.path": str(store_folder(config_file, store))})

    async def make() -> str:
        from agentrt import Runtime
        from agentrt.http.keys import ANY_TENANT, KeyRing

        async with Runtime(config=config, recover=False) as runtime:
            ring = KeyRing(runtime)
            await ring.load()
            return (await ring.make(ANY_TENANT, ["admin"], 0, "made by agentrt keys recover"))[1]

    secret = asyncio.run(make())
    print_json({"secret": secret}) if as_json else click.echo(secret)
