"""`agentrt serve` from its start to its end, and the command line against it."""

import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_kit import AGENTS, Serving, agentrt, command_line, lines, make_certificate

from agentrt.cli import exits
from agentrt.client import Client
from agentrt.doctor import selftest
from agentrt.errors import AgentrtError, ClosedError, QueueFullError, UnauthorizedError, UnreachableError


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("node")
    wasm = folder / "nothing.wasm"
    wasm.write_bytes(selftest.module(selftest.RETURNS))
    settings = f"""
[node]
load = ["{AGENTS}", "{wasm}"]
[node.agents.batched]
source = "{AGENTS}:greet"
tier = 2
[http]
streams_per_tenant_max = 3
"""
    with Serving(folder, settings) as serving:
        yield serving


def test_what_is_loaded(node: Serving) -> None:
    code, out, _ = agentrt(node, "agents", "--json")
    agents = {agent["name"]: agent for agent in lines(out)}
    assert code == exits.OK.code
    assert {name: (a["backend"], a["tier"], a.get("short", False)) for name, a in agents.items()} == {
        "greet": ("python", 1, True),
        "count": ("python", 1, False),
        "chatter": ("python", 1, False),
        "ask": ("python", 1, False),
        "nap": ("python", 1, True),
        "toiler": ("python", 1, False),
        "batched": ("python", 2, True),
        "nothing": ("wasm", 1, False),
    }
    assert agents["batched"]["version"] == agents["greet"]["version"]
    assert node.told["tools"] == ["title", "toil"]


def test_the_admin_key_is_printed_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    with Serving(tmp_path, "[node]\n") as first:
        key = first.key
        assert key.startswith("agentrt_") and first.stop() == 0
    with Serving(tmp_path, "[node]\n", key=key) as second:
        assert second.told["admin_key"] is None
        with second.client() as client:
            assert [each.scopes for each in client.keys().keys] == [["admin"]]
        with Client(second.url, key=key[:-3] + "xxx") as client, pytest.raises(UnauthorizedError):
            client.keys()
    secret = key[len("agentrt_") + 12 + 1 :].encode()  # it may have "_" in it, and so may the id
    assert len(secret) == 43
    assert secret not in first.stderr.read_bytes()
    for file in (tmp_path / "store").rglob("*"):
        assert not file.is_file() or secret not in file.read_bytes(), file


def test_runs_on_the_command_line(node: Serving) -> None:
    code, out, err = agentrt(node, "run", "greet", "--input", '"Ada"', "--json")
    (run,) = lines(out)
    assert (code, run["state"], run["result"], err) == (0, "SUCCEEDED", "hello Ada", "")
    code, out, _ = agentrt(node, "runs", "show", run["run_id"], "--json")
    assert [step["op"] for step in lines(out)[0]["steps"]] == ["tool.call"]
    code, out, _ = agentrt(node, "runs", "tail", run["run_id"], "--json")
    assert (code, [line["event"] for line in lines(out)][-1]) == (0, "ended")
    code, out, _ = agentrt(node, "runs", "ls", "--json")
    assert run["run_id"] in [each["run_id"] for each in lines(out)]
    code, out, _ = agentrt(node, "runs", "ls")
    assert run["run_id"] in out and code == 0
    assert agentrt(node, "run", "count", "--input", '"no number"')[0] == exits.FAILED.code


def test_people_on_the_command_line(node: Serving) -> None:
    with node.client() as client:
        for arguments, end in (
            (["approve", "--comment", "fine"], {"approved": True, "by": "made at the first start"}),
            (["approve", "--reject", "--by", "Grace"], {"approved": False, "by": "Grace"}),
        ):
            run_id = client.submit("ask").run_id
            next(event for event in client.events(run_id) if event.kind == "step_prepared")
            assert agentrt(node, "runs", *arguments[:1], run_id, *arguments[1:])[0] == 0
            assert client.result(run_id) == end
            assert agentrt(node, "runs", "approve", run_id)[0] == exits.INPUT.code
        run_id = client.submit("ask").run_id
        assert agentrt(node, "runs", "cancel", run_id, "--reason", "no")[0] == 0
        assert agentrt(node, "runs", "tail", run_id)[0] == exits.FAILED.code
        assert client.run(run_id).state == "CANCELLED"


def test_keys_on_the_command_line(node: Serving) -> None:
    code, secret, _ = agentrt(node, "keys", "make", "acme", "--scope", "runs:read", "--label", "for looking")
    assert code == 0
    with Client(node.url, key=secret.strip()) as client:
        assert client.runs().runs == []
        key_id = next(k["id"] for k in lines(agentrt(node, "keys", "ls", "--json")[1]) if k["tenant"] == "acme")
        assert agentrt(node, "keys", "ls", "--key", secret.strip())[0] == exits.REFUSED.code
        assert agentrt(node, "keys", "rm", key_id)[0] == 0
        with pytest.raises(UnauthorizedError):
            client.runs()
    assert agentrt(node, "keys", "ls", "--url", "http://127.0.0.1:9")[0] == exits.UNREACHABLE.code
    assert agentrt(node, "runs", "show", "run_01ARZ3NDEKTSV4RRFFQ69G5FAV")[0] == exits.INPUT.code
    assert agentrt(node, "runs", "tail", "run_01ARZ3NDEKTSV4RRFFQ69G5FAV", "--key", "")[0] == exits.USAGE.code


def test_streams_are_bounded_per_tenant(node: Serving) -> None:
    with node.client() as client:
        run_id = client.submit("ask").run_id
        streams = [client.events(run_id) for _ in range(3)]
        for stream in streams:
            next(stream)
        with Client(node.url, key=node.key, attempts_max=1) as another, pytest.raises(QueueFullError) as refused:
            next(another.events(run_id))
        assert refused.value.limit == "http.streams_per_tenant_max"
        other = Client(node.url, key=client.make_key("other", ["runs:write", "runs:read"]).secret)  # type: ignore[arg-type]
        with other:
            assert next(other.events(other.submit("ask").run_id)).kind == "accepted"
        for stream in streams:
            stream.close()
        client.cancel(run_id)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ('[node]\nload = ["nowhere.py"]\n', exits.INPUT, "no file"),
        ('[node]\nload = ["json"]\n', exits.INPUT, "no agents and no tools"),
        ('[node]\nload = ["not_there_at_all"]\n', exits.INPUT, "not_there_at_all"),
        ('[node]\nload = ["not_there_at_all"]\n', exits.INPUT, "installed or in a folder of PYTHONPATH"),
        ('[node]\nload = ["slip.py"]\n', exits.INPUT, "SyntaxError: '(' was never closed (line 2)"),
        ('[node]\nload = ["raises.py"]\n', exits.INPUT, "ZeroDivisionError: division by zero (line 3)"),
        ('[node]\nload = ["lacks.py"]\n', exits.INPUT, "no_such_library must be installed in this Python"),
        ('[store]\npath = "slip.py"\n', exits.STORE, "store.path is a folder"),
        ('[traces]\nendpoint = "localhost:4318"\n', exits.CONFIG, "traces.endpoint: 'localhost:4318' is no URL"),
        ("[node.agents.a]\ntier = 1\n", exits.CONFIG, "no source"),
        (f'[node.agents.a]\nsource = "{AGENTS}"\n', exits.CONFIG, "6 agents"),
        ('[http]\nlisten = "everywhere"\n', exits.CONFIG, "no address"),
        ('[http]\ncertificate = "a.pem"\n', exits.CONFIG, "go together"),
        ('[http]\ncertificate = "a.pem"\nprivate_key = "b.pem"\n', exits.CONFIG, "a.pem with the key"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, code: exits.ExitCode, words: str
) -> None:
    (tmp_path / "node.toml").write_text(settings)
    (tmp_path / "slip.py").write_text("import json\nx = (\n")
    (tmp_path / "raises.py").write_text("def f():\n    pass\nx = 1 / 0\n")
    (tmp_path / "lacks.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    listen = [] if "listen" in settings else ["--listen", "127.0.0.1:0"]
    found, out, err = command_line("--config", "node.toml", "serve", *listen)
    assert (found, out) == (code.code, ""), err
    assert words in err and "Traceback" not in err
    # And before, by who asks whether it would.
    found, out, err = command_line("--config", "node.toml", "config", "check")
    assert (found, out) == (exits.CONFIG.code, ""), err
    assert words in err and "Traceback" not in err


def test_what_a_node_would_load_is_said_by_config_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.wasm").write_text("no wasm")
    (tmp_path / "noisy.py").write_text("print('hello')\n" + Path(AGENTS).read_text())
    monkeypatch.chdir(tmp_path)

    def check(settings: str, *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "node.toml").write_text(settings)
        return command_line("--config", "node.toml", "config", "check", *arguments)

    code, out, err = check(f'[node]\nload = ["{AGENTS}"]\n[node.agents.shell]\ncommand = ["sh", "-c", "true"]\n')
    assert code == 0 and out == "" and "Agents: greet, count, chatter, ask, nap, toiler, shell." in err, err
    code, out, _ = check('[node]\nload = ["noisy.py"]\n', "--json")
    (found,) = lines(out)
    assert code == 0 and found["agents"][0] == "greet" and found["tools"] == ["title", "toil"]
    code, out, err = check('[node]\nload = ["nowhere.py"]\n', "--no-load", "--json")
    assert code == 0 and lines(out)[0]["agents"] is None, err
    for settings, words in (
        ('[node]\nload = ["text.wasm"]\n', "text.wasm is not a wasm module"),
        ('[node.agents.a]\ncommand = ["/no/such/program"]\n', "agent a: there is no program '/no/such/program'"),
        ('[flow]\nfile = "nowhere.toml"\n', "flow.file: nowhere.toml cannot be read"),
    ):
        code, out, err = check(settings)
        assert (code, out) == (exits.CONFIG.code, "") and words in err and "Traceback" not in err, err


def test_a_port_in_use_is_said_before_the_store_is_opened(node: Serving, tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, _, err = command_line("serve", "--listen", f"127.0.0.1:{node.port}", "--store", str(store))
    assert code == exits.CONFIG.code and "Choose another address" in err
    assert not store.exists()


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(30)
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
    with manager, Serving(tmp_path, "[node]\n", env=env) as node:
        ready = manager.recv(4096).decode().splitlines()
        assert ready == ["READY=1", f"MAINPID={node.process.pid}"]
        assert manager.recv(4096) == b"WATCHDOG=1"
        assert node.stop() == 0
        said = set()
        manager.setblocking(False)
        while "STOPPING=1" not in said:
            said.add(manager.recv(4096).decode())


def test_stopping_ends_streams_and_leaves_runs_to_the_next_start(tmp_path: Path) -> None:
    """What waits, streams and idle connections do not hold a node up; the run goes on where it was."""
    settings = f'[node]\nload = ["{AGENTS}"]\n[http]\nstop_timeout_ms = 600000\n'  # longer than the test would wait
    with Serving(tmp_path, settings) as node, node.client() as client:
        run_id = client.submit("ask").run_id
        seen: list[int] = []
        result: list[Any] = []

        def follow() -> None:
            with Client(node.url, key=node.key, attempts_max=1000) as follower:
                seen.extend(event.id for event in follower.events(run_id))
                result.append(follower.result(run_id))

        thread = threading.Thread(target=follow)
        thread.start()
        idle = socket.create_connection(("127.0.0.1", node.port))
        while not seen:
            time.sleep(0.01)
        while client.run(run_id).wait_reason != "approval":
            time.sleep(0.01)
        assert node.stop() == 0
        idle.close()
        with Serving(tmp_path, key=node.key, port=node.port) as again, again.client() as successor:
            successor.approve(run_id, by="Grace")
            thread.join(60)
            assert result == [{"approved": True, "by": "Grace"}]
            assert seen == sorted(set(seen))
            assert again.stop() == 0


def test_a_tool_that_does_not_end_is_ended_with_the_node_and_begun_again_by_the_next(tmp_path: Path) -> None:
    settings = f'[node]\nload = ["{AGENTS}"]\nclose_timeout_ms = 100\n'
    book = tmp_path / "begun"
    with Serving(tmp_path, settings) as node, node.client() as client:
        run_id = client.submit("toiler", str(tmp_path)).run_id
        while not book.exists():
            time.sleep(0.01)
        assert node.stop() == 0
    (tmp_path / "enough").touch()
    with Serving(tmp_path, settings, key=node.key) as again, again.client() as client:
        assert client.result(run_id) == "done"
        kinds = [event.kind for event in client.events(run_id)]
        assert "step_evicted" in kinds and "outcome_unknown" not in kinds
        assert again.stop() == 0
    begun = book.read_text().splitlines()
    assert len(begun) == 2 and len({*begun}) == 1  # the same key, and no attempt was counted


def test_a_drain_that_parks_leaves_runs_to_the_next_start_and_shows_them(tmp_path: Path) -> None:
    settings = f'[node]\nload = ["{AGENTS}"]\nclose_timeout_ms = 100\n'
    with Serving(tmp_path, settings) as node, Client(node.url, key=node.key, attempts_max=1) as client:
        waits, toils = client.submit("ask").run_id, client.submit("toiler", str(tmp_path)).run_id
        done = client.submit("greet", "Ada").run_id
        assert client.result(done) == "hello Ada"
        while not (tmp_path / "begun").exists() or client.run(waits).wait_reason != "approval":
            time.sleep(0.01)
        code, out, _ = agentrt(node, "drain", "--park", "--json")
        assert code == 0 and lines(out)[0]["status"] in ("draining", "parked")
        while httpx.get(f"{node.url}/readyz").json()["status"] != "parked":
            time.sleep(0.01)
        # Whether a wait has been long enough to be journaled as WAITING is chance.
        assert client.run(waits).state in ("ACTIVE", "WAITING")
        assert [client.run(run_id).state for run_id in (toils, done)] == ["ACTIVE", "SUCCEEDED"]
        assert client.result(done) == "hello Ada"
        assert [step.state for step in client.steps(toils).steps] == ["UNCOMMITTED_EVICTED"]
        for ask in (client.approve, client.cancel, client.resume):
            with pytest.raises(ClosedError):
                ask(waits)
        assert httpx.get(f"{node.url}/healthz").status_code == 200
        client.schedule("later", "0 3 * * *", "greet", "Ada")  # what belongs to no run can still be changed
        assert [each.name for each in client.schedules().schedules] == ["later"]
        client.disable_tenant("acme")
        assert [each.tenant for each in client.tenants().tenants] == ["acme"]
        assert client.profiles().changes == [] and client.budgets().budgets == []
        headers = {"authorization": f"Bearer {node.key}"}
        assert httpx.get(f"{node.url}/metrics", headers=headers).status_code == 200
        assert client.agents().agents and client.queues().live == 0 and len(client.tiers().tiers) == 4
        assert agentrt(node, "drain", "--park")[1] == "parked\n"
        assert node.stop() == 0
    (tmp_path / "enough").touch()
    with Serving(tmp_path, settings, key=node.key) as again, again.client() as client:
        client.approve(waits)
        assert client.result(toils) == "done" and client.result(waits)["approved"] is True
        assert again.stop() == 0


def test_a_node_that_drains_says_so_and_takes_nothing(tmp_path: Path) -> None:
    with Serving(tmp_path) as node, Client(node.url, key=node.key, attempts_max=1) as client:
        assert httpx.get(f"{node.url}/readyz").status_code == 200
        client.drain()
        answer = httpx.get(f"{node.url}/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        with pytest.raises(ClosedError):
            client.submit("greet", "x")
        answer = httpx.post(
            f"{node.url}/v1/runs", json={"agent": "greet"}, headers={"authorization": f"Bearer {node.key}"}
        )
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{node.url}/healthz").status_code == 200


def test_tls_from_files(tmp_path: Path) -> None:
    certificate, private_key = make_certificate(tmp_path, "localhost")
    settings = f'[node]\nload = ["{AGENTS}"]\n[http]\ncertificate = "{certificate}"\nprivate_key = "{private_key}"\n'
    with Serving(tmp_path, settings) as node:
        assert node.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        with Client(f"https://localhost:{node.port}", key=node.key, verify=trust) as client:
            assert client.result(client.submit("greet", "Ada").run_id) == "hello Ada"
        with (
            Client(f"https://localhost:{node.port}", key=node.key, attempts_max=1) as distrustful,
            pytest.raises(UnreachableError),
        ):
            distrustful.agents()
        with socket.create_connection(("127.0.0.1", node.port)) as plain:  # does not hold the others up
            plain.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            with Client(f"https://localhost:{node.port}", key=node.key, verify=trust) as client:
                assert client.agents().agents
        assert node.stop() == 0


def test_a_second_signal_ends_it_at_once_and_loses_nothing(tmp_path: Path) -> None:
    """A caller holds the first stop up; what was acknowledged is there at the next start."""
    settings = f'[node]\nload = ["{AGENTS}"]\n[http]\nstop_timeout_ms = 600000\nbody_timeout_ms = 600000\n'
    with Serving(tmp_path, settings) as node, node.client() as client:
        accepted = [client.submit("ask").run_id for _ in range(5)]
        with socket.create_connection(("127.0.0.1", node.port)) as slow:
            head = (
                f"POST /v1/runs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {node.key}\r\ncontent-length: 9\r\n\r\n{{"
            )
            slow.sendall(head.encode())
            client.agents()  # it has been read by now, as its connection is older
            os.kill(node.process.pid, signal.SIGTERM)
            while True:
                try:
                    httpx.get(f"{node.url}/healthz").raise_for_status()
                except httpx.TransportError:
                    break
                time.sleep(0.02)
            assert node.process.poll() is None
            assert node.stop() == exits.INTERRUPTED.code
    with Serving(tmp_path, key=node.key) as again, again.client() as client:
        assert {run.run_id for run in client.runs().runs} == set(accepted)
        for run_id in accepted:
            while True:
                try:
                    client.approve(run_id)
                    break
                except AgentrtError:
                    time.sleep(0.02)
            assert client.result(run_id)["approved"] is True
