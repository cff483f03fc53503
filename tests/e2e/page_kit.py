"""Pages of the documentation, followed to the letter: their files are written, their commands executed, their output
compared."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_READY = "Serving "


class Shell:
    """Executes a page's commands as a reader would. ``ports``: those that the page uses, the node's first; in their
    place are some that are free here."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        (folder / "bin").mkdir()
        for name, code in (("agentrt", "from agentrt.cli.main import main; main()"), ("python", "")):
            arguments = f"-c '{code}'" if code else ""
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        self.folder = folder
        self.ports = {str(port): str(free) for port, free in zip(ports, _free(len(ports)), strict=True)}
        self.env = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "AGENTRT_HTTP__LISTEN": self.here(f"127.0.0.1:{ports[0]}"),
        }
        self.key = ""
        self.jobs: dict[int, subprocess.Popen[str]] = {}

    def here(self, text: str) -> str:
        """The page's text with the ports of this machine."""
        for port, free in self.ports.items():
            text = re.sub(rf"(?<=\D){port}\b", free, text)
        return text

    def execute(self, command: str) -> str:
        """What it prints."""
        command = self.here(command)
        if command.endswith(" &"):
            return self._start(command.removesuffix(" &"))
        if kill := re.fullmatch(r"kill -(\w+) %(\d)", command):
            job = self.jobs.pop(int(kill[2]))
            number = signal.SIGKILL if kill[1] == "9" else signal.Signals[f"SIG{kill[1]}"]
            job.send_signal(number)
            assert job.wait(60) == (-9 if kill[1] == "9" else 0)
            return ""
        if command.startswith("export "):
            for assignment in command.split()[1:]:
                name, _, value = assignment.partition("=")
                self.env[name] = self.key if value == "agentrt_…" else value
            return ""
        if made := re.fullmatch(r"(\w+)=\$\((.*)\)", command):
            self.env[made[1]] = self._run(made[2], words_apart=True).strip()
            return ""
        return self._run(command)

    def close(self) -> None:
        for job in self.jobs.values():
            job.kill()
            job.wait()

    def _run(self, command: str, *, words_apart: bool = False) -> str:
        """``words_apart``: without what is printed beside the result."""
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if words_apart else subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def _start(self, command: str) -> str:
        number = max(self.jobs, default=0) + 1
        log = self.folder / f"job{number}.log"
        with log.open("w") as stream:
            job = self.jobs[number] = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                text=True,
            )
        serves = "agentrt" in command
        while _READY not in log.read_text():
            assert job.poll() is None, log.read_text()
        while serves and not self.key:
            if key := re.search(r"agentrt_\S+", log.read_text()):
                self.key = key[0]
        if not serves:
            return ""
        lines = log.read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith((_READY, "Admin key"))) + "\n"


def _free(count: int) -> list[int]:
    """Ports that nobody has at this moment."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in taken]
    finally:
        for server in taken:
            server.close()


def follow(page: Path, folder: Path, ports: Sequence[int]) -> int:
    """Do what a page says, in an empty folder, and return how many commands that were. Blocks of ``sh`` and tables are
    for other machines, and left out."""
    shell = Shell(folder, ports)
    executed = 0
    try:
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language in ("python", "toml"):
                name = text.partition("\n")[0].removeprefix("# ")
                (folder / name).write_text(shell.here(text))
                continue
            if language == "sh":
                continue
            assert language == "console", language
            for command, shown in commands(text):
                expected = shell.here(shown)
                printed = shell.execute(command)
                assert agrees(expected, printed), (command, expected, printed)
                executed += 1
    finally:
        shell.close()
    return executed


def agrees(expected: str, found: str) -> bool:
    """Whether output is what the page shows; ``…`` stands for anything, and columns may be apart by any space."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("…")]
    return re.fullmatch(r"\s*" + ".*".join(parts) + r"\s*", " ".join(found.split()), re.DOTALL) is not None


def commands(block: str) -> list[tuple[str, str]]:
    """(command, what the page shows of its output)."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    assert found and block.startswith("$ ")
    return found


def program(page: Path, name: str) -> str:
    """A page's program by the file name in its first line."""
    (text,) = [
        text
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language == "python" and text.startswith(f"# {name}\n")
    ]
    return text
