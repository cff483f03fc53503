"""A backend whose guests are generators that live elsewhere: messages to them and from them take time, in order.

An agent is ``agent(ctx, input)``: it yields the handles it waits for and gets the one that was answered. The backend
contract is kept to the letter: replay, unwinding and abandoned handles included.
"""

import random
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec

from agentrt.backends.base import Exit, GuestEvents, Request, Status
from agentrt.engine.machine import Phase
from agentrt.syscalls import BY_OP
from tests.sim.loop import Channel, LifeLoop

if TYPE_CHECKING:
    from tests.sim.laws import Laws

Code = Generator[tuple[int, ...], int, Any]
AgentFn = Callable[["Ctx", Any], Code]
NUMBERS = {op: row.number for op, row in BY_OP.items()}
_EVICTIONS_IN_REPLAY = 8
_encode = msgspec.json.encode
_decode = msgspec.json.decode


class Ctx:
    """What a program can do."""

    def __init__(self, guest: "SimGuest") -> None:
        self._guest = guest

    def op(self, op: str, **request: Any) -> int:
        return self._guest.submit(NUMBERS[op], _encode(request))

    def raw(self, op: str, payload: bytes) -> int:
        return self._guest.submit(NUMBERS[op], payload)

    def log(self, text: str) -> None:
        self._guest.requests.append(Request(0, NUMBERS["log"], _encode({"message": text})))

    def abandon(self, handles: list[int]) -> None:
        guest = self._guest
        guest.report(None)
        guest.out.post(guest.deliver, guest.events.on_abandoned, tuple(handles))

    def on_unwind(self, handler: AgentFn) -> None:
        self._guest.handlers.append(handler)

    def read(self, handle: int) -> tuple[bool, bytes]:
        _, status, payload, _ = self._guest.answers[handle]
        return status == Status.OK, payload

    @property
    def restored(self) -> Any:
        return None if self._guest.restored is None else _decode(self._guest.restored)

    @property
    def clock_ns(self) -> int:
        return self._guest.clock_ns

    @property
    def run_id(self) -> str:
        return self._guest.run_id


class SimGuest:
    """One life of a run's program."""

    def __init__(self, backend: "SimBackend", agent: AgentFn, events: Any, given: dict[str, Any]) -> None:
        self.backend, self.events = backend, events
        self.run_id: str = events.run_id
        self.restored: bytes | None = given["restored"]
        self.clock_ns: int = given["clock_ns"]
        self.live = not given["replay"]
        self.handlers: list[AgentFn] = []
        self.requests: list[Request] = []
        self.answers: dict[int, tuple[int, int, bytes, int]] = {}
        self.gone = False
        self.lent: int | None = None
        self.ran_ns = 0
        chance = backend.chance
        self.into = Channel(backend.life, chance, backend.latency_ns)
        self.out = Channel(backend.life, chance, backend.latency_ns)
        self._look = False
        self.given = 0  # answers that its program went on with
        self._dead = False  # its host has died, and it was not told to unwind yet
        self._unwinding = False
        self._next = 1
        self._waiting: tuple[int, ...] | None = None
        self._ended = False
        self._code = agent(Ctx(self), _decode(given["input"]))
        self._value: int | None = None
        self.into.post(self._turn)

    def submit(self, number: int, payload: bytes) -> int:
        handle, self._next = self._next, self._next + 1
        self.requests.append(Request(handle, number, payload))
        if self.backend.chance.random() < self.backend.chops:
            self.report(None)  # part of the requests is seen before the guest waits
        return handle

    # --- Guest: what the engine says; it arrives later ---

    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None:
        self.into.post(self._complete, handle, status, payload, clock_ns, seq)

    def go_live(self) -> None:
        self.into.post(self._go_live)

    def unwind(self, reason: str, skipped: int = 0) -> None:
        assert not skipped or self.backend.deaths.processes, "what its program asked for is known"
        self.into.post(self._unwind, reason, skipped)

    def kill(self) -> None:
        self.into.post(self._end, "killed", None, "")

    def lend(self, tier: int | None) -> bool:
        if self.backend.chance.random() < 0.1:
            return False
        self.lent = tier
        return True

    # --- arrived ---

    def _complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None:
        if self._ended:
            return
        assert 0 < handle < self._next, f"an answer to handle {handle}, which was never asked"
        assert handle not in self.answers, f"a second answer to handle {handle}"
        if self._dead:
            return
        if not self._unwinding and self.backend.deaths.now(self.run_id, self.restored, handle):
            self._dead = True
            self.requests = []
            self.out.post(self.deliver, self._tell_died)
            return
        self._look = True
        self.answers[handle] = (seq, status, payload, clock_ns)
        self._turn()

    def _go_live(self) -> None:
        if self._ended:
            return
        assert not self.live, "live twice"
        self.live = True
        self._turn()

    def _unwind(self, reason: str, skipped: int) -> None:
        if self._ended:
            return
        self._next += skipped
        assert not self._unwinding, "unwound twice"
        self._unwinding, self._dead = True, False
        self.requests = []
        self.out.post(self.deliver, self.events.on_unwinding)

        def code(ctx: Ctx) -> Code:
            while self.handlers:
                yield from self.handlers.pop()(ctx, reason)

        self._code.close()
        self._code, self._waiting, self._value = code(Ctx(self)), None, None
        self._turn()

    def _tell_died(self) -> None:
        if self._ended or self._unwinding:
            return
        if not self.events.on_cut_short("host_died", "it died", self.given):
            if not self.live:
                self.backend.laws.died_in_replay.add(self.run_id)
            self.into.post(self._end, "host_died", None, "it died")

    def _died_alone(self) -> None:
        """Its process has no other guest, and was heard until it ended, after the last answer and before the next
        wait."""
        self.report(None)
        self._ended = True
        exit = Exit("trap", 1, None, "it died", 1000, 10, 1, 2, 0, 0, answers=self.given - 1, steps=self._next - 1)
        self.out.post(self._exit, exit)

    def _turn(self) -> None:
        if self._ended or self._dead:
            return
        waiting = None
        try:
            while True:
                if self._waiting is not None:
                    if not (self.live or self._look):
                        break
                    ready = [(self.answers[handle][0], handle) for handle in self._waiting if handle in self.answers]
                    if not ready:
                        break
                    handle = min(ready)[1]
                    self.clock_ns = max(self.clock_ns, self.answers[handle][3])
                    self._waiting, self._value = None, handle
                    self.given += not self._unwinding
                if self._value is None:
                    waiting = self._waiting = next(self._code)
                else:
                    value, self._value = self._value, None
                    waiting = self._waiting = self._code.send(value)
                    if not self._unwinding and self.backend.deaths.alone(self.run_id, self.restored, value):
                        self._died_alone()
                        return
                self._look = False
        except StopIteration as stop:
            self.report(None)
            self._end("unwound" if self._unwinding else "returned", _encode(stop.value), "")
            return
        except ProgramError as error:
            self.report(None)
            self._end("trap", None, str(error))
            return
        if self.backend.hogs:
            ran_ns = self.backend.chance.choice((10_000, 10_000, 2_000_000, 100_000_000))
            self.ran_ns += ran_ns
            self.backend.ran_ns[self.run_id] = self.backend.ran_ns.get(self.run_id, 0) + ran_ns
        self.report(waiting)
        if waiting is not None and self.backend.evictions.now(self.run_id, self.live):
            self.into.post(self._end, "evicted", None, "")

    def report(self, waiting: tuple[int, ...] | None) -> None:
        if self.requests or waiting is not None:
            taken, self.requests = self.requests, []
            self.out.post(self.deliver, self.events.on_syscalls, taken, waiting)

    def _end(self, reason: str, output: bytes | None, message: str) -> None:
        if not self._ended:
            self._ended = True
            exit = Exit(reason, 0 if reason == "returned" else 1, output, message, 1000, 10, 1, 2, 0, 0)
            self.out.post(self._exit, exit)

    def deliver(self, event: Callable[..., None], *args: Any) -> None:
        event(*args)

    def _exit(self, exit: Exit) -> None:
        self.gone = True
        del self.backend.guests[self.run_id]
        self.backend.laws.guest_ended(self.run_id, exit.reason)
        # Of others it may be that what they were given before cannot be had again.
        if exit.reason == "killed" and self.events.ending is not None and self.live:
            self.backend.laws.killed_while_ending(self.run_id, self.events.phase is Phase.ENDING)
        self.events.on_exit(exit)


class ProgramError(Exception):
    """A program fails as it was written to."""


class Evictions:
    """How often a backend gives a waiting guest up; in replay a few times for each run only, or a long journal would
    never be through. It has a chance of its own, so that a seed's other draws stay."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"evictions {seed}")
        self._share = self._chance.choice((0.0, 0.0, 0.05, 0.2))
        self._in_replay: dict[str, int] = {}

    def now(self, run_id: str, live: bool) -> bool:
        if self._chance.random() >= self._share:
            return False
        if not live:
            self._in_replay[run_id] = self._in_replay.get(run_id, 0) + 1
        return live or self._in_replay[run_id] <= _EVICTIONS_IN_REPLAY


class Deaths:
    """Which answers a run's host does not survive: always the same, or the same the first time only. ``processes``:
    each run has one of its own. It has a chance of its own, as evictions."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        chance = random.Random(f"deaths {seed}")
        self._share = chance.choice((0.0, 0.0, 0.0, 0.01, 0.05))
        self._once = chance.choice((False, True))
        self.processes = chance.choice((False, False, True))
        self._seen: set[tuple[str, bytes | None, int]] = set()

    def now(self, run_id: str, restored: bytes | None, handle: int) -> bool:
        """In a host with others, before anything was made of the answer."""
        return not self.processes and self._any(run_id, restored, handle)

    def alone(self, run_id: str, restored: bytes | None, handle: int) -> bool:
        """In a process of its own, in what was made of the answer."""
        return self.processes and self._any(run_id, restored, handle)

    def _any(self, run_id: str, restored: bytes | None, handle: int) -> bool:
        if not self._share:
            return False
        if random.Random(f"{self._seed} {run_id} {restored!r} {handle}").random() >= self._share:
            return False
        seen = (run_id, restored, handle) in self._seen
        self._seen.add((run_id, restored, handle))
        return not (self._once and seen)


class SimProgram(msgspec.Struct, frozen=True):
    version: str
    agent: AgentFn
    unwinds: bool
    pins: dict[str, str] = {}


class SimBackend:
    """The guests of one life of a node."""

    name = "sim"

    def __init__(
        self,
        life: LifeLoop,
        chance: random.Random,
        laws: "Laws",
        latency_ns: int,
        chops: float,
        evictions: "Evictions",
        deaths: "Deaths",
        hogs: bool,
    ) -> None:
        self.life, self.chance, self.laws, self.evictions, self.deaths = life, chance, laws, evictions, deaths
        self.latency_ns, self.chops, self.hogs = latency_ns, chops, hogs
        self.guests: dict[str, SimGuest] = {}
        self.ran_ns: dict[str, int] = {}  # by run: of its guests so far

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def prepare(self, module: bytes) -> SimProgram:
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        return {}

    def start(self, program: SimProgram, events: GuestEvents, **given: Any) -> SimGuest:
        guest = SimGuest(self, program.agent, events, given)
        machine: Any = events
        ending = machine.ending is not None
        self.laws.guest_started(guest.run_id, given["replay"], program.version, machine.agent_version, ending)
        self.guests[guest.run_id] = guest
        return guest
