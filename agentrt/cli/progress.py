"""What commands tell on stderr while they work: in place on a terminal, now and then elsewhere, nothing with --json."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import click

from agentrt.progress import Progress, no_progress

#: How often progress is told where nobody looks at a terminal.
_TELL_S: Final = 5.0


@contextlib.contextmanager
def progress_shown(as_json: bool) -> Iterator[Progress]:
    """While the block runs, what is told is shown; on a terminal nothing of it is left afterwards."""
    if as_json:
        yield no_progress
    elif sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield _lines()


@contextlib.contextmanager
def stages_shown(name: str, as_json: bool) -> Iterator[Callable[[str], None]]:
    """The same for work of few stages: a line each where nobody looks at a terminal."""
    if not as_json and not sys.stderr.isatty():
        yield lambda stage: click.echo(f"{name}: {stage}", err=True)
        return
    with progress_shown(as_json) as tell:
        yield lambda stage: tell(f"{name}: {stage}", 0, 0)


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int) -> None:
            # Without a total the bar says only that it goes on.
            bar.update(task, description=escape(what), completed=done, total=total or None)

        yield tell


def _lines() -> Progress:
    lock = threading.Lock()
    told_s = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told_s
        with lock:
            now_s = time.monotonic()
            if now_s - told_s < _TELL_S:
                return
            told_s = now_s
        share = f" {done:,} of {total:,}" if total else (f" {done:,}" if done else "")
        click.echo(what + share, err=True)

    return tell
