"""The processes of all agents of the node: who gets a place for one, and the watch over those that compute.

Places are given by tier, then to tenants in turn. Some are kept for tiers 0 and 1, and a process that only waits makes
room for a more urgent run: its own comes back from its journal. Processes that are there already are in spares.py.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from agentrt.backends.process.agents.command import ProcessProgram
from agentrt.backends.process.agents.guest import ProcessGuest
from agentrt.backends.process.agents.launch import End
from agentrt.backends.process.agents.launched import Launched
from agentrt.backends.process.agents.limits import ProcessLimits
from agentrt.backends.process.agents.spares import Spare, Spares
from agentrt.backends.process.launcher import Launcher
from agentrt.backends.slots import Slots
from agentrt.errors import QueueFullError
from agentrt.flow.fair import Fair

_TICK_S: Final = 0.01
_REMEMBERED_MAX: Final = 10_000  # runs whose evictions are counted; the oldest is forgotten
#: CPU time of a process that has no slot since it did not use one, after which it needs one.
_AFLOAT_NS: Final = 2_000_000
_LAUNCH_AGAIN_S: Final = 0.5
_LAUNCHES_FAILED_MAX: Final = 20


class PoolStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and how many there are now."""

    guests: int
    processes: int
    queued: int
    started: int
    preemptions: int
    snapshots: int
    evictions: int
    kills: int
    spares: int  # processes that have started, and have no run yet


class ProcessPool:
    """On the control loop's thread."""

    def __init__(
        self, limits: ProcessLimits, slots: Slots, launcher: Launcher, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.limits: Final = limits
        self.slots: Final = slots
        self.loop: Final = loop
        self._launcher = launcher
        self._guests: dict[int, ProcessGuest] = {}
        self._running: dict[int, ProcessGuest] = {}  # that have a process, ended or not
        self._queue: Fair[ProcessGuest] = Fair()
        self._watched: set[ProcessGuest | Spare] = set()
        self._ticking = self._pumping = False
        self._numbers = 0
        self._kills: OrderedDict[str, int] = OrderedDict()  # run -> how often others ended its process
        self._discards: OrderedDict[str, int] = OrderedDict()
        self._stalls: OrderedDict[str, int] = OrderedDict()
        self._launches_failed = 0
        self.closed = False
        self._emptied: asyncio.Future[None] | None = None
        self._started = 0
        self.preemptions = 0
        self.snapshots = 0
        self._evictions = 0
        self._killed = 0
        self.spares: Final = Spares(self)

    def start(self, make: Callable[[int], ProcessGuest], *, admitted: bool) -> ProcessGuest:
        """Queue a guest. Raises QueueFullError unless ``admitted``."""
        if len(self._guests) >= self.limits.guests_max and not admitted:
            raise QueueFullError(f"{self.limits.guests_max} agent processes are wanted already")
        self._numbers += 1
        guest = make(self._numbers)
        self._guests[guest.number] = guest
        guest.queued = True
        self._queue.put(guest.tier, guest.tenant, 1, guest.number, guest)
        self._pump_soon()
        return guest

    def tell(self, event: Callable[..., None], *args: Any) -> None:
        """Call the engine; what it raises is reported and harms no other guest."""
        if self.closed:
            return
        try:
            event(*args)
        except Exception as error:
            self.loop.call_exception_handler({"message": "a guest's event handler raised", "exception": error})

    def forget(self, guest: ProcessGuest, reason: str) -> None:
        """The engine knows that it is over."""
        self._guests.pop(guest.number, None)
        if guest.queued:
            guest.queued = False
            self._queue.remove(guest.tier, guest.tenant, guest.number)
        if reason == "evicted":
            self._evictions += 1
        elif reason != "killed":
            self._kills.pop(guest.run_id, None)
            self._discards.pop(guest.run_id, None)
        self._pump_soon()

    def on_ready(self) -> None:
        """A program is there: another may start."""
        self._pump_soon()

    def _gone(self, guest: ProcessGuest) -> None:
        """Its process is no more."""
        self._running.pop(guest.number, None)
        self._watched.discard(guest)
        self._all_gone()
        self._pump_soon()

    def _all_gone(self) -> None:
        """Tell who waits for that, if it is so."""
        if not (self._running or self.spares) and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def may_come_back(self, guest: ProcessGuest) -> bool:
        """Somebody else has ended its process: whether the run is tried again. Counts."""
        self._killed += 1
        return _counted(self._kills, guest.run_id) <= self.limits.kills_max

    def may_discard(self, guest: ProcessGuest) -> bool:
        """Whether its process may be ended to make room: not always, or the run would never come further. Counts."""
        return _counted(self._discards, guest.run_id) <= self.limits.discards_max

    def may_hand_over(self, guest: ProcessGuest) -> bool:
        """Whether one that stands still for lack of memory may go on from its state: not for ever. Counts."""
        return _counted(self._stalls, guest.run_id) <= self.limits.stalls_max

    # --- places ---------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pumping and not self.closed:
            self._pumping = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        starting = sum(1 for guest in self._running.values() if guest.starting)
        while self._queue and not self.closed and starting < self.limits.starts_max:
            tier = next((tier for tier in self._queue.order() if len(self._running) < self._places(tier)), None)
            if tier is None:
                self._make_room(self._queue.first_tier())
                return
            guest = self._queue.take(tier, 1)
            guest.queued = False
            if self._launch(guest):
                starting += 1
        if not self._queue and not starting:
            self.spares.fill()

    def has_room_for_spare(self) -> bool:
        """Whether there is a place that nobody waits for, beside those that are kept for urgent runs."""
        room = self.limits.processes_max - self.limits.reserved - len(self._running) - len(self.spares)
        return room > 0 and not self._queue

    def on_spare_gone(self) -> None:
        """Its process is no more."""
        self._all_gone()
        self._pump_soon()

    def _places(self, tier: int) -> int:
        """How many processes there may be for a run of that tier to get one."""
        kept = self.limits.reserved * (0, 1, 2, 2)[tier] // 2
        return max(1, self.limits.processes_max - kept)

    def _make_room(self, tier: int) -> None:
        """One that has ended goes at once; else, of those of lower tiers that only wait, one of the lowest."""
        leaving = [guest for guest in self._running.values() if guest.leaving]
        if leaving:
            leaving[0].end_process()
            return
        spare = [guest for guest in self._running.values() if guest.waiting is not None and guest.tier > tier]
        if spare:
            last = max(spare, key=lambda guest: (guest.tier, guest.number))
            last.stop("evicted", "its process made room for more urgent work")

    def _launch(self, guest: ProcessGuest) -> bool:
        """Whether one starts for it; else it has got one that is there, or none, and has been told or queued again."""
        program = guest.program
        changed = program.changed()
        if changed is not None:
            guest.end(
                "missing",
                0,
                None,
                f"{changed} is not what it was when the agent was registered: put it back, or register the agent again",
            )
            return False

        def on_start() -> None:
            self._launches_failed = 0
            self._started += 1
            guest.on_start()

        def on_end(end: End) -> None:
            guest.on_end(end)
            self._gone(guest)
            if end.error is not None and not guest.ended:
                self._not_launched(guest, end.error, end.again)

        spare = self.spares.take(program)
        if spare is not None:
            launched, turn, said = spare.hand_over()
            launched.on_end, launched.on_stall = on_end, guest.on_stall
            self._running[guest.number] = guest
            self._started += 1
            guest.took_over(launched, turn, said)
            return False  # it is not starting
        if len(self._running) + len(self.spares) >= self.limits.processes_max:
            self.spares.make_room()
        try:
            launched = self.open(
                program, domain=guest.tenant, tier=guest.tier, on_start=on_start, on_end=on_end, on_stall=guest.on_stall
            )
        except OSError as error:
            self._not_launched(guest, str(error), True)
            return False
        self._running[guest.number] = guest
        guest.began(launched)
        return True

    def open(
        self,
        program: ProcessProgram,
        *,
        domain: str,
        tier: int,
        on_start: Callable[[], None],
        on_end: Callable[[End], None],
        on_stall: Callable[[], bool],
    ) -> Launched:
        """A process of the program. Raises OSError: no descriptor is left."""
        return Launched(
            self.loop,
            self._launcher,
            program,
            confined=self.limits.confined,
            tenant=domain,
            tier=tier,
            output_bytes_kept=self.limits.output_bytes_kept,
            on_start=on_start,
            on_end=on_end,
            on_stall=on_stall,
        )

    def _not_launched(self, guest: ProcessGuest, error: str, again: bool) -> None:
        """The machine has no process for it now, or the program is none."""
        self._launches_failed += 1
        if not again or self._launches_failed > _LAUNCHES_FAILED_MAX:
            guest.end("host_died", 0, None, f"the agent's program could not be started: {error}")
            return
        guest.queued = True
        self._queue.put(guest.tier, guest.tenant, 1, guest.number, guest)
        self.loop.call_later(_LAUNCH_AGAIN_S, self._pump_soon)

    # --- the watch ---------------------------------------------------------------------------

    def watch(self, guest: ProcessGuest | Spare) -> None:
        """It computes; it is looked at until it does not."""
        self._watched.add(guest)
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        for guest in tuple(self._watched):
            if guest.ended or not guest.computing:
                self._watched.discard(guest)
            else:
                self._look(guest, now_ns)
        self._ticking = bool(self._watched) and not self.closed
        if self._ticking:
            self.loop.call_later(_TICK_S, self._tick)

    def _look(self, guest: ProcessGuest | Spare, now_ns: int) -> None:
        cpu_ns = guest.cpu_ns()
        if guest.fuel_is_spent(cpu_ns):
            guest.stop("fuel", "the run has used its fuel")
        elif guest.unwinding_is_spent(now_ns, cpu_ns):
            guest.stop("unwound", "it did not unwind in the time that it had for that")
        elif (turn := guest.turn) is None:
            return
        elif guest.afloat:
            if cpu_ns - guest.seen_cpu_ns >= _AFLOAT_NS and guest.process is not None:
                guest.afloat = False
                guest.process.freeze()  # until it has a slot
                turn.want()
        elif turn.granted:
            if cpu_ns - guest.seen_cpu_ns >= _AFLOAT_NS or is_runnable(guest):
                guest.seen_cpu_ns, guest.seen_at_ns = cpu_ns, now_ns
            elif now_ns - guest.seen_at_ns >= self.limits.idle_slot_ns:
                guest.seen_cpu_ns, guest.afloat = cpu_ns, True
                turn.rest()

    # --- for whoever looks -----------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            len(self._guests),
            len(self._running),
            len(self._queue),
            self._started,
            self.preemptions,
            self.snapshots,
            self._evictions,
            self._killed,
            self.spares.ready,
        )

    async def close(self) -> None:
        """End all processes; no event follows."""
        self.closed = True
        for guest in tuple(self._running.values()):
            if guest.process is not None:
                guest.process.kill()
        self.spares.close()
        if self._running or self.spares:
            self._emptied = self.loop.create_future()
            try:
                async with asyncio.timeout(10):
                    await self._emptied
            except TimeoutError:
                pass  # the kernel does not let it go


def _counted(counts: "OrderedDict[str, int]", run_id: str) -> int:
    counts[run_id] = count = counts.pop(run_id, 0) + 1
    if len(counts) > _REMEMBERED_MAX:
        counts.popitem(last=False)
    return count


def is_runnable(guest: ProcessGuest | Spare) -> bool:
    """Whether its process runs or waits for a CPU, not for something else."""
    assert guest.process is not None
    try:
        with open(f"/proc/{guest.process.pid}/stat", "rb") as file:
            return file.read(512).rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):
        return False
