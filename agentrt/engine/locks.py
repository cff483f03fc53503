"""Locks: leases with fencing tokens, one holder at a time, handed to the most urgent who waits.

Who waits has a row in WAITS under the lock's address, as for an event; who holds it is the row in LOCKS, written in the
transaction that tells the holder. Everything that concerns one lock happens one after the other (`Lanes`). Tokens grow
over all locks of a node and through restarts, so that whatever a lock protects can refuse a holder of the past.

A holder that ends without releasing leaves the lock marked dirty: the next holder is told that what the lock protects
may be half done. So does one that holds it longer than ``hold_ns`` while somebody waits: its lock is broken, and its
next step says so. A wait that would close a circle of waits is refused.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from agentrt.engine.lanes import Lanes
from agentrt.engine.machine import RunMachine
from agentrt.engine.ports import Runs
from agentrt.engine.steps import Held, LockAcquire, LockRelease, StepInFlight, decode, lock_address
from agentrt.errors import AgentrtError
from agentrt.stores.base import LOCKS, NODE, WAITS, Row, Store
from agentrt.stores.keys import lock_key, parse_wait_key

_TOKEN_KEY: Final = b"lock token"
_PAGE: Final = 1000
_CHECK_S: Final = 0.5  # how often broken holds are looked for while anybody waits


_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.Decoder(Held).decode
_json: Final = msgspec.json.encode


class Locks:
    """Loop thread only. The maps are what the store says, kept to find circles and overlong holds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, hold_ns: int) -> None:
        self._loop = loop
        self._runs = runs
        self._hold_ns = hold_ns
        self._lanes = Lanes()
        self._held: dict[bytes, Held] = {}
        self._waiting: dict[bytes, dict[tuple[str, str], int]] = {}  # address -> (run, path) -> tier
        self._token = 0
        self._refused: dict[bytes, set[tuple[str, str]]] = {}  # who was to get the lock and could not be told
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self._open = False
        self._early: list[Callable[[], None]] = []  # until the store has been read

    def open(self) -> None:
        """Read who holds what, then serve what came meanwhile."""

        def look(store: Store) -> tuple[bytes | None, list[tuple[bytes, bytes]]]:
            rows: list[tuple[bytes, bytes]] = []
            while page := store.scan_rows(LOCKS, b"", rows[-1][0] if rows else b"", _PAGE):
                rows += page
            return store.read_row(NODE, _TOKEN_KEY), rows

        def found(read: Any, error: BaseException | None) -> None:
            if error is not None:
                self._loop.call_exception_handler({"message": "locks cannot be read", "exception": error})
                self._loop.call_later(1.0, self.open)
                return
            self._token = int.from_bytes(read[0] or b"", "big")
            for _, value in read[1]:
                held = _decode(value)
                self._held[lock_address(held.tenant, held.name)] = held
            self._open = True
            for address in self._held:  # dirty and free, and somebody may wait
                self._lanes.enter(address, partial(self._hand_over, address))
            early, self._early = self._early, []
            for action in early:
                action()

        self._runs.read(look, found)

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def acquire(self, machine: RunMachine, step: StepInFlight) -> None:
        """The machine waits for the lock, durably."""
        if not self._open:
            self._early.append(lambda: self.acquire(machine, step))
            return
        request = decode(step.op, step.request)
        assert isinstance(request, LockAcquire)
        tenant = machine.accepted.tenant
        address = lock_address(tenant, request.name)
        held = self._held.get(address)
        if held is not None and held.run_id is not None and self._circle(machine.run_id, held.run_id):
            error = {"code": "deadlock", "message": f"lock {request.name!r}: its holder waits for this run"}
            machine.answer(step.path, False, _json(error))
            return
        self._waiting.setdefault(address, {})[machine.run_id, step.path] = machine.tier
        self._lanes.enter(address, lambda: self._hand_over(address))
        self._check_later()

    def recovered(self, address: bytes, run_id: str, path: str, tenant: str, tier: int) -> None:
        """A run of the store waits for the lock at the address."""
        if not self._open:
            self._early.append(lambda: self.recovered(address, run_id, path, tenant, tier))
            return
        self._waiting.setdefault(address, {})[run_id, path] = tier
        self._lanes.enter(address, lambda: self._hand_over(address))
        self._check_later()

    def release(self, machine: RunMachine, step: StepInFlight) -> None:
        """The machine gives the lock up."""
        if not self._open:
            self._early.append(lambda: self.release(machine, step))
            return
        request = decode(step.op, step.request)
        assert isinstance(request, LockRelease)
        path = step.path
        address = lock_address(machine.accepted.tenant, request.name)

        def give_up() -> None:
            held = self._held.get(address)
            if held is None or (held.run_id, held.token) != (machine.run_id, request.token):
                machine.answer(path, False, _lost(request.name))
                self._lanes.leave(address)
                return
            row = Row(LOCKS, lock_key(held.tenant, held.name), None)
            if not machine.answer(path, True, b"null", (row,), given_up):
                self._lanes.leave(address)

        def given_up(error: AgentrtError | None) -> None:
            if error is None:
                self._held.pop(address, None)
            self._hand_over(address)

        self._lanes.enter(address, give_up)

    def ended(self, run_id: str, tenant: str, names: list[str]) -> None:
        """A run has ended that held these, durably: its rows say that nobody does and that they are dirty."""
        if not self._open:
            self._early.append(lambda: self.ended(run_id, tenant, names))
            return
        for name in names:
            address = lock_address(tenant, name)

            def hand_on(address: bytes = address) -> None:
                held = self._held.get(address)
                if held is not None and held.run_id == run_id:
                    self._held[address] = _left(held)
                self._hand_over(address)

            self._lanes.enter(address, hand_on)

    # --- one lock at a time -----------------------------------------------------------------

    def _hand_over(self, address: bytes) -> None:
        """In the lock's lane: if it is free, to whom waits for it; then leave the lane."""
        held = self._held.get(address)
        waiting = self._waiting.get(address)
        if not waiting or self._closed or (held is not None and held.run_id is not None):
            if not waiting:
                self._waiting.pop(address, None)
            self._lanes.leave(address)
            return

        known = list(waiting)  # who comes while the store is read may have a row that is not seen

        def look(store: Store) -> list[tuple[bytes, bytes]]:
            return store.scan_rows(WAITS, address, b"", _PAGE)

        def found(rows: Any, error: BaseException | None) -> None:
            if error is not None:
                self._hand_over_later(address)
                return
            # The most urgent first, of those who waits longest; who has no row does not wait (any more).
            order = [(waiting.get((run, path), 3), since, run, path) for _, since, run, path in map(_parsed, rows)]
            there = {(run, path) for _, _, run, path in order}
            for who in known:
                if who not in there:
                    waiting.pop(who, None)
            if not order:
                self._hand_over(address)
                return
            refused = self._refused.get(address, ())
            willing = [each for each in order if each[2:] not in refused]
            if not willing:  # those that are there cannot be read or written now
                self._hand_over_later(address)
                return
            _, _, run_id, path = min(willing)
            self._give(address, run_id, path)

        self._runs.read(look, found)

    def _hand_over_later(self, address: bytes) -> None:
        """Leave the lane, and try again in a while."""
        self._refused.pop(address, None)
        self._runs.later(lambda: self._lanes.enter(address, lambda: self._hand_over(address)))
        self._lanes.leave(address)

    def _give(self, address: bytes, run_id: str, path: str) -> None:
        before = self._held.get(address)

        def give(machine: RunMachine) -> None:
            tenant, name = machine.accepted.tenant, machine.lock_of(path)
            if name is None:
                gone(None)
                return
            # Here, where the commit follows at once: so tokens become durable in their order.
            now = self._runs.now_ns()
            self._token = token = max(self._token + 1, now // 1000)
            answer = _json({"token": token, "dirty": before is not None})
            held = Held(tenant, name, run_id, token, now)
            rows = (
                Row(LOCKS, lock_key(tenant, name), _encode(held)),
                Row(NODE, _TOKEN_KEY, token.to_bytes(8, "big")),
            )
            if machine.answer(path, True, answer, rows, given):
                self._held[address] = held
            else:
                gone(None)

        def given(error: AgentrtError | None) -> None:
            if error is None:
                self._waiting.get(address, {}).pop((run_id, path), None)
                self._refused.pop(address, None)
            else:
                if before is None:
                    self._held.pop(address, None)
                else:
                    self._held[address] = before
                self._refused.setdefault(address, set()).add((run_id, path))
            self._hand_over(address)

        def gone(error: BaseException | None) -> None:
            if error is None:
                self._waiting.get(address, {}).pop((run_id, path), None)
            else:
                self._refused.setdefault(address, set()).add((run_id, path))
            self._hand_over(address)

        self._runs.with_run(run_id, give, gone)

    # --- circles and overlong holds ---------------------------------------------------------

    def _circle(self, run_id: str, holder: str) -> bool:
        """Whether the holder waits, over whatever others, for a lock that the run holds."""
        seen: set[str] = set()
        todo = [holder]
        while todo:
            current = todo.pop()
            if current == run_id:
                return True
            if current in seen:
                continue
            seen.add(current)
            for address, waiting in self._waiting.items():
                held = self._held.get(address)
                if held is not None and held.run_id is not None and any(run == current for run, _ in waiting):
                    todo.append(held.run_id)
        return False

    def _check_later(self) -> None:
        if self._handle is None and not self._closed and self._waiting:
            self._handle = self._loop.call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._handle = None
        now = self._runs.now_ns()
        for address in [*self._waiting]:
            held = self._held.get(address)
            if held is not None and held.run_id is not None and now - held.since_ns > self._hold_ns:
                self._lanes.enter(address, lambda address=address, held=held: self._break(address, held))  # type: ignore[misc]
        self._check_later()

    def _break(self, address: bytes, held: Held) -> None:
        """In the lock's lane: take it from a holder that kept it too long."""
        if self._held.get(address) is not held or not self._waiting.get(address) or held.run_id is None:
            self._lanes.leave(address)
            return
        row = Row(LOCKS, lock_key(held.tenant, held.name), _encode(_left(held)))

        def take(machine: RunMachine) -> None:
            machine.lock_broken(held.name, held.token, (row,), taken)

        def taken(error: AgentrtError | None) -> None:
            if error is None:
                self._held[address] = _left(held)
            self._hand_over(address)

        def gone(error: BaseException | None) -> None:
            if error is not None:
                self._lanes.leave(address)
                return
            self._runs.commit_rows((row,), taken)  # its run is not there any more

        self._runs.with_run(held.run_id, take, gone)


def _left(held: Held) -> Held:
    return Held(held.tenant, held.name, None, held.token, held.since_ns)


def _lost(name: str) -> bytes:
    return _json({"code": "lock_lost", "message": f"this run does not hold lock {name!r} under that token"})


def _parsed(row: tuple[bytes, bytes]) -> tuple[bytes, int, str, str]:
    return parse_wait_key(row[0])
