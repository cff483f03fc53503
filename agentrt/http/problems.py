"""Errors as answers: `AgentrtError` codes to status and Problem+JSON (RFC 9457)."""

import logging
import math
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentrt.errors import AgentrtError, InternalError
from agentrt.http.types import Problem

_log: Final = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"

#: Status by code; a code that is not here takes that of the class it comes from, in the order of its bases.
STATUS: Final = {
    "unauthorized": 401,
    "forbidden": 403,
    "denied": 403,
    "unknown_run": 404,
    "unknown_agent": 404,
    "not_found": 404,
    "method": 405,
    "too_slow": 408,
    "idempotency_conflict": 409,
    "step_settled": 409,
    "too_large": 413,
    "media_type": 415,
    "input": 422,
    "bad_request": 400,
    "queue_full": 429,
    "store_full": 507,
    "closed": 503,
    "store": 503,
    "internal": 500,
    "error": 500,
}

#: After how many seconds to try again, where the error itself does not say.
RETRY_AFTER_S: Final = {429: 1, 503: 2, 507: 30}


class HttpError(AgentrtError):
    """An error that only the API knows."""

    code = "bad_request"


class NotFoundError(HttpError):
    code = "not_found"


class MethodError(HttpError):
    code = "method"


class TooLargeError(HttpError):
    code = "too_large"


class SlowError(HttpError):
    code = "too_slow"


class MediaTypeError(HttpError):
    code = "media_type"


_encode: Final = msgspec.json.Encoder().encode


def status_of(error: AgentrtError) -> int:
    """The status that tells a client what to do."""
    for kind in type(error).__mro__:
        status = STATUS.get(getattr(kind, "code", ""))
        if status is not None:
            return status
    return 500


def problem_response(error: AgentrtError) -> Response:
    """The error as an answer. What is wrong inside the node is logged and not told."""
    status = status_of(error)
    if status == 500:
        _log.error("%s", error)
        error = InternalError("the node could not answer", hint="Its log says why")
    problem = Problem(
        type=f"urn:agentrt:error:{error.code}",
        title=error.code.replace("_", " "),
        status=status,
        detail=error.message,
        code=error.code,
        run=error.run,
        step=error.step,
        limit=error.limit,
        hint=error.hint,
        retry_after_s=getattr(error, "retry_after_s", None),
    )
    headers = {}
    if status in (408, 413):  # what is left of the body would be read as the next request
        headers["connection"] = "close"
    if status in RETRY_AFTER_S:
        after_s = getattr(error, "retry_after_s", None) or RETRY_AFTER_S[status]
        headers["retry-after"] = str(max(1, math.ceil(after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(_encode(problem), status, headers, MEDIA_TYPE)


async def on_error(request: Request, error: Exception) -> Response:
    """What a handler raised."""
    if isinstance(error, AgentrtError):
        return problem_response(error)
    _log.error("a handler of %s failed", request.url.path, exc_info=error)
    return problem_response(InternalError("the node could not answer", hint="Its log says why"))
