"""Native commands in tests: a launcher, and a small program of ours that tries to get out."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.process import Ended, Order, Process
from agentrt.backends.process.settings import ProcessConfig

SOURCE = Path(__file__).with_name("escapes.c")


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that processes of another user may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="agentrt-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def escapes() -> Iterator[Path]:
    """The built program."""
    with public_folder() as folder:
        program = folder / "escapes"
        subprocess.run(["cc", "-O1", "-w", "-o", program, SOURCE], check=True, timeout=120)
        yield program


class Running:
    """A process, and what it wrote so far."""

    def __init__(self) -> None:
        self.process: Process
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.started = asyncio.Event()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)

    async def output(self) -> tuple[Ended, str]:
        """Its end, and all it wrote."""
        ended = await self.ended
        os.close(self._writer)
        chunks = []
        while chunk := os.read(self._reader, 65536):
            chunks.append(chunk)
        os.close(self._reader)
        return ended, b"".join(chunks).decode(errors="replace")

    async def line(self) -> str:
        """The next line it writes."""
        loop = asyncio.get_running_loop()
        text = b""
        while not text.endswith(b"\n"):
            text += await loop.run_in_executor(None, os.read, self._reader, 1)
        return text.decode().strip()


def begin(launcher: Launcher, *argv: object, tier: int = 2, domain: str = "t", **more: Any) -> Running:
    """Start a program."""
    running = Running()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def start() -> None:
        os.close(null)
        running.started.set()

    def end(ended: Ended) -> None:
        if not running.started.is_set():
            start()
        running.ended.set_result(ended)

    order = Order(argv=tuple(map(str, argv)), domain=domain, tier=tier, **more)
    try:
        running.process = launcher.start(order, [null, running._writer, running._writer], end, start)
    except BaseException:
        for fd in (null, running._writer, running._reader):
            os.close(fd)
        raise
    return running


async def run(launcher: Launcher, *argv: object, **more: Any) -> tuple[Ended, str]:
    """Run a program to its end: how it ended, and what it wrote."""
    return await begin(launcher, *argv, **more).output()


@contextlib.asynccontextmanager
async def launcher_with(**settings: Any) -> AsyncIterator[Launcher]:
    made = Launcher(asyncio.get_running_loop(), ProcessConfig(**settings))
    await made.open()
    try:
        yield made
    finally:
        await made.close()
