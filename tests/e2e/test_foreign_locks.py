"""Agents that hold a Redis lock or a PostgreSQL advisory lock: freed at the end, by unwinding, after a restart."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from foreign_locks import TOOLS, holder, write
from foreign_servers import postgres_server, redis_server

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import HostDiedError, RunCancelledError
from agentrt.run import Run

Server = tuple[str, str]


@pytest.fixture(scope="module")
def redis_at() -> Iterator[str | None]:
    with redis_server() as socket:
        yield socket


@pytest.fixture(scope="module")
def postgres_at() -> Iterator[str | None]:
    with postgres_server() as place:
        yield place


@pytest.fixture(params=["redis", "postgres"])
def server(request: pytest.FixtureRequest) -> Server:
    place = request.getfixturevalue(f"{request.param}_at")
    if place is None:
        pytest.skip(f"there is no {request.param} server here; .ci/run tools installs one")
    return request.param, place


@contextmanager
def node(store: Path) -> Iterator[Runtime]:
    config = load_config(arguments={"limits.hot_ms": 60_000, "wasm.guests_max": 256, "wasm.stacks_max": 256})
    tools = [write, *(each for pair in TOOLS.values() for each in pair)]
    with Runtime(store=store, config=config, tools=tools) as runtime:
        runtime.register_sync(holder)
        yield runtime


def owner_of(server: Server) -> str | None:
    """Who has the lock."""
    kind, place = server
    if kind == "redis":
        value = redis.Redis(unix_socket_path=place).get("stock")
        return None if value is None else value.decode()
    with psycopg.connect(place) as connection:
        row = connection.execute(
            "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory'"
        ).fetchone()
        return None if row is None else str(row[0])


def until(condition: Any, what: str) -> None:
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError(what)


def test_the_program_in_the_manual_runs(redis_at: str | None, tmp_path: Path) -> None:
    if redis_at is None:
        pytest.skip("there is no redis server here; .ci/run tools installs one")
    page = (Path(__file__).parents[2] / "docs" / "durable-runs.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(import asyncio\n\nimport redis.*?)```", page, re.DOTALL)
    text = text.replace("redis://localhost", f"unix://{redis_at}")
    (tmp_path / "restock.py").write_text(
        f"""{text}
from agentrt import Runtime
if __name__ == "__main__":
    with Runtime(store="store", tools=[take, free]) as runtime:
        runtime.register_sync(restock)
        print(runtime.submit_sync("restock", "nails").result_sync(30))
"""
    )
    done = subprocess.run(
        [sys.executable, "restock.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "nails are in stock again\n"), done.stderr
    assert redis.Redis(unix_socket_path=redis_at).get("nails") is None


def submit(runtime: Runtime, server: Server, file: Path, **more: Any) -> Run:
    return runtime.submit_sync("holder", {"kind": server[0], "server": server[1], "file": str(file), **more})


def test_one_at_a_time_has_it_and_nobody_afterwards(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "work"
    with node(tmp_path / "store") as runtime:
        runs = [submit(runtime, server, file) for _ in range(4)]
        owners = [run.result_sync(60)[0] for run in runs]
        assert [owner.partition("/")[0] for owner in owners] == [run.run_id for run in runs]
    lines = file.read_text().splitlines()
    assert len(lines) == 8
    assert all(lines[n].split()[1] == lines[n + 1].split()[1] for n in range(0, 8, 2)), lines
    assert owner_of(server) is None


def test_who_ends_its_host_frees_it_for_the_next(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "work"
    with node(tmp_path / "store") as runtime:
        first = submit(runtime, server, file, wait=True, dies=True)
        until(lambda: (owner_of(server) or "").startswith(first.run_id), "the first never had it")
        second = submit(runtime, server, file)
        runtime.send_sync({"n": 1}, topic="go")
        with pytest.raises(HostDiedError):
            first.result_sync(60)
        assert second.result_sync(60)[0].startswith(second.run_id)
    assert owner_of(server) is None


def test_unwinding_frees_it_for_the_next(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "work"
    with node(tmp_path / "store") as runtime:
        first = submit(runtime, server, file, wait=True)
        until(lambda: (owner_of(server) or "").startswith(first.run_id), "the first never had it")
        second = submit(runtime, server, file)
        first.cancel_sync()
        with pytest.raises(RunCancelledError):
            first.result_sync(60)
        assert second.result_sync(60) == [f"{second.run_id}/1:1"]
    assert owner_of(server) is None


def test_a_run_that_is_cancelled_while_it_takes_the_lock_does_not_keep_it(server: Server, tmp_path: Path) -> None:
    with node(tmp_path / "store") as runtime:
        run = submit(runtime, server, tmp_path / "work", slow_s=0.5)
        until(lambda: any(step.tool.endswith("_take") for step in run.describe_sync().steps), "it never takes it")
        run.cancel_sync()
        with pytest.raises(RunCancelledError):
            run.result_sync(60)
    assert owner_of(server) is None


@pytest.mark.parametrize("then", ["goes on", "is cancelled"])
def test_it_is_freed_by_the_next_life_of_the_node(server: Server, tmp_path: Path, then: str) -> None:
    file = tmp_path / "work"
    with node(tmp_path / "store") as runtime:
        run_id = submit(runtime, server, file, wait=True).run_id
        until(lambda: (owner_of(server) or "").startswith(run_id), "it never had it")
        until(lambda: runtime.describe_run_sync(run_id).wait_reason == "event", "it never waits")
    if server[0] == "redis":
        assert owner_of(server) == f"{run_id}/1:1"  # nobody frees it while the node is down
    else:  # its session went with the tools' host; see docs/durable-runs.md
        until(lambda: owner_of(server) is None, "the session is still there")
    with node(tmp_path / "store") as runtime:
        if then == "goes on":
            runtime.send_sync(None, topic="go")
            assert runtime.run(run_id).result_sync(60) == [f"{run_id}/1:1"]
        else:
            runtime.run(run_id).cancel_sync()
            with pytest.raises(RunCancelledError):
                runtime.run(run_id).result_sync(60)
        assert owner_of(server) is None
        other = submit(runtime, server, file)
        assert other.result_sync(60) == [f"{other.run_id}/1:1"]
