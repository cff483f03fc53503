"""Settings of what a node tells about itself."""

from typing import Annotated, ClassVar, Literal

from agentrt.settings import Section, Tables, setting

_MS_MAX = 31 * 86_400_000


class TargetConfig(Section, frozen=True, kw_only=True):
    """`[slo.targets.NAME]`: which share of runs must succeed, and how fast. Runs that were cancelled do not count."""

    tier: Annotated[int, setting("Runs that were asked for at this tier; -1: at any.", "tier", -1, 3)] = -1
    run_class: Annotated[
        Literal["any", "agent", "code"], setting("Runs of this class: agents, or native commands.")
    ] = "any"
    latency_ms: Annotated[
        int, setting("From acceptance (or `run_at`) to the end, waits for people included.", "ms", 1, _MS_MAX)
    ] = 60_000
    objective_permille: Annotated[
        int, setting("Share of the runs that must succeed within that time.", "1/1000", 1, 1_000)
    ] = 990


class SloConfig(Section, frozen=True, kw_only=True):
    """Service-level targets: measured by the node, shown as metrics and on the dashboard (docs/observability.md)."""

    targets: Annotated[Tables, setting("The targets: `[slo.targets.NAME]`.")] = {}  # noqa: RUF012

    tables: ClassVar[dict[str, type[Section]]] = {"targets": TargetConfig}


class LogsConfig(Section, frozen=True, kw_only=True):
    """What `agentrt serve` writes to standard error (docs/observability.md)."""

    format: Annotated[Literal["text", "json"], setting("Lines for people, or one JSON object a line.")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], setting("The least important that is written.")] = (
        "info"
    )
    runs: Annotated[
        Literal["none", "failed", "all"], setting("Of which runs the end is written: also of those that succeeded?")
    ] = "failed"
    queue_items_max: Annotated[
        int,
        setting("Lines that wait to be written; more are dropped and counted.", "lines", 100, 1_000_000),
    ] = 10_000


class TracesConfig(Section, frozen=True, kw_only=True):
    """Traces of runs, sent with OpenTelemetry's protocol (docs/observability.md)."""

    endpoint: Annotated[
        str, setting("Where they go, with OTLP over HTTP, as `http://127.0.0.1:4318/v1/traces`. Empty: nowhere.", "URL")
    ] = ""
    sample_permille: Annotated[
        int, setting("Of how many families of runs in a thousand: of all their runs, or of none.", "1/1000", 0, 1_000)
    ] = 1_000
    queue_items_max: Annotated[
        int, setting("Runs that wait to be sent; the traces of more are dropped and counted.", "runs", 1, 1_000_000)
    ] = 10_000
    live_ms: Annotated[
        int,
        setting("How often finished steps of runs that go on are sent. 0: when they park or end.", "ms", 0, 3_600_000),
    ] = 5_000
    timeout_ms: Annotated[int, setting("For sending some, retries included.", "ms", 100, 600_000)] = 10_000
