"""Clients that send nonsense, send slowly, do not read, or stay for ever: they get their answer or are cut, and the
node serves the others."""

import contextlib
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import http_fixture
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.http.app import make_app, streams_of
from agentrt.http.keys import KeyRing
from agentrt.http.server import HttpServer, limits_of, listen
from agentrt.http.sse import Streams


class Target:
    """A node in this process with bounds that tests reach."""

    def __init__(self, folder: Path, **http: Any) -> None:
        arguments = {"store.path": str(folder / "store"), **{f"http.{name}": value for name, value in http.items()}}
        self.runtime = Runtime(config=load_config(env={}, arguments=arguments), tools=http_fixture.TOOLS)
        self.runtime.start_sync()
        for agent in http_fixture.AGENTS:
            self.runtime.register_sync(agent)
        self.config = self.runtime.config.http
        self.streams: Streams = streams_of(self.config)
        keys = KeyRing(self.runtime)
        self.keys: dict[str, str] = {}

        async def before() -> None:
            for tenant in ("*", "acme", "other"):
                scopes = ["admin"] if tenant == "*" else ["runs:read", "runs:write"]
                self.keys[tenant] = (await keys.make(tenant, scopes, 0))[1]

        app = make_app(self.runtime, keys, self.streams)
        self.server = HttpServer(
            app,
            listen("127.0.0.1", 0),
            limits=limits_of(self.config),
            before=before,
            stopping=self.streams.close,
        )
        self.server.start()
        self.address = self.server.address
        self.admin = self.client("*")

    def client(self, tenant: str) -> httpx.Client:
        host, port = self.address
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=f"http://{host}:{port}", headers=headers, timeout=30)

    def connect(self, data: bytes = b"") -> socket.socket:
        made = socket.create_connection(self.address, 30)
        made.sendall(data)
        return made

    def head(self, line: str, *headers: str) -> bytes:
        return "\r\n".join(
            [f"{line} HTTP/1.1", "host: x", f"authorization: Bearer {self.keys['*']}", *headers, "", ""]
        ).encode()

    def close(self, timeout_s: float = 5) -> None:
        self.admin.close()
        self.server.stop(timeout_s)
        self.runtime.close_sync()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    bounds = {
        "write_timeout_ms": 700,
        "connections_max": 40,
        "head_timeout_ms": 700,
        "body_timeout_ms": 700,
        "head_bytes_max": 4096,
    }
    made = Target(tmp_path_factory.mktemp("hostile"), **bounds)
    yield made
    made.close()


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    data = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            data += part
    return data


def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def status(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /healthz HTTP/1.1\r\nhost: x\r\n", b"POST /v1/runs HTT"])
def test_a_head_that_does_not_come_is_given_up(target: Target, sent: bytes) -> None:
    with target.connect(sent) as connection:
        assert status(everything(connection)) == 408


def test_a_body_that_does_not_come_is_given_up(target: Target) -> None:
    with target.connect(target.head("POST /v1/runs", "content-length: 100") + b"{") as connection:
        assert status(everything(connection)) == 408


def test_a_body_without_an_end_is_cut(target: Target) -> None:
    size = target.config.body_bytes_max
    with target.connect(target.head("POST /v1/runs", "transfer-encoding: chunked")) as connection:
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(everything(connection)))
        reader.start()
        with contextlib.suppress(OSError):
            for _ in range(size // 65536 + 100):
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        reader.join(60)
    assert answer[0] == b"" or status(answer[0]) == 413


def test_a_head_that_is_too_large_is_refused(target: Target) -> None:
    for data in (
        b"GET /" + b"x" * 5_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(1_000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000,
    ):
        with target.connect() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            answer = everything(connection)
            assert answer == b"" or status(answer) == 431, answer[:100]


def test_too_many_connections_are_refused_and_the_others_served(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(target.client("*"))
        assert kept.get("/v1/agents").status_code == 200
        answers = [stack.enter_context(target.connect()) for _ in range(45)]
        assert status(everything(answers[-1])) == 503
        assert kept.get("/v1/agents").status_code == 200
    until(lambda: target.admin.get("/healthz").status_code == 200)


_HEAD = st.sampled_from(
    [
        b"GET /v1/runs HTTP/1.1\r\n",
        b"POST /v1/runs HTTP/1.1\r\n",
        b"POST /v1/events HTTP/1.0\r\n",
        b"PUT /v1/schedules/a HTTP/1.1\r\n",
        b"DELETE /v1/keys/%00 HTTP/1.1\r\n",
        b"GET /v1/runs/%ff%fe/events HTTP/1.1\r\n",
        b"GET http://other/v1/runs?limit=%ff&after=\x80 HTTP/1.1\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
)
_FIELD = st.sampled_from(
    [
        b"content-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"content-length: 5, 6\r\n",
        b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"expect: 100-continue\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\n",
        b"connection: close\r\n",
        b"content-type: application/json\r\n",
        b"content-type: \xff\r\n",
        b"idempotency-key: \x00\xff\r\n",
        b"last-event-id: 99999999999999999999999\r\n",
        b"authorization: Bearer agentrt_\r\n",
        b"x" * 600 + b": y\r\n",
        b" folded\r\n",
        b"\r",
    ]
)
_REST = st.one_of(
    st.binary(max_size=60), st.sampled_from([b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b'{"a":', b"{}" * 20])
)


@settings(max_examples=150, deadline=None)
@given(
    head=_HEAD | st.binary(max_size=40),
    fields=st.lists(_FIELD, max_size=4),
    key=st.booleans(),
    end=st.sampled_from([b"\r\n", b"\n", b""]),
    rest=_REST,
    cut=st.integers(1, 400),
)
def test_no_bytes_make_it_fail(
    target: Target, head: bytes, fields: list[bytes], key: bool, end: bytes, rest: bytes, cut: int
) -> None:
    known = b"authorization: Bearer %b\r\n" % target.keys["*"].encode() if key else b""
    data = head + b"".join(fields) + known + end + rest
    with target.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data[:cut])
            connection.sendall(data[cut:])
            connection.shutdown(socket.SHUT_WR)
        answer = everything(connection)
    for line in answer.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 "):
            assert int(line.split(b" ")[1]) < 500, (data, line)


def test_after_all_that_it_is_as_before(target: Target) -> None:
    assert target.admin.post("/v1/runs?wait=20", json={"agent": "greet", "input": "x"}).json()["result"] == "hello x"


# --- streams ---------------------------------------------------------------------------


def start(target: Target, agent: str, input: Any, tenant: str = "acme") -> str:
    with target.client(tenant) as client:
        run_id: str = client.post("/v1/runs", json={"agent": agent, "input": input}).json()["run_id"]
        return run_id


def stream(target: Target, run_id: str, receive_bytes: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect(target.address)
    made.sendall(target.head(f"GET /v1/runs/{run_id}/events"))
    return made


def test_who_does_not_read_is_cut(target: Target) -> None:
    run_id = start(target, "chatter", 400)
    slow = [stream(target, run_id, 4096) for _ in range(5)]
    until(lambda: len(target.streams) == 5)
    until(lambda: len(target.streams) == 0)
    for connection in slow:
        data = everything(connection)
        assert data.startswith(b"HTTP/1.1 200") and b"event: ended" not in data
        connection.close()
    with stream(target, run_id) as connection:  # who reads gets all of it
        data = b""
        while b"event: ended" not in data:
            data += connection.recv(65536)
    assert data.count(b"event: emit") == 400


def test_who_goes_away_is_forgotten(target: Target) -> None:
    run_id = start(target, "ask", None)
    connections = [stream(target, run_id) for _ in range(20)]
    until(lambda: len(target.streams) == 20)
    for connection in connections:
        connection.close()
    until(lambda: len(target.streams) == 0)
    target.admin.post(f"/v1/runs/{run_id}/cancel")


def test_streams_end_when_the_server_stops(tmp_path: Path) -> None:
    own = Target(tmp_path)
    run_id = start(own, "ask", None)
    connections = [stream(own, run_id) for _ in range(10)]
    until(lambda: len(own.streams) == 10)
    for connection in connections:
        seen = b""
        while b"event: accepted" not in seen:
            seen += connection.recv(65536)
    own.close(3600)  # none of them holds it up
    for connection in connections:
        assert everything(connection).endswith(b"0\r\n\r\n")
        connection.close()


#: Opens so many connections, sends what it is told on each, says so, and keeps them until its input ends.
_CROWD = """
import socket, sys
host, port, count, receive_bytes, head = sys.argv[1], *map(int, sys.argv[2:5]), bytes.fromhex(sys.argv[5])
kept = []
for _ in range(count):
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((host, port))
    made.sendall(head)
    kept.append(made)
print("here", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def crowd(target: Target, run_id: str, count: int, receive_bytes: int = 0) -> Iterator[None]:
    """So many streams of clients in another process, which do not read."""
    head = target.head(f"GET /v1/runs/{run_id}/events").hex()
    host, port = target.address
    arguments = [host, str(port), str(count), str(receive_bytes), head]
    process = subprocess.Popen(
        [sys.executable, "-c", _CROWD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "here\n"
        yield
        process.stdin.close()


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_ten_thousand_idle_streams_and_a_thousand_slow_ones(tmp_path: Path) -> None:
    """What 11,000 clients cost, and that the node answers others meanwhile."""
    idle, slow = 10_000, 1_000
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = idle + slow + 1_000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # That who does not read is cut is tried elsewhere: here the last must have come before the first goes.
    bounds = {"connections_max": 20_000, "streams_max": 20_000, "streams_per_tenant_max": 20_000}
    own = Target(tmp_path, **bounds, write_timeout_ms=3_600_000)
    waits, talks = start(own, "ask", None), start(own, "chatter", 2_000)
    until(lambda: own.admin.get(f"/v1/runs/{talks}").json()["state"] == "SUCCEEDED")
    began_kb = resident_kb()
    with crowd(own, waits, idle):
        until(lambda: len(own.streams) == idle, 600)
        idle_kb = (resident_kb() - began_kb) / idle
        before_kb = resident_kb()
        with crowd(own, talks, slow, 4096):
            until(lambda: len(own.streams) == idle + slow, 600)
            times_s = []
            for _ in range(200):
                began_s = time.monotonic()
                assert own.admin.get("/healthz").status_code == 200
                times_s.append(time.monotonic() - began_s)
            slow_kb = (resident_kb() - before_kb) / slow
            print(f"idle {idle_kb:.0f} KiB, slow {slow_kb:.0f} KiB, health p95 {sorted(times_s)[190] * 1e3:.1f} ms")
            assert sorted(times_s)[190] < 0.5
            assert idle_kb < 100 and slow_kb < 1_000  # a page of records and what is buffered for the socket, each
    until(lambda: len(own.streams) == 0, 600)
    own.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def resident_kb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


# --- secrets in times --------------------------------------------------------------------


def test_foreign_and_unknown_runs_cannot_be_told_apart_by_time(target: Target) -> None:
    """In memory, ended, never there: which of two answers came sooner says nothing."""
    live, ended = start(target, "ask", None), start(target, "greet", "x")
    until(lambda: target.admin.get(f"/v1/runs/{ended}").json()["state"] == "SUCCEEDED")
    chance = random.Random(5)
    with target.client("other") as other:
        times: dict[str, list[int]] = {live: [], ended: [], "": []}
        for _ in range(150):
            order = [*times]
            chance.shuffle(order)
            for run_id in order:
                asked = run_id or "run_01M8" + "".join(chance.choices("0123456789ABCDEFGHJKMNPQRSTVWXYZ", k=22))
                began_ns = time.perf_counter_ns()
                assert other.get(f"/v1/runs/{asked}").status_code == 404
                times[run_id].append(time.perf_counter_ns() - began_ns)
    for run_id in (live, ended):
        # The chance that a foreign one takes longer; its spread by luck alone is 0.033.
        longer = sum((a > b) + (a == b) / 2 for a in times[run_id] for b in times[""]) / 150**2
        assert 0.35 < longer < 0.65, (run_id == live, longer)
    target.admin.post(f"/v1/runs/{live}/cancel")


def test_a_wrong_key_takes_as_long_as_an_unknown_one(target: Target) -> None:
    right = target.keys["acme"]
    wrong = right[:-43] + ("A" * 43)
    unknown = right[:8] + "A" * 12 + right[20:]
    host, port = target.address
    times: dict[str, list[int]] = {wrong: [], unknown: []}
    with httpx.Client(base_url=f"http://{host}:{port}", timeout=30) as client:
        for _ in range(150):
            for key, taken in times.items():
                began_ns = time.perf_counter_ns()
                answer = client.get("/v1/agents", headers={"authorization": f"Bearer {key}"})
                taken.append(time.perf_counter_ns() - began_ns)
                assert answer.status_code == 401 and "key" in answer.json()["detail"]
    longer = sum((a > b) + (a == b) / 2 for a in times[wrong] for b in times[unknown]) / 150**2
    assert 0.35 < longer < 0.65, longer


# --- faults -----------------------------------------------------------------------------


def test_fault_L38_L39_health_is_answered_while_the_control_loop_is_busy(target: Target) -> None:
    """By another thread, soon, and it says how old the loop's last sign of life is."""
    busy, over = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            over.wait(0.01)

    target.runtime._control.post(hold)
    assert busy.wait(30)
    ages, took_s = [], []
    with target.client("*") as client:
        while not ages or ages[-1] < 1_000:
            began_s = time.monotonic()
            answer = client.get("/healthz")
            took_s.append(time.monotonic() - began_s)
            assert answer.status_code == 200
            ages.append(answer.json()["heartbeat_age_ms"])
    assert sorted(took_s)[len(took_s) // 2] < 0.05
    over.set()
    until(lambda: target.admin.get("/healthz").json()["heartbeat_age_ms"] < 1_000)


def test_a_stuck_control_loop_is_ill_health(tmp_path: Path) -> None:
    own = Target(tmp_path, heartbeat_max_ms=200)
    over = threading.Event()
    own.runtime._control.post(lambda: over.wait(60))
    until(lambda: own.admin.get("/healthz").status_code == 503)
    assert own.admin.get("/healthz").json()["status"] == "stuck"
    over.set()
    until(lambda: own.admin.get("/healthz").status_code == 200)
    own.close()
