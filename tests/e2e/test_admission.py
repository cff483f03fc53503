"""A full node at its HTTP door, with the real client."""

from collections.abc import Iterator
from pathlib import Path

import http_fixture
import pytest
from test_http_api import Served, client, problem

from agentrt import Client, Runtime, load_config
from agentrt.errors import QueueFullError
from agentrt.http.app import make_app
from agentrt.http.keys import KeyRing
from agentrt.http.server import HttpServer, listen

PLACES = 3


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Served]:
    """A node with few places, and one fewer for tenant acme."""
    settings = {
        "store.path": str(tmp_path / "store"),
        "store.force_place": True,
        "scheduler.queue_items_max": PLACES,
        "flow.queue_tier_pct": (100, 100, 100, 100),
        "flow.tenants": {"acme": {"queue_items_max": PLACES - 1}},
        "limits.hot_ms": 3_600_000,
    }
    with Runtime(config=load_config(env={}, arguments=settings), tools=http_fixture.TOOLS) as runtime:
        runtime.register_sync(http_fixture.ask)
        keys, secrets = KeyRing(runtime), []

        async def before() -> None:
            secrets.append((await keys.make("*", ["admin"], 0))[1])

        server = HttpServer(make_app(runtime, keys), listen("127.0.0.1", 0), before=before)
        server.start()
        try:
            yield Served(runtime, server, client(server, secrets[0]))
        finally:
            server.stop(5)


def test_callers_of_a_full_node_are_told_at_once_when_to_come_back(small: Served) -> None:
    acme = small.client("acme", ["runs:write", "runs:decide", "runs:read"])
    runs = [acme.post("/v1/runs", json={"agent": "ask", "tier": "batch"}).json()["run_id"] for _ in range(PLACES - 1)]
    refused = acme.post("/v1/runs", json={"agent": "ask", "tier": "batch"})
    found = problem(refused, 429, "queue_full")
    assert found["limit"] == "flow.queue_items_max" and "tenant acme" in found["detail"]
    assert 1 <= float(found["retry_after_s"]) <= int(refused.headers["retry-after"]) <= 600

    other = small.client("other", ["runs:write"])
    assert other.post("/v1/runs", json={"agent": "ask"}).status_code == 202
    found = problem(other.post("/v1/runs", json={"agent": "ask"}), 429, "queue_full")
    assert found["limit"] == "scheduler.queue_items_max"
    assert small.runtime.statistics_sync().engine.refused == 2

    for run_id in runs:
        assert acme.post(f"/v1/runs/{run_id}/approvals", json={"approved": True}).status_code == 200
        small.runtime.run(run_id).wait_sync(30)
    assert acme.post("/v1/runs", json={"agent": "ask"}).status_code == 202


def test_the_client_raises_what_the_node_said(small: Served) -> None:
    host, port = small.server.address
    secret = small.admin.post("/v1/keys", json={"tenant": "acme", "scopes": ["runs:write"], "max_tier": 1}).json()
    with Client(f"http://{host}:{port}", key=secret["secret"], attempts_max=1) as asks:
        for _ in range(PLACES - 1):
            asks.submit("ask")
        with pytest.raises(QueueFullError) as refused:
            asks.submit("ask")
    assert refused.value.limit == "flow.queue_items_max"
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
