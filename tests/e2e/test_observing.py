"""Metrics and logs of a node that works, as those who watch it get them."""

import json
import re
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from promql import Scrape, ask
from serve_kit import AGENTS, Serving

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.http.app import make_app
from agentrt.http.keys import KeyRing
from agentrt.http.server import HttpServer, listen
from agentrt.observe.histogram import DURATION_BOUNDS_NS
from agentrt.testing.models import ModelServer, Reply

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
SETTINGS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
NODE = f'[node]\nload = ["{AGENTS}"]\n'


def scrape(url: str, key: str) -> dict[str, float]:
    answer = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"}, timeout=30)
    assert answer.status_code == 200, answer.text
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_settings_of_the_page_are_settings(tmp_path: Path) -> None:
    assert len(SETTINGS) == 3
    for number, text in enumerate(SETTINGS):
        tomllib.loads(text)
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        load_config(file, env={})


def test_what_a_node_tells_of_its_work(tmp_path: Path) -> None:
    with Serving(
        tmp_path,
        NODE
        + "\n".join(text for text in SETTINGS if "[traces]" not in text).replace('runs = "failed"', 'runs = "all"'),
    ) as node:
        admin = {"authorization": f"Bearer {node.key}"}
        with httpx.Client(base_url=node.url, headers=admin, timeout=30) as http:
            before = scrape(node.url, node.key)
            for number in range(20):  # other tenants, other keys, the same series
                made = http.post(
                    "/v1/runs",
                    json={"agent": "greet", "input": "Ada", "tenant": f"tenant-{number}", "tier": number % 3},
                    params={"wait": 30},
                )
                assert made.json()["state"] == "SUCCEEDED", made.text
            run_id = http.post("/v1/runs", json={"agent": "ask", "tenant": "acme"}).json()["run_id"]
            http.post(f"/v1/runs/{run_id}/cancel", json={"reason": "not needed"})
            with http.stream("GET", f"/v1/runs/{run_id}/events") as stream:
                stream.read()  # until its end
            key = http.post("/v1/keys", json={"tenant": "*", "scopes": ["node:read"]}).json()["secret"]
            found = scrape(node.url, key)
            blind = http.post("/v1/keys", json={"tenant": "acme", "scopes": ["runs:read"]}).json()["secret"]
        assert httpx.get(f"{node.url}/metrics").status_code == 401
        assert httpx.get(f"{node.url}/metrics", headers={"authorization": f"Bearer {blind}"}).status_code == 403
        assert set(found) == set(before), "series came or went"
        ended = sum(found[f"agentrt_runs_ended_total class=agent state=SUCCEEDED tier={tier}"] for tier in range(3))
        assert ended == 20 and found["agentrt_run_seconds_count class=agent tier=0"] == 7
        assert sum(value for name, value in found.items() if "state=CANCELLED" in name) == 1
        assert found["agentrt_steps_total op=tool.call outcome=ok"] == 20
        assert found["agentrt_queue_wait_seconds_count tier=0"] >= 7  # each turn of a Python agent waits for a slot
        assert found["agentrt_slo_runs_total slo=urgent"] == 7
        assert found["agentrt_slo_objective_ratio slo=urgent"] == 0.995
        assert found["agentrt_store_commits_total"] > before["agentrt_store_commits_total"]
        assert node.stop() == 0
    lines = [json.loads(line) for line in node.stderr.read_text().splitlines() if line.startswith("{")]
    ends = {line["run_id"]: line for line in lines if line["logger"] == "agentrt.runs"}
    assert len(ends) == 21 and {line["state"] for line in ends.values()} == {"SUCCEEDED", "CANCELLED"}
    assert ends[run_id]["tenant"] == "acme" and ends[run_id]["code"] == "run_cancelled"
    assert "not needed" not in node.stderr.read_text(), "texts of errors are not logged"
    assert node.key not in node.stderr.read_text()


def test_a_look_ends_with_its_key(tmp_path: Path) -> None:
    with Serving(tmp_path, NODE) as node, node.client() as client:
        made = client.make_key("*", ["node:read"])
        headers = {"authorization": f"Bearer {made.secret}"}
        with httpx.stream("GET", f"{node.url}/v1/live", headers=headers, timeout=30) as stream:
            lines = stream.iter_lines()
            assert any(line.startswith("data: ") for line in lines)
            client.remove_key(made.id)
            for _ in lines:
                pass
        assert httpx.get(f"{node.url}/v1/live", headers=headers).status_code == 401


def test_a_busy_control_loop_is_seen(tmp_path: Path) -> None:
    """The loop sleeps while it is looked at: what was counted and the age of its last sign of life are still told."""
    with Runtime(store=tmp_path) as runtime:
        go, asleep = threading.Event(), threading.Event()

        def sleep() -> None:
            asleep.set()
            assert go.wait(60)

        keys, secrets = KeyRing(runtime), []

        async def before() -> None:
            secrets.append((await keys.make("*", ["node:read"], 0))[1])

        server = HttpServer(make_app(runtime, keys), listen("127.0.0.1", 0), before=before)
        server.start()
        try:
            runtime._control.post(sleep)
            assert asleep.wait(60)
            found = scrape(f"http://127.0.0.1:{server.address[1]}", secrets[0])
            assert found["agentrt_loop_heartbeat_age_seconds"] >= 1.5 and "agentrt_runs_live" not in found
            assert found["agentrt_runs_accepted_total class=agent tier=1"] == 0
        finally:
            go.set()
            server.stop(5)


def test_every_query_of_the_page_answers_what_happened(tmp_path: Path) -> None:
    """A node does what is known beforehand, beside two scrapes; each query is asked, and none is empty."""
    fixture = Path(__file__).with_name("metrics_fixture.py")
    rows = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    queries = {question.strip(): query for question, query in rows}
    with ModelServer() as server:
        server.script = [
            Reply(status=429),
            Reply(text="fine", usage=(1_000, 500)),
            Reply(text="good", usage=(1_000, 500)),
        ]
        settings = f"""
[node]
load = ["{fixture}"]
[models.providers.server]
base_url = "{server.url}"
[models.catalog.test]
provider = "server"
input_price = 1_000_000
output_price = 2_000_000
[models.profiles.work]
models = ["test"]
[flow]
retry_base_ms = 1
[slo.targets.urgent]
tier = 0
latency_ms = 600_000
objective_permille = 995
"""
        with Serving(tmp_path, settings) as node, node.client() as client:

            def look() -> Scrape:
                headers = {"authorization": f"Bearer {node.key}"}
                return Scrape(httpx.get(f"{node.url}/metrics", headers=headers, timeout=30).text)

            def end(run_id: str) -> float:
                for _ in client.events(run_id):
                    pass
                run = client.run(run_id)
                assert run.ended_at is not None
                return run.ended_at - run.accepted_at

            end(client.submit("works", "before the first scrape").run_id)
            before = look()
            server.script = [
                Reply(status=429),
                Reply(text="good", usage=(1_000, 500)),
                Reply(text="good", usage=(1_000, 500)),
            ]
            took_s = [end(client.submit("works", "a", tier=0).run_id), end(client.submit("works", "b", tier=0).run_id)]
            end(client.submit("fails", tier=0).run_id)
            end(client.submit("spends").run_id)
            asked_s = time.time()
            approved = client.submit("asks").run_id
            next(event for event in client.events(approved) if event.kind == "step_prepared")
            client.approve(approved)
            end(approved)
            waited_s = time.time() - asked_s
            after = look()
            assert node.stop() == 0

    def told(question: str) -> float:
        ((labels, value),) = ask(queries.pop(question), before, after).items()
        assert labels == () or dict(labels).keys() <= {"instance", "job"}
        return value

    # Runs: 5 ended, 3 of them well. Steps: works 2 + 2, fails 1, spends 1 (and one refused), asks 1.
    assert told("share of runs that succeed") == 3 / 5
    assert told("runs that spend their budget") == 1 / 5
    steps = sum(value for name, value in _since(before, after, "agentrt_steps_total"))
    assert told("steps of a run") == steps / 5
    assert steps == 7
    assert told("model calls of a run") == 2 / 5
    assert told("share of tool calls that fail") == 1 / 4
    assert told("retries of a step") == (3 + 1) / steps  # a tool's three times, a model's once
    assert told("calls that a model's provider fails") == 1 / 3
    assert told("cost of a run that succeeds") == pytest.approx(2 * (1_000 * 1 + 500 * 2) / 1e6 / 3)
    p99 = told("p99 of a class at a tier")
    bounds = [0.0, *(bound / 1e9 for bound in DURATION_BOUNDS_NS)]
    slowest = next(index for index, bound in enumerate(bounds) if max(took_s) <= bound)
    assert p99 <= bounds[slowest]
    assert 0 < told("p99 of urgent work's wait for a CPU slot") < 70
    people = told("how long people take to approve")
    assert 0 <= people <= bounds[next(index for index, bound in enumerate(bounds) if waited_s <= bound)]
    assert told("fuel of a run") >= 0
    assert told("runs that are stuck") == 0
    burns = re.findall(r"^`(\(1 - .*)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    ((_, value),) = ask(burns[0], before, after).items()
    assert value == pytest.approx((1 / 3) / (1 - 0.995))
    assert not queries, f"not tried: {list(queries)}"


def _since(before: Scrape, after: Scrape, name: str) -> Iterator[tuple[str, float]]:
    for labels, value in after.samples[name].items():
        yield str(labels), value - before.samples[name][labels]
