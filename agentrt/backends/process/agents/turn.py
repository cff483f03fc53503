"""The turns of one process in a CPU slot: asked for when it has work to do, given back when it waits.

A slot is asked for again only after "released", so that no stop meant for the last turn hits the next. "preempted": the
core has stopped the process itself, and grants it a slot again by itself; what it has started is stopped from here.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Final

from agentrt.backends.process.agents.launch import AgentProcess
from agentrt.backends.slots import Lease, SlotEvent, Slots

#: When a slot is just being queued or picked, it is asked again a little later.
_AGAIN_S: Final = 0.001


class Turn:
    """``granted()`` and ``preempted()`` are called on the loop. `close` lets go of the process when the core has.
    Raises OSError: no descriptor is left."""

    def __init__(
        self,
        slots: Slots,
        loop: asyncio.AbstractEventLoop,
        process: AgentProcess,
        tenant: str,
        tier: int,
        granted: Callable[[], None],
        preempted: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._loop = loop
        self._process = process
        self._pidfd = os.dup(process.pidfd)  # the core's for as long as it has a lease
        self._tenant = tenant
        self._tier = tier
        self._on_granted = granted
        self._on_preempted = preempted
        self._lease: Lease | None = None
        self._releasing = False
        self._wanted = False
        self._closed = False
        self._lent: int | None = None
        self._applied: int | None = None  # what the lease is lent
        self._lending = False
        self.granted = False
        self.preemptions = 0
        #: Told when it has given a slot back and wants none.
        self.on_idle: Callable[[], None] | None = None

    @property
    def idle(self) -> bool:
        """Whether it has no slot, and has asked for none."""
        return self._lease is None

    def hand_over(self, tenant: str, tier: int, granted: Callable[[], None], preempted: Callable[[], None]) -> None:
        """The process works for somebody else from now on. It has no slot, and wants none."""
        assert self._lease is None and not self._wanted
        self._tenant, self._tier = tenant, tier
        self._on_granted, self._on_preempted = granted, preempted
        self.on_idle = None
        self.preemptions = 0

    def want(self) -> None:
        """It has work to do. ``granted`` follows, not from inside this call."""
        self._wanted = True
        if self._lease is None and not self._closed:
            self._ask()

    def rest(self) -> None:
        """It has nothing to do, or nothing that takes the CPU."""
        self._wanted = False
        if self._lease is not None and not self._releasing:
            self._releasing = True
            self.granted = False
            self._release(self._lease)

    def lend(self, tier: int | None) -> None:
        """See agentrt.backends.base.Guest.lend; holds for all turns until told otherwise."""
        self._lent = tier
        self._apply()

    def close(self) -> None:
        """The process is gone."""
        self._closed = True
        self.rest()
        if self._lease is None:
            os.close(self._pidfd)

    def on_slot(self, event: SlotEvent) -> None:
        """See agentrt.backends.slots."""
        if event.kind == "released":
            self._lease = None
            self.granted = self._releasing = False
            if self._closed:
                os.close(self._pidfd)
            elif self._wanted:
                self._ask()
            else:
                if event.preemptions:  # it was stopped and gave the slot back: nobody else lets it go on
                    self._process.thaw()
                if self.on_idle is not None:
                    self.on_idle()
        elif self._releasing or self._closed:
            return
        elif event.kind == "granted":
            self.granted = True
            self._process.thaw()
            self._on_granted()
        elif event.kind == "preempted":
            self.preemptions += 1
            self.granted = False
            self._process.freeze()
            self._on_preempted()

    def _ask(self) -> None:
        self._lease = self._slots.ask(self, self._pidfd, tenant=self._tenant, tier=self._tier)
        self._applied = None
        self._apply()

    def _release(self, lease: Lease) -> None:
        if lease is self._lease and not lease.release():
            self._loop.call_later(_AGAIN_S, self._release, lease)

    def _apply(self) -> None:
        if self._lease is None or self._releasing or self._lending or self._lent == self._applied:
            return
        if self._lease.lend(self._lent):
            self._applied = self._lent
        else:
            self._lending = True
            self._loop.call_later(_AGAIN_S, self._apply_again)

    def _apply_again(self) -> None:
        self._lending = False
        self._apply()
