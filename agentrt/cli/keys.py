"""``agentrt keys``."""

import asyncio

import click

from agentrt.cli.main import print_json
from agentrt.cli.node_runs import json_option
from agentrt.cli.remote import clock, connected, node_options
from agentrt.cli.runs import store_folder, store_option
from agentrt.cli.tables import json_lines_option, plain, show
from agentrt.config import load_config


@click.group(name="keys")
def command() -> None:
    """API keys of a node: who may do what for which tenant (docs/http.md). Needs an admin key."""


@command.command(name="ls")
@node_options
@json_lines_option
def list_keys(url: str | None, key: str | None, as_json: bool) -> None:
    """List the keys, without their secrets."""
    with connected(url, key) as client:
        keys = client.keys().keys
    show(
        keys,
        as_json,
        {
            "key": lambda each: each.id,
            "tenant": lambda each: each.tenant,
            "scopes": lambda each: ", ".join(each.scopes),
            "max tier": lambda each: each.max_tier,
            "label": lambda each: each.label,
            "made": lambda each: clock(each.created_at),
        },
    )


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


@command.command(name="callbacks")
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--rotate", is_flag=True, help="Make a new one first.")
@click.option(
    "--overlap",
    type=click.FloatRange(0, 2_592_000),
    default=86_400.0,
    show_default=True,
    metavar="SECONDS",
    help="How long callbacks are signed with the one before as well.",
)
@node_options
@json_option
def callback_secret(
    tenant: str | None, rotate: bool, overlap: float, url: str | None, key: str | None, as_json: bool
) -> None:
    """Print the secret with which callbacks are signed. Needs a key with the scope runs:write."""
    with connected(url, key) as client:
        found = (
            client.rotate_callback_secret(tenant=tenant, overlap_s=overlap)
            if rotate
            else client.callback_secret(tenant=tenant)
        )
    print_json(plain(found)) if as_json else click.echo(found.secret)


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
