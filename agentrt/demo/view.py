"""The demo's live view in a terminal."""

from functools import partial

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrt.demo.figures import percentile, sum_counters
from agentrt.demo.supervisor import Progress, Result

_WORK = (
    ("0 critical", "qualify a lead, at random times"),
    ("1 interactive", "six steps, each a tool call"),
    ("2 batch", "index a Python source, in MicroPython"),
    ("3 maintenance", "compute, never yield"),
)


def _latency_line(name: str, values: list[float]) -> tuple[str, str, str, str, str]:
    return (
        name,
        f"{percentile(values, 50):,.0f}",
        f"{percentile(values, 99):,.0f}",
        f"{max(values, default=0):,.0f}",
        f"{len(values):,}",
    )


def _tiers(progress: Progress) -> Table:
    table = Table(expand=True, box=None, header_style="bold")
    for title in ("tier", "work", "ordered", "ended", "per second"):
        table.add_column(title, justify="left" if title in ("tier", "work") else "right")
    elapsed_s = max(progress.elapsed_s, 0.001)
    for tier, (name, work) in enumerate(_WORK):
        ended = progress.ended_by_tier[tier]
        table.add_row(name, work, f"{progress.sent_by_tier[tier]:,}", f"{ended:,}", f"{ended / elapsed_s:,.1f}")
    return table


def _latencies(progress: Progress) -> Table:
    table = Table(expand=True, box=None, header_style="bold")
    for title in ("urgent latency, microseconds", "p50", "p99", "max", "runs"):
        table.add_column(title, justify="left" if title.startswith("urgent") else "right")
    table.add_row(*_latency_line("core submit to first guest instruction", progress.urgent_us))
    table.add_row(*_latency_line("order sent to first guest instruction (durable)", progress.urgent_accept_us))
    return table


def _counters(progress: Progress) -> Text:
    total = partial(sum_counters, progress.lives)
    agings = total("promotions_count") + total("promotions_wait")
    return Text(
        f"preemptions {total('preemptions'):,}   demotions {total('demotions'):,}   agings {agings:,}   "
        f"node kills {progress.kills}   recovered {total('recovered'):,}   outage {progress.outage_ms:,.0f} ms"
    )


def render(progress: Progress) -> Panel:
    """The view of one moment."""
    title = f"agentrt demo   {min(progress.elapsed_s, progress.seconds):.0f} of {progress.seconds:.0f} s"
    return Panel(
        Group(_tiers(progress), Text(), _latencies(progress), Text(), _counters(progress)),
        title=title,
        subtitle=progress.phase,
    )


def render_verdict(result: Result) -> Group:
    """What the demo ends with."""
    verdict = result.verdict
    good = verdict.passed
    lines = [
        Text(
            f"accepted {verdict.accepted:,} = finished {verdict.finished:,}, lost {verdict.lost}, "
            f"duplicates {verdict.duplicates}",
            style="bold green" if good else "bold red",
        ),
        Text(
            f"The ledger dropped {verdict.dropped} repetitions of calls whose outcome was unknown when the node was "
            "killed: done again under the same idempotency key, entered once."
        ),
        *(Text(finding, style="red") for finding in verdict.findings),
    ]
    return Group(*lines)
