"""``agentrt runs`` on a node: the commands that need one, and those of a store that also work on one."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click
from rich.markup import escape
from rich.table import Table

from agentrt.cli import exits
from agentrt.cli.main import console, print_json
from agentrt.cli.remote import clock, connected, node_options
from agentrt.cli.tables import make_table, plain, runs_table
from agentrt.engine.listing import Wanted

if TYPE_CHECKING:
    from agentrt.client import Client
    from agentrt.http.types import Run

_PAGE: Final = 500

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


def list_node_runs(url: str | None, key: str | None, wanted: Wanted, limit: int, as_json: bool) -> None:
    """``runs ls`` of a node."""
    with connected(url, key) as client:
        found = list(islice(_newest_runs(client, wanted, limit), limit + 1))
    shown = found[:limit][::-1]
    if as_json:
        for run in shown:
            print_json(plain(run))
        return
    table = runs_table()
    for run in shown:
        table.add_row(
            run.run_id,
            escape(run.agent),
            escape(run.tenant),
            str(run.tier),
            run.state + (f" ({run.wait_reason})" if run.wait_reason else ""),
            clock(run.accepted_at),
            f"{run.ended_at - run.accepted_at:,.3f} s" if run.ended_at else "",
        )
    console().print(table)
    if len(found) > limit:
        click.echo("There are older ones; see --limit", err=True)


def _newest_runs(client: "Client", wanted: Wanted, limit: int) -> "Iterator[Run]":
    after: str | None = None
    while True:
        page = client.runs(
            state=wanted.state,
            tenant=wanted.tenant,
            agent=wanted.agent,
            text=wanted.text,
            after=after,
            limit=min(limit + 1, _PAGE),
            newest_first=True,
        )
        yield from page.runs
        after = page.next
        if after is None:
            return


def show_node_run(url: str | None, key: str | None, run_id: str, as_json: bool) -> None:
    """``runs show`` of a node."""
    with connected(url, key) as client:
        run = plain(client.run(run_id))
        steps: list[dict[str, Any]] = []
        after: int | None = 0
        while after is not None:
            page = client.steps(run_id, after=after, limit=_PAGE)
            steps += (plain(step) for step in page.steps)
            after = page.next
        decided = [plain(each) for each in client.decisions(run_id).decisions]
    run["steps"], run["decisions"] = steps, decided
    if as_json:
        print_json(run)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in run.items():
        if name not in ("steps", "decisions") and value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            table.add_row(name.replace("_", " "), escape(clock(value) if name.endswith("_at") else text[:2000]))
    console().print(table)
    if steps:
        listed = make_table("step", "op", "tool", "state", "attempt", "took", "cost")
        for step in steps:
            listed.add_row(
                step["path"],
                step["op"],
                escape(step.get("tool") or ""),
                step["state"] + (" (failed)" if step.get("ok") is False else ""),
                str(step.get("attempt", 1)),
                _took(step),
                f"${step['cost_micro_usd'] / 1e6:,.6f}" if "cost_micro_usd" in step else "",
            )
        console().print(listed)
    if decided:
        what = ("at", "step", "control", "action", "scope", "name", "limit", "value", "bound", "detail")
        listed = make_table(*what)
        for each in decided:
            each["at"] = clock(each["at"])
            listed.add_row(*(escape(str(each.get(name) or "")) for name in what))
        console().print(listed)


def _took(step: dict[str, Any]) -> str:
    if "started_at" not in step or "ended_at" not in step:
        return ""
    return f"{step['ended_at'] - step['started_at']:,.3f} s"


@click.command()
@click.argument("run_id", metavar="RUN")
@node_options
@click.option("--after", type=click.IntRange(min=0), default=0, help="Only events after this one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event and line.")
def tail(run_id: str, url: str | None, key: str | None, after: int, as_json: bool) -> exits.ExitCode:
    """Follow what happens to a run, to its end. Exit code 1 if it did not succeed."""
    state = None
    with connected(url, key) as client:
        for event in client.events(run_id, after=after):
            if event.kind == "ended":
                state = event.data.get("state")
            if as_json:
                print_json({"id": event.id, "event": event.kind, "data": event.data})
            else:
                rest = {name: value for name, value in event.data.items() if name not in ("seq", "at")}
                text = json.dumps(rest, ensure_ascii=False)
                click.echo(f"{clock(event.data.get('at'))}  {event.kind:<15} {text[:1000]}")
    return exits.OK if state == "SUCCEEDED" else exits.FAILED


@click.command()
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True)
@node_options
@click.option("--reason", default="cancelled by request", help="Said in the run's journal.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run and line.")
def cancel(run_ids: tuple[str, ...], url: str | None, key: str | None, reason: str, as_json: bool) -> None:
    """Cancel runs and what they started."""
    with connected(url, key) as client:
        for run_id in run_ids:
            run = client.cancel(run_id, reason)
            if as_json:
                print_json(plain(run))
            else:
                click.echo(f"{run_id} {run.state}{' (cancel requested)' if run.cancel_requested else ''}")


@click.command()
@click.argument("run_id", metavar="RUN")
@click.argument("step", metavar="[STEP]", required=False)
@node_options
@json_option
def retry(run_id: str, step: str | None, url: str | None, key: str | None, as_json: bool) -> None:
    """Let a run go on that waits for an operator; with STEP, let that step run once more, whatever its kind."""
    with connected(url, key) as client:
        answer = plain(client.resume(run_id) if step is None else client.retry(run_id, step))
    print_json(answer) if as_json else click.echo(f"{run_id} goes on")


@click.command()
@click.argument("run_id", metavar="RUN")
@node_options
@click.option("--reject", is_flag=True, help="Answer no.")
@click.option("--step", help="Which approval, if the run waits for several.")
@click.option("--by", help="Who answers; default: the label of the API key.")
@click.option("--comment", help="Given to the agent.")
@json_option
def approve(
    run_id: str,
    url: str | None,
    key: str | None,
    reject: bool,
    step: str | None,
    by: str | None,
    comment: str | None,
    as_json: bool,
) -> None:
    """Answer an approval that a run waits for. It counts once."""
    with connected(url, key) as client:
        answer = client.approve(run_id, not reject, step=step, by=by, comment=comment)
    if as_json:
        print_json(plain(answer))
    else:
        click.echo(f"{run_id} step {answer.step}: {'rejected' if reject else 'approved'}")


COMMANDS: Final = (tail, cancel, retry, approve)
