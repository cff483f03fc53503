"""Versions of agents that runs may still need are made ready ahead, where the profiles in force say so: else the first
run that comes back waits for its module to be read, compiled and loaded. One walk through all runs for new names."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, Protocol

from agentrt.states import TERMINAL
from agentrt.stores.base import Store

_PAGE: Final = 1000


class Runs(Protocol):
    """What it needs of the engine."""

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def later(self, again: Callable[[], None]) -> None: ...


def needed_of(store: Store, names: Collection[str]) -> set[tuple[str, str]]:
    """Versions and names of these agents, of runs that have not ended. Blocks."""
    needed: set[tuple[str, str]] = set()
    after = ""
    while heads := store.scan_heads(after, _PAGE):
        of_them = (head for head in heads if head.agent in names and head.state not in TERMINAL)
        needed.update((head.agent_version, head.agent) for head in of_them)
        after = heads[-1].run_id
    return needed


class Preload:
    """Loop thread only. ``make_ready(version, name)`` is called for each that is kept, as long as it is not there."""

    def __init__(self, runs: Runs, make_ready: Callable[[str, str], None]) -> None:
        self._runs = runs
        self._make_ready = make_ready
        self._looked: frozenset[str] = frozenset()

    def want(self, names: frozenset[str]) -> None:
        """These agents, which are registered, from now on."""
        new, self._looked = names - self._looked, names
        if new:
            self._look(new)

    def _look(self, names: frozenset[str]) -> None:
        self._runs.read(lambda store: needed_of(store, names), partial(self._found, names))

    def _found(self, names: frozenset[str], needed: Any, error: BaseException | None) -> None:
        if error is not None:
            self._runs.later(partial(self._look, names))
            return
        for version, name in sorted(needed):
            if name in self._looked:
                self._make_ready(version, name)
