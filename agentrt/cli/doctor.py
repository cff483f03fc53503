"""``agentrt doctor``."""

import click
from rich.markup import escape
from rich.table import Table

from agentrt.cli import exits
from agentrt.cli.main import console, print_json
from agentrt.doctor import Report, examine
from agentrt.doctor.needs import NEEDS

_STYLES = {"works": "green", "degraded": "yellow", "refused": "bold red"}


@click.command(name="doctor")
@click.option("--store", metavar="DIR", help="Folder of the store whose disk is measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: state, checks, needs.")
@click.pass_obj
def command(config_file: str | None, store: str | None, as_json: bool) -> exits.ExitCode:
    """Say what works on this machine, what is degraded or refused, and why; then what agentrt needs of a machine, and
    what happens where that is missing.

    Takes some three seconds, with every core busy for about one. Exit code 1 if something is refused.
    """
    from agentrt.config import load_config

    report = examine(load_config(config_file, arguments={"store.path": store}))
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report)
    return exits.FAILED if report.state == "refused" else exits.OK


def _show(report: Report) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        lines = [escape(check.found)]
        if check.why:
            lines.append(f"[dim]why:[/] {escape(check.why)}")
        if check.hint:
            lines.append(f"[dim]try:[/] {escape(check.hint)}")
        table.add_row(check.name, f"[{_STYLES[check.state]}]{check.state}[/]", "\n".join(lines))
    console().print(table)
    needs = Table(box=None, pad_edge=False, title="\nWhat degrades and what refuses", title_justify="left")
    for head in ("for", "agentrt needs", "without it", "what then", "here"):
        needs.add_column(head, overflow="fold", no_wrap=head in ("without it", "here"))
    for need in NEEDS:
        here = need.here(report.checks)
        state = "not looked at" if here is None else f"[{_STYLES[here]}]{here}[/]"
        needs.add_row(*(escape(_plain(text)) for text in need[:4]), state)
    console().print(needs)


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")
