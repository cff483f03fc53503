"""CPU slots for other processes: how a backend whose guests run in hosts shares the core's slots with wasm guests.

A holder asks for a slot for a process. When it is granted the process may work; when it is preempted the core has
stopped the process and will grant it again by itself; after `Lease.release` the event "released" is the last one.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agentrt.backends.tenants import TenantIndex

if TYPE_CHECKING:
    from agentrt import _core


class Lease(Protocol):
    """A slot that was asked for."""

    def release(self) -> bool:
        """Give it back, or stop asking. "released" follows; the process is not signalled by the core after that. False:
        that may take long, unless it is asked for again in a moment."""

    def lend(self, tier: int | None) -> bool:
        """As `agentrt.backends.base.Guest.lend`, for this slot only."""


class SlotEvent(NamedTuple):
    kind: str  # granted, preempted, released
    grants: int
    preemptions: int


class SlotHolder(Protocol):
    """Called on the control loop; the same kind may come twice in a row."""

    def on_slot(self, event: SlotEvent) -> None: ...


class Slots(Protocol):
    def ask(self, holder: SlotHolder, pidfd: int, *, tenant: str, tier: int) -> Lease:
        """Ask for a slot for the process behind ``pidfd``, which must stay open until "released". No event comes from
        inside this call."""


class SlotRequest:
    """What the core gives back with the events of a foreign task."""

    __slots__ = ("_holder", "_slots", "_tenant")

    def __init__(self, slots: "CoreSlots", holder: SlotHolder, tenant: str) -> None:
        self._slots = slots
        self._holder = holder
        self._tenant = tenant

    def on_event(self, kind: str, detail: Any) -> None:
        """From the core's drain."""
        if kind == "released":
            self._slots.tenants.release(self._tenant)
        self._holder.on_slot(SlotEvent(kind, *detail))


class CoreSlots:
    """The slots of the core that ``open_core()`` gives as long as it is open (it is not kept: its address space is free
    when nobody holds it). Whoever drains the core calls `SlotRequest.on_event` for events whose owner is one."""

    def __init__(self, open_core: "Callable[[], _core.Core]", tenants: TenantIndex) -> None:
        self._open_core = open_core
        self.tenants = tenants

    def ask(self, holder: SlotHolder, pidfd: int, *, tenant: str, tier: int) -> Lease:
        """See `Slots`. Raises ClosedError."""
        index = self.tenants.acquire(tenant, admitted=True)
        try:
            return self._open_core().submit_foreign(SlotRequest(self, holder, tenant), pidfd, tenant=index, tier=tier)
        except BaseException:
            self.tenants.release(tenant)
            raise


class FreeSlots:
    """Slots without a core: every one asked for is granted in the next turn of the loop, and none is preempted.

    For a node that runs Python agents only on a machine of its own, and for tests of what is above the slots.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def ask(self, holder: SlotHolder, pidfd: int, *, tenant: str, tier: int) -> Lease:
        """See `Slots`."""
        return _FreeLease(self._loop, holder)


class _FreeLease:
    def __init__(self, loop: asyncio.AbstractEventLoop, holder: SlotHolder) -> None:
        self._loop = loop
        self._holder = holder
        self._released = False
        loop.call_soon(self._grant)

    def _grant(self) -> None:
        if not self._released:
            self._holder.on_slot(SlotEvent("granted", 1, 0))

    def lend(self, tier: int | None) -> bool:
        """Nobody waits for a slot here."""
        return True

    def release(self) -> bool:
        if not self._released:
            self._released = True
            self._loop.call_soon(self._holder.on_slot, SlotEvent("released", 1, 0))
        return True
