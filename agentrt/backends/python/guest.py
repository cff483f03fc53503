"""One run as the control plane sees it: what it was given, in order, so that any host can bring it to where it is.

`log` holds the answers (and an unwinding) in the order in which they were given; the host has acknowledged the first
`acked` of them. A guest that loses its host is started elsewhere with those as its history, and gets the rest again.
What it asks for on the way must be what it asked for before. When the acknowledged ones have more bytes than
`PythonLimits.answers_bytes_max`, they are forgotten: should it lose its host now, it ends as "evicted", and the engine
brings the run back from its journal.
"""

import time
from typing import TYPE_CHECKING, Final

from agentrt.agents.host import request_check
from agentrt.agents.protocol import Answer, Ask, Complete, Ended, Start, Suspended, ToHost, Unwind
from agentrt.backends.base import Exit, GuestEvents, Request
from agentrt.syscalls import BY_NUMBER
from agentrt.tools.protocol import FrameError

if TYPE_CHECKING:
    from agentrt.backends.python.host import HostLink
    from agentrt.backends.python.pool import HostPool, PythonProgram

#: In `log`, handle 0 stands for an unwinding.
_UNWIND: Final = 0
FUEL_SPENT: Final = "the run has used its fuel"
#: What an answer takes besides its payload.
_ENTRY_BYTES: Final = 200
#: How a host may say that a run has ended.
_REASONS: Final = frozenset(("returned", "failed", "memory", "unwound"))


class PythonGuest:
    """Implements agentrt.backends.base.Guest. On the control loop's thread."""

    __slots__ = (
        "_acked_bytes",
        "_answers",
        "_checks",
        "_clock_ns",
        "_cpu_ns",
        "_first_ns",
        "_handles",
        "_input",
        "_pool",
        "_ran_ns",
        "_restored",
        "_run_id",
        "_seed",
        "_submitted_ns",
        "acked",
        "demotions",
        "died",
        "ended",
        "events",
        "forgetful",
        "fuel",
        "fuel_used",
        "host",
        "kills",
        "lent",
        "log",
        "moves",
        "number",
        "open",
        "program",
        "rebuilding",
        "started",
        "stay",
        "tenant",
        "tier",
        "unwinding",
        "waits_for_host",
    )

    def __init__(
        self,
        pool: "HostPool",
        number: int,
        program: "PythonProgram",
        events: GuestEvents,
        *,
        run_id: str,
        tenant: str,
        tier: int,
        input: bytes,
        restored: bytes | None,
        fuel: int,
        seed: bytes,
        clock_ns: int,
    ) -> None:
        self._pool = pool
        self.number: Final = number
        self.program: Final = program
        self.events: Final = events
        self.tenant: Final = tenant
        self.tier: Final = tier
        self.fuel: Final = fuel
        self._run_id = run_id
        self._input = input
        self._restored = restored
        self._seed = seed
        self._clock_ns = clock_ns
        self.host: HostLink | None = None
        self.waits_for_host = False
        self.lent: int | None = None  # the tier it is lent
        self.log: list[Answer] = []
        self.acked = 0
        self.forgetful = False  # what was acknowledged is not in `log` any more
        self._acked_bytes = 0
        self._answers = 0  # acknowledged ones
        self.started = False  # a host has acknowledged its start
        self.rebuilding = False  # its start is under way once more
        self.unwinding = False
        self.ended = False
        self.died = False  # it has ended a host
        self.open: dict[int, None] = {}  # steps that are not answered, in order
        self.fuel_used = 0
        self.demotions = 0
        self.moves = 0  # how often it was brought back in another host
        self.kills = 0  # how often others ended its host while it was executing
        self.stay = 0  # counts its hosts
        self._checks = bytearray()
        self._handles = 0  # how many steps it has asked for
        self._cpu_ns = 0
        self._ran_ns = 0
        self._submitted_ns = time.monotonic_ns()
        self._first_ns = 0

    # --- for the engine --------------------------------------------------------------

    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None:
        """See agentrt.backends.base.Guest; answers are delivered in the order of these calls."""
        if self.ended or handle not in self.open:
            return
        del self.open[handle]
        self._push(Answer(handle, status, payload, clock_ns))

    def go_live(self) -> None:
        """Nothing changes: each answer is an activation of its own, and each suspension is reported, all the time."""

    def kill(self) -> None:
        """See agentrt.backends.base.Guest."""
        if not self.ended:
            self._pool.kill(self)

    def lend(self, tier: int | None) -> bool:
        """See agentrt.backends.base.Guest. The guest stays in its host, whose turn is raised while it works there."""
        if tier != self.lent and not self.ended:
            self.lent = tier
            if self.host is not None:
                self.host.raise_turn()
        return True

    @property
    def ran_ns(self) -> int:
        """CPU time of its activations so far."""
        running = 0 if self.host is None or self.ended else self.host.running_ns(self.number)
        self._ran_ns = max(self._ran_ns, self._cpu_ns + running)
        return self._ran_ns

    def unwind(self, reason: str, skipped: int = 0) -> None:
        """Stop the program where it is and run its handlers; `on_exit` with reason "unwound" follows. What an
        activation asks for is known when it is over, so none is ``skipped``."""
        if self.ended or self.unwinding:
            return
        self.unwinding = True
        self.open.clear()
        self._push(Answer(_UNWIND, 0, reason.encode(errors="replace"), 0))
        self._pool.on_unwinding(self)

    def _push(self, entry: Answer) -> None:
        self.log.append(entry)
        if self.host is not None:
            self._pool.send(self, self._message(entry))
        else:
            self._pool.place(self)

    # --- for the pool ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether its host has something to do for it."""
        return not self.ended and (not self.started or self.acked < len(self.log))

    def messages(self) -> list[ToHost]:
        """What brings a host to where the run is. It is the run's host from now on."""
        self.rebuilding = self.started
        start = Start(
            self.number,
            self.program.entry,
            self._run_id,
            self.tenant,
            self._input,
            self._restored,
            self._seed,
            self._clock_ns,
            self.log[: self.acked],
        )
        return [start, *(self._message(entry) for entry in self.log[self.acked :])]

    def _message(self, entry: Answer) -> ToHost:
        if entry.handle == _UNWIND:
            return Unwind(self.number, entry.payload.decode())
        return Complete(self.number, entry)

    @property
    def never_unwinds(self) -> bool:
        """Whether, its activation not ending, it does not come to the unwinding it was told to do."""
        if not self.unwinding or self.rebuilding:
            return False
        return not self.started or self.acked == len(self.log) or self.log[self.acked].handle != _UNWIND

    def skip_to_unwinding(self) -> bool:
        """Its activation never ends: what it was given for that is taken back. Whether there was anything."""
        for place in range(self.acked, len(self.log)):
            if self.log[place].handle == _UNWIND:
                del self.log[self.acked : place]
                if place > self.acked:
                    self._pool.ask(self.events.on_cut_short, "unwound", "", self._answers)
                return place > self.acked
        return False

    def unwinds_without(self, reason: str, message: str) -> bool:
        """Its activation has ended its host or used its fuel: whether it is to be brought back without that, and
        unwinds."""
        if not self.started or not self.can_move:
            return False
        if self.unwinding:  # it was told to before that, and had not come to it
            return self.skip_to_unwinding()
        given, self.log = self.log, self.log[: self.acked]
        if self._pool.ask(self.events.on_cut_short, reason, message, self._answers):
            return True
        self.log = given
        return False

    def on_message(self, message: Suspended | Ended) -> None:
        """An activation of this run is over. Raises FrameError if its host cannot mean what it says."""
        if message.cpu_ns < 0 or (isinstance(message, Ended) and message.reason not in _REASONS):
            raise FrameError("no end or time of an activation")
        self._cpu_ns += message.cpu_ns
        if self.rebuilding:
            self._rebuilt(message)
            return
        self._check(message.requests)
        self.fuel_used += message.cpu_ns * self._pool.limits.fuel_per_us // 1000
        if self.started:
            if self.log[self.acked].handle == _UNWIND:
                self.open.clear()  # the program has asked for the last time
                self._pool.tell(self.events.on_unwinding)
            self._acknowledged(self.log[self.acked])
        else:
            self.started = True
            self._first_ns = time.monotonic_ns() - message.cpu_ns
        requests: list[Request] = []
        for ask in message.requests:
            requests.append(Request(ask.handle, ask.op, ask.payload))
            if ask.handle:
                if not self.forgetful:
                    self._checks += request_check(ask).to_bytes(4, "little")
                self.open[ask.handle] = None
                self._handles = ask.handle
        abandoned = tuple(handle for handle in message.abandoned if self.open.pop(handle, 0) is None)
        if isinstance(message, Ended):
            self._pool.on_ended(self)
            if requests:
                self._pool.tell(self.events.on_syscalls, requests, None)
            if abandoned:
                self._pool.tell(self.events.on_abandoned, abandoned)
            self.end(message.reason, message.code, message.output, message.message)
            return
        self._pool.tell(self.events.on_syscalls, requests, tuple(self.open))
        if abandoned:
            self._pool.tell(self.events.on_abandoned, abandoned)
        spent = self.fuel_used >= self.fuel and not self.ended and not self.unwinding
        if spent and not self._pool.ask(self.events.on_cut_short, "fuel", FUEL_SPENT, -1):
            self._pool.drop(self)
            self.end("fuel", 0, None, FUEL_SPENT)

    def _acknowledged(self, entry: Answer) -> None:
        self.acked += 1
        self._answers += entry.handle != _UNWIND
        self._acked_bytes += len(entry.payload) + _ENTRY_BYTES
        if self._acked_bytes > self._pool.limits.answers_bytes_max:
            self.forgetful = True
            del self.log[: self.acked]
            self.acked = 0
            self._checks.clear()

    @property
    def can_move(self) -> bool:
        """Whether another host could be brought to where it is."""
        return not (self.started and self.forgetful)

    def _check(self, requests: list[Ask]) -> None:
        handle = self._handles
        for ask in requests:
            if ask.handle:
                handle += 1
            if ask.handle not in (0, handle) or ask.op not in BY_NUMBER:
                raise FrameError("no request of this run")
            if len(ask.payload) > self._pool.limits.request_bytes_max:
                raise FrameError("a request above the limit")

    def _rebuilt(self, message: Suspended | Ended) -> None:
        self.rebuilding = False
        checks = message.checks + b"".join(
            request_check(ask).to_bytes(4, "little") for ask in message.requests if ask.handle
        )
        if isinstance(message, Suspended) and checks == self._checks:
            return
        if isinstance(message, Ended):
            self._pool.on_ended(self)
            what = f"it ended ({message.reason})"
        else:
            self._pool.drop(self)
            place = next((n for n in range(0, len(checks), 4) if checks[n : n + 4] != self._checks[n : n + 4]), 0)
            what = f"its request {place // 4 + 1} is another"
        self.end("non_determinism", 0, None, f"brought back in another host, the agent did something else: {what}")

    def end(self, reason: str, code: int, output: bytes | None, message: str) -> None:
        """It is over: tell the engine, once."""
        if not self.ended:
            self._pool.tell(self.events.on_exit, self.close(reason, code, output, message))

    def close(self, reason: str, code: int, output: bytes | None, message: str) -> Exit:
        """It is over; what the engine is to be told."""
        self.ended = True
        self._pool.forget(self)
        return Exit(
            reason,
            code,
            output,
            message,
            self.fuel_used,
            self._cpu_ns,
            self._submitted_ns,
            self._first_ns,
            self.moves,
            self.demotions,
        )
