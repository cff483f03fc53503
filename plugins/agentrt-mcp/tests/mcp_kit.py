"""Servers to test with, and the provider on a loop as the node's."""

import asyncio
import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import agentrt_mcp
import msgspec
import pytest
from agentrt_mcp.provider import McpTools

from agentrt.config import Config, load_config
from agentrt.plugins import Plugins
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolRegistry

HERE = Path(__file__).parent
#: Distributions of servers, which processes of any user may read (see `Place`).
SERVERS = ("mcp", "mcp-server-time", "mcp-server-git")
WAIT_S = 60.0


def plugins() -> Plugins:
    return Plugins.load({"agentrt-mcp": agentrt_mcp}, entry_points=False)


class Place:
    """Where everybody may read: a node of root gives each process a user of its own, which sees nothing of root's."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="agentrt-mcp-tests-"))
        self.path.chmod(0o755)
        self.packages = self.path / "packages"
        shutil.copytree(HERE, self.path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for name in closure(SERVERS):
            for file in importlib.metadata.files(name) or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    target = self.packages / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file.locate(), target)
        self.python = interpreter()
        self._folders = 0

    def folder(self) -> Path:
        """One that everybody may change."""
        self._folders += 1
        made = self.path / f"folder{self._folders}"
        made.mkdir()
        made.chmod(0o777)
        return made

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def server(self, arguments: list[str], write: list[Path], packages: Path | None = None, **more: Any) -> Any:
        """Settings of one in Python."""
        environment = {"PYTHONPATH": str(packages or self.packages)} | more.pop("environment", {})
        return {
            "command": [self.python, "-P", "-B", *arguments],
            "read": [str(self.path), str(packages or self.packages), *SYSTEM],
            "write": [str(path) for path in write],
            "environment": environment,
        } | more

    def faulty(self, folder: Path, **more: Any) -> Any:
        """Settings of faulty.py, as a program."""
        arguments = [str(self.path / "tests" / "faulty.py"), str(folder)]
        return self.server(arguments, [folder], **({"trust_hints": True} | more))


#: What an interpreter needs beside what every process may read.
SYSTEM = tuple({sys.base_prefix, os.path.realpath(sys.base_prefix)} - {"/usr"})


def interpreter() -> str:
    """A Python of this version that other users may execute."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (os.path.realpath(sys.executable), f"/usr/local/bin/{name}", f"/usr/bin/{name}"):
        if os.path.exists(path) and all(each.stat().st_mode & 1 for each in (Path(path), *Path(path).parents)):
            return path
    pytest.skip(f"no {name} that other users may execute")


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions and what they require."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        found.add(name)
        left += [re.split(r"[^A-Za-z0-9._-]", each)[0] for each in requires if "extra ==" not in each]
    return found


def config(servers: dict[str, Any], **more: Any) -> Config:
    # As nice as the tests: on a full machine a process of niceness 19 takes minutes to import what a server needs.
    arguments = {"store.kind": "memory", "tools.providers": "mcp", "process.nice": 0}
    found = load_config(arguments=arguments | more, env={})
    return msgspec.structs.replace(found, plugins={"mcp": {**found.plugins.get("mcp", {}), "servers": servers}})


class Bench:
    """An open provider."""

    def __init__(self, tools: McpTools, registry: ToolRegistry) -> None:
        self.tools, self.registry = tools, registry
        self.loop = asyncio.get_running_loop()
        self.last: Any = None

    def begin(self, name: str, args: Any = None, **more: Any) -> "asyncio.Future[ToolOutcome]":
        future: asyncio.Future[ToolOutcome] = self.loop.create_future()
        more = {"key": "key", "tenant": "acme", "tier": 1, "attempt": 1} | more
        self.last = self.tools.call(name, msgspec.json.encode(args or {}), done=future.set_result, **more)
        return future

    async def call(self, name: str, args: Any = None, **more: Any) -> ToolOutcome:
        return await asyncio.wait_for(self.begin(name, args, **more), WAIT_S)

    async def value(self, name: str, args: Any = None, **more: Any) -> Any:
        """Of a call that ends well: what it returned, or its text."""
        outcome = await self.call(name, args, **more)
        assert outcome.ok, outcome
        told = msgspec.json.decode(outcome.payload)
        structured = told.get("structured")
        if isinstance(structured, dict) and set(structured) == {"result"}:
            return structured["result"]
        return structured if structured is not None else told["content"][0]["text"]

    async def listing(self, server: str | None = None) -> dict[str, Any]:
        outcome = await self.call("mcp.tools", {} if server is None else {"server": server})
        assert outcome.ok, outcome
        return {tool["name"]: tool for tools in msgspec.json.decode(outcome.payload).values() for tool in tools}


@contextlib.asynccontextmanager
async def opened(settings: Config) -> AsyncIterator[Bench]:
    registry = ToolRegistry()
    tools = McpTools(settings, registry, asyncio.get_running_loop())
    try:
        await asyncio.wait_for(tools.open(), WAIT_S)
        tools.start()
        yield Bench(tools, registry)
    finally:
        await asyncio.wait_for(tools.close(), WAIT_S)


def lines(folder: Path) -> list[str]:
    try:
        return (folder / "log").read_text().splitlines()
    except FileNotFoundError:
        return []


async def until(condition: Any, what: str = "") -> None:
    """Look until it holds."""
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)
    if asyncio.iscoroutine(found):
        raise TypeError("a condition is no coroutine")


class HttpServer:
    """faulty.py by streamable HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        command = [sys.executable, "-P", "-B", str(HERE / "faulty.py"), str(self.folder), str(self.port)]
        with open(self.folder / "stderr", "ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "stderr").read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[HttpServer]:
    made = HttpServer(folder)
    made.start()
    try:
        yield made
    finally:
        made.kill()
