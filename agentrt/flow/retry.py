"""Retries: each kind of failure has one owner, and a call's attempts are one number for all layers (law 9).

A failure is *transport* (nobody answered, or a 5xx: worth another try), *rate* (refused for now: worth it later),
*conflict* (the world is not as the caller thought: its business, never retried) or *fatal* (it will not get better;
an exhausted quota is one). Whoever makes the first attempt owns the retries; it hands `Attempts` down, in the context
and in headers, and a layer that gets them makes one attempt: five layers that would each retry five times make five.

Back-off has full jitter: a draw between 0 and a bound that doubles. After *rate* it fits the limit's window: no two
attempts within a fifth of it, however short the first back-offs (fault B83). `Retry-After` is believed up to a cap.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from agentrt.errors import ConfigError

_S: Final = 10**9
ATTEMPT_HEADER: Final = "agentrt-attempt"
_NUMBER_MAX: Final = 1_000


class Failure(StrEnum):
    TRANSPORT = "transport"
    RATE = "rate"
    CONFLICT = "conflict"
    FATAL = "fatal"


class RetryLimits(msgspec.Struct, frozen=True):
    """``base_ns`` bounds the first back-off, ``cap_ns`` every one; ``retry_after_max_ns`` what `Retry-After` may
    ask for."""

    attempts_max: int = 5
    base_ns: int = _S // 2
    cap_ns: int = 60 * _S
    retry_after_max_ns: int = 300 * _S

    def __post_init__(self) -> None:
        if not 1 <= self.attempts_max <= _NUMBER_MAX or not 0 < self.base_ns <= self.cap_ns:
            raise ConfigError(
                f"retries of {self.attempts_max} attempts, {self.base_ns} to {self.cap_ns} ns apart",
                hint=f"attempts_max 1 to {_NUMBER_MAX}, 0 < base_ns <= cap_ns",
            )


class Attempts(msgspec.Struct, frozen=True):
    """The attempt that is being made, handed down: ``number`` from 1, of ``limit``."""

    number: int = 1
    limit: int = 1

    def header(self) -> dict[str, str]:
        """For the request to the other side."""
        return {ATTEMPT_HEADER: f"{self.number}/{self.limit}"}


def attempts_of(headers: Mapping[str, str]) -> Attempts | None:
    """What a caller has handed down in its headers (any case of the name); None if nothing that makes sense."""
    for name, value in headers.items():
        if name.lower() == ATTEMPT_HEADER:
            number, _, limit = value.partition("/")
            if len(value) <= 9 and number.isascii() and number.isdecimal() and limit.isascii() and limit.isdecimal():
                found = Attempts(int(number), int(limit))
                if 1 <= found.number <= found.limit <= _NUMBER_MAX:
                    return found
    return None


class Again(msgspec.Struct, frozen=True):
    """Make attempt ``number`` at ``at_ns``."""

    at_ns: int
    number: int


class GiveUp(msgspec.Struct, frozen=True):
    """No further attempt, and why: kind (of the failure), attempts, owner (a layer above retries), deadline."""

    reason: str


class Retries:
    """One layer's policy. ``handed_down``: what the layer above gave, if there is one; then this one never retries."""

    __slots__ = ("_handed_down", "_limits")

    def __init__(self, limits: RetryLimits | None = None, handed_down: Attempts | None = None) -> None:
        self._limits = RetryLimits() if limits is None else limits
        self._handed_down = handed_down

    def attempts(self, number: int = 1) -> Attempts:
        """What this layer hands down with its attempt ``number``."""
        return self._handed_down or Attempts(number, self._limits.attempts_max)

    def decide(
        self,
        failure: Failure,
        number: int,
        now_ns: int,
        draw: float,
        *,
        window_ns: int = 0,
        retry_after_ns: int | None = None,
        deadline_ns: int | None = None,
    ) -> Again | GiveUp:
        """What follows a failed attempt ``number``. ``draw`` is random, 0 <= draw < 1; ``window_ns`` is the window of
        the limit that was met."""
        limits = self._limits
        if failure in (Failure.CONFLICT, Failure.FATAL):
            return GiveUp("kind")
        if self._handed_down is not None:
            return GiveUp("owner")
        if number >= limits.attempts_max:
            return GiveUp("attempts")
        bound = min(limits.cap_ns, limits.base_ns << min(number - 1, 32))
        floor = 0
        if failure is Failure.RATE:
            bound = max(bound, min(window_ns, limits.retry_after_max_ns))
            floor = min(window_ns // 5, bound)
            if retry_after_ns is not None:
                # Everybody was told the same moment: the jitter comes on top of it.
                floor = min(max(0, retry_after_ns), limits.retry_after_max_ns)
                bound = floor + max(limits.base_ns, window_ns // 5)
        at_ns = now_ns + floor + int(draw * (bound - floor))
        if deadline_ns is not None and at_ns >= deadline_ns:
            return GiveUp("deadline")
        return Again(at_ns, number + 1)
