"""Law 11: no blocking call on the control loop. A watcher measures the CPU time that the loop's thread spends per turn.

The watcher (a thread) sends the loop a ping and notes the thread's CPU clock; the pong is the first thing the loop does
in its next turn. CPU time between the two is (the rest of) one turn. It counts CPU time, not wall time, so a loop that
was merely not scheduled is innocent; a call that sleeps is not seen. While a ping is overdue, the watcher takes the
loop's stack, which names the line that blocks. The time of the last pong is the loop's heartbeat.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

_logger: Final = logging.getLogger("agentrt.loop")


class LongTurn(msgspec.Struct, frozen=True):
    """One turn that took too long: CPU time, and where the loop was when the bound was passed ("" if not caught)."""

    cpu_ns: int
    stack: str


class LoopWatch:
    """Start on the loop's thread, close from any thread. ``turns`` holds the last 100 long turns."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        cpu_max_ns: int,
        interval_ns: int,
        report: Callable[[LongTurn], None] | None = None,
    ) -> None:
        self.cpu_max_ns: Final = cpu_max_ns
        self.turns: deque[LongTurn] = deque(maxlen=100)
        self.long_turns = 0
        self.longest_ns = 0
        self.heartbeat_ns = time.monotonic_ns()
        self._loop = loop
        self._interval_s = interval_ns / 1e9
        self._report = report or _log
        ident = threading.get_ident()
        self._ident = ident
        self._clock = time.pthread_getcpuclockid(ident)
        self._pong = threading.Event()
        self._pong_cpu_ns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agentrt-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Must come before the loop's thread ends: its CPU clock ends with it."""
        self._stop.set()
        self._pong.set()
        if threading.get_ident() != self._thread.ident:
            self._thread.join()

    def age_ms(self) -> int:
        """Since the loop's last sign of life. Any thread."""
        return max(0, time.monotonic_ns() - self.heartbeat_ns) // 1_000_000

    def _on_ping(self) -> None:
        self._pong_cpu_ns = time.thread_time_ns()
        self.heartbeat_ns = time.monotonic_ns()
        self._pong.set()

    def _watch(self) -> None:
        wait_s = self.cpu_max_ns / 1e9
        while not self._stop.wait(self._interval_s):
            self._pong.clear()
            began = time.clock_gettime_ns(self._clock)
            try:
                self._loop.call_soon_threadsafe(self._on_ping)
            except RuntimeError:  # closed
                return
            stack = ""
            while not self._pong.wait(wait_s):
                if self._stop.is_set():  # `close` came before the pong was cleared, and its loop answers no more
                    return
                if not stack and time.clock_gettime_ns(self._clock) - began > self.cpu_max_ns:
                    stack = self._stack()
            if self._stop.is_set():
                return
            used = self._pong_cpu_ns - began
            self.longest_ns = max(self.longest_ns, used)
            if used > self.cpu_max_ns:
                self.long_turns += 1
                turn = LongTurn(used, stack)
                self.turns.append(turn)
                self._report(turn)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._ident)
        return "" if frame is None else "".join(traceback.format_stack(frame, limit=12))


def _log(turn: LongTurn) -> None:
    _logger.warning("a turn of the control loop used %.1f ms of CPU time\n%s", turn.cpu_ns / 1e6, turn.stack)
