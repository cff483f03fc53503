"""The backend contract: what runs an agent's code and hands its syscalls to the engine.

A backend turns a module into a `Program` once, and starts a `Guest` per run. Guests talk to the engine by events, all
delivered on the control loop; the engine answers with `Guest.complete`. Handles number a guest's syscalls 1, 2, 3, …
in program order, so the handle is also the step's place in its segment.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from agentrt.backends.slots import Slots
    from agentrt.stores.frames import FrameData


class Request(NamedTuple):
    """One syscall as the guest sent it."""

    handle: int
    op: int  # number in agentrt.syscalls
    payload: bytes  # JSON, not yet checked


class Status:
    """How a syscall is answered; the guest sees it as the sign of the returned value."""

    OK = 0
    FAILED = 1  # payload is an error as JSON


class Exit(NamedTuple):
    """How a guest ended. ``reason``: returned, failed (entry returned non-zero), trap, fuel, memory, killed, engine,
    unwound (its unwinding handlers have run), evicted (the backend cannot go on with it: the run is started again from
    its journal), missing (its program is not there any more: the run waits for an operator, who is told why)."""

    reason: str
    code: int  # the entry's return value, what it exited with, or the trap code
    output: bytes | None  # what the guest gave to agentrt.output
    message: str  # trap text with backtrace, or what the engine said
    fuel: int  # guest work done, in fuel
    slot_ns: int
    submitted_ns: int  # CLOCK_MONOTONIC at core submit
    first_ns: int  # CLOCK_MONOTONIC at the guest's first instruction, 0 if it never ran
    preemptions: int
    demotions: int
    stdout: bytes = b""  # of a WASI guest: the end of what it wrote, after a line that says if more was cut off
    stderr: bytes = b""
    answers: int = -1  # after how many its program waited last, if it was cut short and can be brought back to there
    steps: int = -1  # that its program has asked for, if so


class GuestEvents(Protocol):
    """The engine's side; called on the control loop only."""

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        """New syscalls in program order (may be empty). ``waiting`` is the set of handles of which the suspended guest
        needs any one to go on, or None while it still runs. Each suspension is reported once."""

    def on_abandoned(self, handles: tuple[int, ...]) -> None:
        """The guest will never take the answers of these syscalls."""

    def on_unwinding(self) -> None:
        """After `Guest.unwind`: the program is gone, what is asked for from now on its unwinding handlers ask."""

    def on_safe_point(self) -> None:
        """The guest has stopped where it could be captured, asked to by `want_safe_point`, until it is told to go on.
        Only backends whose guests have such a method call this."""

    def may_snapshot(self) -> bool:
        """Whether a checkpoint that the guest asked for right now would be taken, whatever its order of syscalls."""
        ...

    def on_cut_short(self, reason: str, message: str, answers: int) -> bool:
        """The guest cannot go on: the process that it lived in has ended, by its doing as far as is known, in what it
        did with the last answer that it got (``reason`` is then "host_died"), it has used its fuel ("fuel"), or it does
        not come to the unwinding that it was told to do ("unwound"). True: `Guest.unwind` was called, now or before,
        and its handlers are to run as they were after the first ``answers`` answers of its segment (-1: all that it was
        given); false: it ends, and `on_exit` with the reason follows."""

    def on_exit(self, exit: Exit) -> None:
        """The guest is gone; nothing follows."""


class Guest(Protocol):
    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None:
        """Answer a syscall from the record ``seq`` of the run, written at ``clock_ns``. Among answered handles a
        waiting guest gets the one with the lowest seq. Ignored when the guest has ended."""

    def go_live(self) -> None:
        """The replay is over: every recorded answer was given. Until then (``replay`` at start) each wait suspends the
        guest and is reported, and only an answer given after that resumes it, so that the engine alone decides which
        of several recorded answers comes first. From now on the guest takes what is answered already."""

    def unwind(self, reason: str, skipped: int = 0) -> None:
        """The run was told to end: after the answers given so far the program stops where it is and never runs again;
        `GuestEvents.on_unwinding` follows, then its unwinding handlers run, last in, first out, and make syscalls with
        further handles, of which ``skipped`` are left out: an earlier guest of the segment has used them, whose `Exit`
        has said how many ``steps`` it made; then `on_exit` with reason "unwound", or another if the program had ended
        before. Called only if the program's ``unwinds`` is true."""

    def kill(self) -> None:
        """End the guest wherever it is; `on_exit` follows with reason "killed"."""

    def lend(self, tier: int | None) -> bool:
        """Tier lending: until told otherwise the guest runs at no lower tier than this, wherever it is now, and is not
        demoted from it; None ends that, and gives it back the tier that it had. False: not now; ask again in a
        moment."""

    @property
    def ran_ns(self) -> int:
        """Slot or CPU time that the guest has had so far, about; never less than before."""


class Capture(Protocol):
    """Of a backend whose guests can be captured: see ``WasmBackend.capturing``."""

    def __call__(
        self, *, frame_id: bytes, segment: int, seq: int, base: "FrameData | None" = None
    ) -> "tuple[FrameData, int]":
        """Blocking: a frame of the guest, which stays as it is, and the fuel that it has used; a delta to ``base``, an
        earlier one that is none. Raises FrameError."""


class Program(Protocol):
    @property
    def version(self) -> str:
        """Content address: sha256 of the module, hex."""

    @property
    def pins(self) -> dict[str, str]:
        """What else the program depends on: engine, ABI, … and their versions."""

    @property
    def unwinds(self) -> bool:
        """Whether a guest may have unwinding handlers."""


class Surroundings(msgspec.Struct, frozen=True):
    """What a backend gets from its node. ``slots``: the CPU slots for hosts; None for the backend that has the core,
    whose own ``slots`` they are. ``secret``: 32 bytes that stay the same for a store."""

    slots: "Slots | None"
    secret: bytes


class Backend(Protocol):
    """Made with the runtime's config; `open` is called on the control loop. One with a true ``self_contained`` is given
    all that a version of an agent is as its module's bytes: they are kept for its runs as long as they may need it. One
    with a method ``prewarm(counts)`` is told, as (program, count) pairs, how many guests of which agents are to be kept
    ready from now on; of all others none."""

    name: str

    async def open(self) -> None: ...

    async def prepare(self, module: bytes) -> Program:
        """Check, compile (off the loop) and load. Raises ModuleError and its kinds; changes nothing then."""

    def start(
        self,
        program: Any,
        events: GuestEvents,
        *,
        tenant: str,
        tier: int,
        input: bytes,
        restored: bytes | None = None,
        fuel: int,
        seed: bytes,
        clock_ns: int,
        admitted: bool,
        replay: bool,
    ) -> Guest:
        """Queue a guest. Raises QueueFullError unless ``admitted`` (recovered work is never refused). ``replay``: its
        journal holds answers; see `Guest.go_live`. ``restored``: the state of the run's last checkpoint, None before
        the first. ``seed`` (16 bytes) and ``clock_ns`` (when it began) are those of the segment."""

    def statistics(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Slice(NamedTuple):
    """One uninterrupted stretch in a CPU slot; times in ns, monotonic. ``end``: open (it goes on), over, blocked,
    preempted (a higher tier wanted the slot), spent (the allotment was used) or stopped. ``run_id``: None of a host's
    (``foreign``) and of a run that has ended since."""

    start_ns: int
    end_ns: int
    tier: int
    end: str
    run_id: str | None
    foreign: bool


class WorkerSlices(NamedTuple):
    """What one CPU slot was used for; ``count``: how many slices there were, of which the longest are here."""

    slices: tuple[Slice, ...]
    total: int
