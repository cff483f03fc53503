"""How many runs a second does a node take over HTTP, and how fast is an urgent one answered beside hogs?

``runs_per_s``, ``p99_ms``: POST /v1/runs of an agent that does nothing, durable when it is answered, from 64
connections to `agentrt serve` on this machine. ``urgent_p50_ms``, ``urgent_p99_ms``: one caller after the other waits
for the result of such a run at tier 0 (``?wait``), while 1,000 runs of tier 3 that never yield have every slot; time in
the server, as its Server-Timing header has it. ``urgent_seen_p99_ms``: as the caller sees it, who has no core either.

Baseline: the same server and framework with an endpoint that reads and writes the same JSON and does nothing else; and
the same server with litestar, where it is installed (the extra ``peers``).
The load comes from wrk where it is installed, else from asyncio in a process of its own, which needs a core for itself.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import wasmtime

from agentrt.demo.figures import percentile
from perf import guests
from perf.report import Report, disk, machine

_CONNECTIONS = 64
_BODY = '{"agent":"noop"}'
_WRK = """
wrk.method = "POST"
wrk.body = '{body}'
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {key}"
done = function(summary, latency, requests)
  local failed = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  io.write(string.format("%d %f %f %d", summary.requests, summary.duration / 1e6, latency:percentile(99) / 1e3,
    failed + summary.errors.status))
end
"""


def run(tiny: bool) -> Report:
    seconds, hogs, urgent = (1, 20, 20) if tiny else (15, 1_000, 1_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        baselines = _does_nothing("perf.http_nothing", "nothing", folder, seconds)
        if importlib.util.find_spec("litestar") is not None:
            baselines |= _does_nothing("perf.peers.litestar_nothing", "litestar_nothing", folder, seconds)
        with _node(folder) as (port, key):
            _load(folder, port, key, 1)  # until caches are warm
            runs_per_s, p99_ms = _load(folder, port, key, seconds)
        shutil.rmtree(folder / "store")
        with _node(folder) as (port, key):
            served_ms, seen_ms = _urgent(port, key, hogs, urgent)
    figures = {
        "runs_per_s": runs_per_s,
        "p99_ms": p99_ms,
        "urgent_p50_ms": percentile(served_ms, 50),
        "urgent_p99_ms": percentile(served_ms, 99),
        "urgent_seen_p99_ms": percentile(seen_ms, 99),
    }
    return Report("http", figures, baselines, machine([f"load from {_loader()}"]) | disk())


def _loader() -> str:
    return "wrk" if shutil.which("wrk") else "asyncio"


@contextlib.contextmanager
def _node(folder: Path) -> Iterator[tuple[int, str]]:
    """(port, key) of a node with a store on this machine's disk."""
    for name, text in (("noop", guests.NOOP), ("hog", guests.HOG)):
        (folder / f"{name}.wasm").write_bytes(wasmtime.wat2wasm(text))
    config = folder / "node.toml"
    config.write_text(
        f'[store]\npath = "{folder}/store"\n[http]\nlisten = "127.0.0.1:0"\n'
        f'[node]\nload = ["{folder}/hog.wasm"]\nclose_timeout_ms = 1000\n'
        f'[node.agents.noop]\nsource = "{folder}/noop.wasm"\nshort = true\n'
    )
    code = "from agentrt.cli.main import main; main()"
    with _started([sys.executable, "-c", code, "--config", str(config), "serve", "--json"]) as (line, _):
        told = json.loads(line)
        yield int(told["url"].rpartition(":")[2]), told["admin_key"]


def _does_nothing(module: str, name: str, folder: Path, seconds: int) -> dict[str, float]:
    """``cpu_us``: time of the server's process for an answer, which a busy machine changes less than the others."""
    with _started([sys.executable, "-m", module]) as (line, pid):
        _load(folder, int(line), "none", 1)
        before_s = _cpu_s(pid)
        per_s, p99_ms = _load(folder, int(line), "none", seconds)
        cpu_us = (_cpu_s(pid) - before_s) / (per_s * seconds) * 1e6
    return {f"{name}_per_s": per_s, f"{name}_p99_ms": p99_ms, f"{name}_cpu_us": cpu_us}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[tuple[str, int]]:
    """The first line that the process prints, and its id; ended at the end."""
    root = str(Path(__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{command} ended with {process.wait()}")
        yield line, process.pid
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _load(folder: Path, port: int, key: str, seconds: int) -> tuple[float, float]:
    """(answers a second, p99 in ms). Raises RuntimeError if one was not 2xx."""
    url = f"http://127.0.0.1:{port}/v1/runs"
    if _loader() == "wrk":
        script = folder / "post.lua"
        script.write_text(_WRK.replace("{body}", _BODY).replace("{key}", key))
        command = ["wrk", "-t1", f"-c{_CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(script), url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"(\d+) ([\d.]+) ([\d.]+) (\d+)\s*$", out)
        if found is None:
            raise RuntimeError(out)
        requests, took_s, p99_ms, failed = int(found[1]), float(found[2]), float(found[3]), int(found[4])
    else:
        command = [sys.executable, "-m", "perf.http_load", str(port), key, str(_CONNECTIONS), str(seconds), _BODY]
        root = Path(__file__).parents[1]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
        requests, took_s, p99_ms, failed = json.loads(out)
    if failed:
        raise RuntimeError(f"{failed} of {requests} requests failed")
    return requests / took_s, p99_ms


def _urgent(port: int, key: str, hogs: int, count: int) -> tuple[list[float], list[float]]:
    """Times in the server and as seen from outside, in ms."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def post(path: str, body: dict[str, object]) -> tuple[int, float]:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, float((answer.headers["server-timing"] or "dur=nan").rpartition("dur=")[2])

    for number in range(hogs):
        if post("/v1/runs", {"agent": "hog", "tier": 3, "tenant": f"tenant-{number % 10}"})[0] != 202:
            raise RuntimeError("a hog was not accepted")
    served_ms: list[float] = []
    seen_ms: list[float] = []
    for number in range(count + count // 10):
        began = time.perf_counter_ns()
        status, dur_ms = post("/v1/runs?wait=30", {"agent": "noop", "tier": 0})
        if status != 200:
            raise RuntimeError(f"an urgent run was answered {status}")
        if number >= count // 10:
            seen_ms.append((time.perf_counter_ns() - began) / 1e6)
            served_ms.append(dur_ms)
    connection.close()
    return served_ms, seen_ms
