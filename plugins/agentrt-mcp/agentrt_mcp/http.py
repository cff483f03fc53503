"""Streamable HTTP: the SDK's transport over a client whose answers are bounded, and whose failures keep to the request
that they belong to and say whether the server can have seen it."""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
import msgspec
from mcp.client.streamable_http import streamable_http_client

from agentrt_mcp.results import HTTP_FAILED

#: Answers of streams may be silent for long: deadlines are the calls'.
_TIMEOUT: Final = httpx2.Timeout(15.0, read=None)
_NEVER_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class _Bounded(httpx2.AsyncByteStream):
    """A body of at most ``bytes_max``, in one piece or, of a stream of events, each."""

    def __init__(self, inner: Any, bytes_max: int, events: bool) -> None:
        self._inner, self._bytes_max, self._events = inner, bytes_max, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        try:
            async for chunk in self._inner:
                if not self._events and (seen := seen + len(chunk)) > self._bytes_max:
                    raise httpx2.StreamError(f"more than {self._bytes_max} bytes")
                yield chunk
        except httpx2.TransportError as error:  # of this request, not of the session
            raise httpx2.StreamError(f"{type(error).__name__}: {error}") from None

    async def aclose(self) -> None:
        await self._inner.aclose()


class Transport(httpx2.AsyncBaseTransport):
    """``mark``: what the errors made here carry, so that no server can make them."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, bytes_max: int, mark: str) -> None:
        self._inner, self._bytes_max, self._mark = inner, bytes_max, mark

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._inner.handle_async_request(request)
        except _NEVER_SENT as error:
            return self._failed(request, 0, f"{type(error).__name__}: {error}")
        except httpx2.TransportError as error:
            return self._failed(request, 1, f"{type(error).__name__}: {error}")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        json = kind == "application/json"
        # 404 and 405 mean something to the SDK; what is JSON may be the server's own words.
        if response.status_code in (429, 503) or (
            response.status_code >= 400 and response.status_code not in (404, 405) and not json
        ):
            await response.aclose()
            after_s = _seconds(response.headers.get("retry-after"))
            return self._failed(request, response.status_code, f"HTTP {response.status_code}", after_s)
        if response.headers.get("content-encoding", "identity") != "identity":  # not asked for: it could grow
            await response.aclose()
            return self._failed(request, 1, "a compressed answer")
        response.stream = _Bounded(response.stream, self._bytes_max, kind == "text/event-stream")
        return response

    def _failed(
        self, request: httpx2.Request, status: int, reason: str, after_s: float | None = None
    ) -> httpx2.Response:
        data = {"mark": self._mark, "status": status, "reason": reason[:200], "retry_after_s": after_s}
        error = {"code": HTTP_FAILED, "message": reason[:200], "data": data}
        body = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error})
        return httpx2.Response(502, headers={"content-type": "application/json"}, content=body, request=request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= 86_400 else None


@asynccontextmanager
async def http_streams(url: str, headers: Mapping[str, str], bytes_max: int, mark: str) -> AsyncIterator[Any]:
    """The SDK's streams to a server. ``bytes_max``: of an answer, or of one event."""
    inner = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=256, max_keepalive_connections=16))
    async with (
        httpx2.AsyncClient(
            transport=Transport(inner, bytes_max, mark),
            headers={**headers, "accept-encoding": "identity"},
            timeout=_TIMEOUT,
            follow_redirects=False,
            trust_env=False,
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=bytes_max) as streams,
    ):
        yield streams
