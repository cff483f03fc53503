"""Traces as a collector gets them, of a node that is killed in the middle of a run."""

import contextlib
import gzip
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serve_kit import AGENTS, Serving

from agentrt.observe.traces import span_id_of, trace_id_of

pytest.importorskip("opentelemetry.proto", reason="OpenTelemetry is not installed")


class Collector(ThreadingHTTPServer):
    """OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.grown = threading.Condition()

    def wait_for(self, count: int) -> list[Any]:
        with self.grown:
            assert self.grown.wait_for(lambda: len(self.spans) >= count, 60), self.spans
            return list(self.spans)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        asked = ExportTraceServiceRequest.FromString(body)
        collector: Any = self.server
        with collector.grown:
            for resource in asked.resource_spans:
                collector.resources.append({each.key: each.value.string_value for each in resource.resource.attributes})
                for scope in resource.scope_spans:
                    collector.spans += scope.spans
            collector.grown.notify_all()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


def settings(port: int) -> str:
    return f'[node]\nload = ["{AGENTS}"]\n[traces]\nendpoint = "http://127.0.0.1:{port}/v1/traces"\n'


def test_a_trace_survives_the_death_of_its_node(tmp_path: Path) -> None:
    with collecting() as collector:
        text = settings(collector.server_address[1])
        with Serving(tmp_path, text) as node, node.client() as client:
            key, port = node.key, node.port
            run_id = client.submit("ask", tenant="acme").run_id
            for event in client.events(run_id):
                if event.kind == "step_prepared":
                    break
            node.stop(signal.SIGKILL)
        killed_ns = time.time_ns()
        with Serving(tmp_path, text, key=key, port=port) as node, node.client() as client:
            client.approve(run_id, True)
            assert client.result(run_id)["approved"]
            assert node.stop() == 0  # with what it had to send
        collector.wait_for(3)
        stays = [span for span in collector.spans if span.name == "activation"]
        run, step = sorted(
            (span for span in collector.spans if span.name != "activation"), key=lambda span: bool(span.parent_span_id)
        )
        assert int.from_bytes(run.trace_id) == int.from_bytes(step.trace_id) == trace_id_of(run_id)
        assert int.from_bytes(run.span_id) == span_id_of(run_id) == int.from_bytes(step.parent_span_id)
        assert (run.name, step.name) == ("invoke_agent ask", "approval.request")
        assert step.start_time_unix_nano < killed_ns < step.end_time_unix_nano <= run.end_time_unix_nano
        assert collector.resources[0]["service.name"] == "agentrt"
        # The stay that the killed node was in is not told; the next one is, and that it began with a replay.
        assert all(span.parent_span_id == run.span_id and span.trace_id == run.trace_id for span in stays)
        last = attributes(max(stays, key=lambda span: span.end_time_unix_nano))
        assert (last["agentrt.begun"], last["agentrt.ended"]) == ("replay", "SUCCEEDED")


def attributes(span: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


def test_spans_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    """A run that waits for a person: its activation is drawn, and the stop of the node shows."""
    with collecting() as collector:
        text = settings(collector.server_address[1]) + "live_ms = 50\n"
        with Serving(tmp_path, text) as node, node.client() as client:
            run_id = client.submit("ask", tenant="acme").run_id
            while client.run(run_id).wait_reason != "approval":
                time.sleep(0.01)
            assert node.stop() == 0
        (span,) = {span.span_id: span for span in collector.wait_for(1)}.values()
        assert span.name == "activation" and int.from_bytes(span.trace_id) == trace_id_of(run_id)
        assert attributes(span)["agentrt.begun"] == "fresh"
        assert int.from_bytes(span.parent_span_id) == span_id_of(run_id)


def test_a_callers_trace_goes_on_through_preemption_and_restarts(tmp_path: Path) -> None:
    """One whose node stops in between, one that the caller does not keep, one of a caller that says nonsense."""
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with collecting() as collector:
        text = settings(collector.server_address[1])
        with Serving(tmp_path, text) as node, node.client() as client:
            key, port = node.key, node.port
            run_id = client.submit("ask", tier=2, traceparent=caller).run_id
            while client.run(run_id).wait_reason != "approval":
                time.sleep(0.01)
            assert node.stop() == 0
        with Serving(tmp_path, text, key=key, port=port) as node, node.client() as client:
            unsampled = client.submit("greet", "Ada", traceparent=caller[:-1] + "0").run_id
            client.result(unsampled)
            nonsense = client.submit("greet", "Ada", traceparent="nonsense").run_id
            client.result(nonsense)
            client.approve(run_id, True)
            client.result(run_id)
            assert node.stop() == 0
        collector.wait_for(7)
        spans = [span for span in collector.spans if span.name != "activation"]
        roots = {span.name: span for span in spans if span.name.startswith("invoke_agent")}
        assert sorted(span.name for span in spans) == [
            "approval.request",
            "execute_tool",
            "invoke_agent ask",
            "invoke_agent greet",
        ]
        assert roots["invoke_agent ask"].trace_id.hex() == caller[3:35]
        assert roots["invoke_agent ask"].parent_span_id.hex() == caller[36:52]
        assert int.from_bytes(roots["invoke_agent greet"].trace_id) == trace_id_of(nonsense)


def test_a_collector_that_is_not_there_costs_nothing_but_traces(tmp_path: Path) -> None:
    with collecting() as collector:
        port = collector.server_address[1]
    with Serving(tmp_path, settings(port) + "timeout_ms = 500\n") as node, node.client() as client:
        for _ in range(5):
            run_id = client.submit("greet", "Ada").run_id
            assert client.result(run_id) == "hello Ada"
        started_s = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - started_s < 20
    assert "traces of" in (tmp_path / "stderr").read_text()


def test_an_endpoint_without_the_library_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from agentrt.errors import ConfigError
    from agentrt.observe.settings import TracesConfig
    from agentrt.observe.tracing import otlp

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        otlp(TracesConfig(endpoint="http://127.0.0.1:4318/v1/traces"))
    assert "agentrt[traces]" in str(caught.value)
