"""``agentrt serve``."""

import os
import sys
from typing import TYPE_CHECKING

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.config import load_config

if TYPE_CHECKING:
    from agentrt.node.node import Started


@click.command(name="serve")
@click.option("--store", metavar="DIR", help="Folder of the store; default: store.path of the settings.")
@click.option("--listen", metavar="HOST:PORT", help="Where the HTTP API listens; default: http.listen.")
@click.option(
    "--load",
    multiple=True,
    metavar="SOURCE",
    help="Agents and tools to load beside node.load: pkg.module, file.py, file.py:function, or file.wasm; repeatable.",
)
@click.option("--numa-node", metavar="N|auto", help="Run on one NUMA node, memory included; default: node.numa_node.")
@click.option(
    "--role",
    type=click.Choice(["node"]),
    default="node",
    show_default=True,
    help="Reserved for stores that several nodes share.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line when it serves: url, agents, tools, admin_key.")
@click.pass_obj
def command(
    config_file: str | None,
    store: str | None,
    listen: str | None,
    load: tuple[str, ...],
    numa_node: str | None,
    role: str,
    as_json: bool,
) -> exits.ExitCode:
    """Run a node: agents and tools from the settings, behind the HTTP API (docs/http.md).

    The first start of a store makes an admin key and prints it, once. SIGTERM and Ctrl-C stop the node: it takes no
    more runs, answers what it was asked, and leaves every run at its place in the journal for the next start; a second
    signal ends it at once, which loses nothing either.
    """
    given = {"store.path": store, "http.listen": listen, "node.numa_node": numa_node}
    config = load_config(config_file, arguments=given)
    if load:
        config = load_config(config_file, arguments=given | {"node.load": [*config.node.load, *load]})
    if config.node.numa_node:
        from agentrt.node.numa import bind

        placed = bind(config.node.numa_node)  # before there is any thread
        where = f"On NUMA node {placed.node} with {len(placed.cpus)} CPUs"
        click.echo(where if placed.bound else f"{where}; its memory cannot be bound: {placed.memory}", err=True)
    if not config.store.path and config.store.kind == "lmdb":
        click.echo("Warning: no store.path is set, so all runs are lost when this node stops", err=True)

    from agentrt.node.node import Node
    from agentrt.node.serve import StoppedHard, serve
    from agentrt.observe.logs import start_logging

    def told(started: "Started") -> None:
        if as_json:
            print_json(
                {
                    "url": started.url,
                    "agents": started.agents,
                    "tools": started.tools,
                    "admin_key": started.admin_key,
                }
            )
        else:
            click.echo(f"Serving {started.url} with agents: {', '.join(started.agents) or 'none'}", err=True)
            if started.admin_key is not None:
                click.echo(f"Admin key, shown this once: {started.admin_key}", err=True)
        sys.stdout.flush()

    stop_logging = start_logging(config.logs, sys.stderr)
    try:
        serve(Node(config), told)
    except StoppedHard as stop:
        click.echo(f"Stopped at once: {stop.why}; runs go on at the next start", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exits.INTERRUPTED.code)
    finally:
        stop_logging()
    return exits.OK
