"""`agentrt serve` as a process of its own, for tests that are its clients."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from agentrt.cli import main
from agentrt.client import Client

AGENTRT = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]
AGENTS = Path(__file__).with_name("http_fixture.py")


class Serving:
    """One life of a node. ``key`` is the admin key, kept from the first life on the same store."""

    def __init__(
        self, folder: Path, settings: str = "", *, key: str = "", port: int = 0, env: Mapping[str, str] | None = None
    ) -> None:
        config = folder / "node.toml"
        config.write_text(settings or f'[node]\nload = ["{AGENTS}"]\n')
        self.stderr = folder / "stderr"
        with self.stderr.open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(*AGENTRT, "--config", str(config), "serve", "--json"),
                    *("--store", str(folder / "store"), "--listen", f"127.0.0.1:{port}"),
                ],
                cwd=folder,  # where its tools write
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.stderr.read_text()
        self.told: dict[str, Any] = json.loads(line)
        self.url: str = self.told["url"]
        self.port = int(self.url.rpartition(":")[2])
        self.key: str = self.told["admin_key"] or key

    def client(self) -> Client:
        return Client(self.url, key=self.key)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def agentrt(node: Serving, *arguments: str) -> tuple[int, str, str]:
    """A command line against the node: exit status, stdout, stderr."""
    with mock.patch.dict(os.environ, {"AGENTRT_URL": node.url, "AGENTRT_KEY": node.key}):
        return command_line(*arguments)


def command_line(*arguments: str) -> tuple[int, str, str]:
    """A command line in this process: exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments).code
    return code, out.getvalue(), err.getvalue()


def lines(out: str) -> list[dict[str, Any]]:
    """JSON lines."""
    return [msgspec.json.decode(line) for line in out.splitlines()]


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed one for a name, which also is its own authority."""
    certificate, private_key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(private_key), "-out", str(certificate), "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, private_key
