"""A real Redis and a real PostgreSQL for the tests, on unix sockets; None where there is none."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import redis

_START_S = 30.0


def _until(ready: Callable[[], object], server: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            ready()
            return
        except (redis.RedisError, psycopg.Error, OSError):
            if time.monotonic() > until or server.poll() is not None:
                raise
            time.sleep(0.02)


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="agentrt-"))  # short: sockets have paths of 107 bytes at most
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def redis_server() -> Iterator[str | None]:
    """The path of its socket."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with _folder() as folder:
        socket = str(folder / "redis")
        arguments = ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", str(folder)]
        with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL) as server:
            try:
                _until(redis.Redis(unix_socket_path=socket).ping, server)
                yield socket
            finally:
                server.terminate()


@contextmanager
def postgres_server() -> Iterator[str | None]:
    """How to connect to it."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    found = shutil.which("initdb")
    if found is not None:
        programs.append(Path(found).resolve().parent)
    if not programs:
        yield None
        return
    with _folder() as folder:
        user: str | None = None
        if os.geteuid() == 0:  # which it refuses to run as
            user = "postgres"
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        data = str(folder / "data")
        made = [str(programs[-1] / "initdb"), "-D", data, "-U", "agentrt", "-A", "trust", "--no-sync"]
        subprocess.run(made, check=True, user=user, stdout=subprocess.DEVNULL, cwd=folder)
        command = [str(programs[-1] / "postgres"), "-D", data, "-k", str(folder), "-h", "", "-c", "fsync=off"]
        with subprocess.Popen(command, user=user, stderr=subprocess.DEVNULL, cwd=folder) as server:
            place = f"host={folder} user=agentrt dbname=postgres"
            try:
                _until(lambda: psycopg.connect(place).close(), server)
                yield place
            finally:
                server.send_signal(3)  # SIGQUIT: at once, whoever is connected
