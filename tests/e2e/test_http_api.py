"""The HTTP API over a real socket, as a client sees it."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import http_fixture
import httpx
import msgspec
import pytest

from agentrt import Runtime
from agentrt.engine.schedules import Schedule
from agentrt.http.app import make_app
from agentrt.http.keys import KeyRing
from agentrt.http.server import HttpServer, listen
from agentrt.stores.base import SCHEDULES


class Served(msgspec.Struct):
    """A runtime behind a socket, and a client with a key for everything."""

    runtime: Runtime
    server: HttpServer
    admin: httpx.Client

    def client(self, tenant: str, scopes: list[str], max_tier: int = 1) -> httpx.Client:
        made = self.admin.post("/v1/keys", json={"tenant": tenant, "scopes": scopes, "max_tier": max_tier})
        assert made.status_code == 201, made.text
        return client(self.server, made.json()["secret"])


def client(server: HttpServer, secret: str) -> httpx.Client:
    host, port = server.address
    return httpx.Client(base_url=f"http://{host}:{port}", headers={"authorization": f"Bearer {secret}"}, timeout=30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Runtime(store=tmp_path_factory.mktemp("store"), tools=http_fixture.TOOLS) as runtime:
        for agent in http_fixture.AGENTS:
            runtime.register_sync(agent, short=True if agent is http_fixture.ask else None)
        keys, secrets = KeyRing(runtime), []

        async def before() -> None:
            await keys.load()
            secrets.append((await keys.make("*", ["admin"], 0))[1])

        server = HttpServer(make_app(runtime, keys), listen("127.0.0.1", 0), before=before)
        server.start()
        try:
            yield Served(runtime, server, client(server, secrets[0]))
        finally:
            server.stop(5)


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    found: dict[str, Any] = answer.json()
    assert (found["status"], found["code"]) == (status, code)
    return found


def events(answer: httpx.Response) -> list[tuple[int, str, Any]]:
    """(id, kind, data) of a finished stream."""
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((int(fields["id"]), fields["event"], msgspec.json.decode(fields["data"])))
    return found


def test_a_run_from_its_start_to_its_end(served: Served) -> None:
    started = served.admin.post("/v1/runs", json={"agent": "greet", "input": "Ada"}, params={"wait": 20})
    assert started.status_code == 200, started.text
    run = started.json()
    assert (run["state"], run["result"], run["tenant"]) == ("SUCCEEDED", "hello Ada", "default")
    assert float(started.headers["server-timing"].removeprefix("total;dur=")) > 0
    assert started.headers["location"] == f"/v1/runs/{run['run_id']}"
    assert served.admin.get(started.headers["location"]).json() == run
    (step,) = served.admin.get(f"/v1/runs/{run['run_id']}/steps").json()["steps"]
    assert (step["op"], step["state"], step["ok"]) == ("tool.call", "COMMITTED", True)


def test_events_go_on_where_the_client_was(served: Served) -> None:
    run_id = served.admin.post("/v1/runs", json={"agent": "count", "input": 3}).json()["run_id"]
    everything = events(served.admin.get(f"/v1/runs/{run_id}/events"))
    assert [number for number, _, _ in everything] == list(range(1, len(everything) + 1))
    assert [data["data"] for _, kind, data in everything if kind == "emit"] == [0, 1, 2]
    assert everything[-1][1] == "ended" and everything[-1][2]["state"] == "SUCCEEDED"
    for after in range(len(everything)):
        rest = served.admin.get(f"/v1/runs/{run_id}/events", headers={"last-event-id": str(after)})
        assert events(rest) == everything[after:]


def test_nobody_is_kept_waiting_for_a_person(served: Served) -> None:
    began_s = time.monotonic()
    answer = served.admin.post("/v1/runs", json={"agent": "ask"}, params={"wait": 29})
    assert answer.status_code == 202 and time.monotonic() - began_s < 25
    slow = served.admin.post("/v1/runs", json={"agent": "nap", "input": 0.6}, params={"wait": 29})
    assert (slow.status_code, slow.json()["result"]) == (200, "awake")  # later than at once, and with nobody
    assert served.admin.post("/v1/runs", json={"agent": "nap", "input": 60}, params={"wait": 0.4}).status_code == 202
    assert served.admin.post("/v1/runs", json={"agent": "count", "input": 1}, params={"wait": 5}).status_code == 202


def test_an_approval_counts_once(served: Served) -> None:
    run_id = served.admin.post("/v1/runs", json={"agent": "ask"}).json()["run_id"]
    with served.admin.stream("GET", f"/v1/runs/{run_id}/events") as stream:
        for line in stream.iter_lines():
            if line == "event: step_prepared":
                break
    answered = served.admin.post(f"/v1/runs/{run_id}/approvals", json={"approved": True, "by": "Grace"})
    assert answered.status_code == 200, answered.text
    assert events(served.admin.get(f"/v1/runs/{run_id}/events"))[-1][2]["result"] == {"approved": True, "by": "Grace"}
    problem(served.admin.post(f"/v1/runs/{run_id}/approvals", json={"approved": False}), 409, "step_settled")


def test_tenants_do_not_see_each_other(served: Served) -> None:
    acme = served.client("acme", ["runs:read", "runs:write"])
    other = served.client("other", ["runs:read", "runs:write", "runs:decide"])
    run_id = acme.post("/v1/runs", json={"agent": "greet", "input": "x"}).json()["run_id"]
    assert acme.get(f"/v1/runs/{run_id}").json()["tenant"] == "acme"
    unknown = "run_01ARZ3NDEKTSV4RRFFQ69G5FAV"
    for method, path in (
        ("GET", ""),
        ("GET", "/steps"),
        ("GET", "/decisions"),
        ("GET", "/events"),
        ("POST", "/cancel"),
        ("POST", "/resume"),
        ("POST", "/steps/1:1/retry"),
    ):
        foreign = problem(other.request(method, f"/v1/runs/{run_id}{path}"), 404, "unknown_run")
        missing = problem(other.request(method, f"/v1/runs/{unknown}{path}"), 404, "unknown_run")
        assert foreign["detail"].replace(run_id, unknown) == missing["detail"]
    assert other.get("/v1/runs").json() == {"runs": []}
    assert other.get("/v1/runs", params={"tenant": "acme"}).json() == {"runs": []}
    assert [run["run_id"] for run in acme.get("/v1/runs").json()["runs"]] == [run_id]
    problem(other.post("/v1/runs", json={"agent": "greet", "tenant": "acme"}), 403, "forbidden")
    problem(acme.post(f"/v1/runs/{run_id}/approvals", json={"approved": True}), 403, "forbidden")
    problem(acme.get("/v1/keys"), 403, "forbidden")
    problem(acme.post("/v1/runs", json={"agent": "greet", "tier": 0}), 403, "forbidden")


def test_a_schedule_is_no_way_round_the_tier_of_a_key(served: Served) -> None:
    served.runtime.register_sync(http_fixture.count, tier=0)
    try:
        low = served.client("low", ["runs:read", "runs:write"], max_tier=2)
        made = low.put("/v1/schedules/often", json={"cron": "* * * * *", "agent": "count", "input": 1})
        assert made.status_code == 200
        rows = asyncio.run(served.runtime.read_store(lambda store: store.scan_rows(SCHEDULES)))
        (kept,) = (msgspec.msgpack.decode(value, type=Schedule) for _, value in rows)
        assert (kept.tenant, kept.tier) == ("low", 2)
        assert low.delete("/v1/schedules/often").status_code == 204
        problem(low.put("/v1/schedules/a", json={"cron": "* * * * *", "agent": "count", "tier": 1}), 403, "forbidden")
    finally:
        served.runtime.register_sync(http_fixture.count)


def test_a_stream_ends_with_its_key(served: Served) -> None:
    reader = served.client("acme", ["runs:read", "runs:write"])
    run_id = reader.post("/v1/runs", json={"agent": "ask"}).json()["run_id"]
    key_id = max(served.admin.get("/v1/keys").json()["keys"], key=lambda key: key["created_at"])["id"]
    with reader.stream("GET", f"/v1/runs/{run_id}/events") as stream:
        lines = stream.iter_lines()
        assert any(line == "event: step_prepared" for line in lines)
        assert served.admin.delete(f"/v1/keys/{key_id}").status_code == 204
        served.admin.post(f"/v1/runs/{run_id}/cancel")
        assert not [line for line in lines if line == "event: ended"]


def test_the_same_idempotency_key_is_the_same_run(served: Served) -> None:
    def start(name: str) -> httpx.Response:
        return served.admin.post("/v1/runs", json={"agent": "greet", "input": name}, headers={"idempotency-key": "k1"})

    assert start("Ada").json() == start("Ada").json()
    problem(start("Grace"), 409, "idempotency_conflict")


def test_keys_that_are_gone_or_wrong(served: Served) -> None:
    reader = served.client("acme", ["runs:read"])
    key_id = next(key["id"] for key in served.admin.get("/v1/keys").json()["keys"] if key["scopes"] == ["runs:read"])
    assert "hash" not in served.admin.get("/v1/keys").text and "secret" not in served.admin.get("/v1/keys").text
    assert reader.get("/v1/runs").status_code == 200
    assert served.admin.delete(f"/v1/keys/{key_id}").status_code == 204
    problem(reader.get("/v1/runs"), 401, "unauthorized")
    for header in ("", "Bearer", "Bearer agentrt_x", "Basic YTpi", f"Bearer agentrt_{'x' * 12}_{'y' * 43}"):
        answer = httpx.get(f"{served.admin.base_url}/v1/runs", headers={"authorization": header} if header else {})
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "bad_request"),
        (b"[]", 422, "input"),
        (b'{"agent": "greet", "inptu": 1}', 422, "input"),
        (b'{"agent": "nobody"}', 404, "unknown_agent"),
        (b'{"agent": "greet", "tier": 7}', 422, "input"),
        (b'{"agent": "greet", "budget": {"x": 1}}', 422, "input"),
        (b'{"agent": "greet", "run_at": -1}', 422, "input"),
        (b'{"agent": "greet", "input": "' + b"x" * 2_100_000 + b'"}', 413, "too_large"),
        (b"\xff\xfe", 400, "bad_request"),
        (b'{"agent": "greet", "input": ' + b"[" * 100_000, 400, "bad_request"),
    ],
)
def test_bad_bodies_are_refused_by_name(served: Served, body: bytes, status: int, code: str) -> None:
    problem(served.admin.post("/v1/runs", content=body), status, code)


def test_tiers_and_tenants(served: Served) -> None:
    tiers = served.admin.get("/v1/tiers").json()["tiers"]
    assert [(tier["tier"], tier["name"]) for tier in tiers] == [
        (0, "critical"),
        (1, "interactive"),
        (2, "batch"),
        (3, "maintenance"),
    ]
    started = served.admin.post(
        "/v1/runs", json={"agent": "greet", "input": "x", "tier": 2}, params={"wait": 20}
    ).json()
    assert started["resume_token"].startswith(f"{started['run_id']}/1/{started['version']}/")
    assert served.admin.get("/v1/tiers").json()["tiers"][2]["started"] > tiers[2]["started"]
    off = served.admin.put("/v1/tenants/lent", json={"enabled": False, "reason": "unpaid"})
    assert off.json() == {"tenant": "lent", "enabled": False, "reason": "unpaid"}
    assert served.admin.get("/v1/tenants").json()["tenants"] == [off.json()]
    refused = served.admin.post("/v1/runs", json={"agent": "greet", "tenant": "lent"})
    assert refused.json()["code"] == "tenant_disabled" and refused.status_code < 500
    assert served.admin.put("/v1/tenants/lent", json={"enabled": True}).status_code == 200
    assert served.admin.post("/v1/runs", json={"agent": "greet", "input": "x", "tenant": "lent"}).status_code == 202
    problem(served.client("acme", ["runs:write"]).put("/v1/tenants/lent", json={"enabled": False}), 403, "forbidden")


def test_what_is_not_there(served: Served) -> None:
    problem(served.admin.get("/v1/nothing"), 404, "not_found")
    problem(served.admin.delete("/v1/runs"), 405, "method")
    problem(served.admin.get("/v1/runs/nonsense"), 404, "unknown_run")
    problem(served.admin.get("/v1/runs", params={"limit": "many"}), 422, "input")
    assert "TIMED_OUT" in problem(served.admin.get("/v1/runs", params={"state": "GONE"}), 422, "input")["hint"]
    slip = problem(served.admin.get("/v1/runs", params={"staet": "FAILED"}), 422, "input")
    assert "staet" in slip["detail"] and "state" in slip["hint"]
    problem(served.admin.get("/v1/queues", params={"tenant": "acme"}), 422, "input")


def test_runs_are_found(served: Served) -> None:
    """The newest first, by what is known of them, page by page; of other tenants none."""
    client, other = served.client("finder", ["runs:read", "runs:write"]), served.client("other", ["runs:read"])
    made = []
    for agent, given in (("greet", "a"), ("count", 1), ("ask", None), ("greet", "b"), ("ask", None)):
        made.append(client.post("/v1/runs", json={"agent": agent, "input": given}).json()["run_id"])

    def found(**query: Any) -> list[str]:
        ids: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = client.get("/v1/runs", params=query | after).json()
            ids += [run["run_id"] for run in page["runs"]]
            if "next" not in page:
                return ids
            after = {"after": page["next"]}

    assert found() == made
    for limit in (1, 2, 5, 100):
        assert found(newest_first="true", limit=limit) == made[::-1]
    assert found(agent="greet") == [made[0], made[3]]
    assert found(agent="gree") == []
    assert found(text="GREE", newest_first="true") == [made[3], made[0]]
    assert found(text=made[1][-8:].lower()) == [made[1]]
    assert found(text="ask", state="succeeded") == []
    assert other.get("/v1/runs", params={"text": "ask"}).json()["runs"] == []
    problem(client.get("/v1/runs", params={"newest_first": "perhaps"}), 422, "input")


def test_a_step_says_how_long_it_took(served: Served) -> None:
    run_id = served.admin.post("/v1/runs", json={"agent": "nap", "input": 0.2}, params={"wait": 20}).json()["run_id"]
    (step,) = served.admin.get(f"/v1/runs/{run_id}/steps").json()["steps"]
    assert 0.2 <= step["ended_at"] - step["started_at"] < 60
    run_id = served.admin.post("/v1/runs", json={"agent": "ask"}).json()["run_id"]
    steps: list[Any] = []
    while not steps:  # it waits: so far there is no end
        steps = served.admin.get(f"/v1/runs/{run_id}/steps").json()["steps"]
    assert "started_at" in steps[0] and "ended_at" not in steps[0]
