"""The tool provider: on the control loop the engine's calls and the registry, on a thread of its own the servers.

What is heard from a server is read, checked and turned into JSON on that thread; the control loop gets outcomes.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt.backends.process import shared
from agentrt.backends.process.launcher import Launcher
from agentrt.config import Config
from agentrt.decoding import UNREADABLE
from agentrt.errors import ClosedError, InputError, QueueFullError
from agentrt.sizing import tool_limits
from agentrt.tools.binding import encode_result
from agentrt.tools.declare import CLASS_DEFAULT
from agentrt.tools.outcome import EVICTED_WAITING, ClassStatistics, Done, ToolOutcome
from agentrt.tools.secrets import SecretAsker, provider_from
from agentrt.tools.spec import ToolRegistry, ToolSpec
from agentrt_mcp.catalog import Catalog, Entry
from agentrt_mcp.results import Answer, failed
from agentrt_mcp.server import Call, Server
from agentrt_mcp.settings import RESERVED, McpSettings

PROVIDER: Final = "mcp"
#: What the servers offer, as a step of its own: what a run has seen stays what it has seen.
LISTING: Final = f"{RESERVED}.tools"
_LISTING_TIMEOUT_NS: Final = 30_000_000_000
_CLOSE_PATIENCE_S: Final = 10.0
_CATALOG_BYTES_MAX: Final = 64 << 20

_log = logging.getLogger(__name__)


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    server: str | None = None


class _Pending:
    """A call as the control loop knows it."""

    __slots__ = ("call", "cls", "done", "ended", "server", "size")

    def __init__(self, done: Done, size: int, cls: str) -> None:
        self.done, self.size, self.cls = done, size, cls
        self.ended = False
        self.server: Server | None = None
        self.call: Call | None = None


class McpTools:
    """See `agentrt.engine.ports.Tools`."""

    def __init__(self, config: Config, registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ConfigError."""
        self.registry: Final = registry
        self._config = config
        self._settings = config.plugin("mcp", McpSettings)
        self._loop = loop
        self._folder = self._catalog_folder()
        self._secrets = SecretAsker(provider_from(config.secrets), "agentrt-mcp-secrets")
        self._mark = secrets.token_hex(16)
        self._limits = {cls: tool_limits(config, None, cls) for cls in registry.classes}
        self._launcher: Launcher | None = None
        # No uvloop: its pipes close a descriptor twice, the second time under the feet of whoever has the number then.
        self._theirs: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="agentrt-mcp", daemon=True)
        self._files = ThreadPoolExecutor(1, "agentrt-mcp-files")
        self._servers: dict[str, Server] = {}
        self._names: dict[str, Server] = {}  # by tool; the plugin's thread adds, in `_add`
        self._closed = self._stopping = self._opened = False
        self._number = 0
        self._counts = {cls: [0] * 5 for cls in registry.classes}  # items, bytes, calls, failures, timeouts
        for name, server in self._settings.servers.items():
            self._check(name, server.cls)

    def _check(self, name: str, cls: str) -> None:
        if cls not in self.registry.classes:
            raise InputError(
                f"plugins.mcp.servers.{name}.cls: there is no class {cls!r}",
                hint=f"Classes: {', '.join(self.registry.classes)}",
            )

    def _catalog_folder(self) -> Path | None:
        if self._settings.catalog_path:
            return Path(self._settings.catalog_path)
        store = self._config.store
        return None if store.kind == "memory" else Path(store.path) / "mcp"

    # --- life, on the control loop --------------------------------------------------------

    async def open(self) -> None:
        """Ask the servers for their tools, each for as long as its start may take. One that is away is asked again;
        meanwhile there is what it offered before."""
        self._opened = True
        if any(server.command for server in self._settings.servers.values()):
            process = self._config.process
            self._launcher = shared.acquire(self._loop, process, self._config.scheduler.tier0_share_pct)
        self.registry.add(
            ToolSpec(LISTING, "keyed", _LISTING_TIMEOUT_NS, True, "mcp:listing", CLASS_DEFAULT, provider=PROVIDER)
        )
        self._thread.start()
        await self._there(self._open())

    def start(self) -> None:
        """See `open`."""

    def call(
        self,
        name: str,
        args: bytes,
        *,
        key: str | None,
        tenant: str,
        tier: int,
        attempt: int,
        done: Done,
        timeout_ns: int | None = None,
        reconcile: bool = False,
    ) -> object:
        """As `Tools.call`."""
        if self._closed:
            raise ClosedError("the tools of MCP servers are closed")
        spec = self.registry.get(name)
        limits, counts = self._limits[spec.cls], self._counts[spec.cls]
        if reconcile:
            raise InputError(f"tool {name} is an MCP server's, which cannot be asked what became of a call")
        if len(args) > limits.request_bytes_max:
            raise InputError(
                f"arguments of {len(args)} bytes for tool {name}, more than {limits.request_bytes_max}",
                limit="limits.request_bytes_max",
            )
        if counts[0] >= limits.queue_items_max or counts[1] + len(args) > limits.queue_bytes_max:
            raise QueueFullError(f"{counts[0]} calls of MCP tools with {counts[1]} bytes are waiting or running")
        pending = _Pending(done, len(args), spec.cls)
        counts[0] += 1
        counts[1] += len(args)
        counts[2] += 1
        self._number += 1
        if self._stopping:
            self._loop.call_soon(self._finish, pending, EVICTED_WAITING)
            return pending
        limit_ns = spec.timeout_ns if timeout_ns is None else min(timeout_ns, spec.timeout_ns)
        pending.call = Call(
            self._number, name, bytes(args), key, attempt, limit_ns, tenant, tier, partial(self._answered, pending)
        )
        self._do(self._put, pending)
        return pending

    def cancel(self, call: Any) -> None:
        if isinstance(call, _Pending) and not call.ended:
            self._do(self._cancel, call)

    def statistics(self) -> dict[str, ClassStatistics]:
        """By class; ``hosts`` and ``running`` are not counted here."""
        return {
            cls: ClassStatistics(queued=items, queued_bytes=size, calls=calls, failures=failures, timeouts=timeouts)
            for cls, (items, size, calls, failures, timeouts) in self._counts.items()
        }

    def urgent(self, wanted: Callable[[], bool]) -> None:
        """A run of tier 0 begins: servers of lower tiers make room."""
        if self._launcher is not None:
            self._launcher.urgent(wanted)

    def stop(self) -> None:
        self._stopping = True
        self._do(self._each, Server.stop)

    def evict(self) -> None:
        self._do(self._each, Server.evict)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread.ident is not None:
            with contextlib.suppress(Exception):
                await self._there(self._close())
            self._theirs.call_soon_threadsafe(self._theirs.stop)
            await asyncio.get_running_loop().run_in_executor(self._files, self._thread.join, _CLOSE_PATIENCE_S)
        else:
            self._theirs.close()
        self._files.shutdown(wait=False)
        self._secrets.close()
        if self._launcher is not None:
            launcher, self._launcher = self._launcher, None
            await shared.release(launcher)

    # --- between the threads ------------------------------------------------------------------

    def _do(self, action: Callable[..., None], *arguments: Any) -> None:
        """On the plugin's thread."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._theirs.call_soon_threadsafe(action, *arguments)

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        """The same for work that takes time, waited for."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._theirs))

    def _answered(self, pending: _Pending, answer: Answer, cost_ns: int) -> None:
        """On the plugin's thread."""
        with contextlib.suppress(RuntimeError):  # the control loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._finish, pending, _outcome(answer, cost_ns))

    def _finish(self, pending: _Pending, outcome: ToolOutcome) -> None:
        """On the control loop."""
        if pending.ended or self._closed:
            return
        pending.ended = True
        counts = self._counts[pending.cls]
        counts[0] -= 1
        counts[1] -= pending.size
        counts[3] += not outcome.ok
        counts[4] += outcome.code == "tool_timeout"
        pending.done(outcome)

    def _register(self, specs: list[ToolSpec]) -> None:
        """On the control loop."""
        for spec in specs:
            try:
                self.registry.add(spec)
            except InputError as error:  # another tool has the name
                _log.warning("%s", error)

    # --- on the plugin's thread ---------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._theirs)
        try:
            self._theirs.run_forever()
        finally:
            self._theirs.run_until_complete(self._theirs.shutdown_asyncgens())
            self._theirs.close()

    async def _open(self) -> None:
        for name, settings in self._settings.servers.items():
            catalog = Catalog(name, settings)
            kept = await self._theirs.run_in_executor(self._files, self._read, name)
            server = self._servers[name] = Server(
                name,
                settings,
                catalog,
                self._launcher,
                self._secrets,
                self._mark,
                self._limits[settings.cls].result_bytes_max,
                partial(self._add, name),
                partial(self._keep, name),
            )
            if kept:
                catalog.load(kept)
            server.start()
        await asyncio.gather(*[server.listed() for server in self._servers.values()])
        for name, server in self._servers.items():
            if server.catalog.current is None:
                entries, problems = server.catalog.remembered()
                for problem in problems:
                    _log.warning("mcp server %s: %s", name, problem)
                self._add(name, entries)

    def _add(self, name: str, entries: list[Entry]) -> None:
        settings = self._settings.servers[name]
        for entry in entries:
            self._names[entry.name] = self._servers[name]
        specs = [
            ToolSpec(
                entry.name,
                entry.version.kind,
                round(settings.timeout_s * 1e9),
                True,
                f"mcp:{name}:{entry.version.tool}@{entry.version.version}",
                settings.cls,
                key_ttl_ns=round(settings.key_ttl_s * 1e9),
                provider=PROVIDER,
            )
            for entry in entries
        ]
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._register, specs)

    def _put(self, pending: _Pending) -> None:
        call = pending.call
        assert call is not None
        if call.entry_name == LISTING:
            call.finish(self._listing(call.args))
            return
        server = self._names.get(call.entry_name)
        if server is None:
            call.finish(failed("tool_unavailable", f"no MCP server has offered {call.entry_name} yet"))
            return
        pending.server = server
        server.put(call)

    def _cancel(self, pending: _Pending) -> None:
        if pending.server is not None and pending.call is not None:
            pending.server.cancel(pending.call)

    def _listing(self, args: bytes) -> Answer:
        try:
            asked = msgspec.json.decode(args, type=_Asked)
        except UNREADABLE as error:
            return failed("tool_args", f"the arguments do not fit: {error}")
        if asked.server is not None and asked.server not in self._servers:
            return failed("tool_args", f"there is no MCP server {asked.server[:100]!r}")
        found = {
            name: list(server.catalog.listing())
            for name, server in self._servers.items()
            if asked.server in (None, name)
        }
        payload, code = encode_result(found, self._limits[CLASS_DEFAULT].result_bytes_max)
        return Answer(code is None, payload, code)

    def _each(self, action: Callable[[Server], None]) -> None:
        for server in self._servers.values():
            action(server)

    async def _close(self) -> None:
        await asyncio.gather(*[server.close(_CLOSE_PATIENCE_S / 2) for server in self._servers.values()])

    # --- what is kept, on a thread for files -----------------------------------------------------

    def _read(self, name: str) -> bytes:
        if self._folder is None:
            return b""
        try:
            with open(self._folder / f"{name}.json", "rb") as file:
                return file.read(_CATALOG_BYTES_MAX)
        except FileNotFoundError:
            return b""
        except OSError as error:
            _log.warning("what mcp server %s offered before cannot be read: %s", name, error.strerror)
            return b""

    def _keep(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            self._files.submit(self._write, self._folder, name, data)

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            beside = folder / f".{name}.json"
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(folder / f"{name}.json")
        except OSError as error:
            _log.warning("what mcp server %s offers cannot be kept: %s", name, error.strerror)


def _outcome(answer: Answer, cost_ns: int) -> ToolOutcome:
    evicted = answer.code == "tool_evicted"
    died = answer.code == "tool_host_died"
    return ToolOutcome(answer.ok, answer.payload, answer.code, cost_ns, died, answer.unknown, evicted)
