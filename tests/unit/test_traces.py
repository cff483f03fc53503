"""Runs as traces: spans that follow from journals, and what sends them."""

import threading
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from hypothesis import given
from hypothesis import strategies as st
from test_engine_waits import COLD, Clock, asker, make, parked

from agentrt import records as r
from agentrt.engine.info import RunResult
from agentrt.ids import new_run_id
from agentrt.observe.parent import TraceParent, parse_traceparent
from agentrt.observe.settings import TracesConfig
from agentrt.observe.traces import SPANS_MAX, Span, span_id_of, spans_of, trace_id_of, wanted
from agentrt.observe.tracing import Tracing
from agentrt.records import Cost
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk


def both(ctx: Ctx, input: Any) -> Any:
    """A step, a person, a pure step, one that fails."""
    yield ctx.wait(ctx.tool("put", n=1))
    yield from asker(ctx, None)
    yield ctx.wait(ctx.tool("add", a=1, b=2))
    yield ctx.wait(ctx.tool("no_such_tool"))


def journal(node: Node, run_id: str) -> list[r.Record]:
    return node.store.read_records(run_id)


def test_a_trace_is_whole_through_a_restart() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=COLD)
        node.register("both", both)
        run_id = await node.submit("both", tier=0, tenant="acme")
        await parked(node, run_id, "approval")
        assert spans_of(run_id, journal(node, run_id)) == []  # it has not ended
        await node.close()
        clock.forward(3_000)
        node = make(disk, world, clock, limits=COLD)
        node.register("both", both)
        await node.approve(run_id)
        await node.result(run_id)
        spans = spans_of(run_id, journal(node, run_id))
        assert spans == spans_of(run_id, journal(node, run_id))
        whole, *steps = spans
        assert [step.name for step in steps] == ["execute_tool put", "approval.request", "execute_tool", "execute_tool"]
        assert {step.trace_id for step in spans} == {trace_id_of(run_id)}
        assert {step.parent_id for step in steps} == {whole.span_id} and whole.parent_id is None
        assert len({step.span_id for step in spans}) == 5
        assert whole.name == "invoke_agent both" and whole.error is None
        assert whole.attributes["agentrt.tenant"] == "acme" and whole.attributes["agentrt.state"] == "SUCCEEDED"
        put, person, pure, bad = steps
        assert person.end_ns - person.start_ns >= 3_000e9 and put.end_ns < person.end_ns
        assert [event.name for event in whole.events] == ["waiting", "resumed"]
        assert pure.start_ns == pure.end_ns  # its beginning is not journaled
        assert bad.error == "unknown_tool" and put.attributes["gen_ai.tool.name"] == "put"
        assert all(whole.start_ns <= span.start_ns <= span.end_ns <= whole.end_ns for span in spans)
        await node.close()

    run(main())


def test_a_child_is_below_the_step_that_spawned_it() -> None:
    async def main() -> None:
        node = make(MemoryDisk(), World(), Clock())
        run_id = await node.submit("parent", [["double", 21]])
        (result,) = (await node.result(run_id)).value()
        (child,) = node.fold(run_id).children.values()
        above = spans_of(run_id, journal(node, run_id))
        below = spans_of(child.run_id, journal(node, child.run_id))
        spawn = next(span for span in above if span.name == "run.spawn")
        assert below[0].parent_id == spawn.span_id and below[0].trace_id == above[0].trace_id == trace_id_of(run_id)
        assert result
        await node.close()

    run(main())


ACCEPTED = r.RunAccepted(1, 10, "t", "a", "v", b"1", 1, b"s" * 16, 5)


def test_a_model_call_has_the_conventions_names() -> None:
    request = b'{"profile":"work","messages":[{"role":"user","content":"secret"}]}'
    answer = b'{"text":"secret","model":"m-1","usage":{"input_tokens":7,"output_tokens":3},"finish":"stop"}'
    run_id = new_run_id()
    _, step = spans_of(
        run_id,
        [
            ACCEPTED,
            r.StepPrepared(2, 20, "1:1", "model.generate", "keyed", request, b"d", "k", 1),
            r.StepAborted(3, 25, "1:1", "rate"),
            r.StepPrepared(4, 30, "1:1", "model.generate", "keyed", request, b"d", "k", 2),
            r.StepCommitted(5, 40, "1:1", "model.generate", b"d", True, answer, b"d", 2, Cost(0, 0, 99, 10)),
            r.RunEnded(6, 50, "FAILED", None, b'{"code":"trap","message":"secret"}'),
        ],
    )
    assert (step.name, step.remote, step.start_ns, step.end_ns) == ("chat work", True, 20, 40)
    assert step.attributes["gen_ai.operation.name"] == "chat" and step.attributes["gen_ai.response.model"] == "m-1"
    assert step.attributes["gen_ai.usage.input_tokens"] == 7 and step.attributes["agentrt.cost_micro_usd"] == 99
    assert [event.name for event in step.events] == ["aborted", "attempt"]
    assert "secret" not in repr((_, step)) and _.error == "trap"


def test_fault_P75_a_long_run_makes_a_bounded_trace() -> None:
    steps = [r.StepCommitted(n + 2, n, f"1:{n}", "tool.call", b"", True, None, b"", 1) for n in range(SPANS_MAX + 5)]
    spans = spans_of(new_run_id(), [ACCEPTED, *steps, r.RunEnded(99_999, 99_999, "SUCCEEDED", b"1", None)])
    assert len(spans) == SPANS_MAX + 1 and spans[0].attributes["agentrt.steps_left_out"] == 5


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_what_agents_and_tools_say_never_breaks_a_trace(request: bytes, result: bytes) -> None:
    for op in ("tool.call", "model.generate"):
        for ok in (True, False):
            spans = spans_of(
                new_run_id(),
                [
                    ACCEPTED,
                    r.StepPrepared(2, 20, "1:1", op, "keyed", request, b"d", "k", 1),
                    r.StepCommitted(3, 40, "1:1", op, b"d", ok, result, b"d", 1),
                    r.RunEnded(4, 50, "FAILED", None, result),
                ],
            )
            assert len(spans) == 2


CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CALLED = msgspec.structs.replace(ACCEPTED, traceparent=CALLER)
ENDED = r.RunEnded(2, 50, "SUCCEEDED", b"1", None)


def test_a_callers_trace_goes_on_in_the_run_and_its_children() -> None:
    run_id, child_id = new_run_id(), new_run_id()
    spawn = r.StepPrepared(2, 20, "1:1", "run.spawn", "keyed", b"{}", b"d", "k", 1)
    run, step = spans_of(run_id, [CALLED, spawn, msgspec.structs.replace(ENDED, seq=3)])
    child = msgspec.structs.replace(CALLED, parent=f"{run_id}/1:1", root=run_id, depth=1)
    (below,) = spans_of(child_id, [child, ENDED])
    assert {run.trace_id, step.trace_id, below.trace_id} == {0x4BF92F3577B34DA6A3CE929D0E0E4736}
    assert (run.parent_id, below.parent_id) == (0x00F067AA0BA902B7, step.span_id)
    assert len({run.span_id, step.span_id, below.span_id}) == 3


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_traceparent_is_read_as_it_was_written(trace_id: int, span_id: int, sampled: bool) -> None:
    parent = TraceParent(trace_id, span_id, sampled)
    assert parse_traceparent(str(parent)) == parent
    assert parse_traceparent("cc" + str(parent)[2:] + "-what-the-future-will-be-like") == parent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        CALLER[:-1],
        CALLER + "-x",
        CALLER.upper(),
        "ff" + CALLER[2:],
        "00-" + "0" * 32 + CALLER[35:],
        CALLER[:36] + "0" * 16 + "-01",
        "01" + CALLER[2:] + "x",
        "01" + CALLER[2:] + "-" + "x" * 512,
    ],
)
def test_what_is_no_traceparent_begins_a_trace_of_its_own(text: str) -> None:
    assert parse_traceparent(text) is None
    run_id = new_run_id()
    (run,) = spans_of(run_id, [msgspec.structs.replace(ACCEPTED, traceparent=text), ENDED])
    assert (run.trace_id, run.parent_id) == (trace_id_of(run_id), None)


@given(st.text(max_size=100))
def test_no_header_breaks_a_trace(text: str) -> None:
    assert isinstance(parse_traceparent(text), TraceParent | None)


def test_what_the_caller_does_not_keep_is_not_sent() -> None:
    kept, dropped = new_run_id(), new_run_id()
    journals: dict[str, list[r.Record]] = {
        kept: [CALLED, ENDED],
        dropped: [msgspec.structs.replace(CALLED, traceparent=CALLER[:-1] + "0"), ENDED],
    }
    assert (wanted(journals[kept]), wanted(journals[dropped]), wanted([])) == (True, False, True)
    collector = Collector()
    collector.go.set()
    tracing = Tracing(TracesConfig(), lambda run_id: journals[run_id], collector)
    for run_id in (dropped, kept):
        tracing.observe(*ended(run_id))
    tracing.close(60)
    assert collector.runs == [int(CALLER[3:35], 16)] and tracing.dropped == 0


def test_ids_are_never_zero() -> None:
    assert trace_id_of("run_" + "0" * 26) == 1
    assert span_id_of("x") != span_id_of("y")


# --- what sends ------------------------------------------------------------------------


class Collector:
    """Takes spans once it is let go; ``fails`` the first so many times."""

    def __init__(self, fails: int = 0) -> None:
        self.go, self.asked = threading.Event(), threading.Event()
        self.fails = fails
        self.runs: list[int] = []

    def __call__(self, spans: list[Span]) -> bool:
        self.asked.set()
        assert self.go.wait(60)
        if self.fails:
            self.fails -= 1
            raise OSError("no collector")
        self.runs += [span.trace_id for span in spans]
        return True


def ended(run_id: str) -> tuple[str, RunResult]:
    return "ended", RunResult(run_id, RunState.SUCCEEDED, b"1", None, Cost(), 1)


def read(run_id: str) -> list[r.Record]:
    return [ACCEPTED, r.RunEnded(2, 50, "SUCCEEDED", b"1", None)]


def test_a_collector_that_is_slow_makes_nobody_wait_and_a_bound_holds() -> None:
    collector = Collector()
    tracing = Tracing(TracesConfig(queue_items_max=3), read, collector)
    runs = [new_run_id() for _ in range(10)]
    tracing.observe(*ended(runs[0]))
    assert collector.asked.wait(60)
    for run_id in runs[1:]:
        tracing.observe(*ended(run_id))
    assert tracing.dropped == 6
    collector.go.set()
    tracing.close(60)
    assert collector.runs == [trace_id_of(run_id) for run_id in runs[:4]]
    tracing.observe(*ended(runs[0]))
    assert tracing.dropped == 7


def test_a_collector_that_fails_costs_only_its_traces() -> None:
    collector = Collector(fails=1)
    collector.go.set()
    tracing = Tracing(TracesConfig(), read, collector)
    tracing.observe(*ended(new_run_id()))
    assert collector.asked.wait(60)
    while not tracing.dropped:
        threading.Event().wait(0.005)
    kept = new_run_id()
    tracing.observe(*ended(kept))
    tracing.close(60)
    assert collector.runs == [trace_id_of(kept)] and tracing.dropped == 1


@pytest.mark.parametrize("permille", [0, 500, 1_000])
def test_a_sample_is_of_families(permille: int) -> None:
    collector = Collector()
    collector.go.set()
    tracing = Tracing(TracesConfig(sample_permille=permille), read, collector)
    runs = [new_run_id(1_700_000_000_000, number.to_bytes(10)) for number in range(1_000)]
    for run_id in runs:
        tracing.observe(*ended(run_id))
    tracing.close(60)
    assert abs(len(collector.runs) - permille) <= 50
    assert set(collector.runs) <= {trace_id_of(run_id) for run_id in runs}
