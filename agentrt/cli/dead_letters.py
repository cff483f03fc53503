"""``agentrt dead-letters``."""

import click

from agentrt.cli.main import print_json
from agentrt.cli.node_runs import json_option
from agentrt.cli.remote import clock, connected, node_options
from agentrt.cli.tables import json_anyhow_option, json_lines_option, plain
from agentrt.cli.tables import show as show_rows


@click.group(name="dead-letters")
def command() -> None:
    """Events of buses that became no runs (docs/plugins/ingress.md). Needs an admin key."""


@command.command(name="ls")
@click.option("--after", metavar="ID", help="Only those behind this one; a page has 100.")
@node_options
@json_lines_option
def ls(after: str | None, url: str | None, key: str | None, as_json: bool) -> None:
    """List them, and why."""
    with connected(url, key) as client:
        letters = client.dead_letters(after=after).letters
    show_rows(
        letters,
        as_json,
        {
            "id": lambda letter: letter.id,
            "ingress": lambda letter: letter.ingress,
            "event": lambda letter: f"{letter.topic} {letter.partition} {letter.offset}",
            "since": lambda letter: clock(letter.at),
            "why": lambda letter: letter.message,
        },
    )


@command.command()
@click.argument("letter_id", metavar="ID")
@node_options
@json_anyhow_option
def show(letter_id: str, url: str | None, key: str | None) -> None:
    """Show one with its payload, as a JSON object."""
    with connected(url, key) as client:
        print_json(plain(client.dead_letter(letter_id)))


@command.command()
@click.argument("letter_id", metavar="ID")
@node_options
@json_option
def retry(letter_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Make the event's one run of it after all, and print the run's id."""
    with connected(url, key) as client:
        retried = client.retry_dead_letter(letter_id)
    print_json(plain(retried)) if as_json else click.echo(retried.run_id)


@command.command()
@click.argument("letter_id", metavar="ID")
@node_options
@json_option
def drop(letter_id: str, url: str | None, key: str | None, as_json: bool) -> None:
    """Throw one away."""
    with connected(url, key) as client:
        client.drop_dead_letter(letter_id)
    print_json({"dropped": letter_id}) if as_json else click.echo(f"{letter_id} dropped")
