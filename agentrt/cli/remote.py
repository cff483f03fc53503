"""What commands that talk to a node share: where it is, the key, and errors of the API as errors of the command."""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from agentrt.errors import AgentrtError, ClosedError, InputError, InternalError, UnreachableError
from agentrt.nodeplace import KEY_VARIABLE, URL_DEFAULT, URL_VARIABLE

if TYPE_CHECKING:
    from agentrt.client import Client

F = TypeVar("F", bound=Callable[..., Any])

_FINDING_MAX: Final = 3


def node_options(command: F) -> F:
    """``--url`` and ``--key``."""
    for option in (
        click.option("--key", metavar="KEY", envvar=KEY_VARIABLE, help=f"API key; default: {KEY_VARIABLE}."),
        click.option("--url", metavar="URL", envvar=URL_VARIABLE, help=f"The node; default: {URL_VARIABLE}."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def connected(url: str | None, key: str | None) -> Iterator["Client"]:
    """A client of the node; without a URL, of the one on this machine. Raises UsageError without a key, and what the
    node answers."""
    from agentrt.client import Client
    from agentrt.client.answers import ApiError

    if not key:
        raise click.UsageError(f"no API key: use --key or {KEY_VARIABLE}")
    url = url or URL_DEFAULT
    with Client(url, key=key) as client:
        _find(url, key)
        try:
            yield client
        except ApiError as error:
            status = error.problem.status
            kind = InputError if status < 500 else ClosedError if status == 503 else InternalError
            raise kind(error.message, run=error.run, step=error.step, limit=error.limit, hint=error.hint) from error


def _find(url: str, key: str) -> None:
    """Raises UnreachableError soon if there is nothing at that address, which is a slip more often than a restart. What
    breaks later is waited for."""
    from agentrt.client import Client
    from agentrt.client.ask import Ask
    from agentrt.http.types import Health

    with Client(url, key=key, attempts_max=_FINDING_MAX) as client:
        try:
            client.send_ask(Ask("GET", "/healthz", Health))
        except UnreachableError:
            raise
        except AgentrtError:  # there is a node; what it says to the command itself counts
            return


def named_node(url: str | None, store: str | None) -> bool:
    """Whether the command is about a node and not about a store. Raises UsageError for both."""
    if url and store and not os.environ.get(URL_VARIABLE):
        raise click.UsageError("--url and --store exclude each other")
    return bool(url) and store is None


def clock(unix_s: float | None) -> str:
    """A time for a table."""
    if unix_s is None:
        return ""
    return datetime.datetime.fromtimestamp(unix_s, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
