"""A model server for tests: the OpenAI-compatible protocol over real HTTP on this machine, with faults by script.

    with ModelServer() as server:
        server.script = [Reply(status=429, headers={"Retry-After": "1"}), Reply(text="fine")]
        config = server.config()                      # settings for a Runtime that uses it
        ...
        assert server.requests[0].status == 429

Each request takes the next reply of the script; when there is none, what ``answer`` makes of the request (by default an
echo of the last message). It runs on a thread of its own.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

_encode = msgspec.json.encode


class Reply(msgspec.Struct, kw_only=True):
    """How a request is answered. Times are seconds.

    ``usage``: tokens of input and output that are reported, None: none are; the default counts bytes. ``delay``:
    before anything is sent; ``piece_delay``: before each event of a stream. After ``cut_after`` pieces the connection
    is closed in the middle, after ``stall_after`` nothing more comes, until the client gives up. ``body``: sent as it
    is, in place of an answer. ``endless``: pieces for ever.
    """

    text: str = "ok"
    tool_calls: Sequence[tuple[str, str]] = ()  # name, arguments as JSON text
    usage: tuple[int, int] | str | None = "bytes"
    cached_tokens: int = 0
    finish: str = "stop"
    pieces: int = 4  # of a stream
    delay: float = 0
    piece_delay: float = 0
    cut_after: int | None = None
    stall_after: int | None = None
    endless: bool = False
    status: int = 200
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    error_code: str | None = None
    body: bytes | None = None


class SeenRequest(msgspec.Struct, kw_only=True):
    """A request as it came; ``status`` as it was answered. ``gave_up``: the client closed the connection before the
    end."""

    at_s: float  # of time.monotonic
    body: dict[str, Any]
    headers: dict[str, str]
    peer: str = ""  # the client's address and port: a connection
    status: int = 0
    gave_up: bool = False


class ModelServer:
    """``rate``: (requests, seconds): more than so many in a window of so long are answered 429, with ``Retry-After`` if
    ``tells_when``. ``port`` 0: any that is free. Use it as a context manager; everything else may be changed while it
    runs.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Reply] | None = None,
        *,
        rate: tuple[int, float] | None = None,
        tells_when: bool = True,
        port: int = 0,
    ) -> None:
        self.answer = answer or (lambda body: Reply(text=str(body["messages"][-1].get("content"))))
        self.rate = rate
        self.tells_when = tells_when
        self.port = port
        self.script: list[Reply] = []
        self.requests: list[SeenRequest] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="model-server", daemon=True)
        self._started = threading.Event()
        self._refused: OSError | None = None
        self._runner: web.AppRunner
        self._window = (0.0, 0)  # begin, requests
        self._lock = threading.Condition()

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        if self._refused is not None:
            raise self._refused
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def config(self, **model: Any) -> dict[str, Any]:
        """Arguments for `load_config`: one provider, one model ``test`` with these settings, one profile ``work``."""
        settings: dict[str, Any] = {"provider": "server", "structured": True, "tools": True}
        return {
            "models.providers": {"server": {"base_url": self.url}},
            "models.catalog": {"test": settings | model},
            "models.profiles": {"work": {"models": ("test",)}},
        }

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        """Block until the condition holds; it is looked at whenever a request has come or ended."""
        with self._lock:
            if not self._lock.wait_for(condition, timeout_s):
                raise AssertionError("the model server never saw that")

    @property
    def sent(self) -> int:
        """How many requests were answered with 200."""
        return sum(request.status == 200 for request in self.requests)

    # --- on its thread ------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._open())
        except OSError as error:
            self._refused = error
            return
        finally:
            self._started.set()
        self._loop.run_forever()

    async def _open(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def _told(self) -> None:
        with self._lock:
            self._lock.notify_all()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        seen = SeenRequest(at_s=time.monotonic(), body=body, headers=dict(request.headers))
        if request.transport is not None:
            seen.peer = str(request.transport.get_extra_info("peername"))
        self.requests.append(seen)
        self._told()
        try:
            reply = self._limited(seen.at_s) or (self.script.pop(0) if self.script else self.answer(body))
            seen.status = reply.status
            return await self._reply(request, body, reply)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.gave_up = True
            raise
        finally:
            self._told()

    def _limited(self, now_s: float) -> Reply | None:
        if self.rate is None:
            return None
        count_max, seconds = self.rate
        begin, count = self._window
        if now_s - begin >= seconds:
            begin, count = now_s, 0
        self._window = (begin, count + 1)
        if count < count_max:
            return None
        headers = {"Retry-After": f"{max(1, round(begin + seconds - now_s))}"} if self.tells_when else {}
        return Reply(status=429, headers=headers)

    async def _reply(self, request: web.Request, body: dict[str, Any], reply: Reply) -> web.StreamResponse:
        await asyncio.sleep(reply.delay)
        if reply.body is not None:
            return web.Response(body=reply.body, status=reply.status, headers=reply.headers)
        if reply.status != 200:
            error = {"error": {"message": f"status {reply.status}", "type": "error", "code": reply.error_code}}
            return web.Response(
                body=_encode(error), status=reply.status, headers=reply.headers, content_type="application/json"
            )
        calls = [
            {"index": place, "id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": text}}
            for place, (name, text) in enumerate(reply.tool_calls)
        ]
        finish = "tool_calls" if calls else reply.finish
        usage = self._usage(body, reply)
        if not body.get("stream"):
            message = {"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {})
            answer = {"choices": [{"index": 0, "message": message, "finish_reason": finish}]} | usage
            return web.Response(body=_encode(answer), headers=reply.headers, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reply.headers})
        await response.prepare(request)
        await self._stream(request, response, reply, calls)
        await self._event(response, reply, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if usage and body.get("stream_options", {}).get("include_usage"):
            await self._event(response, reply, {"choices": [], **usage})
        await asyncio.sleep(reply.piece_delay)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, reply: Reply, calls: list[dict[str, Any]]
    ) -> None:
        text, size = reply.text, max(1, -(-len(reply.text) // max(1, reply.pieces)))
        deltas: list[dict[str, Any]] = [{"content": text[place : place + size]} for place in range(0, len(text), size)]
        deltas += [{"tool_calls": [call]} for call in calls]
        number = 0
        while reply.endless or number < len(deltas):
            if reply.cut_after == number and request.transport is not None:
                request.transport.abort()
                raise ConnectionResetError
            if reply.stall_after == number:
                await asyncio.sleep(3600)
            delta = deltas[number % len(deltas)]
            await self._event(response, reply, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            number += 1

    async def _event(self, response: web.StreamResponse, reply: Reply, data: dict[str, Any]) -> None:
        await asyncio.sleep(reply.piece_delay)
        await response.write(b"data: " + _encode(data) + b"\n\n")

    def _usage(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        if reply.usage is None:
            return {}
        if isinstance(reply.usage, str):
            sent, made = len(_encode(body["messages"])), len(reply.text.encode()) + 1
        else:
            sent, made = reply.usage
        details = {"cached_tokens": reply.cached_tokens}
        return {"usage": {"prompt_tokens": sent, "completion_tokens": made, "prompt_tokens_details": details}}
