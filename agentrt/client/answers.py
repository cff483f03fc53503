"""What answers mean: values, typed errors, and when to ask again. Pure."""

import random
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from agentrt import errors
from agentrt.client.ask import Ask, run
from agentrt.client.events import Event, EventReader
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
        if ask.answer is bytes:
            return body  # type: ignore[return-value]
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
    if kind is None:
        return ApiError(problem.detail, problem, **where)
    made = kind(problem.detail, **where)
    if isinstance(made, errors.QueueFullError):
        made.retry_after_s = problem.retry_after_s
    return made


_KINDS: Final = errors.errors_by_code()


class Attempts:
    """The attempts at one request: what they met, and how long to wait before the next one."""

    def __init__(self, ask: Ask[Any], attempts_max: int, chance: random.Random) -> None:
        self._ask = ask
        self._left = self._max = attempts_max
        self._chance = chance

    def begin_again(self) -> None:
        """It has got on: what was met before does not count any more."""
        self._left = self._max

    def answered(self, status: int, retry_after: str | None) -> float | None:
        """Seconds to wait before the next attempt; None: this answer is the one."""
        self._left -= 1
        if self._left <= 0:
            return None
        if status in _REFUSED:
            said = _seconds(retry_after)
            if said is not None:
                return min(said, RETRY_AFTER_S_MAX) * (1 + 0.1 * self._chance.random())
        elif not (self._ask.again and status in _LOST):
            return None
        return self._pause_s()

    def failed(self, error: errors.UnreachableError, *, sent: bool = True) -> float:
        """The same when there was no answer. ``sent``: the node may have got the request. Raises the error if it may
        not be sent again."""
        self._left -= 1
        if self._left <= 0 or (sent and not self._ask.again):
            raise error
        return self._pause_s()

    def _pause_s(self) -> float:
        return self._chance.random() * min(_MOST_S, _FIRST_S * 2.0 ** min(self._max - self._left, 20))


class Following:
    """A run's events through as many streams as it takes; ``after``: the last event that was seen; ``text``: what
    models answer is wanted as well."""

    def __init__(self, run_id: str, after: int, attempts_max: int, chance: random.Random, text: bool = False) -> None:
        self._query = {"text": "true"} if text else {}
        self._path = run(run_id).path + "/events"
        self._after = after
        self._attempts = Attempts(self.ask, attempts_max, chance)
        self.ended = False
        self._reader = EventReader()

    @property
    def ask(self) -> Ask[None]:
        """For the stream from here on."""
        return Ask("GET", self._path, None, query=self._query, headers={"last-event-id": str(self._after)})

    def begin(self) -> None:
        """A stream has begun."""
        self._reader = EventReader()

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete now, none after the run's end. Raises UnreachableError for what no node would
        send."""
        for event in self._reader.feed(data):
            self._after = max(self._after, event.id)
            self._attempts.begin_again()
            yield event
            if event.kind == "ended":
                self.ended = True
                return

    def refused(self, status: int, retry_after: str | None, body: bytes) -> float:
        """Seconds to wait before the next stream. Raises the error in the answer."""
        pause = self._attempts.answered(status, retry_after)
        if pause is None:
            raise error_of(status, body)
        return pause

    def broken(self, error: errors.UnreachableError | None = None) -> float:
        """The same after a stream that is over. Raises UnreachableError."""
        return self._attempts.failed(error or errors.UnreachableError("the stream ended before the run did"))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() and len(text) < 10 else None
