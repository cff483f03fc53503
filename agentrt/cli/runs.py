"""``agentrt runs``: what is in a store, also while a node has it open; or on a node, over HTTP."""

import asyncio
import contextlib
import datetime
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
from rich.markup import escape
from rich.table import Table

from agentrt.about import version
from agentrt.cli.main import console, print_json
from agentrt.cli.node_runs import COMMANDS, list_node_runs, show_node_run
from agentrt.cli.progress import progress_shown
from agentrt.cli.remote import named_node, node_options
from agentrt.cli.tables import runs_table
from agentrt.config import load_config
from agentrt.engine.listing import Wanted, find_heads
from agentrt.errors import ConfigError, StoreCorruptError, UnknownRunError
from agentrt.fold import RunFold, fold
from agentrt.ids import parse_run_id
from agentrt.states import RunState
from agentrt.stores.base import Head
from agentrt.stores.lmdb import LmdbReader

PAGE: Final = 1000
#: Results longer than this are cut in the table form; --json has all.
SHOWN_CHARACTERS_MAX: Final = 2_000

store_option = click.option("--store", metavar="DIR", help="Folder of the store; default: store.path of the settings.")


@click.group(name="runs")
def command() -> None:
    """Show and handle runs: of a node (--url), or those in a store (--store), which a node may have open; move them to
    another store.

    On a node, the API key decides whose runs they are.
    """


@command.command(name="ls")
@store_option
@node_options
@click.option(
    "--state",
    type=click.Choice([*RunState.__members__], case_sensitive=False),
    metavar="STATE",
    help="Only runs in this state, such as ACTIVE or FAILED.",
)
@click.option("--tenant", metavar="NAME", help="Only runs of this tenant.")
@click.option("--agent", metavar="NAME", help="Only runs of this agent.")
@click.option("--text", metavar="TEXT", help="Only runs with this in their id, agent, state or reason to wait.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="The most recent so many of them."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run and line, oldest first.")
@click.pass_obj
def list_runs(
    config_file: str | None,
    store: str | None,
    url: str | None,
    key: str | None,
    state: str | None,
    tenant: str | None,
    agent: str | None,
    text: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List the most recent runs, oldest first."""
    wanted = Wanted(state and state.upper(), tenant, agent, text and text.lower())
    if named_node(url, store):
        list_node_runs(url, key, wanted, limit, as_json)
        return
    with _reader(config_file, store) as reader:
        heads = list(islice(_newest_heads(reader, wanted), limit + 1))
    shown = heads[:limit][::-1]
    if as_json:
        for head in shown:
            print_json(head_as_dict(head))
        return
    table = runs_table()
    for head in shown:
        table.add_row(
            head.run_id,
            escape(head.agent),
            escape(head.tenant),
            str(head.tier),
            head.state + (f" ({head.wait_reason})" if head.wait_reason else ""),
            _time(head.accepted_ns),
            _took(head),
        )
    console().print(table)
    if len(heads) > limit:
        click.echo("There are older ones; see --limit", err=True)


@command.command()
@click.argument("run_id", metavar="RUN")
@store_option
@node_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def show(
    config_file: str | None, run_id: str, store: str | None, url: str | None, key: str | None, as_json: bool
) -> None:
    """Show one run: its state, steps and result."""
    parse_run_id(run_id)
    if named_node(url, store):
        show_node_run(url, key, run_id, as_json)
        return
    with _reader(config_file, store) as reader:
        head = reader.read_head(run_id)
        if head is None:
            raise UnknownRunError("there is no such run in this store", run=run_id)
        described = describe(head, fold(reader.read_records(run_id)))
    if as_json:
        print_json(described)
    else:
        _show(described)


@command.command(name="export")
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True)
@click.option("-o", "--output", required=True, metavar="FILE", help="The file to make.")
@click.option("--again", is_flag=True, help="Also of runs that were exported before and of which no file was made.")
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: file, runs.")
@click.pass_obj
def export_command(
    config_file: str | None, run_ids: tuple[str, ...], output: str, again: bool, store: str | None, as_json: bool
) -> None:
    """Move runs, and what they started, out of a store that no node has open into a file.

    They are fenced in the store (state EXPORTED) and go on where the file is imported, which may be the same store.
    """
    from agentrt.transfer.offline import export_offline

    store_folder(config_file, store)
    config = load_config(config_file, arguments={"store.path": store})
    room = config.wasm.frames_bytes_max
    with progress_shown(as_json) as progress:
        moved = asyncio.run(
            export_offline(
                config.store,
                run_ids,
                Path(output),
                version(),
                again=again,
                frames_bytes_max=room,
                progress=progress,
            )
        )
    if as_json:
        print_json({"file": output, "runs": moved})
    else:
        click.echo(f"{len(moved)} runs in {output}", err=True)


@command.command(name="import")
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: runs.")
@click.pass_obj
def import_command(config_file: str | None, file: str, store: str | None, as_json: bool) -> None:
    """Take over the runs of an exported file into a store that no node has open; the next node goes on with them."""
    from agentrt.transfer.offline import import_offline

    store_folder(config_file, store)
    config = load_config(config_file, arguments={"store.path": store})
    room = config.wasm.frames_bytes_max
    with progress_shown(as_json) as progress:
        come = asyncio.run(
            import_offline(config.store, Path(file), version(), frames_bytes_max=room, progress=progress)
        )
    if as_json:
        print_json({"runs": come})
    else:
        for run_id in come:
            click.echo(run_id)


for _command in COMMANDS:
    command.add_command(_command)


@contextlib.contextmanager
def _reader(config_file: str | None, store: str | None) -> Iterator[LmdbReader]:
    reader = LmdbReader(store_folder(config_file, store))
    try:
        yield reader
    finally:
        reader.close()


def store_folder(config_file: str | None, store: str | None) -> Path:
    """The folder that the command is about. Raises ConfigError."""
    config = load_config(config_file, arguments={"store.path": store}).store
    if config.kind != "lmdb":
        raise ConfigError(f"a store of kind {config.kind} has no folder to look into")
    if not config.path:
        raise ConfigError("no store is named", hint="Use --store DIR, the setting store.path, or a node: --url")
    return Path(config.path)


def _newest_heads(reader: LmdbReader, wanted: Wanted) -> Iterator[Head]:
    after: str | None = ""
    while after is not None:
        heads, after = find_heads(reader, wanted, after, PAGE, newest_first=True)
        yield from heads


def head_as_dict(head: Head) -> dict[str, Any]:
    """The run at a glance, as plain data."""
    return {
        "run_id": head.run_id,
        "agent": head.agent,
        "agent_version": head.agent_version,
        "tenant": head.tenant,
        "tier": head.tier,
        "base_tier": head.base_tier,
        "state": head.state,
        "wait_reason": head.wait_reason,
        "cancel_requested": head.cancel_requested,
        "accepted_ns": head.accepted_ns,
        "ended_ns": head.ended_ns or None,
        "version": head.version,
    }


def describe(head: Head, folded: RunFold) -> dict[str, Any]:
    """The run in full, as plain data: `head_as_dict` plus input, result, error, cost and steps."""
    accepted, ended = folded.run(), folded.ended
    described = head_as_dict(head)
    described |= {
        "idempotency_key": accepted.idempotency_key,
        "input": _json(accepted.input),
        "result": _json(ended.result) if ended else None,
        "error": _json(ended.error) if ended else None,
        "fuel_max": accepted.fuel_max,
        "pins": folded.pins,
        "cost": None,
        "steps": [
            {
                "path": step.path,
                "op": step.op,
                "kind": step.kind,
                "state": step.state.value,
                "attempt": step.attempt,
                "key": step.key,
                "request": _json(step.request),
                "ok": step.ok,
                "result": _json(step.result),
            }
            for step in folded.steps.values()
        ],
    }
    if ended:
        cost = ended.cost
        described["cost"] = {
            "fuel": cost.fuel,
            "slot_ns": cost.slot_ns,
            "micro_usd": cost.micro_usd,
            "tokens": cost.tokens,
        }
    return described


def _json(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise StoreCorruptError(f"a journaled value is not JSON: {error}") from error


def _show(run: dict[str, Any]) -> None:
    out = console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name in ("run_id", "state", "agent", "agent_version", "tenant", "tier", "base_tier", "idempotency_key"):
        if run[name] is not None:
            table.add_row(name.replace("_", " "), escape(str(run[name])))
    table.add_row("accepted", _time(run["accepted_ns"]))
    if run["ended_ns"]:
        table.add_row("ended", _time(run["ended_ns"]))
    if run["cost"]:
        table.add_row("fuel", f"{run['cost']['fuel']:,}")
    for name in ("wait_reason", "input", "result", "error"):
        if run[name] is not None:
            table.add_row(name.replace("_", " "), escape(_short(run[name])))
    out.print(table)
    if run["steps"]:
        steps = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("step", "op", "kind", "state", "attempt", "request", "result"):
            steps.add_column(name, no_wrap=name not in ("request", "result"), overflow="fold")
        for step in run["steps"]:
            cells = (step["path"], step["op"], step["kind"] or "", step["state"], str(step["attempt"]))
            steps.add_row(*cells, escape(_short(step["request"], 200)), escape(_short(step["result"], 200)))
        out.print(steps)


def _short(value: Any, characters_max: int = SHOWN_CHARACTERS_MAX) -> str:
    if value is None:
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= characters_max else text[:characters_max] + " …"


def _time(unix_ns: int) -> str:
    when = datetime.datetime.fromtimestamp(unix_ns / 1e9, tz=datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _took(head: Head) -> str:
    return f"{(head.ended_ns - head.accepted_ns) / 1e9:,.3f} s" if head.ended_ns else ""
