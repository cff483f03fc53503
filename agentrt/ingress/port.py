"""What an ingress is to a node. Plugins bring them (agentrt/hooks.py); `agentrt.testing.ingresses` checks one.

The node keeps the promises, the plugin speaks the bus's language:

1. The plugin gives each event of its topic to `Inbox.deliver`, at least once, in the order of its partition.
2. The node makes a run of it. The run, and that this event has become it, are one transaction.
3. Only then is the event among those that `Ingress.acknowledge` gets. Who dies before that is given the event again,
   which is found to be a run already.
4. What cannot become a run, now or later (no JSON, no such agent), goes to the node's dead letters with the reason,
   and is acknowledged then.
5. Under pressure the node holds what it has got and calls `Ingress.pause` for the partition; nothing is dropped.

Everything here is called on the ingress thread's loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

#: The last offset that there can be.
OFFSET_MAX: Final = 2**63 - 1


class Delivery(msgspec.Struct, frozen=True):
    """One event as the bus delivers it.

    (``source``, ``partition``, ``offset``) name it for ever: the same three are the same event. ``source`` tells one
    incarnation of a topic from the next where the bus can (a stream that is made anew counts from the start);
    ``stamp`` is what else must be the same at every delivery of it, such as the time at which it was written: an event
    with the same name and another payload or stamp is no repetition, and goes to the dead letters. Names are 1 to 200
    printable characters without spaces; ``offset`` is 0 to 2**63 - 1.
    """

    source: str
    partition: str
    offset: int
    payload: bytes
    topic: str = ""
    type: str = ""
    headers: Mapping[str, str] = {}
    stamp: str = ""


class Inbox(Protocol):
    """The node's side."""

    def assign(self, partitions: Iterable[str]) -> None:
        """Events of these may come. Buses that hand partitions out tell when they do; for others, the first delivery
        of a partition assigns it."""

    def deliver(self, delivery: Delivery) -> None:
        """Take an event; never refuses, for that there is `Ingress.pause`, which may be called before this returns. One
        that is already here is only noted. Raises InputError for a name that cannot be."""

    def behind(self, partition: str, events: int) -> None:
        """So many events of the partition are on the bus and not delivered yet, 0 or more. For the node's metrics: tell
        it with each fetch, if the bus says it anyway."""

    def position(self, partition: str) -> int | None:
        """The offset before which everything that was delivered is settled, or the one behind the last delivery if all
        is; None if nothing was delivered. Buses that count acknowledge this."""

    async def revoke(self, partitions: Iterable[str], timeout_s: float) -> dict[str, int]:
        """These go to somebody else: drop what waits, see what is under way to its end (at most so long), and say the
        positions up to which to acknowledge. Their events are not acknowledged afterwards."""


class Ingress(Protocol):
    """The plugin's side."""

    async def run(self, inbox: Inbox) -> None:
        """Connect and deliver until cancelled. Raises what it cannot get over: it is then closed, and made again in a
        while. Reconnecting to a bus that restarts is its own business."""

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """These have become runs or dead letters, durably; the bus need not deliver them again. Not called side by
        side. What it raises is logged: those events may come again, which is harmless."""

    def pause(self, partition: str) -> None:
        """Deliver nothing more of this partition than what was fetched already, and fetch the others as before."""

    def resume(self, partition: str) -> None:
        """Go on with it."""

    async def close(self) -> None:
        """After `run` has ended. Lets go of the bus without acknowledging anything more."""
