"""Kept modules go when no run needs them: a walk through all runs, now and then."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from agentrt.states import TERMINAL
from agentrt.stores.base import Store
from agentrt.stores.modules import Modules

_FIRST_S: Final = 120.0  # after the start, when agents have been registered
_PERIOD_S: Final = 3600.0
_PAGE: Final = 1000


class Runs(Protocol):
    """What it needs of the engine."""

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def registered_versions(self) -> set[str]:
        """Versions that new runs may have."""


def needed_versions(store: Store) -> set[str]:
    """Versions of agents that runs have which have not ended. Blocks."""
    needed: set[str] = set()
    after = ""
    while heads := store.scan_heads(after, _PAGE):
        needed.update(head.agent_version for head in heads if head.state not in TERMINAL)
        after = heads[-1].run_id
    return needed


class ModuleKeep:
    """Loop thread only; the walk and the removal happen on a reader thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, modules: Modules) -> None:
        self._loop = loop
        self._runs = runs
        self._modules = modules
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False

    def open(self) -> None:
        self._later(_FIRST_S)

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def walk(self) -> None:
        """Look now."""
        registered = self._runs.registered_versions()

        def sweep(store: Store) -> list[str]:
            kept = self._modules.versions()
            if not set(kept) - registered:
                return []
            return self._modules.sweep(needed_versions(store) | registered)

        self._runs.read(sweep, self._swept)

    def _later(self, seconds: float) -> None:
        if not self._closed:
            self._handle = self._loop.call_later(seconds, self.walk)

    def _swept(self, gone: Any, error: BaseException | None) -> None:
        if error is not None:
            self._loop.call_exception_handler({"message": "kept modules cannot be swept", "exception": error})
        self._later(_PERIOD_S)
