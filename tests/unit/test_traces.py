"""Runs as traces: spans that follow from journals, and what sends them."""

import threading
from collections import Counter
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run
from hypothesis import given
from hypothesis import strategies as st
from test_engine_waits import COLD, Clock, asker, make, parked

from agentrt import records as r
from agentrt.engine.info import Activation, RunResult
from agentrt.errors import ClosedError
from agentrt.ids import new_run_id
from agentrt.observe.parent import TraceParent, parse_traceparent
from agentrt.observe.settings import TracesConfig
from agentrt.observe.traces import SPANS_MAX, Span, Trace, span_id_of, spans_of, trace_id_of, wanted
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
    tracing = Tracing(TracesConfig(), lambda run_id, after: journals[run_id], collector)
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


def read(run_id: str, after: int) -> list[r.Record]:
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


# --- runs that go on ---------------------------------------------------------------------


class Kept(Collector):
    """All that was sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.go.set()
        self.spans: list[Span] = []
        self.grown = threading.Condition()

    def __call__(self, spans: list[Span]) -> bool:
        with self.grown:
            self.spans += spans
            self.grown.notify_all()
        return True

    def wait_for(self, count: int) -> list[Span]:
        with self.grown:
            assert self.grown.wait_for(lambda: len(self.spans) >= count, 60), self.spans
            return [*self.spans]


def step(seq: int, path: str) -> list[r.Record]:
    return [
        r.StepPrepared(seq, seq, path, "tool.call", "keyed", b'{"tool":"put"}', b"d", f"key{path}", 1),
        r.StepCommitted(seq + 1, seq + 1, path, "tool.call", b"d", True, b"1", b"r", 1, Cost()),
    ]


def activation(run_id: str, ended: str, began_ns: int = 10) -> tuple[str, Activation]:
    return "left", Activation(run_id, ACCEPTED, began_ns, began_ns + 5, "fresh", ended, 1, 7, 3, 1, 2, 1)


def test_steps_appear_while_the_run_goes_on_and_once() -> None:
    run_id, collector = new_run_id(), Kept()
    records: list[r.Record] = [ACCEPTED, *step(2, "1:1"), step(4, "1:2")[0]]
    tracing = Tracing(TracesConfig(live_ms=1), lambda run_id, after: [x for x in records if x.seq > after], collector)
    tracing.observe("begun", run_id)
    assert [span.attributes["agentrt.step"] for span in collector.wait_for(1)] == ["1:1"]
    records += step(4, "1:2")[1:]
    assert [span.attributes["agentrt.step"] for span in collector.wait_for(2)] == ["1:1", "1:2"]
    records += step(6, "1:3")
    tracing.observe(*activation(run_id, "approval"))
    assert len(collector.wait_for(4)) == 4
    tracing.observe("begun", run_id)
    records += [step(8, "1:4")[0], r.RunEnded(9, 50, "SUCCEEDED", b"1", None)]
    tracing.observe(*activation(run_id, "SUCCEEDED", 40))
    tracing.observe(*ended(run_id))
    tracing.settle(60)
    tracing.close(60)
    names = Counter((span.name, span.span_id) for span in collector.spans)
    assert set(names.values()) == {1} and len(names) == 7
    assert sorted(span.name for span in collector.spans) == sorted(
        ["activation"] * 2 + ["execute_tool put"] * 4 + ["invoke_agent a"]
    )
    assert {span.trace_id for span in collector.spans} == {trace_id_of(run_id)}
    assert tracing.dropped == 0


def test_nothing_is_sent_of_runs_that_go_on_if_the_settings_say_so() -> None:
    run_id, collector = new_run_id(), Kept()
    records: list[r.Record] = [ACCEPTED, *step(2, "1:1")]
    tracing = Tracing(TracesConfig(live_ms=0), lambda run_id, after: [x for x in records if x.seq > after], collector)
    tracing.observe("begun", run_id)
    assert not tracing._live
    tracing.observe(*activation(run_id, "timer"))
    assert {span.name for span in collector.wait_for(2)} == {"activation", "execute_tool put"}
    tracing.close(60)


def test_what_ends_while_the_node_stops_is_sent_though_no_run_can_be_read() -> None:
    run_id, collector = new_run_id(), Kept()

    def closed(run_id: str, after: int) -> list[r.Record]:
        raise ClosedError("the store is closed")

    tracing = Tracing(TracesConfig(), closed, collector)
    tracing.settle(60)
    tracing.observe(*activation(run_id, "stopped"))
    tracing.close(60)
    (span,) = collector.spans
    assert span.parent_id == span_id_of(run_id) and span.attributes["agentrt.ended"] == "stopped"


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(0, 3))
def test_whoever_reads_a_journal_in_pieces_makes_the_same_spans(cuts: list[int], steps: int) -> None:
    run_id = new_run_id()
    records: list[r.Record] = [ACCEPTED, *(each for n in range(steps) for each in step(2 + 2 * n, f"1:{n}"))]
    records += [step(90, "1:9")[0], r.Waiting(91, 91, "timer", None, ""), r.RunEnded(92, 92, "FAILED", None, b"{}")]
    trace = Trace(run_id)
    found: list[Span] = []
    at = 0
    for cut in [*cuts, len(records)]:
        found += [span for _, span in trace.feed(records[at : at + cut])]
        at += cut
    assert trace.ended
    key = lambda span: span.span_id  # noqa: E731
    assert sorted([*trace.rest(), *found], key=key) == sorted(spans_of(run_id, records), key=key)


def test_activations_follow_a_run_through_waits_and_restarts() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        seen: list[Any] = []

        def watch(node: Node) -> None:
            node.engine.observe(lambda event, data: seen.append((event, data)), True)

        node = make(disk, world, clock, limits=COLD)
        watch(node)
        node.register("both", both)
        run_id = await node.submit("both", tier=0, tenant="acme")
        await parked(node, run_id, "approval")
        await node.close()
        clock.forward(3_000)
        node = make(disk, world, clock, limits=COLD)
        watch(node)
        node.register("both", both)
        await node.approve(run_id)
        await node.result(run_id)
        await node.close()
        left = [data for event, data in seen if event == "left"]
        assert [data for event, data in seen if event == "begun"] == [run_id] * len(left)
        assert [(each.begun, each.ended) for each in left] == [("fresh", "approval"), ("replay", "SUCCEEDED")]
        assert left[0].ended_ns < left[1].began_ns and {each.run_id for each in left} == {run_id}
        order = [event for event, _ in seen if event in ("left", "parked", "ended")]
        assert order == ["left", "parked", "left", "ended"]

    run(main())
