"""Tenants that are switched off: nothing new of theirs is accepted, and what waits does not go on.

A row of NODE each, under ``tenant off``; in memory the same, read before the first run goes on.
"""

from collections.abc import Callable
from typing import Final, Protocol

from agentrt.errors import AgentrtError, TenantDisabledError
from agentrt.stores.base import NODE, Row, Store, scan_all

_PREFIX: Final = b"tenant off\0"

Plain = Callable[[BaseException | None], None]


class Runs(Protocol):
    """What it needs of the engine."""

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None: ...

    def tenant_enabled(self, tenant: str) -> None:
        """Its runs may go on."""


class Tenants:
    """Loop thread only, but for `load`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._off: dict[str, str] = {}  # -> why

    def load(self, store: Store) -> None:
        """Read them. Blocks; before anything else happens. Raises StoreError kinds."""
        self._off = {key[len(_PREFIX) :].decode(): why.decode() for key, why in scan_all(store, NODE, _PREFIX)}

    def why_off(self, tenant: str) -> str | None:
        """Why nothing of the tenant goes on; None if it does."""
        return self._off.get(tenant)

    def check(self, tenant: str) -> None:
        """Raises TenantDisabledError."""
        if self._off and (why := self._off.get(tenant)) is not None:
            raise TenantDisabledError(shown(tenant, why), hint="Enable the tenant")

    def disabled(self) -> dict[str, str]:
        return dict(self._off)

    def disable(self, tenant: str, why: str, done: Plain) -> None:
        """``done(None)`` once it is durable; from then on nothing new goes on."""

        def kept(error: AgentrtError | None) -> None:
            if error is None:
                self._off[tenant] = why
            done(error)

        self._runs.commit_rows((Row(NODE, _key(tenant), why.encode()),), kept)

    def enable(self, tenant: str, done: Plain) -> None:
        """``done(None)`` once it is durable; what has waited for it goes on."""

        def kept(error: AgentrtError | None) -> None:
            if error is None:
                self._off.pop(tenant, None)
                self._runs.tenant_enabled(tenant)
            done(error)

        self._runs.commit_rows((Row(NODE, _key(tenant), None),), kept)


def shown(tenant: str, why: str) -> str:
    """What is said of it."""
    return f"tenant {tenant} is disabled" + (f": {why}" if why else "")


def _key(tenant: str) -> bytes:
    return _PREFIX + tenant.encode()
