"""One at a time, the most urgent tier first, in a tier who came first."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Loop thread only."""

    def __init__(self) -> None:
        self._taken = False
        self._number = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, tier: int) -> AsyncIterator[None]:
        """Wait for it; whoever is cancelled meanwhile gives it to the next."""
        if self._taken:
            self._number += 1
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (tier, self._number, mine))
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, next_one = heapq.heappop(self._waiting)
            if not next_one.done():
                next_one.set_result(None)  # it stays taken
                return
        self._taken = False
