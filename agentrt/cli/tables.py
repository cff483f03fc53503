"""Lists of things as tables for people or as JSON lines for programs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click
import msgspec

from agentrt.cli.main import console, print_json

T = TypeVar("T", bound=msgspec.Struct)

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
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(cell(row))) for cell in columns.values()))
    if table.row_count:
        console().print(table)
    else:
        click.echo("none", err=True)
