"""Traces on their way out: runs that ended are read from the store by a thread of their own and sent with OTLP.

It is best effort and bounded: what does not fit is dropped and counted, and what a node that is killed had not sent is
not sent. Nothing waits for it.
"""

import importlib.metadata
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from agentrt.engine.info import RunResult
from agentrt.errors import AgentrtError, ConfigError
from agentrt.observe.settings import TracesConfig
from agentrt.observe.traces import Span, spans_of, wanted
from agentrt.records import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_logger: Final = logging.getLogger(__name__)
_RUNS_PER_BATCH: Final = 50
_SAMPLE_OF: Final = 1_000

ReadRun = Callable[[str], list[Record]]
Send = Callable[[list[Span]], bool]


class Tracing:
    """`observe` is a runtime's observer; ``read`` gives a run's journal, ``send`` says whether it was taken; both may
    block."""

    def __init__(self, config: TracesConfig, read: ReadRun, send: Send) -> None:
        self._config = config
        self._read = read
        self._send = send
        self._runs: deque[str] = deque()
        self._wake = threading.Event()
        self._closed = False
        self.dropped = 0  # runs
        self._thread = threading.Thread(target=self._run, name="agentrt-traces", daemon=True)
        self._thread.start()

    def observe(self, event: str, data: Any) -> None:
        """On the control loop."""
        if event != "ended" or not isinstance(data, RunResult):
            return
        if self._closed or len(self._runs) >= self._config.queue_items_max:
            self.dropped += 1
            return
        self._runs.append(data.run_id)
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Send what is there, within the time-out; while the runtime can still be read. Blocks."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self.dropped or self._runs:
            _logger.warning("the traces of %d runs were dropped", self.dropped + len(self._runs))

    def _run(self) -> None:
        while not self._closed or self._runs:
            self._wake.wait()
            self._wake.clear()
            while self._runs:
                self._send_some([self._runs.popleft() for _ in range(min(_RUNS_PER_BATCH, len(self._runs)))])

    def _send_some(self, runs: list[str]) -> None:
        spans: list[Span] = []
        for run_id in runs:
            try:
                records = self._read(run_id)
            except AgentrtError:  # erased meanwhile, or the node stops
                self.dropped += 1
                continue
            found = spans_of(run_id, records) if wanted(records) else []
            if found and found[0].trace_id % _SAMPLE_OF < self._config.sample_permille:
                spans += found
        if not spans:
            return
        try:
            sent = self._send(spans)
        except Exception:
            _logger.warning("traces could not be sent", exc_info=True)
            sent = False
        if not sent:
            self.dropped += len(runs)


def otlp(config: TracesConfig) -> Send:
    """Sends to ``config.endpoint`` with OTLP over HTTP. Raises ConfigError if OpenTelemetry is not installed."""
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
    resource = Resource.create({"service.name": "agentrt", "service.version": _version()})

    def send(spans: list[Span]) -> bool:
        return exporter.export([_readable(span, resource) for span in spans]) is SpanExportResult.SUCCESS

    return send


def _version() -> str:
    try:
        return importlib.metadata.version("agentrt")
    except importlib.metadata.PackageNotFoundError:
        return "0+uninstalled"


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
