"""Processes of programs that are started ahead of their runs, as a profile's ``prewarm`` says.

    asked for -> boots, in turns of the lowest tier -> has said ready, stands still -> is a run's

A program may do nothing before its start that depends on a run, for it has nothing of one: its environment, limits and
place on disk are its agent's, and all else comes with the line ``start``. So who has said ready may be any run's, of
any tenant; until then it belongs to nobody, and afterwards to that run alone. One of another registration is never
given: what a run's program is, is looked at again when it gets one.

Only one boots at once, and only while no run waits for a process; they take no places that are kept for urgent runs,
and go when a run needs theirs.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agentrt.backends.process.agents.command import ProcessProgram
from agentrt.backends.process.agents.launch import AgentProcess, End
from agentrt.backends.process.agents.launched import Launched
from agentrt.backends.process.agents.protocol import ABI, LineError, LineReader, Ready, decode_line
from agentrt.backends.process.agents.turn import Turn

if TYPE_CHECKING:
    from agentrt.backends.process.agents.pool import ProcessPool

#: In the scheduler: of no tenant, and behind all that anybody waits for.
_NOBODY: Final = ""
_TIER: Final = 3
#: After one that did not come up; twice as long after each further one, and in the end not before the next profile.
_AGAIN_S: Final = 0.5
_FAILURES_MAX: Final = 5
#: The first line is short.
_READ_BYTES: Final = 64


class Spare:
    """One of them, until it is a run's. To the pool's watch it is what a guest is."""

    def __init__(self, spares: "Spares", program: ProcessProgram, number: int) -> None:
        pool = spares.pool
        self._spares = spares
        self._pool = pool
        self.program: Final = program
        self.ready = False  # it has said so, and stands still
        self.ended = self.computing = False
        self.afloat = False
        self.seen_cpu_ns = self.seen_at_ns = 0
        self.turn: Turn | None = None
        self._reader = LineReader(_READ_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self.launched: Final = pool.open(
            program,
            domain=f"spare {number}",  # whose it will be is not known, and nobody else's network is its
            tier=_TIER,
            on_start=self._on_start,
            on_end=self._on_end,
            on_stall=lambda: False,
        )

    @property
    def process(self) -> AgentProcess:
        return self.launched.process

    def cpu_ns(self) -> int:
        return self.process.cpu_ns()

    def fuel_is_spent(self, cpu_ns: int) -> bool:
        """Whether it has computed for as long as it may take to come up."""
        return cpu_ns >= self._pool.limits.start_timeout_ns

    def unwinding_is_spent(self, now_ns: int, cpu_ns: int) -> bool:
        return False

    def stop(self, reason: str, message: str) -> None:
        """End it; the spares hear of it."""
        self.computing = False
        self.process.kill()

    def hand_over(self) -> tuple[Launched, Turn, bytes]:
        """It is somebody else's now: what becomes of it, and whose turns it has, is theirs to say. With what it has
        said after that it is ready."""
        assert self.ready and self.turn is not None
        return self.launched, self.turn, self._reader.rest()

    def _on_start(self) -> None:
        pool = self._pool
        self.seen_at_ns = time.monotonic_ns()
        try:
            self.turn = Turn(pool.slots, pool.loop, self.process, _NOBODY, _TIER, self._on_granted, _nothing)
        except OSError:
            self.process.kill()
            return
        self.computing = True
        pool.loop.add_reader(self.launched.socket.fileno(), self._on_readable)
        self._timer = pool.loop.call_later(pool.limits.start_timeout_ns / 1e9, self._on_timeout)
        self.turn.want()

    def _on_granted(self) -> None:
        self.afloat = False
        self.seen_at_ns = time.monotonic_ns()
        if self.computing:
            self._pool.watch(self)
        elif self.turn is not None:
            self.turn.rest()

    def _on_timeout(self) -> None:
        """It counts only while it is not stopped."""
        if self.turn is not None and (self.turn.granted or self.afloat):
            self.stop("protocol", "")
        else:
            self._timer = self._pool.loop.call_later(self._pool.limits.start_timeout_ns / 1e9, self._on_timeout)

    def _on_readable(self) -> None:
        try:
            data = self.launched.socket.recv(_READ_BYTES)
            self._reader.add(data)
            line = self._reader.line()
            if data and line is None:
                return
            if line is None or decode_line(line) != Ready(ABI):
                self.stop("protocol", "")
        except BlockingIOError:
            return
        except (OSError, LineError):
            self.stop("protocol", "")
        self._deaf()
        if self.computing and self.turn is not None:
            self.computing = False
            self.turn.on_idle = self._on_idle
            self.turn.rest()
            if self.turn.idle:  # it came up without one
                self._on_idle()

    def _on_idle(self) -> None:
        """It has no slot any more, and computes no further."""
        self.process.freeze()
        self.ready = True
        self._spares.on_ready(self)

    def _deaf(self) -> None:
        self._pool.loop.remove_reader(self.launched.socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_end(self, end: End) -> None:
        self.ended, self.computing = True, False
        self._deaf()
        self.launched.socket.close()
        self.launched.tail.close()
        if self.turn is not None:
            self.turn.close()
        self._spares.on_gone(self)


class Spares:
    """Of one pool. On the control loop's thread."""

    def __init__(self, pool: "ProcessPool") -> None:
        self.pool: Final = pool
        self._wanted: dict[int, tuple[ProcessProgram, int]] = {}  # by identity of the program
        self._there: dict[int, list[Spare]] = {}  # that have said ready
        self._all: set[Spare] = set()
        self._leaving: set[Spare] = set()
        self._failures: dict[int, int] = {}
        self._waits: asyncio.TimerHandle | None = None
        self._number = 0

    def __len__(self) -> int:
        """Their processes, whether or not they are ready."""
        return len(self._all)

    @property
    def ready(self) -> int:
        return sum(map(len, self._there.values()))

    def prewarm(self, counts: Iterable[tuple[ProcessProgram, int]]) -> None:
        """So many are to be there of these programs from now on, of all others none."""
        self._wanted = {id(program): (program, count) for program, count in counts if count}
        self._failures.clear()
        self._stop_waiting()
        for spare in tuple(self._all):
            if id(spare.program) not in self._wanted:
                self._end(spare)
        for key, (_, count) in self._wanted.items():
            for spare in self._there.get(key, [])[count:]:
                self._end(spare)
        self.fill()

    def take(self, program: ProcessProgram) -> Spare | None:
        """One for a run of the program, which it is from now on."""
        there = self._there.get(id(program))
        if not there:
            return None
        spare = there.pop(0)
        self._all.discard(spare)
        return spare

    def make_room(self) -> None:
        """A run needs the place of one."""
        spare = next((spare for spare in self._all if not spare.ready), None)
        spare = spare or next((spare for there in self._there.values() for spare in there), None)
        if spare is not None:
            self._end(spare)

    def fill(self) -> None:
        """Start the next, if one is wanted and there is room."""
        if self._waits is not None or self.pool.closed or any(not spare.ready for spare in self._all):
            return
        for key, (program, count) in self._wanted.items():
            short = count - len(self._there.get(key, ()))
            if short > 0 and self._failures.get(key, 0) < _FAILURES_MAX and self.pool.has_room_for_spare():
                self._start(program)
                return

    def close(self) -> None:
        self._wanted.clear()
        self._stop_waiting()
        for spare in tuple(self._all):
            self._end(spare)

    def on_ready(self, spare: Spare) -> None:
        if spare in self._leaving or id(spare.program) not in self._wanted:
            self._end(spare)
            return
        self._failures.pop(id(spare.program), None)
        self._there.setdefault(id(spare.program), []).append(spare)
        self.pool.on_ready()

    def on_gone(self, spare: Spare) -> None:
        self._all.discard(spare)
        there = self._there.get(id(spare.program), [])
        if spare in there:
            there.remove(spare)
        if spare in self._leaving:
            self._leaving.discard(spare)
        else:
            self._failed(spare.program)
        self.pool.on_spare_gone()

    def _start(self, program: ProcessProgram) -> None:
        if program.changed() is not None:
            self._failures[id(program)] = _FAILURES_MAX  # until it is registered again
            return
        self._number += 1
        try:
            self._all.add(Spare(self, program, self._number))
        except OSError:  # no descriptor is left
            self._failed(program)

    def _failed(self, program: ProcessProgram) -> None:
        count = self._failures[id(program)] = self._failures.get(id(program), 0) + 1
        if self._waits is None and not self.pool.closed:
            self._waits = self.pool.loop.call_later(_AGAIN_S * 2**count, self._again)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _again(self) -> None:
        self._waits = None
        self.fill()

    def _end(self, spare: Spare) -> None:
        """It goes; it is not counted as a failure."""
        self._leaving.add(spare)
        there = self._there.get(id(spare.program), [])
        if spare in there:
            there.remove(spare)
        spare.stop("killed", "")


def _nothing(*_: object) -> None:
    """Nobody is to hear of it."""
