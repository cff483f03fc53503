"""A node: a runtime with what its configuration loads, behind the HTTP API."""

import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
from starlette.routing import BaseRoute

from agentrt.callbacks.address import parse_networks
from agentrt.callbacks.secrets import CallbackSecrets
from agentrt.callbacks.sender import Sender
from agentrt.config import Config
from agentrt.http.app import make_app, streams_of
from agentrt.http.keys import ANY_TENANT, KeyRing
from agentrt.http.server import HttpServer, limits_of, listen
from agentrt.http.settings import parse_address
from agentrt.node.sources import Described, load_sources
from agentrt.observe.tracing import Tracing, otlp
from agentrt.records import Record
from agentrt.runtime import Runtime

#: Descriptors beside those of connections: the store, hosts, events.
_DESCRIPTORS_OWN: Final = 1_024


class Started(msgspec.Struct, frozen=True):
    """``url``: of the API. ``admin_key``: made because there was no key yet; nobody can see it again."""

    url: str
    agents: list[str]
    tools: list[str]
    admin_key: str | None = None


class Node:
    """Made, started and stopped by one thread, which blocks meanwhile. ``routes(runtime)``: more than the API."""

    def __init__(self, config: Config, routes: Callable[[Runtime], Iterable[BaseRoute]] | None = None) -> None:
        """Imports what is to be loaded, in a child. Raises ConfigError, InputError of what is loaded."""
        self.config = config
        self._routes = routes
        parse_address(config.http.listen)
        parse_networks(config.http.callback_networks)
        self._described: Described = load_sources(config)
        self.runtime = Runtime(config=config, tools=self._described.tools)
        self._server: HttpServer | None = None
        self._send_traces = otlp(config.traces) if config.traces.endpoint else None
        self._tracing: Tracing | None = None

    def start(self) -> Started:
        """Returns when the node serves. Raises StoreError kinds, ConfigError, InputError, ModuleError kinds: nothing is
        left behind."""
        config = self.config.http
        _raise_descriptor_limit(config.connections_max)
        listener = listen(*parse_address(config.listen))  # before the store is opened: a port in use is found at once
        try:
            self.runtime.start_sync()
            if self._send_traces is not None:
                self._tracing = Tracing(self.config.traces, self._journal_of, self._send_traces)
                self.runtime.observe(self._tracing.observe, activations=True)
            for agent in self._described.agents:
                self.runtime.register_sync(agent.name, **agent.arguments())
            keys, callback_secrets = KeyRing(self.runtime), CallbackSecrets(self.runtime)
            secrets: list[str] = []

            async def before() -> None:
                await keys.load()
                await callback_secrets.load()
                if not len(keys):
                    secrets.append((await keys.make(ANY_TENANT, ["admin"], 0, "made at the first start"))[1])

                sender.start()

            streams = streams_of(config)
            sender = Sender(self.runtime, parse_networks(config.callback_networks), callback_secrets)

            def stopping() -> None:
                streams.close()
                sender.close()

            extra = () if self._routes is None else self._routes(self.runtime)
            self._server = HttpServer(
                make_app(self.runtime, keys, streams, callback_secrets, extra=extra),
                listener,
                limits=limits_of(config),
                certificate=_path(config.certificate),
                private_key=_path(config.private_key),
                before=before,
                stopping=stopping,
            )
            self._server.start()
            self.runtime.open_ingresses_sync()
        except BaseException:
            listener.close()
            if self._tracing is not None:
                self._tracing.close(0)
            self.runtime.close_sync()
            raise
        host, port = self._server.address
        scheme = "https" if config.certificate else "http"
        return Started(
            f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}",
            [agent.name for agent in self._described.agents],
            [tool.name for tool in self._described.tools],
            secrets[0] if secrets else None,
        )

    @property
    def alive(self) -> bool:
        """Whether the control loop has shown a sign of life lately."""
        return self.runtime.loop_watch.age_ms() <= self.config.http.heartbeat_max_ms

    def stop(self) -> None:
        """Take no more runs, end streams, let answers under way finish, park what runs at its place in the journal, and
        let go of the store: within `stop_bound_s`, whatever guests and clients do. Blocks."""
        self.runtime.stop_accepting()  # also of what stands at the door, for which ingresses would wait
        self.runtime.close_ingresses_sync()
        if self._server is not None:
            self._server.stop(self.config.http.stop_timeout_ms / 1e3)
        patience_s = self.config.traces.timeout_ms / 1e3
        if self._tracing is not None:
            self._tracing.settle(patience_s)
        self.runtime.close_sync()
        if self._tracing is not None:
            self._tracing.close(patience_s)  # with the activations that have just ended

    def _journal_of(self, run_id: str, after: int) -> list[Record]:
        return self.runtime.read_store_sync(lambda store: store.read_records(run_id, after))

    @property
    def stop_bound_s(self) -> float:
        """The time in which `stop` is over, with room for a slow disk."""
        traces_ms = 2 * self.config.traces.timeout_ms if self._tracing is not None else 0
        return (self.config.http.stop_timeout_ms + self.config.node.close_timeout_ms + traces_ms) / 1e3 + 20


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _raise_descriptor_limit(connections_max: int) -> None:
    """As far as the process may, so that connections are refused by their own bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + _DESCRIPTORS_OWN
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
