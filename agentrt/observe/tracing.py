"""Traces on their way out, with OTLP: a thread of its own reads runs from the store, of those that go on the finished
steps every now and then, of those that have ended the rest, and hears from the engine when they were in memory.

It is best effort and bounded: what does not fit is dropped and counted, and what a node that is killed had not sent of
its activations is not sent. After a restart finished steps may be sent a second time, with the same ids. Nothing waits
for it.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from agentrt.about import version
from agentrt.engine.info import Activation, RunResult
from agentrt.errors import AgentrtError, ConfigError
from agentrt.observe.settings import TracesConfig
from agentrt.observe.traces import Span, Trace, activation_span, trace_of, wanted
from agentrt.records import Record, RunAccepted
from agentrt.states import TERMINAL

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_logger: Final = logging.getLogger(__name__)
_RUNS_PER_BATCH: Final = 50
_SPANS_PER_BATCH: Final = 1_000
_SAMPLE_OF: Final = 1_000
_ENDS: Final = frozenset(state.value for state in TERMINAL)

#: Activations that wait to be sent, for each run that may.
_ACTIVATIONS_PER_RUN: Final = 4
#: Runs that go on, looked at in a round.
_LIVE_MAX: Final = 1_000
#: Runs of which it is known up to where they were sent, after they have left the memory.
_SENT_MAX: Final = 100_000

#: ``read(run id, after)``: the journal's records with a ``seq`` above that.
ReadRun = Callable[[str, int], list[Record]]
Send = Callable[[list[Span]], bool]


class Tracing:
    """`observe` is a runtime's observer, of activations as well; ``read`` gives a run's journal, ``send`` says whether
    it was taken; both may block."""

    def __init__(self, config: TracesConfig, read: ReadRun, send: Send) -> None:
        self._config = config
        self._read = read
        self._send = send
        self._runs: deque[tuple[str, bool]] = deque()  # to be looked at, and whether they have ended
        self._activations: deque[Activation] = deque()
        self._live: dict[str, None] = {}
        self._traces: dict[str, Trace | None] = {}  # of live ones; None: not to be sent
        self._sent: OrderedDict[str, int] = OrderedDict()
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._settling = self._closed = False
        self._at = 0  # among the live ones
        self.dropped = 0  # runs
        self._thread = threading.Thread(target=self._run, name="agentrt-traces", daemon=True)
        self._thread.start()

    def observe(self, event: str, data: Any) -> None:
        """On the control loop."""
        if event == "ended" and isinstance(data, RunResult):
            self._add(data.run_id, True)
        elif event == "begun":
            if self._config.live_ms and not self._settling:
                self._live[data] = None
                if len(self._live) == 1:
                    self._wake.set()
        elif event == "left" and isinstance(data, Activation):
            self._live.pop(data.run_id, None)
            if len(self._activations) >= _ACTIVATIONS_PER_RUN * self._config.queue_items_max:
                self.dropped += 1
                return
            self._activations.append(data)
            if data.ended not in _ENDS and not self._settling:
                self._add(data.run_id, False)
            self._wake.set()

    def settle(self, timeout_s: float) -> None:
        """Send what is there, within the time-out, and read no run any more. Blocks."""
        self._settling = True
        self._wake.set()
        self._settled.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """The same, and send what activations came since. Blocks."""
        self._settling = self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self.dropped or self._runs:
            _logger.warning("the traces of %d runs were dropped", self.dropped + len(self._runs))

    def _add(self, run_id: str, ended: bool) -> None:
        if self._settling or len(self._runs) >= self._config.queue_items_max:
            self.dropped += ended
            return
        self._runs.append((run_id, ended))
        self._wake.set()

    def _run(self) -> None:
        every_s = self._config.live_ms / 1e3
        due_s = 0.0
        while True:
            self._wake.wait(max(0.0, due_s - time.monotonic()) if self._live else None)
            self._wake.clear()
            closed, settling = self._closed, self._settling
            while self._runs:
                self._send_some([self._runs.popleft() for _ in range(min(_RUNS_PER_BATCH, len(self._runs)))])
            if settling or time.monotonic() >= due_s:
                self._look_at_live()
                due_s = time.monotonic() + every_s
            self._send_activations()
            if settling:
                self._settled.set()
            if closed:
                return

    def _look_at_live(self) -> None:
        """The next some of the runs that go on."""
        live = [*self._live]
        self._traces = {run_id: trace for run_id, trace in self._traces.items() if run_id in self._live}
        if live:
            begin = self._at % len(live)
            self._at = begin + _LIVE_MAX
            self._send_some([(run_id, False) for run_id in (live[begin:] + live[:begin])[:_LIVE_MAX]])

    def _send_some(self, runs: list[tuple[str, bool]]) -> None:
        spans: list[Span] = []
        for run_id, ended in runs:
            try:
                spans += self._spans(run_id, ended)
            except AgentrtError:  # erased meanwhile, or the node stops
                self.dropped += ended
        if spans and not self._sends(spans):
            self.dropped += sum(ended for _, ended in runs)

    def _spans(self, run_id: str, ended: bool) -> list[Span]:
        """What is new of a run. Raises AgentrtError: it cannot be read."""
        lives = run_id in self._live and not ended
        trace = self._traces.get(run_id) if lives else self._traces.pop(run_id, None)
        if run_id in self._traces and trace is None:
            return []
        records = self._read(run_id, 0 if trace is None else trace.seq)
        if trace is None:
            trace = Trace(run_id)
            if not self._samples(run_id, records):
                if lives:
                    self._traces[run_id] = None
                return []
        finished = trace.feed(records)
        sent = self._sent.pop(run_id, 0)
        spans = [span for seq, span in finished if seq > sent]
        if ended:
            return [*trace.rest(), *spans] if trace.ended else []
        if lives:
            self._traces[run_id] = trace
        self._sent[run_id] = trace.seq
        if len(self._sent) > _SENT_MAX:
            self._sent.popitem(last=False)
        return spans

    def _samples(self, run_id: str, records: list[Record]) -> bool:
        first = records[0] if records else None
        return isinstance(first, RunAccepted) and self._samples_run(run_id, first)

    def _samples_run(self, run_id: str, accepted: RunAccepted) -> bool:
        return wanted([accepted]) and trace_of(run_id, accepted) % _SAMPLE_OF < self._config.sample_permille

    def _send_activations(self) -> None:
        while self._activations:
            some = [self._activations.popleft() for _ in range(min(_SPANS_PER_BATCH, len(self._activations)))]
            spans = [activation_span(each) for each in some if self._samples_run(each.run_id, each.accepted)]
            if spans:
                self._sends(spans)

    def _sends(self, spans: list[Span]) -> bool:
        try:
            return self._send(spans)
        except Exception:
            _logger.warning("traces could not be sent", exc_info=True)
            return False


def otlp(config: TracesConfig) -> Send:
    """Sends to ``config.endpoint`` with OTLP over HTTP. Raises ConfigError if that is no URL, or OpenTelemetry is not
    installed."""
    if not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"traces.endpoint: {config.endpoint!r} is no URL",
            hint="It is the collector's, as http://127.0.0.1:4318/v1/traces",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise ConfigError(
            f"traces.endpoint is set and OpenTelemetry is not installed: {error}",
            hint="pip install 'agentrt[traces]'",
        ) from error
    exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=config.timeout_ms / 1e3)
    resource = Resource.create({"service.name": "agentrt", "service.version": version()})

    def send(spans: list[Span]) -> bool:
        return exporter.export([_readable(span, resource) for span in spans]) is SpanExportResult.SUCCESS

    return send


def _readable(span: Span, resource: Any) -> "ReadableSpan":
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: int) -> SpanContext:
        return SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        span.name,
        context(span.span_id),
        None if span.parent_id is None else context(span.parent_id),
        resource,
        span.attributes,
        [Event(each.name, each.attributes, each.at_ns) for each in span.events],
        kind=SpanKind.CLIENT if span.remote else SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )
