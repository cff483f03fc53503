"""A run as a trace: one span for the run, one for each of its steps, made from its journal; and one for each of its
activations, the stays in a node's memory, which only that node knows. Pure.

So the run and its steps are whole whatever happened in between: preemptions, nodes that were killed, guests that were
replayed, years of waiting. Its ids follow from the run's: the trace is that of the root of the run's family, or of
whoever called with a ``traceparent``, a child's span is below the step that spawned it, and who reads a journal twice
makes the same spans.

Names and attributes follow OpenTelemetry's conventions for generative AI where these have some, ``agentrt.…`` else.
What agents say to models and tools is not in them.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

import msgspec
from ulid import base32

from agentrt import records as r
from agentrt.decoding import UNREADABLE
from agentrt.engine.info import Activation
from agentrt.observe.parent import parse_traceparent
from agentrt.states import RunState

#: Of one run; further steps are left out, and the run's span says how many.
SPANS_MAX: Final = 10_000
EVENTS_MAX: Final = 1_000

Attributes = dict[str, str | int | bool]


class Happened(msgspec.Struct, frozen=True):
    """Something at one moment of a span."""

    name: str
    at_ns: int
    attributes: Attributes


class Span(msgspec.Struct):
    """Times are Unix ns; ids as OpenTelemetry has them, 128 and 64 bits. ``remote``: it is a call to elsewhere."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: list[Happened]
    error: str | None = None  # a code
    remote: bool = False


def trace_id_of(run_id: str) -> int:
    """Of the family whose root the run is."""
    return int.from_bytes(base32.decode(run_id.removeprefix("run_"))) or 1


def span_id_of(what: str) -> int:
    """``what``: a run id, or ``run_id/path`` for a step."""
    return int.from_bytes(blake2b(what.encode(), digest_size=8).digest()) or 1


class _Request(msgspec.Struct):
    tool: str | None = None
    profile: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    model: str | None = None
    usage: _Usage = _Usage()


class _Error(msgspec.Struct):
    code: str = "error"


_decode_request: Final = msgspec.json.Decoder(_Request).decode
_decode_answer: Final = msgspec.json.Decoder(_Answer).decode
_decode_error: Final = msgspec.json.Decoder(_Error).decode


def wanted(records: list[r.Record]) -> bool:
    """Whether the caller keeps the run's trace, as far as it has said."""
    first = records[0] if records else None
    caller = parse_traceparent(first.traceparent) if isinstance(first, r.RunAccepted) else None
    return caller is None or caller.sampled


def spans_of(run_id: str, records: Iterable[r.Record]) -> list[Span]:
    """The spans of a run that has ended, its own first; [] if there is no beginning or no end."""
    trace = Trace(run_id, keeps=True)
    trace.feed(records)
    return trace.rest() if trace.ended else []


class Trace:
    """A run's trace as its journal grows. ``keeps``: `rest` has all of it, also what `feed` has returned."""

    def __init__(self, run_id: str, *, keeps: bool = False) -> None:
        self._run_id = run_id
        self._keeps = keeps
        self._steps: dict[str, Span] = {}
        self._count = self._left_out = 0
        self.run: Span | None = None
        self.ended = False
        self.seq = 0  # of the last record

    def feed(self, records: Iterable[r.Record]) -> list[tuple[int, Span]]:
        """The records that follow. Returns the steps that have now an outcome, each with its record's ``seq``."""
        finished: list[tuple[int, Span]] = []
        for record in records:
            self.seq = record.seq
            if isinstance(record, r.RunAccepted):
                self.run = _begun(self._run_id, record)
            elif self.run is None:
                break
            elif isinstance(record, r.StepPrepared | r.StepCommitted):
                self._follow(self.run, record, finished)
            elif isinstance(record, r.StepAborted | r.StepEvicted | r.OutcomeUnknown):
                if (step := self._steps.get(record.path)) is not None:
                    step.end_ns = record.at_ns
                    step.events.append(Happened(_NAMES[type(record)], record.at_ns, {"agentrt.reason": record.reason}))
            elif isinstance(record, r.RunEnded):
                self.ended = True
                _end(self.run, record)
            elif (happened := _event(record)) is not None and len(self.run.events) < EVENTS_MAX:
                self.run.events.append(happened)
        return finished

    def rest(self) -> list[Span]:
        """Of a run that has ended: its own span, and its steps without an outcome."""
        if self.run is None:
            return []
        if self._left_out:
            self.run.attributes["agentrt.steps_left_out"] = self._left_out
        return [self.run, *self._steps.values()]

    def _follow(self, run: Span, record: r.StepPrepared | r.StepCommitted, finished: list[tuple[int, Span]]) -> None:
        step = self._steps.get(record.path)
        if step is None:
            if self._count >= SPANS_MAX:
                self._left_out += 1
                return
            self._count += 1
            step = self._steps[record.path] = _step(self._run_id, run, record)
        _follow(step, record)
        if isinstance(record, r.StepCommitted):
            finished.append((record.seq, step))
            if not self._keeps:
                del self._steps[record.path]


def activation_span(activation: Activation) -> Span:
    """A run's stay in memory, below the run."""
    accepted, run_id = activation.accepted, activation.run_id
    run = _begun(run_id, accepted)
    return Span(
        "activation",
        run.trace_id,
        span_id_of(f"{run_id}@{activation.began_ns}"),
        run.span_id,
        activation.began_ns,
        activation.ended_ns,
        {
            "gen_ai.agent.name": accepted.agent,
            "agentrt.run_id": run_id,
            "agentrt.tenant": accepted.tenant,
            "agentrt.tier": activation.tier,
            "agentrt.begun": activation.begun,
            "agentrt.ended": activation.ended,
            "agentrt.fuel": activation.fuel,
            "agentrt.slot_ns": activation.slot_ns,
            "agentrt.queued_ns": activation.queued_ns,
            "agentrt.preemptions": activation.preemptions,
            "agentrt.demotions": activation.demotions,
        },
        [],
    )


def trace_of(run_id: str, record: r.RunAccepted) -> int:
    """The trace's id: that of the run's family, or the caller's."""
    caller = parse_traceparent(record.traceparent)
    return trace_id_of(record.root or run_id) if caller is None else caller.trace_id


def _begun(run_id: str, record: r.RunAccepted) -> Span:
    caller = parse_traceparent(record.traceparent)
    parent_id = None if caller is None else caller.span_id
    return Span(
        f"invoke_agent {record.agent}",
        trace_of(run_id, record),
        span_id_of(run_id),
        parent_id if record.parent is None else span_id_of(record.parent),
        record.at_ns,
        record.at_ns,
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": record.agent,
            "gen_ai.agent.version": record.version,
            "agentrt.run_id": run_id,
            "agentrt.tenant": record.tenant,
            "agentrt.tier": record.base_tier,
        },
        [],
    )


def _end(run: Span, record: r.RunEnded) -> None:
    run.end_ns = record.at_ns
    run.attributes |= {
        "agentrt.state": record.state,
        "agentrt.fuel": record.cost.fuel,
        "agentrt.slot_ns": record.cost.slot_ns,
    }
    if record.state != RunState.SUCCEEDED:
        run.error = _code(record.error)
        run.attributes["error.type"] = run.error


def _step(run_id: str, run: Span, record: r.StepPrepared | r.StepCommitted) -> Span:
    attributes: Attributes = {"agentrt.op": record.op, "agentrt.step": record.path}
    name, remote = record.op, False
    asked = _read(_decode_request, record.request) if isinstance(record, r.StepPrepared) else None
    if record.op == "tool.call":
        attributes["gen_ai.operation.name"] = name = "execute_tool"
        if asked is not None and asked.tool is not None:
            attributes["gen_ai.tool.name"] = asked.tool
            name += f" {asked.tool}"
    elif record.op == "model.generate":
        attributes["gen_ai.operation.name"] = name = "chat"
        remote = True
        if asked is not None and asked.profile is not None:
            attributes["gen_ai.request.model"] = asked.profile
            name += f" {asked.profile}"
    if isinstance(record, r.StepPrepared):
        attributes["agentrt.kind"] = record.kind
    step_id = span_id_of(f"{run_id}/{record.path}")
    # A pure step has no beginning in the journal.
    return Span(name, run.trace_id, step_id, run.span_id, record.at_ns, record.at_ns, attributes, [], None, remote)


def _follow(step: Span, record: r.StepPrepared | r.StepCommitted) -> None:
    step.end_ns = record.at_ns
    if isinstance(record, r.StepPrepared):
        if record.attempt > 1:
            step.events.append(Happened("attempt", record.at_ns, {"agentrt.attempt": record.attempt}))
        return
    step.attributes |= {"agentrt.attempts": record.attempt}
    if not record.ok:
        step.error = _code(record.result)
        step.attributes["error.type"] = step.error
    elif record.op == "model.generate" and (answer := _read(_decode_answer, record.result)) is not None:
        if answer.model is not None:
            step.attributes["gen_ai.response.model"] = answer.model
        step.attributes |= {
            "gen_ai.usage.input_tokens": answer.usage.input_tokens,
            "gen_ai.usage.output_tokens": answer.usage.output_tokens,
        }
    if record.cost.micro_usd:
        step.attributes["agentrt.cost_micro_usd"] = record.cost.micro_usd


def _event(record: r.Record) -> Happened | None:
    match record:
        case r.Waiting():
            return Happened("waiting", record.at_ns, {"agentrt.reason": record.reason})
        case r.Resumed():
            return Happened("resumed", record.at_ns, {})
        case r.TierChanged():
            return Happened(
                "tier_changed", record.at_ns, {"agentrt.tier": record.tier, "agentrt.reason": record.reason}
            )
        case r.Checkpoint():
            return Happened("checkpoint", record.at_ns, {"agentrt.segment": record.segment})
        case r.CancelRequested():
            return Happened("cancel_requested", record.at_ns, {})
        case r.Ending():
            return Happened("ending", record.at_ns, {"agentrt.state": record.towards})
        case r.LockBroken():
            return Happened("lock_broken", record.at_ns, {})
        case r.Upgraded():
            return Happened("upgraded", record.at_ns, {})
    return None


_NAMES: Final[dict[type, str]] = {
    r.StepAborted: "aborted",
    r.StepEvicted: "evicted",
    r.OutcomeUnknown: "outcome_unknown",
}


def _read(decode: Any, data: bytes | None) -> Any:
    try:
        return None if data is None else decode(data)
    except UNREADABLE:
        return None


def _code(error: bytes | None) -> str:
    found = _read(_decode_error, error)
    return "error" if found is None else str(found.code)
