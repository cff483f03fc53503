"""``agentrt bench``."""

import click

from agentrt.cli.main import print_json
from agentrt.cli.tables import plain
from agentrt.config import load_config
from agentrt.errors import ConfigError

_SHOWN = {
    "runs_per_s": "runs a second, durable, to their ends",
    "accept_p50_ms": "a run is durable, p50 (ms)",
    "accept_p99_ms": "p99",
    "urgent_p50_ms": "an urgent run to its end beside {hogs} that never yield, p50 (ms)",
    "urgent_p99_ms": "p99",
}


@click.command(name="bench")
@click.option("--seconds", type=click.FloatRange(min=0.3), default=9.0, show_default=True, help="How long it takes.")
@click.option("--store", metavar="DIR", help="New folder on the disk to measure; default: a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def command(config_file: str | None, seconds: float, store: str | None, as_json: bool) -> None:
    """Measure what this machine gets out of agentrt: runs a second, and how soon urgent work is done.

    With the settings in force, but never on the store that they name: its runs would be measured, too.
    """
    from pathlib import Path

    from agentrt.doctor.bench import measure

    if store is not None and Path(store).exists() and any(Path(store).iterdir()):
        raise ConfigError(f"{store} is not empty", limit="store.path", hint="Name a folder that is not there yet")
    config = load_config(config_file, arguments={"store.path": store or ""})
    figures = plain(measure(config, seconds, lambda what: click.echo(f"{what} …", err=True)))
    if as_json:
        print_json(figures)
        return
    for name, about in _SHOWN.items():
        click.echo(f"{figures[name]:>12,.2f}  {about.format(hogs=figures['hogs'])}")
