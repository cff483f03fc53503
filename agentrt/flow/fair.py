"""Who waits at a limit, in the order in which they get it: by tier, then tenants by weight, then first come.

Start-time fair queueing per tier: each tenant has a virtual time that grows by the cost of what it gets over its
weight, and the one furthest behind is next. A tenant that comes back begins where the others are: it has saved nothing.
So that no tier starves, the head of a tier that has been passed over ``aging_picks`` times goes first once (law 2).

Items of one tenant come in the order of their numbers, which callers give and which only grow.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

AGING_PICKS: Final = 50
#: A virtual time is a cost times this over a weight: enough for weights up to 10,000 without error worth mention.
_SCALE: Final = 10_000
_TIERS: Final = range(4)

Item = TypeVar("Item")


class _Tenant(Generic[Item]):
    __slots__ = ("at", "items", "name", "weight")

    def __init__(self, name: str, weight: int, at: int) -> None:
        self.name = name
        self.weight = weight
        self.at = at  # virtual time of its head
        self.items: OrderedDict[int, Item] = OrderedDict()


class _Tier(Generic[Item]):
    __slots__ = ("heap", "now", "passed", "tenants")

    def __init__(self) -> None:
        self.now = 0  # virtual time of the last one taken
        self.passed = 0
        self.tenants: dict[str, _Tenant[Item]] = {}
        self.heap: list[tuple[int, str]] = []  # (at, tenant); an entry whose time is not its tenant's is old


class Fair(Generic[Item]):
    """The waiting line of one limit. Bounded by its caller; memory follows the number of items, for a tenant without
    any is forgotten once the others have caught up."""

    __slots__ = ("_aging", "_tiers", "count")

    def __init__(self, aging_picks: int = AGING_PICKS) -> None:
        self._aging = aging_picks
        self._tiers: tuple[_Tier[Item], ...] = tuple(_Tier[Item]() for _ in _TIERS)
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Item]:
        """In no order that means anything."""
        for tier in self._tiers:
            for tenant in tier.tenants.values():
                yield from tenant.items.values()

    def first_tier(self) -> int:
        """The most urgent tier that somebody waits in; 4 if nobody waits."""
        if self.count:
            for index in _TIERS:
                if self._tiers[index].heap:
                    return index
        return 4

    def put(self, tier: int, tenant: str, weight: int, number: int, item: Item) -> None:
        """Among the tenant's others in the order of their numbers; quick behind all of them or in front."""
        line = self._tiers[tier]
        known = line.tenants.get(tenant)
        if known is None:
            if len(line.tenants) > 64 and len(line.tenants) > 2 * len(line.heap):
                self._forget(line)
            known = line.tenants[tenant] = _Tenant(tenant, weight, line.now)
        known.weight = weight
        items = known.items
        if not items:
            known.at = max(known.at, line.now)
            heapq.heappush(line.heap, (known.at, tenant))
        if not items or number > next(reversed(items)):
            items[number] = item
        else:
            first = next(iter(items))
            items[number] = item
            if number < first:
                items.move_to_end(number, last=False)
            else:
                for later in [other for other in items if other > number]:
                    items.move_to_end(later)
        self.count += 1

    def order(self) -> list[int]:
        """Tiers that somebody waits in, in the order in which they are to be asked now."""
        tiers = [index for index in _TIERS if self._tiers[index].heap]
        if len(tiers) > 1:
            for index in tiers[1:]:
                if self._tiers[index].passed >= self._aging:
                    tiers.remove(index)
                    return [index, *tiers]
        return tiers

    def head(self, tier: int) -> Item:
        """The next one of a tier that somebody waits in."""
        line = self._tiers[tier]
        return next(iter(line.tenants[line.heap[0][1]].items.values()))

    def take(self, tier: int, cost: int) -> Item:
        """Remove the tier's head, which gets what it waited for: ``cost`` units of the limit."""
        line = self._tiers[tier]
        tenant = line.tenants[line.heap[0][1]]
        _, item = tenant.items.popitem(last=False)
        self.count -= 1
        line.now = tenant.at
        tenant.at += max(1, cost * _SCALE // tenant.weight)
        if tenant.items:
            heapq.heapreplace(line.heap, (tenant.at, tenant.name))
        else:
            heapq.heappop(line.heap)
        line.passed = 0
        for index in range(tier + 1, 4):
            if self._tiers[index].heap:
                self._tiers[index].passed += 1
        return item

    def remove(self, tier: int, tenant: str, number: int) -> Item:
        """Remove one that goes without having got it. KeyError if it is not there."""
        line = self._tiers[tier]
        known = line.tenants[tenant]
        item = known.items.pop(number)
        self.count -= 1
        if not known.items:
            line.heap.remove((known.at, tenant))
            heapq.heapify(line.heap)
            if not line.heap:
                line.passed = 0
        return item

    def _forget(self, line: _Tier[Item]) -> None:
        """Let go of tenants without items whose virtual time is past: they would begin at the same place."""
        for name in [name for name, known in line.tenants.items() if not known.items and known.at <= line.now]:
            del line.tenants[name]
