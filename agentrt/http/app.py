"""The ASGI application: the endpoints behind one router, and what answers where there is none."""

from collections.abc import Iterable
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentrt.http.endpoint import Endpoint, serve
from agentrt.http.keys import KeyRing
from agentrt.http.node import Node
from agentrt.http.openapi import document
from agentrt.http.problems import HttpError, MethodError, NotFoundError, on_error, problem_response
from agentrt.http.runs import Runs
from agentrt.http.settings import HttpConfig
from agentrt.http.sse import Streams
from agentrt.runtime import Runtime

_VERSION: Final = "v1"


def streams_of(config: HttpConfig) -> Streams:
    """The bounds of the configuration."""
    return Streams(config.streams_max, config.streams_per_tenant_max)


def make_app(
    runtime: Runtime, keys: KeyRing, streams: Streams | None = None, *, extra: Iterable[BaseRoute] = ()
) -> Starlette:
    """The API over one runtime, with the bounds of its configuration. ``streams``: of events; who stops the node closes
    them. ``extra``: routes of others, as the dashboard's."""
    config = runtime.config.http
    table = endpoint_table(runtime, keys, streams_of(config) if streams is None else streams)
    routes: list[BaseRoute] = [
        Route(
            e.path,
            serve(e, keys.check, config.body_bytes_max, config.body_timeout_ms / 1e3),
            methods=[e.method],
            name=f"{e.method} {e.path}",
        )
        for e in table
    ]
    openapi = msgspec.json.encode(document(table, _VERSION))

    async def describe(request: Request) -> Response:
        return Response(openapi, 200, None, "application/json")

    routes.append(Route("/v1/openapi.json", describe, methods=["GET"]))
    return Starlette(
        routes=[*routes, *extra], exception_handlers={HTTPException: _on_http_exception, Exception: on_error}
    )


def endpoint_table(runtime: Runtime, keys: KeyRing, streams: Streams) -> list[Endpoint]:
    """Everything the API can do."""
    return [
        *Runs(runtime, streams).endpoints(),
        *Node(runtime, keys, runtime.config.http.heartbeat_max_ms).endpoints(),
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
