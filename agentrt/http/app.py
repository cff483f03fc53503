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
from agentrt.runtime import Runtime

_VERSION: Final = "v1"


def make_app(
    runtime: Runtime,
    keys: KeyRing,
    *,
    short: Iterable[str] = (),
    body_bytes_max: int = 2 * 2**20,
    heartbeat_bound_ms: int = 10_000,
    extra: Iterable[BaseRoute] = (),
) -> Starlette:
    """The API over one runtime. ``short``: agents whose callers may wait for the result. ``extra``: routes of others,
    as the dashboard's."""
    table = endpoint_table(runtime, keys, short=short, heartbeat_bound_ms=heartbeat_bound_ms)
    routes: list[BaseRoute] = [
        Route(e.path, serve(e, keys.check, body_bytes_max), methods=[e.method], name=f"{e.method} {e.path}")
        for e in table
    ]
    openapi = msgspec.json.encode(document(table, _VERSION))

    async def describe(request: Request) -> Response:
        return Response(openapi, 200, None, "application/json")

    routes.append(Route("/v1/openapi.json", describe, methods=["GET"]))
    return Starlette(
        routes=[*routes, *extra], exception_handlers={HTTPException: _on_http_exception, Exception: on_error}
    )


def endpoint_table(
    runtime: Runtime, keys: KeyRing, *, short: Iterable[str] = (), heartbeat_bound_ms: int = 10_000
) -> list[Endpoint]:
    """Everything the API can do."""
    return [
        *Runs(runtime, frozenset(short)).endpoints(),
        *Node(runtime, keys, heartbeat_bound_ms).endpoints(),
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
