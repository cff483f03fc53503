"""What answers mean: values, typed errors, and when to ask again. Pure."""

import random
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from agentrt import errors
from agentrt.client.ask import Ask
from agentrt.decoding import UNREADABLE
from agentrt.http.types import Problem

T = TypeVar("T")

#: Most that a server's Retry-After is followed.
RETRY_AFTER_S_MAX: Final = 60.0
_FIRST_S: Final = 0.1
_MOST_S: Final = 10.0
#: The node has certainly not taken the request.
_REFUSED: Final = frozenset({429, 503})
#: Something between here and the node failed; nobody knows what the node did.
_LOST: Final = frozenset({502, 504})


class ApiError(errors.AgentrtError):
    """The node answered with an error of which this client knows no class; ``problem`` is its answer."""

    code = "api"

    def __init__(self, message: str, problem: Problem, **where: Any) -> None:
        super().__init__(message, **where)
        self.problem = problem


_decode_problem: Final = msgspec.json.Decoder(Problem).decode


def value_of(ask: Ask[T], status: int, body: bytes) -> T:
    """The answer's value. Raises the error that it says; UnreachableError if it says nothing that a node would."""
    if 200 <= status < 300:
        if ask.answer is None:
            return None  # type: ignore[return-value]
        try:
            return msgspec.json.decode(body, type=ask.answer)
        except UNREADABLE as error:
            raise errors.UnreachableError(f"what answered {ask.path} is no agentrt node: {error}") from error
    raise error_of(status, body)


def error_of(status: int, body: bytes) -> errors.AgentrtError:
    """The error in an answer."""
    try:
        problem = _decode_problem(body)
    except UNREADABLE:
        return errors.UnreachableError(f"the answer was {status} and not one of an agentrt node")
    where = {"run": problem.run, "step": problem.step, "limit": problem.limit, "hint": problem.hint}
    kind = _KINDS.get(problem.code)
    return ApiError(problem.detail, problem, **where) if kind is None else kind(problem.detail, **where)


def _kinds() -> Iterator[tuple[str, type[errors.AgentrtError]]]:
    pending: list[type[errors.AgentrtError]] = [errors.AgentrtError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__ == errors.__name__ and kind is not errors.DuplicateError:
            yield kind.code, kind


_KINDS: Final = dict(_kinds())


def pause_s(
    ask: Ask[Any], attempt: int, status: int | None, retry_after: str | None, chance: random.Random
) -> float | None:
    """How long to wait before attempt ``attempt`` + 1; None: do not ask again. ``status`` None: the connection
    failed."""
    if status in _REFUSED:
        said = _seconds(retry_after)
        if said is not None:
            return min(said, RETRY_AFTER_S_MAX) * (1 + 0.1 * chance.random())
    elif not (ask.again and (status is None or status in _LOST)):
        return None
    return chance.random() * min(_MOST_S, _FIRST_S * 2.0**attempt)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() and len(text) < 10 else None
