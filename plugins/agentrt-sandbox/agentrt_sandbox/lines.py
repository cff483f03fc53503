"""Who waits for a place. Pure: by tier, inside a tier tenants take turns, and inside a tenant first come, first served.

Places are counted, too: a lower tier leaves an eighth of them for each tier above it, so that urgent calls find one
while others, which they preempt, hold theirs.
"""

from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

TIERS: Final = 4
T = TypeVar("T")


class Lines(Generic[T]):
    """``places``: held at once. Bounded in items and bytes; what is in `add` is the caller's to check with `full`."""

    def __init__(self, places: int, items_max: int, bytes_max: int) -> None:
        self._allowed = tuple(max(1, places - tier * (places // 8)) for tier in range(TIERS))
        self._items_max, self._bytes_max = items_max, bytes_max
        self._lines: tuple[OrderedDict[str, deque[tuple[T, int]]], ...] = tuple(OrderedDict() for _ in range(TIERS))
        self.held = 0
        self.items = 0
        self.bytes = 0

    def full(self, size: int) -> bool:
        """Whether one more of that many bytes is too much; never, while there is a place for it."""
        return self.items + 1 > self._items_max or self.bytes + size > self._bytes_max

    def may_begin(self, tier: int) -> bool:
        """Whether there is a place for that tier."""
        return self.held < self._allowed[tier]

    def add(self, item: T, *, tier: int, tenant: str, size: int) -> None:
        """At the end of its line."""
        self._lines[tier].setdefault(tenant, deque()).append((item, size))
        self.items += 1
        self.bytes += size

    def park(self, size: int) -> None:
        """Count one more that waits for something else than a place."""
        self.items += 1
        self.bytes += size

    def unpark(self, size: int) -> None:
        """It does not any more."""
        self.items -= 1
        self.bytes -= size

    def take(self) -> T | None:
        """The next that has a place, which it holds from now on until `free`."""
        for tier, line in enumerate(self._lines):
            if not line:
                continue
            if not self.may_begin(tier):
                return None  # nor does a tier below it
            tenant = next(iter(line))
            own = line[tenant]
            item, size = own.popleft()
            line.move_to_end(tenant)
            if not own:
                del line[tenant]
            self.items -= 1
            self.bytes -= size
            self.held += 1
            return item
        return None

    def remove(self, item: T, *, tier: int, tenant: str) -> bool:
        """Out of its line; false if it does not wait."""
        own = self._lines[tier].get(tenant) or deque()
        for each, size in own:
            if each is item:
                own.remove((each, size))
                if not own:
                    del self._lines[tier][tenant]
                self.items -= 1
                self.bytes -= size
                return True
        return False

    def drain(self) -> list[T]:
        """All that wait, out of their lines."""
        found = [item for line in self._lines for own in line.values() for item, _ in own]
        for line in self._lines:
            for own in line.values():
                self.items -= len(own)
                self.bytes -= sum(size for _, size in own)
            line.clear()
        return found

    def free(self) -> None:
        """A place is free again."""
        self.held -= 1
