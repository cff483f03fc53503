"""``agentrt top``."""

import time
from typing import Any, Final

import click
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agentrt.cli.main import console, print_json
from agentrt.cli.remote import connected, node_options
from agentrt.cli.tables import make_table
from agentrt.observe.histogram import quantile
from agentrt.tiers import Tier

#: Budgets and breakers that are shown; the fullest come first.
_ROWS: Final = 10


@click.command(name="top")
@node_options
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N looks, a second apart; default: never.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per look and line, as GET /v1/live has it.")
def command(url: str | None, key: str | None, count: int | None, as_json: bool) -> None:
    """Watch a node: tiers, CPU slots, latencies, targets, budgets and breakers, once a second. Ends with Ctrl-C.

    Needs a key with the scope node:read.
    """
    with connected(url, key) as client:
        looks = (event.data for event in client.live())
        if as_json:
            for number, now in enumerate(looks, 1):
                print_json(now)
                if number == count:
                    return
        screen = console()
        before: dict[str, Any] | None = None
        with Live(console=screen, auto_refresh=False, screen=screen.is_terminal and count is None) as live:
            for number, now in enumerate(looks, 1):
                live.update(view(now, before), refresh=True)
                before = now
                if number == count:
                    return


def view(now: dict[str, Any], before: dict[str, Any] | None) -> Group:
    """One look at a node as it is sent by ``/v1/live``; rates are those since the look before."""
    parts: list[Any] = [_head(now), _tiers(now, before), _slots(now, before)]
    if now["targets"]:
        parts.append(_targets(now))
    flow = now["flow"]
    if flow["applied"]:
        parts.append(Text("profiles in force: " + ", ".join(flow["applied"])))
    if flow["budgets"]:
        parts.append(_budgets(flow["budgets"][:_ROWS]))
    if flow["breakers"]:
        parts.append(_breakers(flow["breakers"][:_ROWS]))
    return Group(*parts)


def _head(now: dict[str, Any]) -> Text:
    if not now["answers"]:
        return Text(f"the control loop does not answer, for {now['heartbeat_age_ms']} ms", style="bold red")
    state = "" if now["accepting"] else "drains; "
    at = time.strftime("%H:%M:%S", time.gmtime(now["at"]))
    return Text(
        f"{at}Z  {state}{now['live']} runs in memory, {now['parked']} wait for an operator, {now['recovering']} to be "
        f"brought back, {now['stuck']} were stuck; ${now['cost_micro_usd'] / 1e6:.2f}, {now['tokens']:,} tokens"
    )


def _tiers(now: dict[str, Any], before: dict[str, Any] | None) -> Table:
    table = make_table(
        "tier", "queued", "picks/s", "wait p50", "wait p99", "ended", "failed", "run p50", "p95", "p99", numbers=True
    )
    seconds = 1.0 if before is None else max(0.001, now["at"] - before["at"])
    for number, tier in enumerate(now["tiers"]):
        counts, picks = tier["waits"], 0.0
        if before is not None:
            then = before["tiers"][number]
            counts = [count - old for count, old in zip(counts, then["waits"], strict=True)]
            picks = (tier["picks"] - then["picks"]) / seconds
        bounds, ended = now["wait_bounds_ns"], sum(tier["ended"].values())
        table.add_row(
            f"{number} {Tier(number).name.lower()}",
            f"{tier['queued']:,}",
            f"{picks:,.0f}",
            _time(quantile(bounds, counts, 0.5)),
            _time(quantile(bounds, counts, 0.99)),
            f"{ended:,}",
            f"{ended - tier['ended'].get('SUCCEEDED', 0) - tier['ended'].get('CANCELLED', 0):,}",
            *(_time(None if ms is None else ms * 1e6) for ms in tier["run_ms"]),
        )
    return table


def _slots(now: dict[str, Any], before: dict[str, Any] | None) -> Table:
    table = make_table(
        "slot", *(Tier(tier).name.lower() for tier in range(4)), "slices/s", "preemptions/s", numbers=True
    )
    if before is None:
        return table
    seconds = max(0.001, now["at"] - before["at"])
    for number, (worker, then) in enumerate(zip(now["workers"], before["workers"], strict=True)):
        shares = [(ns - old) / 1e9 / seconds for ns, old in zip(worker["slot_ns"], then["slot_ns"], strict=True)]
        table.add_row(
            str(number),
            *(f"{min(share, 1):.0%}" for share in shares),
            f"{(worker['slices'] - then['slices']) / seconds:,.0f}",
            f"{(worker['preemptions'] - then['preemptions']) / seconds:,.0f}",
        )
    return table


def _targets(now: dict[str, Any]) -> Table:
    table = make_table("target", "within", "wanted", "attained", "runs", numbers=True)
    for target in now["targets"]:
        share = target["good"] / target["runs"] if target["runs"] else None
        style = "" if share is None else "green" if share >= target["objective"] else "red"
        table.add_row(
            escape(target["name"]),
            _time(target["latency_ms"] * 1e6),
            f"{target['objective']:.1%}",
            Text("-" if share is None else f"{share:.1%}", style=style),
            f"{target['runs']:,}",
        )
    return table


def _budgets(budgets: list[dict[str, Any]]) -> Table:
    table = make_table("budget", "limit", "used", "held", "at most", numbers=True)
    for each in budgets:
        name = f"{each['scope']} {each['name']}".strip()
        table.add_row(escape(name), each["key"], *(f"{each[what]:,}" for what in ("used", "held", "limit")))
    return table


def _breakers(breakers: list[dict[str, Any]]) -> Table:
    table = make_table("breaker", "state", numbers=True)
    for each in breakers:
        table.add_row(escape(f"{each['scope']} {each['name']}"), each["state"].replace("_", " "))
    return table


def _time(ns: float | None) -> str:
    if ns is None:
        return "-"
    for unit, factor in (("ns", 1), ("µs", 1e3), ("ms", 1e6)):
        if ns < 1000 * factor:
            return f"{ns / factor:.3g} {unit}"
    return f"{ns / 1e9:,.1f} s"
