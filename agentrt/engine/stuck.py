"""Runs that make no progress and wait for nothing that could come: found, reported, handled.

Being queued, running, waiting for a step, a person or a commit is no sign of it; what is left must move within the
bound. A run in memory that does not is discarded and replayed, the second time it waits for an operator. A run that the
store says is to be started and that nobody has is brought back. `StuckRun` tells observers which, since when and why.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.machine import Phase, RunMachine
from agentrt.errors import EngineError
from agentrt.stores.base import READY, Store
from agentrt.stores.keys import parse_ready_key, parse_ready_value

_RUNS_PER_TURN: Final = 500  # at about 1 us each
_PAGE: Final = 1000
_LOOKS: Final = 4  # within the bound
_REPLAYS_MAX: Final = 3  # of a run that gets a little further each time
_PAUSE_S: Final = 0.05  # between two parts of one look


_Suspect = tuple[RunMachine, int, str, int]  # its version, why, since when (monotonic)


class StuckRun(msgspec.Struct, frozen=True):
    """``action``: replayed, operator (it waits for one now), brought back, or none (it cannot be helped from here)."""

    run_id: str
    agent: str
    tier: int
    reason: str
    since_ns: int  # wall clock
    action: str


class Runs(Protocol):
    """What it needs of the engine."""

    now_ns: Callable[[], int]

    def machines(self) -> list[RunMachine]: ...

    def awaited_by(self, run_id: str) -> str | None:
        """What a run without a guest waits for; None if it should have one."""

    def nobody_has(self, run_id: str) -> bool: ...

    def bring_back(self, tier: int, accepted_ns: int, run_id: str, version: str, agent: str) -> None: ...

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def tell(self, event: str, data: Any) -> None: ...


def why_stuck(machine: RunMachine, awaited: str | None) -> str | None:
    """What is wrong with a run that stays as it is; None if something is under way that will move it."""
    if machine.committing or machine.calls:
        return None  # the store and the tools have bounds of their own
    guest, phase = machine.guest, machine.phase
    if phase > Phase.LIVE:
        if machine.awaits_children:
            return None
        return f"nothing is under way and it is {phase.name}" if guest is None else f"its guest stays in {phase.name}"
    if guest is None:
        return None if awaited is not None else "its guest was not started"
    if machine.open or machine.holds is not None:
        return None
    if hasattr(guest, "scheduler_state"):
        return "its guest can go on and is not queued" if guest.scheduler_state is None else None
    return "its program waits for nothing that could come" if machine.suspended else None


class StuckRuns:
    """Loop thread only. ``bound_ns`` 0 switches it off; ``clock_ns`` is monotonic."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, bound_ns: int, clock_ns: Callable[[], int]) -> None:
        self._loop = loop
        self._runs = runs
        self._bound_ns = bound_ns
        self._clock_ns = clock_ns
        self._suspects: dict[str, _Suspect] = {}
        self._replayed: dict[str, tuple[int, int]] = {}  # -> version at which it was replayed, how often
        self._missing: set[str] = set()  # nobody had them at the last look
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self.found = 0

    def open(self) -> None:
        if self._bound_ns and self._handle is None:
            self._later(self._bound_ns / _LOOKS / 1e9, self._look)

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def since(self, run_id: str) -> tuple[str, int] | None:
        """(why, since when, monotonic) of a run that may be stuck."""
        found = self._suspects.get(run_id)
        return None if found is None else (found[2], found[3])

    def _later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        if not self._closed:
            self._handle = self._loop.call_later(seconds, call, *arguments)

    def _look(self) -> None:
        self._look_at(self._runs.machines(), 0, {})

    def _look_at(self, machines: list[RunMachine], start: int, found: dict[str, _Suspect]) -> None:
        now = self._clock_ns()
        for machine in machines[start : start + _RUNS_PER_TURN]:
            run_id = machine.run_id
            why = why_stuck(machine, self._runs.awaited_by(run_id))
            if why is None:
                continue
            known = self._suspects.get(run_id)
            if known is None or known[:3] != (machine, machine.version, why):
                found[run_id] = (machine, machine.version, why, now)
            elif now - known[3] < self._bound_ns:
                found[run_id] = known
            else:
                self._handle_stuck(machine, why, now - known[3])
        start += _RUNS_PER_TURN
        if start < len(machines):
            self._later(_PAUSE_S, self._look_at, machines, start, found)
            return
        self._suspects = found
        for run_id in [run_id for run_id in self._replayed if self._runs.nobody_has(run_id)]:
            del self._replayed[run_id]
        self._look_at_rows(b"", set())

    def _handle_stuck(self, machine: RunMachine, why: str, for_ns: int) -> None:
        self.found += 1
        run_id, action, count = machine.run_id, "none", 0
        if machine.phase <= Phase.LIVE:
            version, count = self._replayed.get(run_id, (0, 0))
            action = "operator" if version == machine.version or count >= _REPLAYS_MAX else "replayed"
        since_ns = self._runs.now_ns() - for_ns
        accepted = machine.accepted
        self._runs.tell("stuck", StuckRun(run_id, accepted.agent, machine.tier, why, since_ns, action))
        if action == "operator":
            self._replayed.pop(run_id, None)
            machine.wait_for_operator(None, f"{why}, and replaying it did not help; cancel it, or resume it")
        elif action == "replayed":
            self._replayed[run_id] = machine.version, count + 1
            machine.discard(EngineError(f"no progress for {for_ns / 1e9:.0f} s: {why}", run=run_id))

    # --- runs that nobody has -------------------------------------------------------------

    def _look_at_rows(self, after: bytes, missing: set[str]) -> None:
        def found(rows: Any, error: BaseException | None) -> None:
            if self._closed:
                return
            for key, value in rows or ():
                tier, accepted_ns, run_id = parse_ready_key(key)
                if not self._runs.nobody_has(run_id):
                    continue
                if run_id not in self._missing:
                    missing.add(run_id)  # it may have ended since the row was read
                    continue
                version, agent = parse_ready_value(value)
                self.found += 1
                self._runs.tell(
                    "stuck", StuckRun(run_id, agent, tier, "nobody had it", self._runs.now_ns(), "brought back")
                )
                self._runs.bring_back(tier, accepted_ns, run_id, version, agent)
            if error is None and len(rows) == _PAGE:
                self._later(_PAUSE_S, self._look_at_rows, rows[-1][0], missing)
                return
            self._missing = missing
            self._later(self._bound_ns / _LOOKS / 1e9, self._look)

        self._runs.read(lambda store: store.scan_rows(READY, b"", after, _PAGE), found)
