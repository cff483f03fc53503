"""Lists of things as tables for people or as JSON lines for programs."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from agentrt.cli.main import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T", bound=msgspec.Struct)

#: For commands that print nothing but JSON: whoever gives it to every command may.
json_anyhow_option = click.option("--json", is_flag=True, expose_value=False, help="It is JSON anyhow.")
json_lines_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per row and line.")


def plain(answer: msgspec.Struct) -> dict[str, Any]:
    """An answer as plain data."""
    value: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    return value


def show(rows: Iterable[T], as_json: bool, columns: Mapping[str, Callable[[T], object]]) -> None:
    """The rows as JSON lines, or with these columns; what they show is nobody's markup."""
    if as_json:
        for row in rows:
            print_json(plain(row))
        return
    from rich.text import Text

    table = make_table(*columns)
    for row in rows:
        table.add_row(*(Text(str(cell(row))) for cell in columns.values()))
    if table.row_count:
        console().print(table)
    else:
        click.echo("none", err=True)


def make_table(*names: str, numbers: bool = False) -> "Table":
    """An empty table; ``numbers``: all but the first column are aligned as such."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(names):
        table.add_column(name, no_wrap=True, justify="right" if numbers and place else "left")
    return table


def runs_table() -> "Table":
    """Of runs; their ids are to be copied, so never cut."""
    table = make_table("run", "agent", "tenant", "tier", "state", "accepted", "took")
    table.columns[0].min_width = 30
    return table
