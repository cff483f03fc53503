"""``agentrt store``: what is done with a store that no node has open."""

from typing import Any

import click
import msgspec
from rich.table import Table

from agentrt.cli import exits
from agentrt.cli.main import console, print_json
from agentrt.cli.progress import progress_shown
from agentrt.cli.runs import store_folder, store_option
from agentrt.cli.tables import json_anyhow_option, make_table
from agentrt.upkeep.offline import held


@click.group(name="store")
def command() -> None:
    """Check, measure, show and shrink a store. All but stats need a store that no node has open."""


@command.command()
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: sound, complete, counts, findings.")
@click.pass_obj
def verify(config_file: str | None, store: str | None, as_json: bool) -> exits.ExitCode:
    """Check every page, journal, head, row and blob; changes nothing.

    Exit code 0 if the store is sound, 1 if something is wrong with it, 5 if it cannot be looked at (in use, newer).
    """
    from agentrt.upkeep.verify import verify as look

    with held(store_folder(config_file, store)) as folder, progress_shown(as_json) as progress:
        verdict = look(folder, progress)
    if as_json:
        print_json({"sound": verdict.sound, **msgspec.to_builtins(verdict)})
    else:
        for finding in verdict.findings:
            click.echo(f"{finding.kind}: {finding.what}" + (f" [run {finding.run}]" if finding.run else ""))
        if not verdict.complete:
            click.echo("Damaged so that the rest could not be looked at", err=True)
        click.echo(
            f"{verdict.runs:,} runs, {verdict.records:,} records, {verdict.rows:,} rows, {verdict.blobs:,} blobs"
            f" ({verdict.unnamed_blobs:,} that nothing names): "
            + ("sound" if verdict.sound else f"{len(verdict.findings):,} findings"),
            err=True,
        )
    return exits.OK if verdict.sound else exits.FAILED


@command.command()
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def stats(config_file: str | None, store: str | None, as_json: bool) -> None:
    """Sizes, runs by state, what is not filed yet, and who reads. Reads only, so a node may have the store open."""
    from agentrt.upkeep.stats import stats as look

    found = look(store_folder(config_file, store))
    if as_json:
        shown: dict[str, Any] = msgspec.to_builtins(found)
        shown["readers"] = [reader._asdict() for reader in found.readers]
        print_json(shown)
        return
    out = console()
    table = make_table("table", "rows", "bytes", numbers=True)
    for each in found.tables:
        table.add_row(each.name, f"{each.rows:,}", f"{each.size_bytes:,}")
    out.print(table)
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("files", ", ".join(f"{name} {size:,}" for name, size in found.file_bytes.items()))
    facts.add_row("free in the journal", f"{found.free_bytes:,}")
    facts.add_row("runs", ", ".join(f"{state} {count:,}" for state, count in found.runs.items()) or "none")
    facts.add_row("not filed yet", f"{found.log_batches:,} batches, {found.log_bytes:,} bytes")
    facts.add_row("blobs", f"{found.blobs:,}, {found.blob_bytes:,} bytes")
    behind = ", ".join(f"process {reader.pid} {reader.behind:,} transactions behind" for reader in found.readers)
    facts.add_row("readers", behind or "none")
    facts.add_row("schema", f"{found.schema}, generation {found.generation}")
    out.print(facts)


@command.command()
@store_option
@click.option("--payloads", is_flag=True, help="Inputs, requests and results, too, and not just how long they are.")
@json_anyhow_option
@click.pass_obj
def dump(config_file: str | None, store: str | None, payloads: bool) -> None:
    """Print heads, records and rows as JSON lines. Secrets are left out; what agents and tools exchanged, too, unless
    asked for."""
    from agentrt.upkeep.dump import dump as lines
    from agentrt.upkeep.dump import write_line

    with held(store_folder(config_file, store)) as folder:
        for line in lines(folder, payloads=payloads):
            click.echo(write_line(line))


@command.command()
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: before_bytes, after_bytes.")
@click.pass_obj
def compact(config_file: str | None, store: str | None, as_json: bool) -> None:
    """Copy the files without what is free in them, and put the copies in their place. Needs room for both."""
    from agentrt.upkeep.compact import compact as shrink

    with held(store_folder(config_file, store)) as folder, progress_shown(as_json) as progress:
        sizes = shrink(folder, progress)
    if as_json:
        print_json({"before_bytes": sizes.before, "after_bytes": sizes.after})
    else:
        click.echo(f"{sizes.before:,} bytes before, {sizes.after:,} now", err=True)


@command.command()
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: schema_before, schema.")
@click.pass_obj
def migrate(config_file: str | None, store: str | None, as_json: bool) -> None:
    """Bring a store of an older agentrt up to this one's schema, as a node does when it opens it."""
    from agentrt.upkeep.compact import migrate as bring_up

    with held(store_folder(config_file, store)) as folder, progress_shown(as_json) as progress:
        before, now = bring_up(folder, progress)
    if as_json:
        print_json({"schema_before": before, "schema": now})
    else:
        click.echo(f"schema {before} before, {now} now", err=True)
