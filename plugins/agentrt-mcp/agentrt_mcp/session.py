"""One session with a server: a process or a connection, the handshake, and the calls that run in it. On the plugin's
loop."""

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any, Final

import mcp_types as types
from mcp import Client
from mcp.client.subscriptions import ListenNotSupportedError
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter, ValidationError

from agentrt_mcp.catalog import TOOLS_MAX, Entry, Offered
from agentrt_mcp.results import Answer, answered, failed, refused
from agentrt_mcp.stdio import ServerError, ServerProcess

#: What goes along with a call, in its ``_meta``: a server that knows the key can see that a call is a repetition.
KEY_META: Final = "agentrt/idempotency-key"
ATTEMPT_META: Final = "agentrt/attempt"

_PAGES_MAX: Final = 100
_LISTEN_AGAIN_S: Final = 5.0
_results: Final[TypeAdapter[types.CallToolResult | types.InputRequiredResult]] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)
_log = logging.getLogger(__name__)


class Clock:
    """A deadline that stands still while the session's process is frozen."""

    def __init__(self, loop: asyncio.AbstractEventLoop, left_s: float, over: Callable[[], None]) -> None:
        self._loop, self._left_s, self._over = loop, left_s, over
        self._handle: asyncio.TimerHandle | None = None

    def run(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(self._left_s, self._over)

    def hold(self) -> None:
        if self._handle is not None:
            self._left_s = max(0.0, self._handle.when() - self._loop.time())
            self._handle.cancel()
            self._handle = None


class Session:
    """``ready`` is done once hands are shaken, or with ServerError. ``process``: of a server that is a program."""

    def __init__(self, server: str, domain: str, start_timeout_s: float, mark: str, bytes_max: int) -> None:
        self.server, self.domain = server, domain
        self._start_timeout_s, self._mark, self._bytes_max = start_timeout_s, mark, bytes_max
        self._loop = asyncio.get_running_loop()
        self.ready: Final[asyncio.Future[None]] = self._loop.create_future()
        self.process: ServerProcess | None = None
        self.client: Client | None = None
        #: Values of the secrets that it was started with, by name.
        self.secrets: dict[str, str] = {}
        self.calls = 0
        self.began = self.idle_since = self._loop.time()
        self.over = False
        self.why = ""  # it is over
        #: Whether the server says when its tools change.
        self.says_changes = False
        #: Called when it has said so, or may have.
        self.on_changed: Callable[[], None] = lambda: None
        self._leaving = asyncio.Event()
        self._clocks: set[Clock] = set()
        self._frozen = False
        self._task: asyncio.Task[None] | None = None

    def begin(
        self, make_transport: Callable[["Session"], Any], on_end: Callable[["Session"], None], handshake: str
    ) -> None:
        """``await make_transport(session)``: what a `Client` is made with. ``on_end(session)`` is called once."""
        self._task = self._loop.create_task(self._serve(make_transport, on_end, handshake))

    def leave(self, why: str) -> None:
        """End it."""
        self.why = self.why or why
        self._leaving.set()

    async def left(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    def abandon(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(
        self, make_transport: Callable[["Session"], Any], on_end: Callable[["Session"], None], handshake: str
    ) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s) as limit:
                transport = await make_transport(self)
                client = Client(
                    transport,
                    mode="auto" if handshake == "auto" else "legacy",
                    cache=None,
                    message_handler=self._on_message,
                    client_info=types.Implementation(name="agentrt", version=_version()),
                )
                async with client:
                    limit.reschedule(None)
                    self.client = client
                    tools = client.server_capabilities.tools
                    self.says_changes = tools is not None and bool(tools.list_changed)
                    self.idle_since = self._loop.time()
                    self.ready.set_result(None)
                    await self._until_it_ends()
        except asyncio.CancelledError:
            self.why = self.why or "it was ended"
        except TimeoutError:
            self.why = self.why or f"it did not shake hands within {self._start_timeout_s:g} seconds"
        except BaseException as error:  # groups of the SDK's, with what happened inside
            self.why = self.why or _told(error)
        finally:
            self.over = True
            self.client = None
            if self.process is not None:
                self.process.kill()
                self.why = f"{self.why}: {self.process.describe()}" if self.why else self.process.describe()
            if not self.ready.done():
                self.ready.set_exception(ServerError(self.why))
                self.ready.exception()  # somebody may have waited, or nobody
            on_end(self)

    async def _until_it_ends(self) -> None:
        waits = [self._leaving.wait()]
        if self.process is not None:
            waits.append(self.process.ended.wait())
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self.on_changed()

    # --- what can be asked of it -----------------------------------------------------

    async def tools(self) -> list[Offered]:
        """Raises MCPError, ValidationError, ServerError."""
        client = self._open_client
        found: list[Offered] = []
        cursor: str | None = None
        for _ in range(_PAGES_MAX):
            page = await client.list_tools(cursor=cursor)
            found += [_offered(tool) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None or len(found) > TOOLS_MAX:
                break
        return found

    async def listen(self) -> None:
        """Hear of changes in the protocol of 2026, which has a stream for it; earlier ones notify by themselves."""
        while not self.over:
            try:
                async with self._open_client.listen(tools_list_changed=True) as changes:
                    self.on_changed()  # whatever came before it
                    async for _ in changes:
                        self.on_changed()
            except (ListenNotSupportedError, ServerError):
                return
            except Exception as error:
                _log.debug("mcp server %s: %s", self.server, _told(error))
            await asyncio.sleep(_LISTEN_AGAIN_S)

    async def call(self, entry: Entry, arguments: dict[str, Any], key: str | None, attempt: int) -> Answer:
        """One call, to its end. Cancelled, it tells the server so."""
        meta: Any = {ATTEMPT_META: attempt}
        if key is not None:
            meta[KEY_META] = key
        request = types.CallToolRequest(
            params=types.CallToolRequestParams(name=entry.version.tool, arguments=arguments, _meta=meta)
        )
        try:
            result = await self._open_client.session.send_request(request, _results)
        except MCPError as error:
            answer = refused(error, self._mark)
            if answer.code == "tool_host_died" and self.process is not None:
                # Its own words come by another pipe, and how it ended from the node.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.process.ended.wait(), 5)
                text = f"the server ended before it answered ({self.process.describe()})"
                answer = failed("tool_host_died", text, unknown=True, lost=True)
            return answer
        except ValidationError as error:
            return failed("tool_result", f"the server's answer is none of a tool: {_first(error)}", unknown=True)
        except ServerError as error:
            return failed("tool_unavailable", str(error), lost=True)
        return answered(result, entry.result, self._bytes_max)

    @property
    def _open_client(self) -> Client:
        if self.client is None:
            raise ServerError(f"the session with {self.server} is over: {self.why or 'it ended'}")
        return self.client

    # --- frozen, or not -----------------------------------------------------------------

    def on_frozen(self, frozen: bool) -> None:
        self._frozen = frozen
        for clock in self._clocks:
            if frozen:
                clock.hold()
            else:
                clock.run()

    def clock(self, left_s: float, over: Callable[[], None]) -> Clock:
        made = Clock(self._loop, left_s, over)
        self._clocks.add(made)
        if not self._frozen:
            made.run()
        return made

    def stop_clock(self, clock: Clock) -> None:
        clock.hold()
        self._clocks.discard(clock)


def _offered(tool: types.Tool) -> Offered:
    hints = tool.annotations
    return Offered(
        tool.name,
        tool.description or "",
        tool.input_schema,
        tool.output_schema,
        bool(hints and hints.read_only_hint),
        bool(hints and hints.idempotent_hint),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("agentrt")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _told(error: BaseException) -> str:
    """The first words of what is inside."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, MCPError):
        return f"{error.error.message} (MCP error {error.error.code})"
    if isinstance(error, ValidationError):
        return _first(error)
    return str(error) or type(error).__name__


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return f"{'.'.join(map(str, found[0]['loc']))}: {found[0]['msg']}" if found else "it does not fit"
