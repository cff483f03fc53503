"""Who wants to know what becomes of a run. Loop thread only."""

from collections.abc import Callable
from typing import Generic, TypeVar

News = TypeVar("News")


class Watches(Generic[News]):
    """``notify(news)`` is called on the control loop: with the version after a batch of the run is durable, or with
    what else a node's watches are for."""

    def __init__(self) -> None:
        self._of: dict[str, list[Callable[[News], None]]] = {}

    def __contains__(self, run_id: str | None) -> bool:
        return run_id in self._of

    def add(self, run_id: str, notify: Callable[[News], None]) -> Callable[[], None]:
        """What ends it."""
        self._of.setdefault(run_id, []).append(notify)

        def remove() -> None:
            watching = self._of.get(run_id, [])
            if notify in watching:
                watching.remove(notify)
            if not watching:
                self._of.pop(run_id, None)

        return remove

    def grown(self, run_id: str, news: News) -> None:
        """The journal is durable up to that record, or there is more of the other."""
        for notify in tuple(self._of.get(run_id, ())):
            notify(news)
