"""What the API is made of: a table of endpoints. Requests are decoded and answers encoded here, in one place, and the
OpenAPI document is made from the same table.

An endpoint's handler gets a `Call` and gives a value of its ``answer`` type (or a Response of its own). It runs after
the key was checked for ``scope``; None is for what everybody may ask.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from agentrt.decoding import UNREADABLE
from agentrt.errors import AgentrtError, InputError, UnauthorizedError, UnknownRunError
from agentrt.http.keys import StoredKey
from agentrt.http.problems import (
    HttpError,
    MediaTypeError,
    NotFoundError,
    SlowError,
    TooLargeError,
    on_error,
    problem_response,
)

#: What must not be told apart by time (unknown and foreign runs, wrong keys) is answered at multiples of this.
_QUANTUM_S: Final = 0.005
_SECRET_ERRORS: Final = (UnknownRunError, UnauthorizedError, NotFoundError)


class Call(NamedTuple):
    """A request on its way: ``body`` is decoded and checked, None if the endpoint takes none."""

    request: Request
    key: StoredKey | None
    body: Any

    def path(self, name: str) -> str:
        """A parameter of the path."""
        return str(self.request.path_params[name])

    def query(self, name: str, parse: Callable[[str], Any] = str, default: Any = None) -> Any:
        """A parameter of the query. Raises InputError."""
        if not self.request.scope["query_string"]:
            return default
        text = self.request.query_params.get(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise InputError(f"the query parameter {name} is wrong: {text[:80]!r}") from error

    @property
    def owner(self) -> StoredKey:
        """The key; there is one wherever a scope is needed."""
        assert self.key is not None
        return self.key


Handler = Callable[[Call], Awaitable[Any]]


class Parameter(NamedTuple):
    """A parameter of the query, or a header if ``where`` says so."""

    name: str
    kind: str  # of JSON schema
    about: str
    where: str = "query"


class Endpoint(NamedTuple):
    method: str
    path: str
    scope: str | None
    handler: Handler
    about: str
    answer: Any = None  # type; None: the handler makes the Response
    body: Any = None  # type
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    media_type: str = "application/json"
    body_optional: bool = False
    #: Whether a caller with this key is refused before the request's body is read.
    refuse: Callable[[StoredKey, Request], AgentrtError | None] | None = None


_encode: Final = msgspec.json.Encoder().encode


def serve(
    endpoint: Endpoint, check: Callable[[str | None], StoredKey], body_bytes_max: int, body_s: float
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint as a function of the request."""
    decode = None if endpoint.body is None else msgspec.json.Decoder(endpoint.body).decode
    handler, scope, status, optional = endpoint.handler, endpoint.scope, endpoint.status, endpoint.body_optional
    refuse = endpoint.refuse
    timed = any(parameter.name == "wait" for parameter in endpoint.parameters)
    known = frozenset(parameter.name for parameter in endpoint.parameters if parameter.where == "query")

    async def answer(request: Request) -> Response:
        start_s = time.monotonic()
        try:
            key = None
            if scope is not None:
                key = check(request.headers.get("authorization"))
                key.require(scope)
                if refuse is not None and (refused := refuse(key, request)) is not None:
                    return problem_response(refused)
            if request.scope["query_string"]:
                _check_query(request, known)
            data = await read_body(request, body_bytes_max if decode is not None else 0, body_s)
            body = None
            if decode is not None and (data or not optional):
                body = _decoded(request, decode, data)
            elif decode is not None:
                body = endpoint.body()
            made = await handler(Call(request, key, body))
        except AgentrtError as error:
            if isinstance(error, _SECRET_ERRORS):
                await _until_quantum(start_s)
            return problem_response(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception as error:
            return await on_error(request, error)
        if isinstance(made, Response):
            if timed:  # from its head to its answer, all waiting included
                made.headers["server-timing"] = f"total;dur={(time.monotonic() - start_s) * 1e3:.3f}"
            return made
        return Response(_encode(made), status, None, "application/json")

    return answer


def _check_query(request: Request, known: frozenset[str]) -> None:
    """A slip in a filter would show everything. Raises InputError."""
    for name in request.query_params:
        if name not in known:
            raise InputError(
                f"there is no query parameter {name[:80]!r} here",
                hint=f"Parameters: {', '.join(sorted(known)) or 'none'}",
            )


def _decoded(request: Request, decode: Callable[[bytes], Any], data: bytes) -> Any:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(f"a body is application/json, not {media_type[:80]}")
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise InputError(f"the body is not what it should be: {error}") from error
    except UNREADABLE as error:
        raise HttpError(f"the body is not JSON: {error}") from error


async def read_body(request: Request, bytes_max: int, timeout_s: float) -> bytes:
    """The body. Raises TooLargeError as soon as that is known, SlowError, ClientDisconnect."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > bytes_max:
        raise TooLargeError(f"the body may have {bytes_max} bytes, not {declared}", limit="http.body_bytes_max")
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size_bytes += len(part)
                if size_bytes > bytes_max:
                    raise TooLargeError(f"the body may have {bytes_max} bytes", limit="http.body_bytes_max")
                parts.append(part)
    except TimeoutError:
        raise SlowError(f"the body did not come within {timeout_s:g} s", limit="http.body_timeout_ms") from None
    return b"".join(parts)


async def _until_quantum(start_s: float) -> None:
    """Wait so long that the time says nothing about what was found."""
    taken_s = time.monotonic() - start_s
    await asyncio.sleep((int(taken_s / _QUANTUM_S) + 1) * _QUANTUM_S - taken_s)
