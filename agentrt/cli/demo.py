"""``agentrt demo``."""

import click

from agentrt.cli import exits


@click.command(name="demo")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=20.0, show_default=True, help="How long to offer work."
)
@click.option(
    "--hogs", type=click.IntRange(min=0), default=200, show_default=True, help="Guests of tier 3 that never yield."
)
@click.option("--store", metavar="DIR", help="Folder of the store; default: a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one is the summary.")
def command(seconds: float, hogs: int, store: str | None, as_json: bool) -> exits.ExitCode:
    """Urgent work beside guests that never yield, killed half-way with SIGKILL, and nothing lost.

    Exit code 1 if a run was lost, an effect happened twice, or the node could not be killed and restarted.
    """
    from agentrt.demo.command import main

    passed = main(seconds=seconds, hogs=hogs, store=store, as_json=as_json) == 0
    return exits.OK if passed else exits.FAILED
