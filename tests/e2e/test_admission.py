"""A full node at its HTTP door, with the real client."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import http_fixture
import pytest
from test_http_api import Served, client, problem

from agentrt import Client, Runtime, Via, load_config
from agentrt.engine import edge
from agentrt.errors import QueueFullError
from agentrt.http.app import make_app
from agentrt.http.keys import KeyRing
from agentrt.http.server import HttpServer, listen

PLACES = 3


@contextlib.contextmanager
def serving(runtime: Runtime, agents: list[Any]) -> Iterator[Served]:
    for agent in agents:
        runtime.register_sync(agent)
    keys, secrets = KeyRing(runtime), []

    async def before() -> None:
        secrets.append((await keys.make("*", ["admin"], 0))[1])

    server = HttpServer(make_app(runtime, keys), listen("127.0.0.1", 0), before=before)
    server.start()
    try:
        yield Served(runtime, server, client(server, secrets[0]))
    finally:
        server.stop(5)


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
    with (
        Runtime(config=load_config(env={}, arguments=settings), tools=http_fixture.TOOLS) as runtime,
        serving(runtime, [http_fixture.ask]) as served,
    ):
        yield served


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
        while not acme.get(f"/v1/runs/{run_id}").json().get("steps"):  # it has not come to its question yet
            time.sleep(0.01)
        assert acme.post(f"/v1/runs/{run_id}/approvals", json={"approved": True}).status_code == 200
        small.runtime.run(run_id).wait_sync(30)
    assert acme.post("/v1/runs", json={"agent": "ask"}).status_code == 202


def test_who_can_only_be_refused_is_refused_unread_and_counted(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is let in as soon as there is room, whatever was said a moment ago."""
    monkeypatch.setattr(edge, "_FRESH_NS", 3_600 * 10**9)
    low = small.client("low", ["runs:write", "runs:decide", "runs:read"], max_tier=2)
    runs = [low.post("/v1/runs", json={"agent": "ask"}).json()["run_id"] for _ in range(PLACES)]
    first = problem(low.post("/v1/runs", json={"agent": "ask"}), 429, "queue_full")
    for _ in range(3):
        refused = low.post("/v1/runs", content=b"what nobody reads", headers={"content-type": "application/json"})
        assert problem(refused, 429, "queue_full") == first and "retry-after" in refused.headers
    problem(small.client("other", ["runs:read"]).post("/v1/runs", json={"agent": "ask"}), 403, "forbidden")
    while small.runtime.statistics_sync().engine.refused < 4:
        time.sleep(0.01)
    counted = small.runtime.statistics_sync().engine
    assert counted.refused == counted.decisions["admission/refuse/node"] == 4

    small.runtime.run(runs[0]).cancel_sync()
    small.runtime.run(runs[0]).wait_sync(30)
    assert low.post("/v1/runs", json={"agent": "ask"}).status_code == 202


def test_a_repeat_of_an_accepted_request_gets_its_run_from_a_full_node(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, where refusals are given without a look at the request, and for who waits in the program."""
    monkeypatch.setattr(edge, "_FRESH_NS", 3_600 * 10**9)
    low = small.client("low", ["runs:write"], max_tier=2)

    def post(who: Any, key: str, body: Any = None) -> Any:
        return who.post("/v1/runs", json=body or {"agent": "ask"}, headers={"idempotency-key": key})

    runs = [post(low, f"key {number}").json()["run_id"] for number in range(PLACES)]
    problem(post(low, "new"), 429, "queue_full")  # from now on as at the edge
    for number in range(PLACES):
        again = post(low, f"key {number}")
        assert (again.status_code, again.json()["run_id"]) == (202, runs[number])
    problem(post(low, "key 0", {"agent": "ask", "input": 7}), 409, "idempotency_conflict")
    unread = low.post("/v1/runs", content=b"what nobody reads", headers={"idempotency-key": "unheard of"})
    problem(unread, 429, "queue_full")
    problem(post(small.client("other", ["runs:write"], max_tier=2), "key 0"), 429, "queue_full")  # it is low's
    any_tenant = small.client("*", ["runs:write"], max_tier=2)
    again = post(any_tenant, "key 0", {"agent": "ask", "tenant": "low"})
    assert (again.status_code, again.json()["run_id"]) == (202, runs[0])

    tier = {"tier": 2, "tenant": "low", "idempotency_key": "key 1"}
    assert small.runtime.submit_sync("ask", **tier).run_id == runs[1]


def errors_alive() -> int:
    return sum(isinstance(each, QueueFullError) for each in gc.get_objects())


def test_no_refusal_outlives_its_caller(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody holds is gone without the garbage collector, whoever was refused."""
    runtime, other = small.runtime, small.client("other", ["runs:write"])
    for _ in range(PLACES):
        runtime.submit_sync("ask")
    monkeypatch.setattr(edge, "_FRESH_NS", 0)  # over HTTP the whole way, too
    there = Via(wait=False)

    async def refused() -> None:
        for _ in range(10):
            with contextlib.suppress(QueueFullError):
                await runtime.submit("ask", via=there)
        found = await runtime.submit_many("ask", [None] * 10, via=there)
        assert all(isinstance(error, QueueFullError) for error in found)

    def all_refused() -> None:
        asyncio.run(refused())
        for _ in range(10):
            assert other.post("/v1/runs", json={"agent": "ask"}).status_code == 429

    all_refused()
    gc.collect()
    gc.disable()
    try:
        before = errors_alive()  # what is said of the last one is kept
        all_refused()
        assert errors_alive() <= before
    finally:
        gc.enable()


RULES = """
[[rules]]
door = "http"
type = "question.*"
headers = { x-kind = "short*" }
set_agent = "greet"
set_tier = "urgent"
set_key = "{source}:{header:x-id}"
[[rules]]
door = "http"
agent = "count"
refuse = "nobody counts here"
[[rules]]
door = "cli"
set_agent = "ask"
"""


def test_rules_decide_over_http_what_a_request_becomes(tmp_path: Path) -> None:
    (tmp_path / "flow.toml").write_text(RULES)
    settings = {
        "store.path": str(tmp_path / "store"),
        "store.force_place": True,
        "flow.file": str(tmp_path / "flow.toml"),
        "flow.tenants": {"acme": {"max_tier": 1}},
    }
    with (
        Runtime(config=load_config(env={}, arguments=settings), tools=http_fixture.TOOLS) as runtime,
        serving(runtime, [http_fixture.greet, http_fixture.count]) as served,
    ):
        asked = {"input": "Ada", "type": "question.new", "source": "shop"}
        headers = {"x-kind": "short one", "x-id": "7"}
        first = served.admin.post("/v1/runs", json=asked, headers=headers, params={"wait": 30})
        assert (first.status_code, first.json()["agent"], first.json()["base_tier"]) == (200, "greet", 0)
        again = served.admin.post("/v1/runs", json=asked, headers=headers | {"idempotency-key": "another"})
        assert again.json()["run_id"] == first.json()["run_id"]
        problem(served.admin.post("/v1/runs", json=asked, headers={"x-kind": "short"}), 422, "input")
        problem(served.admin.post("/v1/runs", json={"agent": "count", "input": 1}), 403, "denied")
        problem(served.admin.post("/v1/runs", json={"input": 1}), 422, "input")

        acme = served.client("acme", ["runs:write", "runs:read"], max_tier=0)
        run_id = acme.post("/v1/runs", json=asked, headers=headers | {"x-id": "8"}).json()["run_id"]
        assert acme.get(f"/v1/runs/{run_id}").json()["base_tier"] == 1  # the tenant's bound
        late = served.client("late", ["runs:write", "runs:read"], max_tier=3)
        run_id = late.post("/v1/runs", json=asked, headers=headers | {"x-id": "9"}).json()["run_id"]
        assert late.get(f"/v1/runs/{run_id}").json()["base_tier"] == 3  # the key's


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
