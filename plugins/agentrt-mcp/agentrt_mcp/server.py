"""A server: its sessions, the line of its calls, and what it offers. On the plugin's loop.

Each tenant has a session of its own, unless the settings say that they share one; the node has one more, which asks for
the tools and hears of changes. A session that could not be started, or has died, is not started again before a while
has passed, which doubles; calls get ``tool_unavailable`` in it, and whoever retries is the runtime.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.process import Order
from agentrt.decoding import UNREADABLE
from agentrt.flow.fair import Fair
from agentrt.tools.secretrefs import VALUE_CHARS_MIN, names_in, redact, redact_payload, substitute
from agentrt.tools.secrets import SecretAsker, SecretError
from agentrt_mcp.catalog import Catalog, Entry
from agentrt_mcp.http import http_streams
from agentrt_mcp.results import Answer, failed
from agentrt_mcp.schemas import misfit
from agentrt_mcp.session import Clock, Session
from agentrt_mcp.settings import SECRET_PREFIX, ServerSettings
from agentrt_mcp.stdio import ServerError, ServerProcess, stdio_streams

#: Whose sessions are the node's own, and the shared ones.
NODE: Final = ""
_BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 30.0
#: A session that has lived so long has not failed to start.
_SETTLED_S: Final = 10.0
#: Between two listings.
_LIST_PAUSE_S: Final = 0.5
_LINE_SLACK_BYTES: Final = 1 << 20
_TIER: Final = 1  # of a process that has no call

_log = logging.getLogger(__name__)


class Call:
    """``finish(answer, cost_ns)`` is called once."""

    def __init__(
        self, number: int, entry_name: str, args: bytes, key: str | None, attempt: int, timeout_ns: int, tenant: str,
        tier: int, finish: Callable[[Answer, int], None],
    ) -> None:  # fmt: skip
        self.number, self.entry_name, self.args, self.key, self.attempt = number, entry_name, args, key, attempt
        self.timeout_ns, self.tenant, self.tier = timeout_ns, tenant, tier
        self._finish: Callable[[Answer, int], None] | None = finish
        self.line: Fair[Call] | None = None
        self.task: asyncio.Task[None] | None = None
        self.session: Session | None = None
        self.stopped: Answer | None = None  # why it was ended by us
        self.sent = False
        self.repeatable = False

    def finish(self, answer: Answer, cost_ns: int = 0) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish(answer, cost_ns)


class _Backoff:
    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0


class Server:
    """``on_entries``: gets entries that are new. ``on_catalog``: gets what is to be kept. ``launcher``: for a server
    that is a program."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        catalog: Catalog,
        launcher: Launcher | None,
        secrets: SecretAsker,
        mark: str,
        result_bytes_max: int,
        on_entries: Callable[[list[Entry]], None],
        on_catalog: Callable[[bytes], None],
    ) -> None:
        self.name, self.settings, self.catalog = name, settings, catalog
        self._launcher, self._secrets, self._mark = launcher, secrets, mark
        self._result_bytes_max = result_bytes_max
        self._on_entries, self._on_catalog = on_entries, on_catalog
        self._loop = asyncio.get_running_loop()
        self._line: Fair[Call] = Fair()
        self._placeless: Fair[Call] = Fair()  # all places for sessions are taken by busy ones
        self._running: set[Call] = set()
        self._sessions: dict[str, Session] = {}
        self._ending: set[Session] = set()
        self._backoffs: dict[str, _Backoff] = {}
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()  # a session of the node
        self._listed: asyncio.Future[None] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = self._closed = False

    # --- life -----------------------------------------------------------------------

    def start(self) -> None:
        self._tasks = [self._loop.create_task(each) for each in (self._keep_listing(), self._end_idle())]

    async def listed(self) -> None:
        """Wait until the server was heard, or could not be, for the first time."""
        await asyncio.shield(self._listed)

    def stop(self) -> None:
        """Begin nothing more: what waits is evicted."""
        self._stopping = True
        for line in (self._line, self._placeless):
            for call in list(line):
                self._take_out(call)
                call.finish(_EVICTED)

    def evict(self) -> None:
        """After `stop`: end what runs."""
        for call in tuple(self._running):
            self._stop(call, _EVICTED._replace(unknown=call.sent))

    async def close(self, patience_s: float) -> None:
        """End all sessions."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for call in tuple(self._running):
            if call.task is not None:
                call.task.cancel()
        sessions = [*self._sessions.values(), *self._ending]
        for session in sessions:
            session.leave("the node stops")
        if sessions:
            _, late = await asyncio.wait([asyncio.ensure_future(each.left()) for each in sessions], timeout=patience_s)
            if late:
                for session in sessions:
                    session.abandon()
                await asyncio.wait(late, timeout=patience_s)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- calls -------------------------------------------------------------------------

    def put(self, call: Call) -> None:
        """Have it done when there is a place."""
        if self._stopping:
            call.finish(_EVICTED)
            return
        self._wait_in(self._line, call)
        self._pump()

    def cancel(self, call: Call) -> None:
        """Nobody wants it any more. One that is under way and may not be repeated is left to its end: its effect would
        come, and nobody would know."""
        if call.line is not None:
            self._take_out(call)
            call.finish(failed("cancelled", "the call was cancelled"))
        elif call in self._running and (call.repeatable or not call.sent):
            self._stop(call, failed("cancelled", "the call was cancelled", unknown=call.sent))

    def _wait_in(self, line: Fair[Call], call: Call) -> None:
        call.line = line
        line.put(call.tier, call.tenant, 1, call.number, call)

    def _take_out(self, call: Call) -> None:
        assert call.line is not None
        call.line.remove(call.tier, call.tenant, call.number)
        call.line = None

    def _stop(self, call: Call, why: Answer) -> None:
        if call.stopped is None and call.task is not None:
            call.stopped = why
            call.task.cancel()

    def _pump(self) -> None:
        while len(self._running) < self.settings.calls_max and not self._closed and not self._stopping:
            line = self._placeless if self._placeless and self._place_for_another() else self._line
            if not line:
                return
            call = line.take(line.order()[0], 1)
            call.line = None
            domain = self._domain(call.tenant)
            if domain not in self._sessions and not self._place_for_another():
                self._wait_in(self._placeless, call)
                continue
            self._running.add(call)
            call.task = self._loop.create_task(self._run(call, domain))
            call.task.add_done_callback(partial(self._over, call))

    def _domain(self, tenant: str) -> str:
        return NODE if self.settings.shared else tenant

    def _place_for_another(self) -> bool:
        """Whether a session more may begin, if need be in the place of one that has nothing to do."""
        if len(self._sessions) < self.settings.sessions_max:
            return True
        idle = [each for each in self._sessions.values() if not each.calls and each.domain != NODE]
        if not idle:
            return False
        self._end(min(idle, key=lambda each: each.idle_since), "its place is needed")
        return True

    async def _run(self, call: Call, domain: str) -> None:
        began_ns = time.monotonic_ns()
        clock: Clock | None = None
        session: Session | None = None
        try:
            found = self._session(domain)
            if isinstance(found, Answer):
                answer = found
            else:
                session = call.session = found
                session.calls += 1
                self._rank(session)
                try:
                    await asyncio.shield(session.ready)
                except ServerError as error:
                    answer = self._unavailable(domain, redact(str(error), session.secrets))
                else:
                    began_ns = time.monotonic_ns()
                    clock = session.clock(call.timeout_ns / 1e9, partial(self._on_deadline, call))
                    answer = await self._ask(session, call)
        except asyncio.CancelledError:
            answer = call.stopped or _EVICTED._replace(unknown=call.sent)
        except Exception as error:
            _log.exception("a call of mcp server %s", self.name)
            answer = failed("tool_failed", f"{type(error).__name__} in the plugin", unknown=call.sent)
        self._running.discard(call)
        if session is not None:
            if clock is not None:
                session.stop_clock(clock)
            session.calls -= 1
            session.idle_since = self._loop.time()
            self._rank(session)
            if answer.lost and not session.over:
                self._end(session, "the server has forgotten it")
        call.finish(answer, time.monotonic_ns() - began_ns)

    def _over(self, call: Call, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before it has begun says nothing itself."""
        self._running.discard(call)
        call.finish(call.stopped or _EVICTED)
        self._pump()

    def _on_deadline(self, call: Call) -> None:
        self._stop(call, failed("tool_timeout", f"not finished within {call.timeout_ns / 1e9:g} seconds", unknown=True))

    async def _ask(self, session: Session, call: Call) -> Answer:
        entry = self.catalog.entries[call.entry_name]
        call.repeatable = entry.version.kind in ("pure", "keyed")
        values: dict[str, str] = {}
        args = call.args
        if self.settings.secrets and (names := names_in(args)):
            try:
                values = await self._values(call.tenant, names)
            except SecretError as error:
                return failed("tool_secret", error.message)
            args = substitute(args, values)
        try:
            arguments = msgspec.json.decode(args)
        except UNREADABLE as error:
            return failed("tool_args", f"the arguments are no JSON: {error}")
        if wrong := self._unfit(entry, arguments):
            return wrong
        call.sent = True
        answer = await session.call(entry, arguments, call.key, call.attempt)
        if known := session.secrets | values:
            answer = answer._replace(payload=redact_payload(answer.payload, known))
        return answer

    def _unfit(self, entry: Entry, arguments: Any) -> Answer | None:
        if not isinstance(arguments, dict):
            return failed("tool_args", "the arguments are no object")
        if wrong := misfit(entry.arguments, arguments):
            return failed("tool_args", f"the arguments do not fit the tool's schema: {wrong}")
        if wrong := self.catalog.superseded(entry):
            return failed("tool_conflict", f"the server has changed the tool: {wrong}")
        now = self.catalog.changed_to(entry)
        if now is not None and (wrong := misfit(now.arguments, arguments)):
            text = f"the server has changed the tool, whose new version is {now.name}: {wrong}"
            return failed("tool_conflict", text)
        return None

    async def _values(self, tenant: str, names: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in sorted(names):
            if name not in self.settings.secrets:
                raise SecretError(f"plugins.mcp.servers.{self.name}.secrets does not name {name[:200]!r}")
            found[name] = await self._value(tenant, name)
        return found

    async def _value(self, tenant: str, name: str) -> str:
        value = await self._secrets(tenant, name)
        if len(value) < VALUE_CHARS_MIN:
            raise SecretError(f"secret {name} has fewer than {VALUE_CHARS_MIN} characters: it could not be kept out")
        return value

    # --- sessions ------------------------------------------------------------------------

    def _session(self, domain: str) -> Session | Answer:
        """The domain's, begun if there is none; or why not."""
        known = self._sessions.get(domain)
        if known is not None:
            return known
        backoff = self._backoffs.get(domain)
        if backoff is not None and self._loop.time() < backoff.until:
            return self._unavailable(domain, "it has just failed")
        if domain == NODE:
            self._begun.set()
        made = self._sessions[domain] = Session(
            self.name, domain, self.settings.start_timeout_s, self._mark, self._result_bytes_max
        )
        made.begin(self._transport, self._on_end, self.settings.handshake)
        return made

    def _unavailable(self, domain: str, why: str) -> Answer:
        backoff = self._backoffs.get(domain)
        left_s = 0.0 if backoff is None else max(0.0, backoff.until - self._loop.time())
        text = f"mcp server {self.name} is not there: {why}"
        return failed("tool_unavailable", text, retry_after_s=round(left_s, 3))

    async def _transport(self, session: Session) -> Any:
        """What a `Client` is made with. Raises ServerError."""
        settings = self.settings
        try:
            if settings.url:
                headers = await self._resolved(session, settings.headers)
                return http_streams(settings.url, headers, 2 * self._result_bytes_max + _LINE_SLACK_BYTES, self._mark)
            environment = await self._resolved(session, settings.environment)
        except SecretError as error:
            raise ServerError(error.message) from None
        assert self._launcher is not None
        order = Order(
            argv=settings.command,
            domain=f"mcp:{self.name}:{session.domain}",
            tier=_TIER,
            environment=environment,
            network=settings.network,
            read=settings.read,
            write=settings.write,
            memory_max_bytes=settings.memory_bytes_max or None,
            pids_max=settings.processes_max or None,
            uid=settings.uid,
        )
        process = session.process = ServerProcess(self._launcher, order, session.on_frozen)
        await process.start()
        return stdio_streams(process, 2 * self._result_bytes_max + _LINE_SLACK_BYTES)

    async def _resolved(self, session: Session, given: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, text in given.items():
            before, prefix, name = text.partition(SECRET_PREFIX)
            if prefix:  # "Bearer secret://name" is one as well
                session.secrets[name] = await self._value(session.domain, name)
                text = before + session.secrets[name]
            found[key] = text
        return found

    def _rank(self, session: Session) -> None:
        """Its process is as urgent as the most urgent of its calls."""
        if session.process is not None:
            tiers = [call.tier for call in self._running if call.session is session]
            session.process.serve(min(tiers, default=_TIER))

    def _end(self, session: Session, why: str) -> None:
        if self._sessions.get(session.domain) is session:
            del self._sessions[session.domain]
        self._ending.add(session)
        session.leave(why)

    def _on_end(self, session: Session) -> None:
        domain = session.domain
        asked = session in self._ending
        self._ending.discard(session)
        if self._sessions.get(domain) is session:
            del self._sessions[domain]
        if not self._closed and not asked:
            self._fail(session)
        self._changed.set()
        if not self._closed:
            self._pump()

    def _fail(self, session: Session) -> None:
        """It ended by itself."""
        backoff = self._backoffs.setdefault(session.domain, _Backoff())
        was_ready = session.ready.done() and session.ready.exception() is None
        if was_ready and self._loop.time() - session.began > _SETTLED_S:
            backoff.failures = 0
        backoff.failures += 1
        wait_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2 ** min(backoff.failures - 1, 16))
        backoff.until = self._loop.time() + wait_s
        self._loop.call_later(2 * _BACKOFF_MAX_S, self._forget, session.domain, backoff, backoff.failures)
        why = redact(session.why, session.secrets)
        _log.warning("mcp server %s is gone, at the earliest back in %.1f s: %s", self.name, wait_s, why[:1000])

    def _forget(self, domain: str, backoff: _Backoff, failures: int) -> None:
        if self._backoffs.get(domain) is backoff and backoff.failures == failures:
            del self._backoffs[domain]

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(self.settings.idle_timeout_s, 10.0) / 2)
            before = self._loop.time() - self.settings.idle_timeout_s
            for session in tuple(self._sessions.values()):
                listens = session.domain == NODE and session.says_changes
                if not session.calls and session.idle_since < before and not listens and session.ready.done():
                    self._end(session, "it had nothing to do")

    # --- what it offers ------------------------------------------------------------------

    async def _keep_listing(self) -> None:
        """Ask for the tools, until the server was heard; then again whenever it says that they have changed, and hear
        of that as long as it does. One that does not say so is asked in each new session of the node's own."""
        while True:
            session = self._session(NODE)
            if isinstance(session, Answer):
                await asyncio.sleep(max(_BACKOFF_MIN_S, self._backoffs[NODE].until - self._loop.time()))
                continue
            self._begun.clear()
            try:
                await self._list(session)
                await self._hear(session)
            except Exception as error:
                _log.warning("mcp server %s does not say its tools: %s", self.name, redact(str(error), session.secrets))
                if not self._listed.done():
                    self._listed.set_result(None)
                if not session.over:
                    self._end(session, "it does not say its tools")
                    self._fail(session)
                continue
            if not session.says_changes:
                await self._begun.wait()

    async def _list(self, session: Session) -> None:
        """Raises ServerError, MCPError, ValidationError."""
        await asyncio.shield(session.ready)
        async with asyncio.timeout(self.settings.start_timeout_s):
            offered = await session.tools()
        entries, problems = self.catalog.absorb(offered)
        for problem in problems:
            _log.warning("mcp server %s: %s", self.name, problem)
        if entries:
            self._on_entries(entries)
            self._on_catalog(self.catalog.dump())
        if not self._listed.done():
            self._listed.set_result(None)

    async def _hear(self, session: Session) -> None:
        """List again whenever the tools have changed, until the session is over. Raises as `_list`."""
        self._changed.clear()
        session.on_changed = self._changed.set
        listening = self._loop.create_task(session.listen()) if session.says_changes else None
        try:
            while not session.over:
                await self._changed.wait()
                self._changed.clear()
                if not session.over:
                    await asyncio.sleep(_LIST_PAUSE_S)  # many changes are one listing
                    self._changed.clear()
                    await self._list(session)
        finally:
            if listening is not None:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


#: The node stops.
_EVICTED: Final = Answer(False, b'{"code":"tool_evicted","message":"the node stopped"}', "tool_evicted")
