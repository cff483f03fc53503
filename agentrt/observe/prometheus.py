"""The metrics as Prometheus reads them. Names and labels are listed in docs/observability.md, which a test compares
with what is here."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agentrt.observe.histogram import WAIT_BOUNDS_NS, Buckets
from agentrt.observe.meter import Measured

if TYPE_CHECKING:
    from agentrt.ingress.service import SourceStatistics
    from agentrt.runtime import RuntimeStatistics

_NS: Final = 1e9


def expose(
    measured: Measured, statistics: "RuntimeStatistics | None", heartbeat_age_ms: int, accept: str
) -> tuple[bytes, str]:
    """Body and media type for a scraper that accepts ``accept``. ``statistics``: None while the control loop does not
    answer; what needs it is left out then."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(lambda: families(measured, statistics, heartbeat_age_ms)))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


class _Collected:
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect


def families(measured: Measured, statistics: "RuntimeStatistics | None", heartbeat_age_ms: int) -> Iterator[Metric]:
    """Every metric, in the order of the documentation."""
    yield from _runs(measured)
    yield from _steps(measured)
    yield from _targets(measured)
    yield _gauge("loop_heartbeat_age_seconds", "Since the control loop's last sign of life.", heartbeat_age_ms / 1e3)
    if statistics is not None:
        yield from _engine(statistics)
        core = statistics.backends.get("wasm")
        if core is not None:
            yield from _core(core)
        hosts = statistics.backends.get("python")
        if hosts is not None:
            yield from _hosts(hosts)
        programs = statistics.backends.get("process")
        if programs is not None:
            yield from _programs(programs)
        yield from _tools(statistics.tools)
        yield from _processes(statistics.tools.processes)
        if statistics.models is not None:
            yield from _models(statistics.models)
        yield from _ingresses(statistics.ingresses)


# --- what the meter has counted ----------------------------------------------------


def _runs(measured: Measured) -> Iterator[Metric]:
    yield _counters("runs_accepted", "Runs accepted, children included.", ("tier", "class"), measured.accepted)
    yield _counters("runs_ended", "Runs that ended, by how.", ("tier", "class", "state"), measured.ended)
    yield _histograms("run_seconds", "From acceptance (or run_at) to the end.", ("tier", "class"), measured.run_ns, _NS)
    yield _histograms("run_tool_calls", "Tool calls of a run that ended.", ("tier", "class"), measured.run_tool_calls)
    yield _counters("fuel", "Guest work of runs that ended.", ("tier",), _keyed(measured.fuel))


def _steps(measured: Measured) -> Iterator[Metric]:
    yield _counters("steps", "Steps with an outcome.", ("op", "outcome"), measured.steps)
    yield _counters("step_retries", "Attempts beyond the first of those steps.", ("op",), _keyed(measured.retries))
    yield _histograms(
        "step_seconds",
        "From the record that began a step to its outcome; of op approval.request: what people took.",
        ("op",),
        _keyed(measured.step_ns),
        _NS,
    )
    yield _counter("cost_usd", "Cost of the steps' outcomes.", measured.micro_usd / 1e6)
    yield _counter("model_tokens", "Tokens of the steps' outcomes.", measured.tokens)


def _targets(measured: Measured) -> Iterator[Metric]:
    attained = {each.target.name: each for each in measured.targets}
    label = ("slo",)
    yield _counters(
        "slo_runs", "Runs measured against a target.", label, {(name,): each.runs for name, each in attained.items()}
    )
    yield _counters(
        "slo_good", "Of these, those that met it.", label, {(name,): each.good for name, each in attained.items()}
    )
    yield _gauges(
        "slo_objective_ratio",
        "The share that must meet it.",
        label,
        {(name,): each.target.objective for name, each in attained.items()},
    )
    yield _gauges(
        "slo_latency_seconds",
        "The time within which a run must succeed.",
        label,
        {(name,): each.target.latency_ns / _NS for name, each in attained.items()},
    )


# --- what the parts say of themselves ------------------------------------------------


def _engine(statistics: "RuntimeStatistics") -> Iterator[Metric]:
    engine = statistics.engine
    yield _counter("runs_refused", "Runs refused because a queue was full.", engine.refused)
    yield _counter("runs_duplicate", "Submits that were answered with an earlier run.", engine.duplicates)
    yield _gauge("runs_live", "Runs in memory.", engine.live)
    yield _gauge("runs_queued_bytes", "Their inputs.", engine.queued_bytes)
    yield _gauge("runs_parked", "Runs that wait for an operator.", engine.parked)
    yield _gauge("runs_recovering", "Runs of the store that will start.", engine.recovering)
    yield _gauge("runs_unclaimed", "Of these, those whose agent nobody has registered.", engine.unclaimed)
    yield _counter("runs_recovered", "Runs that were brought back.", engine.recovered)
    yield _counter("runs_discarded", "Guests dropped because an append was refused.", engine.discarded)
    yield _counter("runs_stuck", "Runs that made no progress and were helped, or reported.", engine.stuck)
    frames = engine.frames
    yield _counter("frames_taken", "Frames taken of runs.", frames.taken)
    yield _counter("frames_used", "Runs that went on from a frame.", frames.used)
    yield _counter("frames_refused", "Frames that were of no use; the run was replayed.", frames.refused)
    yield _counter("frames_failed", "Frames that could not be taken or written.", frames.failed)
    yield _gauge("runs_pinned", "Runs that stay in memory: no frame, and a replay beyond its bound.", frames.pinned)
    yield _counters(
        "flow_decisions",
        "What flow control decided.",
        ("control", "action", "scope"),
        {tuple(key.split("/")): count for key, count in engine.decisions.items()},
    )
    yield _counter("store_commits", "Batches committed.", engine.commits)
    yield _gauge("store_backlog_batches", "Batches given to the store and not durable.", statistics.store_backlog[0])
    yield _gauge("store_backlog_bytes", "Their size.", statistics.store_backlog[1])
    yield _counter("log_lines_dropped", "Log lines of guests that were dropped.", engine.log_lines_dropped)
    yield _counter("loop_long_turns", "Turns of the control loop that took too long.", statistics.loop_long_turns)
    yield _gauge("loop_longest_turn_seconds", "The longest, CPU time.", statistics.loop_longest_turn_ns / _NS)


def _core(core: Mapping[str, Any]) -> Iterator[Metric]:
    yield _per_tier(_gauges, "queue_tasks", "Tasks that wait for a CPU slot.", core["queued"])
    yield _per_tier(_counters, "queue_picks", "Tasks given a CPU slot.", core["pops"])
    waits = {(str(tier),): buckets for tier, buckets in enumerate(waits_of(core))}
    yield _histograms(
        "queue_wait_seconds",
        "How long tasks waited for a CPU slot, each time; of tier 0: how fast urgent work preempts others.",
        ("tier",),
        waits,
        _NS,
    )
    yield _per_tier(_counters, "slot_seconds", "Time of CPU slots.", [ns / _NS for ns in core["slot_ns"]])
    aged = [count + waited for count, waited in zip(core["promotions_count"], core["promotions_wait"], strict=True)]
    yield _per_tier(_counters, "queue_promotions", "Tasks that had waited long enough to go first.", aged)
    yield _counter("queue_refusals", "Tasks refused because the queue was full.", core["refusals"])
    yield _counter("queue_tier0_capped", "Picks that tier 0 left to others at its cap.", core["tier0_capped"])
    yield _counter("slices", "Stretches of work in a CPU slot.", core["slices"])
    yield _counter(
        "preemptions", "Tasks that gave way to a higher tier.", core["preemptions"] + core["foreign_preemptions"]
    )
    yield _counter("demotions", "Tasks that had used their quantum.", core["demotions"])
    yield _gauge("guests_live", "Guests of wasm agents in memory.", core["live"])


def waits_of(core: Mapping[str, Any]) -> list[Buckets]:
    """Waits for a CPU slot, ns, by tier."""
    return [
        Buckets(WAIT_BOUNDS_NS, tuple(counts), total)
        for counts, total in zip(core["waits"], core["waited_ns"], strict=True)
    ]


def _hosts(hosts: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("agent_hosts", "Processes that run Python agents.", hosts["hosts"])
    yield _gauge("agent_host_guests", "Python agents in them.", hosts["guests"])
    yield _gauge("agent_host_waiting", "Python agents with work and without a host.", hosts["waiting"])
    yield _counter("agent_hosts_started", "Hosts started.", hosts["hosts_started"])
    yield _counter("agent_hosts_died", "Hosts that ended by themselves.", hosts["hosts_died"])
    yield _counter("agent_overruns", "Turns over their quantum.", hosts["overruns"])


def _programs(programs: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("program_processes", "Processes of agents that are programs.", programs["processes"])
    yield _gauge("program_waiting", "Runs of programs that wait for a process.", programs["queued"])
    yield _counter("programs_started", "Processes started.", programs["started"])
    yield _counter("program_kills", "Processes that others ended.", programs["kills"])
    yield _counter("program_evictions", "Runs that lost their process and are replayed.", programs["evictions"])
    yield _counter("program_snapshots", "Snapshots taken for more urgent work.", programs["snapshots"])


def _tools(tools: Any) -> Iterator[Metric]:
    for make, name, about, field in (
        (_gauges, "tool_hosts", "Processes that run tools.", "hosts"),
        (_gauges, "tool_calls_running", "Calls under way.", "running"),
        (_gauges, "tool_calls_queued", "Calls that wait for a host.", "queued"),
        (_gauges, "tool_calls_bytes", "Arguments of both.", "queued_bytes"),
        (_counters, "tool_calls", "Calls, attempts counted.", "calls"),
        (_counters, "tool_failures", "Calls that failed.", "failures"),
        (_counters, "tool_timeouts", "Of these, calls that took too long.", "timeouts"),
        (_counters, "tool_hosts_started", "Hosts started.", "hosts_started"),
        (_counters, "tool_hosts_died", "Hosts that ended by themselves.", "hosts_died"),
    ):
        values = {(cls,): getattr(found, field) for cls, found in tools.classes.items()}
        yield make(name, about, ("class",), values)


def _processes(processes: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("processes", "Native processes: commands, and agents that are programs.", processes.get("running", 0))
    yield _counter("processes_started", "Native processes started.", processes.get("started", 0))
    yield _counter("processes_refused", "Native processes that could not be started.", processes.get("refused", 0))
    yield _counter(
        "processes_killed_for_memory",
        "Native processes that the kernel ended for their memory.",
        processes.get("killed_for_memory", 0),
    )
    yield _counter("process_preemptions", "Stops of native processes for urgent work.", processes.get("preemptions", 0))


def _models(models: Any) -> Iterator[Metric]:
    yield _gauge("model_calls_running", "Calls to models under way.", models.running)
    yield _gauge("model_calls_bytes", "Their conversations.", models.running_bytes)
    yield _counter("model_calls", "Calls to models, attempts counted.", models.calls)
    yield _counter("model_failures", "Calls that the provider failed.", models.failures)
    yield _counter("model_input_tokens", "Tokens sent.", models.input_tokens)
    yield _counter("model_output_tokens", "Tokens received.", models.output_tokens)


def _ingresses(sources: "Mapping[str, SourceStatistics]") -> Iterator[Metric]:
    for make, name, about, field in (
        (_gauges, "ingress_lag_events", "Events held, or left on the bus at its last word.", "lag"),
        (_gauges, "ingress_held_events", "Events fetched that are neither runs nor dead letters yet.", "held"),
        (_gauges, "ingress_held_bytes", "Their size.", "held_bytes"),
        (_counters, "ingress_delivered", "Events fetched.", "delivered"),
        (_counters, "ingress_repeated", "Events delivered again while they were here.", "repeated"),
        (_counters, "ingress_accepted", "Events that are runs, now or since before a restart.", "accepted"),
        (_counters, "ingress_dead_letters", "Events that became dead letters.", "dead"),
        (_counters, "ingress_refused", "Attempts that were refused for now.", "refused"),
        (_counters, "ingress_acknowledged", "Events acknowledged.", "acknowledged"),
        (_counters, "ingress_failures", "Times that the ingress failed and was made again.", "failures"),
    ):
        yield make(name, about, ("source",), {(key,): getattr(found, field) for key, found in sources.items()})
    paused = {(key,): len(found.paused) for key, found in sources.items()}
    yield _gauges("ingress_paused_partitions", "Partitions that are paused.", ("source",), paused)


# --- forms ------------------------------------------------------------------------------


def _keyed(values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return {(key,): value for key, value in values.items()}


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"agentrt_{name}", about, value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrt_{name}", about, value)


def _counters(name: str, about: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"agentrt_{name}", about, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauges(name: str, about: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"agentrt_{name}", about, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _per_tier(make: Callable[..., Metric], name: str, about: str, values: Iterable[float]) -> Metric:
    return make(name, about, ("tier",), {(str(tier),): value for tier, value in enumerate(values)})


def _histograms(
    name: str, about: str, labels: tuple[str, ...], values: Mapping[Any, Buckets], unit: float = 1
) -> Metric:
    family = HistogramMetricFamily(f"agentrt_{name}", about, labels=labels)
    for key, found in values.items():
        below, buckets = 0, []
        for bound, count in zip(found.bounds, found.counts, strict=False):
            below += count
            buckets.append((str(float(bound / unit)), float(below)))
        buckets.append(("+Inf", float(found.count)))
        family.add_metric(key, buckets, found.total / unit)
    return family
