"""Many questions in one: who asks is told once, when each has its answer."""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Group(Generic[T]):
    """``done(found, None)`` is called once the last of ``count`` (at least 1) parts has its answer; ``found`` has, per
    part, the value or the error. One thread after another, as questions are."""

    __slots__ = ("_done", "_found", "_left", "parts")

    def __init__(self, count: int, done: Callable[[list[T | BaseException], None], None]) -> None:
        self._done = done
        self._found: list[T | BaseException | None] = [None] * count
        self._left = count
        #: Where each part's answer goes; each is called once. Empty when the last one was.
        self.parts: list[Callable[[T | None, BaseException | None], None]] = [
            partial(self._answered, index) for index in range(count)
        ]

    def _answered(self, index: int, value: T | None, error: BaseException | None) -> None:
        self._found[index] = value if error is None else error
        self._left -= 1
        if not self._left:
            self.parts.clear()  # which lead back here: nobody needs the garbage collector
            self._done(self._found, None)  # type: ignore[arg-type]  # none is None any more
