"""Metrics and logs of a node that works, as those who watch it get them."""

import json
import re
import threading
import tomllib
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serve_kit import AGENTS, Serving

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.http.app import make_app
from agentrt.http.keys import KeyRing
from agentrt.http.server import HttpServer, listen

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
