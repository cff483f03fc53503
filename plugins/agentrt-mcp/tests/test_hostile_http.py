"""Addresses at which something else answers than a well-behaved server."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from mcp_kit import config, opened

pytestmark = pytest.mark.timeout(120)

TOOLS = [{"name": "t", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]


def message(request: dict[str, Any], result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()


def response(status: str, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Raw:
    """``answer(request)``: the bytes that are sent for a call; None: the connection is cut."""

    def __init__(self, answer: Callable[[dict[str, Any]], bytes | None]) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0
                )
                body = await reader.readexactly(length)
                request = json.loads(body) if body else {}
                sent = self._sent(head, request)
                if sent is None:
                    break
                writer.write(sent)
                await writer.drain()
        writer.close()

    def _sent(self, head: bytes, request: dict[str, Any]) -> bytes | None:
        method = request.get("method", "")
        if not head.startswith(b"POST"):
            return response("405 Method Not Allowed", b"")
        if method == "server/discover":
            error = {"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no"}}
            return response("200 OK", json.dumps(error).encode())
        if method == "initialize":
            info = {"name": "raw", "version": "1"}
            told = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            return response("200 OK", message(request, told), "mcp-session-id: one")
        if method == "tools/list":
            return response("200 OK", message(request, {"tools": TOOLS}))
        if method == "tools/call":
            self.calls.append(request)
            return self.answer(request)
        return response("202 Accepted", b"")


@contextlib.asynccontextmanager
async def raw(answer: Callable[[dict[str, Any]], bytes | None]) -> AsyncIterator[tuple[Raw, str]]:
    made = Raw(answer)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    try:
        yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()


FINE = {"content": [{"type": "text", "text": "fine"}]}
HUGE = {"content": [{"type": "text", "text": "x" * 8_000_000}]}


def sse(request: dict[str, Any], result: Any) -> bytes:
    body = b"event: message\ndata: " + message(request, result) + b"\n\n"
    return response("200 OK", body, kind="text/event-stream")


CASES: dict[str, tuple[Callable[[dict[str, Any]], bytes | None], str | None, bool]] = {
    "fine": (lambda request: response("200 OK", message(request, FINE)), None, False),
    "fine event": (lambda request: sse(request, FINE), None, False),
    "cut": (lambda request: None, "tool_host_died", True),
    "rate": (
        lambda request: response("429 Too Many Requests", b"later", "retry-after: 7", kind="text/plain"),
        "tool_rate_limited",
        False,
    ),
    "busy": (lambda request: response("503 Service Unavailable", b"{}"), "tool_unavailable", False),
    "proxy": (lambda request: response("504 Gateway Timeout", b"", kind="text/html"), "tool_host_died", True),
    "no": (lambda request: response("403 Forbidden", b"", kind="text/html"), "tool_failed", False),
    "moved": (
        lambda request: response("307 Temporary Redirect", b"", "location: http://127.0.0.1:1/"),
        "tool_failed",
        False,
    ),
    "nothing": (lambda request: response("202 Accepted", b""), "tool_failed", False),
    "text": (lambda request: response("200 OK", b"hello", kind="text/plain"), "tool_failed", False),
    "no json": (lambda request: response("200 OK", b"{"), "tool_result", True),
    "no result": (lambda request: response("200 OK", message(request, {"content": 3})), "tool_result", True),
    "huge": (lambda request: response("200 OK", message(request, HUGE)), "tool_result", True),
    "huge event": (lambda request: sse(request, HUGE), "tool_host_died", True),
    "half an event": (
        lambda request: response("200 OK", b"event: message\ndata: {", kind="text/event-stream"),
        "tool_host_died",
        True,
    ),
    "compressed": (lambda request: response("200 OK", b"", "content-encoding: gzip"), "tool_host_died", True),
    "asks": (
        lambda request: response(
            "200 OK", message(request, {"resultType": "input_required", "requestState": "x", "inputRequests": {}})
        ),
        "tool_result",
        True,
    ),
    "a fake of ours": (
        lambda request: response(
            "502 Bad Gateway",
            json.dumps(
                {
                    "jsonrpc": "2.0",
                    "id": request["id"],
                    "error": {"code": -32950, "message": "x", "data": {"mark": "", "status": 0, "reason": "x"}},
                }
            ).encode(),
        ),
        "tool_failed",
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_answers_a_call_has_one_outcome_and_the_next_is_clean(case: str) -> None:
    answer, code, unknown = CASES[case]

    async def main() -> None:
        async with raw(answer) as (made, url):
            settings = config({"s": {"url": url, "trust_hints": True}}, **{"limits.result_bytes_max": 1_000_000})
            async with opened(settings) as bench:
                outcome = await bench.call("s.t", {})
                assert (outcome.code, outcome.unknown) == (code, unknown), outcome
                if case == "rate":
                    assert msgspec.json.decode(outcome.payload)["retry_after_s"] == 7
                made.answer = CASES["fine"][0]
                assert await bench.value("s.t") == "fine"

    asyncio.run(main())


def test_an_answer_that_never_comes_is_the_calls_time_out() -> None:
    async def main() -> None:
        async with raw(lambda request: b"") as (made, url):
            settings = config({"s": {"url": url, "timeout_s": 0.3}})
            async with opened(settings) as bench:
                outcome = await bench.call("s.t", {})
                assert (outcome.code, outcome.unknown) == ("tool_timeout", True)
                assert len(made.calls) == 1

    asyncio.run(main())


def test_a_session_that_the_server_has_forgotten_is_made_anew() -> None:
    """It says 404 then, and that the call was not done."""

    async def main() -> None:
        gone = response("404 Not Found", b"", kind="text/plain")
        async with raw(lambda request: gone) as (made, url), opened(config({"s": {"url": url}})) as bench:
            outcome = await bench.call("s.t", {})
            assert (outcome.code, outcome.unknown) == ("tool_unavailable", False)
            made.answer = CASES["fine"][0]
            assert await bench.value("s.t") == "fine"

    asyncio.run(main())
