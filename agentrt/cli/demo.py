"""``agentrt demo``."""

import click

from agentrt.cli import exits
from agentrt.config import load_config
from agentrt.errors import ConfigError
from agentrt.sizing import core_parameters


@click.command(name="demo")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=20.0, show_default=True, help="How long to offer work."
)
@click.option(
    "--hogs", type=click.IntRange(min=0), default=200, show_default=True, help="Guests of tier 3 that never yield."
)
@click.option(
    "--backend",
    type=click.Choice(["wasm", "process"]),
    default="wasm",
    show_default=True,
    help="What the hogs are: wasm guests, or native processes that a tool starts.",
)
@click.option("--store", metavar="DIR", help="Folder of the store; default: a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one is the summary.")
@click.pass_obj
def command(
    config_file: str | None, seconds: float, hogs: int, backend: str, store: str | None, as_json: bool
) -> exits.ExitCode:
    """Urgent work beside guests that never yield, killed half-way with SIGKILL, and nothing lost.

    The settings in force are the node's. It needs a store on disk and counts all runs in it: settings that name a store
    are refused unless --store names one.

    Exit code 1 if a run was lost, an effect happened twice, or the node could not be killed and restarted.
    """
    from agentrt.demo.command import main

    config = load_config(config_file)
    core_parameters(config)
    if config.store.kind != "lmdb":
        raise ConfigError(f"the demo kills its node, and a store of kind {config.store.kind!r} may not survive that")
    if config.store.path and not store:
        raise ConfigError(
            f"the demo would count the runs of store.path {config.store.path} as its own", hint="Use --store DIR"
        )
    passed = (
        main(seconds=seconds, hogs=hogs, store=store, as_json=as_json, config_file=config_file, backend=backend) == 0
    )
    return exits.OK if passed else exits.FAILED
