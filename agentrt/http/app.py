"""The ASGI application: the endpoints behind one router, and what answers where there is none."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrt.callbacks.secrets import CallbackSecrets
from agentrt.http.dashboard import dashboard_routes
from agentrt.http.endpoint import Endpoint, serve
from agentrt.http.ingress import IngressEndpoints
from agentrt.http.keys import KeyRing
from agentrt.http.node import Node
from agentrt.http.observing import Observing
from agentrt.http.openapi import document
from agentrt.http.problems import HttpError, MethodError, NotFoundError, on_error, problem_response
from agentrt.http.runs import Runs
from agentrt.http.settings import HttpConfig
from agentrt.http.sse import Streams
from agentrt.runtime import Runtime

_VERSION: Final = "v1"

Handler = Callable[[Request], Awaitable[Response]]


def streams_of(config: HttpConfig) -> Streams:
    """The bounds of the configuration."""
    return Streams(config.streams_max, config.streams_per_tenant_max)


class Api:
    """Endpoints whose path is fixed are found in a table and answered; the rest is the router's."""

    def __init__(self, fixed: Mapping[tuple[str, str], Handler], app: ASGIApp) -> None:
        self._fixed = fixed
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The router and its middleware take a third of what such a request costs; an endpoint raises nothing that they
        # would have to catch.
        handler = self._fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)


def make_app(
    runtime: Runtime,
    keys: KeyRing,
    streams: Streams | None = None,
    secrets: CallbackSecrets | None = None,
    *,
    extra: Iterable[BaseRoute] = (),
) -> Api:
    """The API over one runtime, with the bounds of its configuration. ``streams``: of events; who stops the node closes
    them. ``secrets``: of callbacks; None: nobody sends any. ``extra``: routes of others."""
    config = runtime.config.http
    table = endpoint_table(runtime, keys, streams_of(config) if streams is None else streams, secrets)
    body_s = config.body_timeout_ms / 1e3
    handlers = [(e, serve(e, keys.check, config.body_bytes_max, body_s)) for e in table]
    routes: list[BaseRoute] = [
        Route(e.path, handler, methods=[e.method], name=f"{e.method} {e.path}") for e, handler in handlers
    ]
    openapi = msgspec.json.encode(document(table, _VERSION))

    async def describe(request: Request) -> Response:
        return Response(openapi, 200, None, "application/json")

    routes.append(Route("/v1/openapi.json", describe, methods=["GET"]))
    routes += dashboard_routes()
    app = Starlette(
        routes=[*routes, *extra], exception_handlers={HTTPException: _on_http_exception, Exception: on_error}
    )
    return Api({(e.method, e.path): handler for e, handler in handlers if "{" not in e.path}, app)


def endpoint_table(
    runtime: Runtime, keys: KeyRing, streams: Streams, secrets: CallbackSecrets | None = None
) -> list[Endpoint]:
    """Everything the API can do."""
    return [
        *Runs(runtime, keys, streams, secrets).endpoints(),
        *Node(runtime, keys, runtime.config.http.heartbeat_max_ms).endpoints(),
        *Observing(runtime, keys, streams).endpoints(),
        *IngressEndpoints(runtime).endpoints(),
    ]


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself answers."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = problem_response(MethodError(f"{request.method} is not possible here"))
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        return problem_response(NotFoundError("there is nothing here", hint="See /v1/openapi.json"))
    return problem_response(HttpError(str(error.detail)))
