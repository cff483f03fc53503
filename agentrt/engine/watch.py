"""Who wants to know when a run's journal has grown. Loop thread only."""

from collections.abc import Callable

Notify = Callable[[int], None]


class Watches:
    """``notify(version)`` is called on the control loop after a batch of the run is durable."""

    def __init__(self) -> None:
        self._of: dict[str, list[Notify]] = {}

    def __contains__(self, run_id: str | None) -> bool:
        return run_id in self._of

    def add(self, run_id: str, notify: Notify) -> Callable[[], None]:
        """What ends it."""
        self._of.setdefault(run_id, []).append(notify)

        def remove() -> None:
            watching = self._of.get(run_id, [])
            if notify in watching:
                watching.remove(notify)
            if not watching:
                self._of.pop(run_id, None)

        return remove

    def grown(self, run_id: str, version: int) -> None:
        """The journal is durable up to that record."""
        for notify in tuple(self._of.get(run_id, ())):
            notify(version)
