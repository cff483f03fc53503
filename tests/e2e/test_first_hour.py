"""docs/first-hour.md, followed to the letter: its files are written, its commands executed, its output compared."""

import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_kit import Serving, command_line

from agentrt.config import SECTIONS
from agentrt.settings import check_value

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "first-hour.md"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_READY = "Serving "


class Shell:
    """Executes a page's commands as a reader would, with the node's port and key in place of the page's."""

    def __init__(self, folder: Path, port: int) -> None:
        (folder / "bin").mkdir()
        for name, code in (("agentrt", "from agentrt.cli.main import main; main()"), ("python", "")):
            arguments = f"-c '{code}'" if code else ""
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        self.folder = folder
        self.env = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "AGENTRT_HTTP__LISTEN": f"127.0.0.1:{port}",
        }
        self.port = port
        self.key = ""
        self.job: subprocess.Popen[str] | None = None

    def execute(self, command: str) -> str:
        """What it prints."""
        if command.endswith(" &"):
            return self._start(command.removesuffix(" &"))
        if kill := re.fullmatch(r"kill -(\w+) %1", command):
            assert self.job is not None
            number = signal.SIGKILL if kill[1] == "9" else signal.Signals[f"SIG{kill[1]}"]
            self.job.send_signal(number)
            assert self.job.wait(60) == (-9 if kill[1] == "9" else 0)
            return ""
        if command.startswith("export "):
            self.env |= {"AGENTRT_URL": f"http://127.0.0.1:{self.port}", "AGENTRT_KEY": self.key}
            return ""
        if assignment := re.fullmatch(r"(\w+)=\$\((.*)\)", command):
            self.env[assignment[1]] = self._run(assignment[2]).strip()
            return ""
        return self._run(command)

    def _run(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", f"{command} 2>&1"],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )
        assert done.returncode == 0, (command, done.stdout)
        return done.stdout

    def _start(self, command: str) -> str:
        log = self.folder / "serve.log"
        with log.open("w") as stream:
            self.job = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                text=True,
            )
        while _READY not in log.read_text():
            assert self.job.poll() is None, log.read_text()
        first = not self.key
        while first and not (key := re.search(r"agentrt_\S+", log.read_text())):
            pass
        if first:
            assert key is not None
            self.key = key[0]
        lines = log.read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith((_READY, "Admin key"))) + "\n"


def agrees(expected: str, found: str) -> bool:
    """Whether output is what the page shows; ``…`` stands for anything, and columns may be apart by any space."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("…")]
    return re.fullmatch(r"\s*" + ".*".join(parts) + r"\s*", " ".join(found.split()), re.DOTALL) is not None


@given(st.text("ab …\n", max_size=20))
def test_what_agrees(text: str) -> None:
    assert agrees("…", text) and agrees(text.replace("…", ""), text.replace("…", ""))
    assert not agrees("x" + text, text.replace("…", ""))


def commands(block: str) -> list[tuple[str, str]]:
    """(command, what the page shows of its output)."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    assert found and block.startswith("$ ")
    return found


def test_the_first_hour(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shell = Shell(tmp_path, port)
    executed = 0
    try:
        for language, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if language in ("python", "toml"):
                name = text.partition("\n")[0].removeprefix("# ")
                (tmp_path / name).write_text(text)
                continue
            assert language == "console", language
            for command, shown in commands(text):
                expected = shown.replace("127.0.0.1:8420", f"127.0.0.1:{port}")
                printed = shell.execute(command)
                assert agrees(expected, printed), (command, expected, printed)
                executed += 1
    finally:
        if shell.job is not None and shell.job.poll() is None:
            shell.job.kill()
            shell.job.wait()
    assert executed >= 15


def program(page: Path, name: str) -> str:
    """A page's program by the file name in its first line."""
    (text,) = [
        text
        for language, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if language == "python" and text.startswith(f"# {name}\n")
    ]
    return text


def test_the_client_of_the_http_page(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(program(PAGE, "shop.py"))
    (tmp_path / "client.py").write_text(program(DOCS / "http.md", "client.py"))
    with Serving(tmp_path, f'[node]\nload = ["{tmp_path / "shop.py"}"]\n') as node:
        for _ in range(2):  # the key makes them one run
            done = subprocess.run(
                [sys.executable, "client.py"],
                cwd=tmp_path,
                env=os.environ | {"AGENTRT_URL": node.url, "AGENTRT_KEY": node.key},
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr
            lines = done.stdout.splitlines()
            assert (lines[0], lines[-1]) == ("1 accepted", "SUCCEEDED")
        with node.client() as client:
            assert len(client.runs().runs) == 1


def test_a_lost_key_is_made_anew(tmp_path: Path) -> None:
    with Serving(tmp_path, "[node]\n") as node:
        assert node.stop() == 0
    code, secret, err = command_line("keys", "recover", "--store", str(tmp_path / "store"))
    assert code == 0, err
    with Serving(tmp_path, "[node]\n", key=secret.strip()) as node, node.client() as client:
        assert len(client.keys().keys) == 2


def test_the_settings_of_the_operations_page_are_settings() -> None:
    (text,) = [text for language, text in _BLOCK.findall((DOCS / "operations.md").read_text()) if language == "toml"]
    for section, table in tomllib.loads(text).items():
        for key, value in table.items():
            check_value(SECTIONS[section], key, value, "docs/operations.md")


@pytest.mark.parametrize("page", ["operations.md", "http.md"])
def test_the_commands_of_the_pages_exist(page: str) -> None:
    import click

    from agentrt.cli.main import group

    lines = [
        line
        for language, text in _BLOCK.findall((DOCS / page).read_text())
        if language in ("sh", "ini")
        for line in text.splitlines()
        if re.search(r"agentrt (?!agentrt|&&|/)", line) and not line.startswith(("useradd ", "python3 -m venv "))
    ]
    for line in lines:
        words = line.partition("agentrt ")[2].replace("--config /etc/agentrt/node.toml ", "").split()
        command: click.Command = group
        context = click.Context(group)
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None, line
            command = found
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
