"""What became of each event of one source, and what is to be done next. Pure: time is passed in, nothing is called.

An event is *held* from its delivery until it is settled: it waits, is sent to be accepted, and then is settled (a run
or a dead letter) or refused (it waits again, until its time comes). Among those that wait, the most urgent tier is
next, in a tier the tenants take turns, and of a tenant the oldest is first (law 1). A refusal holds up its tier and
tenant only, its *line*, and each tier has its own bound of what is under way: what waits below never keeps a higher
tier waiting. A line that was refused has less under way from then on, and one more with each event that is settled, so
that a full node is not asked in vain by hundreds.

A partition is paused when it holds its share of the source's bounds, and resumed at half of it (law 8). Its *position*
is the first offset that is not settled; that and everything behind it comes again after a crash. A partition whose
position does not move is paused, too, when `BEHIND_MAX` events were settled behind it, for each of them is remembered.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

from agentrt.ingress.port import Delivery

#: Under way at once, per tier: enough for group commits, and no more than the store takes in a few of them.
SENT_MAX: Final = 256
BEHIND_MAX: Final = 10_000
_TIERS: Final = range(4)


class Held:
    """An event that is held. ``again``: how often it was refused; ``token``: what the caller wants to know of it."""

    __slots__ = ("again", "delivery", "number", "size_bytes", "tenant", "tier", "token")

    def __init__(self, number: int, delivery: Delivery, tier: int, tenant: str, size_bytes: int, token: Any) -> None:
        self.number = number
        self.delivery = delivery
        self.tier = tier
        self.tenant = tenant
        self.size_bytes = size_bytes
        self.token = token
        self.again = 0

    def __lt__(self, other: "Held") -> bool:
        return self.number < other.number


class _Partition:
    __slots__ = ("behind", "bytes", "held", "next", "order", "paused", "sent", "settled")

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}  # by offset
        self.bytes = 0
        self.sent = 0
        self.order: list[int] = []  # a heap: offsets from the position on, settled ones among them
        self.settled: set[int] = set()  # of `order`
        self.next: int | None = None  # behind the last delivery
        self.paused = False
        self.behind = 0  # events that the bus has not delivered, as it said


class _Line:
    """What is held of one tenant in one tier; forgotten when that is nothing. ``refusals``: in a row."""

    __slots__ = ("again_ns", "heap", "refusals", "sent", "sent_max")

    def __init__(self, sent_max: int) -> None:
        self.heap: list[Held] = []  # what waits
        self.sent = 0
        self.sent_max = sent_max
        self.again_ns = 0
        self.refusals = 0


class Book:
    """One source's. ``items_max``, ``bytes_max``: of what is held, shared out evenly among its partitions."""

    def __init__(self, items_max: int, bytes_max: int, sent_max: int = SENT_MAX, behind_max: int = BEHIND_MAX) -> None:
        self._items_max, self._bytes_max = items_max, bytes_max
        self._sent_max, self._behind_max = sent_max, behind_max
        self._partitions: dict[str, _Partition] = {}
        self._lines: tuple[OrderedDict[str, _Line], ...] = tuple(OrderedDict() for _ in _TIERS)  # by tenant, by turn
        self._sent = [0] * len(_TIERS)
        self._number = 0
        self.held = 0
        self.held_bytes = 0
        self._behind = 0  # of all partitions

    # --- partitions ---

    def assign(self, partitions: Iterable[str]) -> None:
        """Events of these may come."""
        for name in partitions:
            self._partitions.setdefault(name, _Partition())

    def revoke(self, name: str) -> None:
        """Forget the partition: what waits is dropped, what is under way is not asked for when it comes back."""
        partition = self._partitions.pop(name, None)
        if partition is None:
            return
        self.held -= len(partition.held)
        self.held_bytes -= partition.bytes
        self._behind -= partition.behind
        for lines in self._lines:
            for tenant, line in [*lines.items()]:
                line.heap = [held for held in line.heap if held.delivery.partition != name]
                heapq.heapify(line.heap)
                if not line.heap and not line.sent:
                    del lines[tenant]

    def behind(self, name: str, events: int) -> None:
        """So many of the partition are on the bus and not delivered yet."""
        partition = self._partitions.get(name)
        if partition is not None:
            self._behind += events - partition.behind
            partition.behind = events

    @property
    def lag(self) -> int:
        """Events that are held, or are on the bus as far as it was told."""
        return self.held + self._behind

    def partitions(self) -> list[str]:
        return sorted(self._partitions)

    def under_way(self, name: str) -> int:
        """How many of the partition are sent and neither settled nor refused."""
        partition = self._partitions.get(name)
        return 0 if partition is None else partition.sent

    def position(self, name: str) -> int | None:
        """The first offset that is not settled, or the one behind the last delivery; None before the first one."""
        partition = self._partitions.get(name)
        if partition is None:
            return None
        return partition.order[0] if partition.order else partition.next

    # --- events ---

    def deliver(self, delivery: Delivery, tier: int, tenant: str, token: Any = None) -> Held | None:
        """Hold an event; None if it is held already, or was settled and not forgotten yet."""
        partition = self._partitions.setdefault(delivery.partition, _Partition())
        offset = delivery.offset
        if offset in partition.held or offset in partition.settled:
            return None
        size = len(delivery.payload) + sum(len(key) + len(value) for key, value in delivery.headers.items())
        held = Held(self._number, delivery, tier, tenant, size, token)
        self._number += 1
        partition.held[offset] = held
        partition.bytes += size
        heapq.heappush(partition.order, offset)
        partition.next = offset + 1 if partition.next is None else max(partition.next, offset + 1)
        self.held += 1
        self.held_bytes += size
        self._wait(held)
        return held

    def take(self, now_ns: int) -> Held | None:
        """The next one to be accepted, which is under way now."""
        for tier, lines in enumerate(self._lines):
            if self._sent[tier] >= self._sent_max:
                continue
            for tenant, line in lines.items():
                if not line.heap or line.again_ns > now_ns or line.sent >= line.sent_max:
                    continue
                held = heapq.heappop(line.heap)
                lines.move_to_end(tenant)
                line.sent += 1
                self._sent[tier] += 1
                self._partitions[held.delivery.partition].sent += 1
                return held
        return None

    def next_ns(self) -> int | None:
        """When the first of those that were refused may be tried again, if there is room for it."""
        times = [
            line.again_ns
            for tier, lines in enumerate(self._lines)
            if self._sent[tier] < self._sent_max
            for line in lines.values()
            if line.heap and line.sent < line.sent_max
        ]
        return min(times, default=None)

    def settle(self, held: Held) -> bool:
        """It is a run or a dead letter. False: its partition was revoked meanwhile, nobody is to be told."""
        line = self._lines[held.tier][held.tenant]
        line.refusals = 0
        line.sent_max = min(self._sent_max, line.sent_max + 1)
        partition = self._back(held)
        self._forget(held, line)
        if partition is None:
            return False
        offset = held.delivery.offset
        del partition.held[offset]
        partition.bytes -= held.size_bytes
        self.held -= 1
        self.held_bytes -= held.size_bytes
        partition.settled.add(offset)
        while partition.order and partition.order[0] in partition.settled:
            partition.settled.discard(heapq.heappop(partition.order))
        return True

    def refuse(self, held: Held, now_ns: int, pause_ns: Callable[[int], int]) -> bool:
        """It could not be accepted now. Unless it is held up already, nothing of its line is tried for
        ``pause_ns(refusals in a row before)``. False: its partition was revoked meanwhile."""
        line = self._lines[held.tier][held.tenant]
        if line.again_ns <= now_ns:
            line.again_ns = now_ns + pause_ns(line.refusals)
            line.refusals += 1
            line.sent_max = max(1, min(line.sent_max, line.sent) // 2)
        partition = self._back(held)
        if partition is None:
            self._forget(held, line)
            return False
        held.again += 1
        self._wait(held)
        return True

    def must_pause(self, name: str) -> bool:
        """Whether the partition is to be paused and is not."""
        partition = self._partitions[name]
        return not partition.paused and self._is_full(partition, *self._share())

    def changes(self) -> tuple[list[str], list[str]]:
        """(partitions to pause, partitions to resume), each once."""
        pause: list[str] = []
        resume: list[str] = []
        items, size = self._share()
        for name, partition in self._partitions.items():
            if not partition.paused and self._is_full(partition, items, size):
                partition.paused = True
                pause.append(name)
            elif (
                partition.paused
                and len(partition.held) <= items // 2
                and partition.bytes <= size // 2
                and len(partition.settled) < self._behind_max
            ):
                partition.paused = False
                resume.append(name)
        return pause, resume

    def paused(self) -> list[str]:
        """The partitions that are paused."""
        # a copy: other threads ask, too
        return [name for name, partition in [*self._partitions.items()] if partition.paused]

    # --- inside ---

    def _share(self) -> tuple[int, int]:
        """Of a partition: events, bytes."""
        count = len(self._partitions) or 1
        return max(1, self._items_max // count), max(1, self._bytes_max // count)

    def _is_full(self, partition: _Partition, items: int, size: int) -> bool:
        return len(partition.held) >= items or partition.bytes >= size or len(partition.settled) >= self._behind_max

    def _wait(self, held: Held) -> None:
        lines = self._lines[held.tier]
        line = lines.get(held.tenant)
        if line is None:
            line = lines[held.tenant] = _Line(self._sent_max)
        heapq.heappush(line.heap, held)

    def _forget(self, held: Held, line: _Line) -> None:
        if not line.heap and not line.sent:
            del self._lines[held.tier][held.tenant]

    def _back(self, held: Held) -> _Partition | None:
        """One that was under way is not any more."""
        self._sent[held.tier] -= 1
        self._lines[held.tier][held.tenant].sent -= 1
        partition = self._partitions.get(held.delivery.partition)
        if partition is None or partition.held.get(held.delivery.offset) is not held:
            return None
        partition.sent -= 1
        return partition
