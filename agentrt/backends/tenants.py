"""Tenant names to the scheduler's dense indices, of which there is a fixed number."""

from zlib import crc32

from agentrt.errors import QueueFullError


class TenantIndex:
    """Counts the live guests of each tenant, so that an index can go to another one when it is needed."""

    def __init__(self, tenants_max: int) -> None:
        self._max = tenants_max
        self._indices: dict[str, int] = {}
        self._live: dict[str, int] = {}  # only tenants with guests
        self._idle: dict[str, None] = {}  # the others, longest idle first

    def __len__(self) -> int:
        return len(self._indices)

    def acquire(self, name: str, *, admitted: bool) -> int:
        """The tenant's index, for one more guest.

        Raises QueueFullError when every index belongs to another tenant with guests, unless ``admitted``: then the
        guest shares one of theirs, since recovered work is never refused.
        """
        index = self._indices.get(name)
        if index is None:
            index = self._free_index()
            if index is None:
                if not admitted:
                    raise QueueFullError(
                        f"guests of {self._max} tenants are queued or running, and none of {name!r} can be",
                        limit="scheduler.tenants_max",
                        hint="Try again later, or raise it and restart",
                    )
                return crc32(name.encode()) % self._max
            self._indices[name] = index
        live = self._live.get(name, 0)
        if not live:
            self._idle.pop(name, None)
        self._live[name] = live + 1
        return index

    def release(self, name: str) -> None:
        """One of the tenant's guests is gone."""
        live = self._live.get(name, 0) - 1
        if live > 0:
            self._live[name] = live
        elif live == 0:
            del self._live[name]
            self._idle[name] = None

    def _free_index(self) -> int | None:
        if len(self._indices) < self._max:
            return len(self._indices)
        longest_idle = next(iter(self._idle), None)
        if longest_idle is None:
            return None
        del self._idle[longest_idle]
        return self._indices.pop(longest_idle)
