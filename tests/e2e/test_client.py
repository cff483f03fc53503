"""The client against a real node, and against one that fails in all the ways there are."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_http_api import Served, served  # noqa: F401 (the fixture)

from agentrt.client import AsyncClient, Client
from agentrt.client.events import Event, EventReader
from agentrt.errors import (
    IdempotencyConflictError,
    InputError,
    RunError,
    StepSettledError,
    UnauthorizedError,
    UnknownAgentError,
    UnknownRunError,
    UnreachableError,
)


def url_of(served: Served) -> str:  # noqa: F811
    host, port = served.server.address
    return f"http://{host}:{port}"


def key_of(served: Served, *scopes: str) -> str:  # noqa: F811
    made = served.admin.post("/v1/keys", json={"tenant": "client", "scopes": list(scopes)})
    secret: str = made.json()["secret"]
    return secret


@pytest.fixture
def client(served: Served) -> Iterator[Client]:  # noqa: F811
    with Client(url_of(served), key=key_of(served, "runs:read", "runs:write", "runs:decide")) as made:
        yield made


def test_a_run_through_the_client(client: Client) -> None:
    accepted = client.submit("greet", "Ada")
    assert client.result(accepted.run_id) == "hello Ada"
    assert client.run(accepted.run_id).state == "SUCCEEDED"
    assert [step.op for step in client.steps(accepted.run_id).steps] == ["tool.call"]
    assert accepted.run_id in [run.run_id for run in client.runs().runs]
    assert {agent.name for agent in client.agents().agents} >= {"greet", "count", "ask"}
    emitted = [event.data["data"] for event in client.events(client.submit("count", 2).run_id) if event.kind == "emit"]
    assert emitted == [0, 1]


def test_errors_have_their_classes(client: Client) -> None:
    with pytest.raises(UnknownAgentError):
        client.submit("nobody")
    with pytest.raises(UnknownRunError):
        client.run("run_01ARZ3NDEKTSV4RRFFQ69G5FAV")
    client.submit("greet", "a", idempotency_key="one")
    with pytest.raises(IdempotencyConflictError):
        client.submit("greet", "b", idempotency_key="one")
    failed = client.submit("count", "no number")
    with pytest.raises(RunError):
        client.result(failed.run_id)
    with pytest.raises(StepSettledError):
        client.approve(failed.run_id)


@pytest.mark.parametrize("url", ["127.0.0.1:8420", "", "ftp://there", "http://", "http://[::1"])
def test_what_can_be_no_address_is_said_at_once(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InputError, match="no address of a node"):
            kind(url, key="agentrt_a_b")


def test_it_looks_for_a_node_where_the_commands_do(
    served: Served,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AGENTRT_KEY", raising=False)
    with pytest.raises(InputError, match="no API key was given"):
        Client()
    monkeypatch.setenv("AGENTRT_KEY", "secret")
    with pytest.raises(UnreachableError), Client("http://127.0.0.1:9", attempts_max=1) as client:
        client.runs()
    monkeypatch.setenv("AGENTRT_URL", url_of(served))
    with Client() as client, pytest.raises(UnauthorizedError, match="this is no API key"):
        client.runs()
    monkeypatch.setenv("AGENTRT_URL", "nowhere")
    with pytest.raises(InputError, match="no address of a node"):
        Client()


def test_what_can_be_no_key_is_said(served: Served) -> None:  # noqa: F811
    for key in ("ключ", "agentrt_\n"):
        with pytest.raises(InputError, match="no API key"):
            Client(url_of(served), key=key)
    with Client(url_of(served), key="secret") as client, pytest.raises(UnauthorizedError, match="this is no API key"):
        client.runs()


def test_who_cannot_be_reached_is_asked_about() -> None:
    client = Client("http://127.0.0.1:9", key="agentrt_a_b", attempts_max=1)
    with client, pytest.raises(UnreachableError, match="agentrt serve"):
        client.runs()


def test_the_same_through_asyncio(served: Served) -> None:  # noqa: F811
    async def main() -> None:
        async with AsyncClient(url_of(served), key=key_of(served, "runs:read", "runs:write", "runs:decide")) as client:
            run_id = (await client.submit("ask")).run_id
            async for event in client.events(run_id):
                if event.kind == "step_prepared":
                    assert (await client.approve(run_id, by="Grace")).step == event.data["step"]
            assert await client.result(run_id) == {"approved": True, "by": "Grace"}

    asyncio.run(main())


class Failing:
    """A server that answers what it is told to, one connection after the other."""

    def __init__(self, answers: list[bytes], port: int = 0) -> None:
        self.requests: list[bytes] = []
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            with connection:
                self.requests.append(connection.recv(65536))
                connection.sendall(answer)
        self._listener.close()


def answer(status: int, body: Any, *headers: str) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\nconnection: close\r\n"
    return head.encode() + b"".join(h.encode() + b"\r\n" for h in headers) + b"\r\n" + text


OK = answer(202, {"run_id": "run_x", "location": "/v1/runs/run_x"})
FULL = answer(429, {"type": "x", "title": "x", "status": 429, "detail": "full", "code": "queue_full"}, "retry-after: 0")


def test_it_asks_again_with_the_same_key_until_it_is_taken() -> None:
    """Refused, cut off without a word, a proxy's own error: the run is the same one."""
    proxy = b"HTTP/1.1 502 x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
    server = Failing([FULL, b"", proxy, OK])
    with Client(server.url, key="k") as client:
        assert client.submit("a").run_id == "run_x"
    keys = {
        line for request in server.requests for line in request.split(b"\r\n") if b"idempotency-key" in line.lower()
    }
    assert len(server.requests) == 4 and len(keys) == 1


def test_it_gives_up_in_the_end() -> None:
    with Client(Failing([b""] * 3).url, key="k", attempts_max=3) as client, pytest.raises(UnreachableError):
        client.agents()


def test_what_may_not_be_done_twice_is_asked_once() -> None:
    server = Failing([b"", OK])
    with Client(server.url, key="k") as client, pytest.raises(UnreachableError):
        client.approve("run_x")
    assert len(server.requests) == 1


def test_what_was_certainly_not_sent_is_sent_again() -> None:
    """Nobody listens there yet, as in a restart."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    answered: list[str] = []

    def approve() -> None:
        with Client(f"http://127.0.0.1:{port}", key="k", attempts_max=10_000) as client:
            answered.append(client.approve("run_x").step)

    thread = threading.Thread(target=approve)
    thread.start()
    server = Failing([answer(200, {"step": "1:1"})], port)
    thread.join(60)
    assert answered == ["1:1"] and len(server.requests) == 1


def test_a_stream_that_breaks_goes_on_where_it_was() -> None:
    head = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    first = head + b'retry: 1\n\nid: 1\nevent: accepted\ndata: {"seq": 1}\n\nid: 2\nevent: em'
    second = head + b'id: 2\nevent: ended\ndata: {"state": "SUCCEEDED"}\n\n'
    server = Failing([first, second])
    with Client(server.url, key="k") as client:
        assert [(event.id, event.kind) for event in client.events("run_x")] == [(1, "accepted"), (2, "ended")]
    assert b"last-event-id: 1" in server.requests[1].lower()


@given(st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from(["emit", "ended"]), st.text())), st.data())
def test_events_arrive_in_any_pieces(events: list[tuple[int, str, str]], data: st.DataObject) -> None:
    text = b"retry: 1000\n\n: still here\n\n"
    for number, kind, value in events:
        text += b"id: %d\nevent: %b\ndata: %b\n\n" % (number, kind.encode(), json.dumps({"v": value}).encode())
    reader, found, at = EventReader(), list[Event](), 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text)))
        found += reader.feed(text[at : at + size])
        at += size
    assert [(event.id, event.kind, event.data["v"]) for event in found] == events
