"""What falls due: the timers of the store, the next of them in memory.

Rows of TIMERS are written with the steps, runs and deadlines that they belong to and removed with them. Here are the
earliest `WINDOW` of them; those behind the horizon are read when the window is empty, so memory does not grow with the
number of runs that wait. What fell due while the node was down fires at the start, in due order and no faster than
``room`` allows. A deadline that has moved away from its row is kept apart, for it is not found by its key again.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

WINDOW: Final = 10_000
#: The longest sleep of the index: a clock that is set forward is noticed within it.
_SLEEP_S_MAX = 1.0
_RETRY_S: Final = 0.005  # when there is no room
_NEVER: Final = 2**63

#: ``scan(after, limit, done)``: rows of TIMERS with key > after: (key, (due_ns, run_id, path)), where due has moved to.
Timer = tuple[int, str, str]
Scan = Callable[[bytes, int, Callable[[list[tuple[bytes, Timer]]], None]], None]


class Timers:
    """Loop thread only. ``fire(run_id, path, due_ns)`` for each that is due, at the earliest once `open` has read the
    rows; ``room()`` says whether another may fire now."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        scan: Scan,
        fire: Callable[[str, str, int], None],
        room: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._scan = scan
        self._fire = fire
        self._room = room
        self._heap: list[Timer] = []
        self._moved: list[Timer] = []
        self._horizon_ns = _NEVER  # everything that is due before is in the heap
        self._after = b""  # key of the last row read
        self._scanning = False
        self._handle: asyncio.TimerHandle | None = None
        self._wakes_ns = _NEVER
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap) + len(self._moved)

    def open(self) -> None:
        """Read the first window; without, only what is armed fires."""
        self._read()

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def arm(self, due_ns: int, run_id: str, path: str, *, moved: bool = False) -> None:
        """The row is durable. Twice fires twice; who fires late finds the step settled. ``moved``: its row says another
        time."""
        if moved:
            heapq.heappush(self._moved, (due_ns, run_id, path))
            self._sleep()
            return
        if due_ns >= self._horizon_ns:
            return
        heapq.heappush(self._heap, (due_ns, run_id, path))
        if len(self._heap) > 2 * WINDOW:
            self._heap = heapq.nsmallest(WINDOW, self._heap)  # sorted, so a heap
            self._horizon_ns = self._heap[-1][0] + 1
            self._after = self._horizon_ns.to_bytes(8, "big")
        self._sleep()

    def _read(self) -> None:
        if not self._scanning and not self._closed:
            self._scanning = True
            self._horizon_ns = _NEVER  # what is armed meanwhile may come too late for the scan
            self._scan(self._after, WINDOW, self._found)

    def _found(self, rows: list[tuple[bytes, Timer]]) -> None:
        self._scanning = False
        if self._closed:
            return
        for key, timer in rows:
            heapq.heappush(self._heap if key.startswith(timer[0].to_bytes(8, "big")) else self._moved, timer)
        if len(rows) < WINDOW:
            self._horizon_ns = _NEVER
        else:
            # A timer made meanwhile with the last row's very time may lie behind its key: it is read again then.
            self._horizon_ns = int.from_bytes(rows[-1][0][:8], "big")
            self._after = self._horizon_ns.to_bytes(8, "big")
        self._sleep()

    def _sleep(self) -> None:
        """Wake for the earliest."""
        if self._closed:
            return
        if not self._heap and self._horizon_ns != _NEVER:
            self._read()
        first = self._first()
        if not first:
            return
        due_ns = first[0][0]
        if self._handle is not None:
            if due_ns >= self._wakes_ns:
                return
            self._handle.cancel()
        self._wakes_ns = due_ns
        delay_s = min(_SLEEP_S_MAX, max(0, due_ns - self._now_ns()) / 1e9)
        self._handle = self._loop.call_later(delay_s, self._wake)

    def _first(self) -> list[Timer]:
        """Of the two heaps, the one that has the earliest."""
        if not self._moved:
            return self._heap
        return self._moved if not self._heap or self._moved[0] < self._heap[0] else self._heap

    def _wake(self) -> None:
        self._handle = None
        self._wakes_ns = _NEVER
        now = self._now_ns()
        while (first := self._first()) and first[0][0] <= now:
            if not self._room():
                self._handle = self._loop.call_later(_RETRY_S, self._wake)
                return
            due_ns, run_id, path = heapq.heappop(first)
            self._fire(run_id, path, due_ns)
        self._sleep()
