"""What a node tells about itself: histograms, the meter, targets, metrics and their labels, log lines."""

import io
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agentrt.backends.process.agents.pool import PoolStatistics
from agentrt.engine.info import EngineStatistics, FrameStatistics
from agentrt.ingress.service import SourceStatistics
from agentrt.models.service import ModelStatistics
from agentrt.observe.histogram import DURATION_BOUNDS_NS, Histogram
from agentrt.observe.labels import CLASSES, LABELS, OPS, STATES
from agentrt.observe.logs import FIELDS, RUNS, JsonFormatter, start_logging
from agentrt.observe.meter import Meter
from agentrt.observe.prometheus import expose, families
from agentrt.observe.settings import LogsConfig, SloConfig
from agentrt.observe.slo import targets_of
from agentrt.records import Cost
from agentrt.runtime import RuntimeStatistics
from agentrt.tools.outcome import ClassStatistics, ToolStatistics

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
TARGETS = targets_of(
    SloConfig(
        targets={
            "urgent": {"tier": 0, "latency_ms": 100, "objective_permille": 999},
            "everything": {"latency_ms": 5_000, "objective_permille": 500},
        }
    )
)
PER_TIER = [1, 2, 3, 4]
CORE = {
    "queued": PER_TIER, "pops": PER_TIER, "slot_ns": PER_TIER, "promotions_count": PER_TIER,
    "promotions_wait": PER_TIER, "refusals": 1, "tier0_capped": 1, "slices": 1, "preemptions": 1,
    "foreign_preemptions": 2, "demotions": 1, "live": 1, "waits": [[1] * 28] * 4, "waited_ns": PER_TIER,
    "workers": [{"slices": 1, "preemptions": 2, "demotions": 3, "slot_ns": PER_TIER}],
}  # fmt: skip
PROCESSES = {"running": 1, "started": 9, "refused": 2, "killed_for_memory": 3, "preemptions": 4, "leaves": True}
FRAMES = FrameStatistics.__struct_fields__
HOSTS = {"hosts": 1, "guests": 1, "waiting": 1, "hosts_started": 1, "hosts_died": 1, "overruns": 1}
PROGRAMS = dict.fromkeys(PoolStatistics.__struct_fields__, 1)


def statistics() -> RuntimeStatistics:
    engine = msgspec.convert({name: 1 for name in EngineStatistics.__struct_fields__ if name != "ended"}
        | {"ended": {}, "decisions": {"budget/wait/tenant": 3}, "frames": dict.fromkeys(FRAMES, 1)},
        EngineStatistics)  # fmt: skip
    return RuntimeStatistics(
        engine,
        {"wasm": CORE, "python": HOSTS, "process": PROGRAMS},
        ToolStatistics(*range(10), "", {"tool": ClassStatistics(*range(9)), "web": ClassStatistics()}, PROCESSES),
        ModelStatistics(*range(7)),
        (1, 2),
        3,
        4_000_000,
        5,
        {},
        {"orders": SourceStatistics("running", *range(1, 11), ["0", "1"])},
    )


STATISTICS = statistics()


def exposed(meter: Meter) -> dict[str, Any]:
    """Samples by name and labels, as a scraper reads them."""
    body, media_type = expose(meter.snapshot(), statistics(), 7, "text/plain")
    assert media_type.startswith("text/plain")
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


# --- histograms -----------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[int], q: float) -> None:
    histogram = Histogram(DURATION_BOUNDS_NS)
    for value in values:
        histogram.add(value)
    found = histogram.snapshot()
    assert found.count == len(values) and found.total == sum(values)
    true = sorted(values)[max(0, -(-int(q * len(values) * 10**9) // 10**9) - 1)]
    bounds = (0, *DURATION_BOUNDS_NS)
    estimate = found.quantile(q)
    assert estimate is not None
    if true <= bounds[-1]:
        index = next(i for i, bound in enumerate(bounds) if true <= bound)
        # One bucket of tolerance: q * n may fall on either side of a whole number.
        assert bounds[max(0, index - 2)] <= estimate <= bounds[min(len(bounds) - 1, index + 1)]
    else:
        assert estimate <= bounds[-1]


def test_a_histogram_without_values_has_no_quantile() -> None:
    assert Histogram((1, 2)).snapshot().quantile(0.5) is None


def test_quantiles_are_spread_within_a_bucket() -> None:
    histogram = Histogram((10, 20, 40))
    for value in (15, 15, 15, 15):
        histogram.add(value)
    assert [histogram.snapshot().quantile(q) for q in (0.25, 0.5, 1.0)] == [12.5, 15.0, 20.0]


# --- targets ----------------------------------------------------------------------------


def test_targets_count_what_is_theirs() -> None:
    meter = Meter(TARGETS)
    meter.ended(0, "agent", "SUCCEEDED", 50_000_000, 1, 1)
    meter.ended(0, "agent", "SUCCEEDED", 200_000_000, 1, 1)  # too slow for one of them
    meter.ended(2, "code", "FAILED", 1, 1, 1)
    meter.ended(0, "agent", "CANCELLED", 1, 1, 1)  # nobody's failure
    found = {each.target.name: (each.runs, each.good, each.met) for each in meter.snapshot().targets}
    assert found == {"urgent": (2, 1, False), "everything": (3, 2, True)}


def test_a_target_without_runs_is_neither_met_nor_missed() -> None:
    assert [each.met for each in Meter(TARGETS).snapshot().targets] == [None, None]


# --- metrics ------------------------------------------------------------------------------


def test_metrics_say_what_happened() -> None:
    meter = Meter(TARGETS)
    meter.accepted(0, "agent")
    meter.ended(0, "agent", "SUCCEEDED", 30_000_000, 12, 900)
    meter.settled("tool.call", True, 3, 2_000_000, Cost())
    meter.settled("tool.call", False, 1, None, Cost())
    meter.settled("model.generate", True, 1, 10**9, Cost(0, 0, 1_500_000, 40))
    found = exposed(meter)
    assert found["agentrt_runs_accepted_total class=agent tier=0"] == 1
    assert found["agentrt_runs_ended_total class=agent state=SUCCEEDED tier=0"] == 1
    assert found["agentrt_run_seconds_sum class=agent tier=0"] == pytest.approx(0.03)
    assert found["agentrt_run_seconds_bucket class=agent le=0.025 tier=0"] == 0
    assert found["agentrt_run_seconds_bucket class=agent le=0.05 tier=0"] == 1
    assert found["agentrt_run_seconds_bucket class=agent le=+Inf tier=0"] == 1
    assert found["agentrt_run_tool_calls_bucket class=agent le=20.0 tier=0"] == 1
    assert found["agentrt_steps_total op=tool.call outcome=failed"] == 1
    assert found["agentrt_step_retries_total op=tool.call"] == 2
    assert found["agentrt_step_seconds_count op=tool.call"] == 1  # a pure one is never prepared
    assert (found["agentrt_cost_usd_total"], found["agentrt_model_tokens_total"]) == (1.5, 40)
    assert found["agentrt_fuel_total tier=0"] == 900
    assert found["agentrt_slo_good_total slo=urgent"] == 1
    assert found["agentrt_flow_decisions_total action=wait control=budget scope=tenant"] == 3
    assert found["agentrt_preemptions_total"] == 3
    assert found["agentrt_queue_promotions_total tier=3"] == 8
    assert found["agentrt_queue_wait_seconds_bucket le=1.024e-06 tier=0"] == 1
    assert found["agentrt_queue_wait_seconds_bucket le=+Inf tier=3"] == 28
    assert found["agentrt_tool_failures_total class=tool"] == 5
    assert (found["agentrt_processes"], found["agentrt_processes_killed_for_memory_total"]) == (1, 3)
    assert found["agentrt_tool_calls_total class=web"] == 0
    assert found["agentrt_loop_heartbeat_age_seconds"] == 0.007


def test_a_busy_control_loop_leaves_the_rest_to_be_read() -> None:
    body, _ = expose(Meter().snapshot(), None, 60_000, "")
    text = body.decode()
    assert "agentrt_loop_heartbeat_age_seconds 60.0" in text and "agentrt_runs_accepted_total" in text
    assert "agentrt_runs_live" not in text


def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    body, media_type = expose(Meter().snapshot(), statistics(), 0, "application/openmetrics-text; version=1.0.0")
    assert media_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


def _series(meter: Meter) -> set[tuple[str, str]]:
    return {
        (sample.name, repr(sorted(sample.labels.items())))
        for family in families(meter.snapshot(), STATISTICS, 0)
        for sample in family.samples
    }


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(CLASSES), st.sampled_from(STATES), st.integers(0, 10**18),
            st.sampled_from(OPS), st.booleans(), st.integers(1, 5),
        ),
        max_size=50,
    )
)  # fmt: skip
def test_fault_P75_series_do_not_grow(events: list[tuple[Any, ...]]) -> None:
    meter = Meter(TARGETS)
    before = _series(meter)
    for tier, cls, state, ns, op, ok, attempt in events:
        meter.accepted(tier, cls)
        meter.ended(tier, cls, state, ns, attempt, ns)
        meter.settled(op, ok, attempt, ns, Cost(1, 2, 3, 4))
    assert _series(meter) == before


def test_fault_P75_labels_are_from_fixed_sets() -> None:
    configured = {"slo": {target.name for target in TARGETS}, "class": {*LABELS["class"], "web"}, "source": {"orders"}}
    allowed = {**LABELS, **configured}
    for family in families(Meter(TARGETS).snapshot(), statistics(), 0):
        for sample in family.samples:
            for name, value in sample.labels.items():
                assert name == "le" or value in allowed[name], (sample.name, name, value)
    forbidden = {"run", "run_id", "tenant", "agent", "tool", "model", "key", "path", "step"}
    assert not forbidden & set(allowed)


def test_every_metric_is_documented_and_every_documented_one_is_there() -> None:
    there = {}
    for family in families(Meter(TARGETS).snapshot(), statistics(), 0):
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        there[family.name + ("_total" if family.type == "counter" else "")] = (family.type, ", ".join(labels))
    rows = re.findall(r"^\| `(agentrt_\w+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: (kind, labels.replace("`", "").strip()) for name, kind, labels in rows} == there


# --- logs --------------------------------------------------------------------------------


def _record(message: str, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, message, (), None, extra=extra)


def test_a_line_is_one_json_object_with_known_fields_only() -> None:
    line = JsonFormatter().format(_record('two\nlines "quoted" \ud800', run_id="run_1", password="hunter2", tier=0))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["run_id"], found["tier"], found["level"]) == ("run_1", 0, "warning")
    assert set(found) <= {"at", "level", "logger", "message", *FIELDS}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["at"])


class _Stuck(io.StringIO):
    """A terminal that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.asked = threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.go.wait(60)
        return super().write(text)


def test_who_logs_does_not_wait_for_who_writes() -> None:
    stream = _Stuck()
    stop = start_logging(LogsConfig(format="json", queue_items_max=100), stream)
    logger = logging.getLogger("agentrt.test")
    try:
        logger.warning("first")
        assert stream.asked.wait(60)
        for number in range(250):
            logger.warning("line %d", number)  # would never return if it waited
    finally:
        stream.go.set()
        stop()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines[:2]] == ["first", "line 0"]
    assert lines[-1]["message"] == "150 log lines were dropped" and len(lines) == 102


def test_a_reader_that_never_comes_does_not_keep_a_node_from_ending() -> None:
    stream = _Stuck()
    stop = start_logging(LogsConfig(format="json"), stream)
    logging.getLogger("agentrt.test").warning("first")
    assert stream.asked.wait(60)
    stop()
    stream.go.set()  # or the next test's would never


def test_an_exception_is_written_as_text() -> None:
    stream = io.StringIO()
    stop = start_logging(LogsConfig(format="json"), stream)
    try:
        raise ValueError("no good")
    except ValueError:
        logging.getLogger("agentrt.test").exception("failed", extra={"run_id": "run_1"})
    finally:
        stop()
    (line,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert line["run_id"] == "run_1" and "ValueError: no good" in line["exception"]


@pytest.mark.parametrize(("runs", "levels"), [("none", []), ("failed", ["info"]), ("all", ["debug", "info"])])
def test_which_ends_are_written(runs: Any, levels: list[str]) -> None:
    stream = io.StringIO()
    stop = start_logging(LogsConfig(format="json", level="warning", runs=runs), stream)
    try:
        logging.getLogger(RUNS).debug("it succeeded")
        logging.getLogger(RUNS).info("it failed")
        logging.getLogger("agentrt.test").info("not important")
    finally:
        stop()
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == levels
    assert logging.getLogger(RUNS).level == logging.NOTSET
