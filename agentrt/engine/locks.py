"""Locks: leases with fencing tokens, one holder at a time, handed to the most urgent who waits.

Who waits has a row in WAITS under the lock's address, as for an event; who holds it is the row in LOCKS, written in the
transaction that tells the holder. Everything that concerns one lock happens one after the other (`Lanes`). Tokens grow
over all locks of a node and through restarts, so that whatever a lock protects can refuse a holder of the past.

A holder that ends without releasing leaves the lock marked dirty: the next holder is told that what the lock protects
may be half done. So does one that, while somebody waits, runs for longer than ``grace_ns``, or holds it for longer than
``hold_ns``: its lock is broken, and its next step says so.

While somebody waits the holder runs at no lower tier than whoever waits, and so does whoever the holder waits for, by
lock or join (`Lending`). That follows from the rows, so a restart finds it again; the journal is told of each change.
Of the waits for locks in a circle the youngest is refused. A join may close one: those of runs that somebody waits for
are known here, of others they cost nothing.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.grace import LOOK_MAX_S, Grace
from agentrt.engine.lanes import Lanes
from agentrt.engine.lending import NOT_LENT, Lending
from agentrt.engine.machine import RunMachine
from agentrt.engine.ports import Runs
from agentrt.engine.steps import Held, LockAcquire, LockRelease, StepInFlight, decode, lock_address
from agentrt.errors import AgentrtError
from agentrt.stores.base import LOCKS, NODE, WAITS, Row, Store
from agentrt.stores.keys import lock_key, parse_wait_key

_TOKEN_KEY: Final = b"lock token"
_PAGE: Final = 1000
_HOLDER: Final = "holder"  # key of a lock's edge to its holder


_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.Decoder(Held).decode
_json: Final = msgspec.json.encode


class LockRuns(Runs, Protocol):
    """What locks need of the engine."""

    def in_memory(self, run_id: str) -> RunMachine | None: ...

    def tier_is_lent(self, run_id: str) -> None:
        """Another tier is lent to the run (`Locks.lent`): have it run at it, and call `Locks.joining` for the joins
        that it is in, if it is lent one."""

    def wake_late(self, run_id: str, since_ns: int, action: Callable[[], None]) -> None:
        """What the run has waited for since then was there before the node started: act when it is the run's turn."""


class Locks:
    """Loop thread only. The maps are what the store says, kept to lend tiers and to find circles and overlong holds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: LockRuns, hold_ns: int, grace_ns: int) -> None:
        self._loop = loop
        self._runs = runs
        self._hold_ns = hold_ns
        self._grace_ns = grace_ns
        self._lanes = Lanes()
        self._held: dict[bytes, Held] = {}
        #: address -> (run, path) -> the run's own tier, and since when it waits
        self._waiting: dict[bytes, dict[tuple[str, str], tuple[int, int]]] = {}
        self._lending = Lending(self._changed)
        self._lent: set[str] = set()  # to be told
        self._graces: dict[bytes, Grace] = {}
        self._looks: dict[bytes, asyncio.TimerHandle] = {}
        self._token = 0
        self._refused: dict[bytes, set[tuple[str, str]]] = {}  # who was to get the lock and could not be told
        self._reads = 0  # of waits, under way
        self._over: set[tuple[str, str]] = set()  # waits that ended meanwhile, which such a read may still bring
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
                self._set(lock_address(held.tenant, held.name), held)
            self._open = True
            for address in self._held:  # dirty and free, and somebody may wait
                self._lanes.enter(address, partial(self._hand_over, address))
            early, self._early = self._early, []
            for action in early:
                action()

        self._runs.read(look, found)

    def close(self) -> None:
        self._closed = True
        for look in self._looks.values():
            look.cancel()

    def acquire(self, machine: RunMachine, step: StepInFlight) -> None:
        """The machine waits for the lock, durably."""
        self._over.discard((machine.run_id, step.path))
        if not self._open:
            self._early.append(lambda: self.acquire(machine, step))
            return
        request = decode(step.op, step.request)
        assert isinstance(request, LockAcquire)
        accepted = machine.accepted
        address = lock_address(accepted.tenant, request.name)
        self._wait(address, machine.run_id, step.path, accepted.base_tier, step.prepared_ns)

    def reading(self) -> None:
        """The store is read for who waits: `recovered` follows for each, then `done_reading`."""
        self._reads += 1

    def done_reading(self) -> None:
        self._reads -= 1
        if not self._reads:
            self._over.clear()

    def recovered(self, address: bytes, run_id: str, path: str, base_tier: int, since_ns: int) -> None:
        """A run of the store waits for the lock at the address, as far as was read."""
        if (run_id, path) not in self._over:
            self._wait_there(address, run_id, path, base_tier, since_ns, late=True)

    def _wait_there(
        self, address: bytes, run_id: str, path: str, base_tier: int, since_ns: int, *, late: bool = False
    ) -> None:
        if not self._open:
            self._early.append(lambda: self._wait_there(address, run_id, path, base_tier, since_ns, late=late))
        elif (run_id, path) not in self._waiting.get(address, ()):
            self._wait(address, run_id, path, base_tier, since_ns, late=late)

    def _wait(
        self, address: bytes, run_id: str, path: str, base_tier: int, since_ns: int, *, late: bool = False
    ) -> None:
        """``late``: it waited before the node started, and is handed a free lock when it is its turn."""
        self._waiting.setdefault(address, {})[run_id, path] = base_tier, since_ns
        self._lending.connect(run_id, path, address, base_tier)
        self._break_circle(address, run_id, (run_id, path))
        hand_over = partial(self._lanes.enter, address, partial(self._hand_over, address))
        if late and self._runs.in_memory(run_id) is None:
            self._runs.wake_late(run_id, since_ns, hand_over)
        else:
            hand_over()
        self._look(address)

    def wait_again(self, machine: RunMachine, path: str, request: bytes, since_ns: int) -> None:
        """A run that only waits, and does not ask again, may be thought not to wait any more."""
        wanted = decode("lock.acquire", request)
        assert isinstance(wanted, LockAcquire)
        accepted = machine.accepted
        address = lock_address(accepted.tenant, wanted.name)
        self._over.discard((machine.run_id, path))
        self._wait_there(address, machine.run_id, path, accepted.base_tier, since_ns)

    def joining(self, machine: RunMachine, path: str, child: str) -> None:
        """The run waits for its child. Only of runs that somebody waits for this needs to be known."""
        run_id = machine.run_id
        if self.lent(run_id) is not None and self._lending.waits_of(run_id).get(path) != child:
            self._lending.connect(run_id, path, child)
            self._break_circle(child, run_id, None)

    def wait_over(self, run_id: str, path: str) -> None:
        """The run does not wait for that lock or child any more. Calls nobody back at once."""
        if self._reads:
            self._over.add((run_id, path))
        if not self._open:
            self._early.append(lambda: self.wait_over(run_id, path))
            return
        address = self._lending.disconnect(run_id, path)
        if isinstance(address, bytes):
            self._not_waiting(address, run_id, path)

    def left(self, run_id: str) -> None:
        """The run is not this node's any more: it waits for nobody here."""
        for path in self._lending.waits_of(run_id):
            self.wait_over(run_id, path)

    def lent(self, run_id: str) -> int | None:
        """The tier of the most urgent who waits for a lock of the run, or for whom it waits; None if nobody does."""
        tier = self._lending.tier(run_id)
        return None if tier == NOT_LENT else tier

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
                self._set(address, None)
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
                    self._set(address, _left(held))
                self._hand_over(address)

            self._lanes.enter(address, hand_on)

    # --- who waits, who holds, and what that lends -------------------------------------------

    def _set(self, address: bytes, held: Held | None) -> None:
        """Who holds the lock has changed."""
        if held is None:
            self._held.pop(address, None)
        else:
            self._held[address] = held
        if held is None or held.run_id is None:
            self._lending.disconnect(address, _HOLDER)
        else:
            self._lending.connect(address, _HOLDER, held.run_id)

    def _not_waiting(self, address: bytes, run_id: str, path: str) -> None:
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.pop((run_id, path), None)
            if not waiting:
                del self._waiting[address]
                self._graces.pop(address, None)  # it counts only while somebody waits

    def _changed(self, run_id: str) -> None:
        # Later: a machine is not called back before its own call has returned.
        if not self._lent and not self._closed:
            self._loop.call_soon(self._tell_lent)
        self._lent.add(run_id)

    def _tell_lent(self) -> None:
        told, self._lent = self._lent, set()
        if self._closed:
            return
        for run_id in sorted(told):
            if self.lent(run_id) is None:
                for path, target in self._lending.waits_of(run_id).items():
                    if isinstance(target, str):
                        self._lending.disconnect(run_id, path)
            self._runs.tier_is_lent(run_id)

    def _break_circle(self, start: str | bytes, goal: str, closing: tuple[str, str] | None) -> None:
        """If the start waits for the goal, over whatever others, nobody of them gets on: refuse the youngest wait for a
        lock. ``closing``: the wait from goal to start, if it is for a lock."""
        way = self._lending.way(start, goal)
        if way is None:
            return
        waits = [closing] if closing is not None else []
        waits += [(run, path) for run, path in way if isinstance(run, str)]
        found: list[tuple[int, str, str]] = []
        for run_id, path in waits:
            address = self._lending.waits_of(run_id)[path]
            if isinstance(address, bytes):
                found.append((self._waiting[address][run_id, path][1], run_id, path))
        if not found:
            return
        _, run_id, path = max(found)

        def refuse(machine: RunMachine) -> None:
            name = machine.lock_of(path)
            error = {"code": "deadlock", "message": f"lock {name!r}: its holder waits for this run"}
            machine.answer(path, False, _json(error))

        # Later, as the wait may just have been asked for.
        self._loop.call_soon(self._runs.with_run, run_id, refuse, _ignore)

    # --- one lock at a time -----------------------------------------------------------------

    def holder(self, tenant: str, name: str) -> str | None:
        """Who holds the lock."""
        held = self._held.get(lock_address(tenant, name))
        return None if held is None else held.run_id

    def lost_by(self, run_id: str, tenant: str, held: dict[str, int]) -> list[tuple[str, int]]:
        """Of the locks (name -> token) that a run believes to hold, those that it does not."""
        if not self._open:
            return []  # nobody can have taken them yet
        lost: list[tuple[str, int]] = []
        for name, token in held.items():
            row = self._held.get(lock_address(tenant, name))
            if row is None or (row.run_id, row.token) != (run_id, token):
                lost.append((name, token))
        return lost

    def _hand_over(self, address: bytes) -> None:
        """In the lock's lane: if it is free, to whom waits for it; then leave the lane."""
        held = self._held.get(address)
        if address not in self._waiting or self._closed or (held is not None and held.run_id is not None):
            self._lanes.leave(address)
            self._look(address)
            return

        def look(store: Store) -> list[tuple[bytes, bytes]]:
            return store.scan_rows(WAITS, address, b"", _PAGE)

        def found(rows: Any, error: BaseException | None) -> None:
            if error is not None:
                self._hand_over_later(address)
                return
            # The most urgent first, of those who waits longest. The rows tell of those that a start has not met yet.
            waiting = self._waiting.get(address, {})
            order = [(self._tier(run, tier), since, run, path) for (run, path), (tier, since) in waiting.items()]
            order += [(3, since, run, path) for _, since, run, path in map(_parsed, rows) if (run, path) not in waiting]
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

    def _tier(self, run_id: str, base_tier: int) -> int:
        lent = self.lent(run_id)
        return base_tier if lent is None else min(base_tier, lent)

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
                self._set(address, held)
            else:
                gone(None)

        def given(error: AgentrtError | None) -> None:
            if error is None:
                self._refused.pop(address, None)
            else:
                self._set(address, before)
                refused()
            self._hand_over(address)

        def gone(error: BaseException | None) -> None:
            if error is None:
                self._lending.disconnect(run_id, path)
                self._not_waiting(address, run_id, path)
            else:
                refused()
            self._hand_over(address)

        def refused() -> None:
            # If it had an answer that is void now, it waits again once it is read again: see `Engine._loaded`.
            self._refused.setdefault(address, set()).add((run_id, path))

        self._runs.with_run(run_id, give, gone)

    # --- overlong holds ---------------------------------------------------------------------

    def _look(self, address: bytes) -> None:
        """While somebody waits: has the holder run for too long, or held it for too long?"""
        planned = self._looks.pop(address, None)
        if planned is not None:
            planned.cancel()
        held = self._held.get(address)
        if held is None or held.run_id is None or address not in self._waiting or self._closed:
            self._graces.pop(address, None)  # it counts only then
            return
        grace = self._graces.get(address)
        if grace is None or grace.token != held.token:
            grace = self._graces[address] = Grace(held.token)
        machine = self._runs.in_memory(held.run_id)
        grace.look(None if machine is None else machine.guest)
        hold_left_ns = self._hold_ns - (self._runs.now_ns() - held.since_ns)
        if hold_left_ns < 0 or grace.used_ns >= self._grace_ns:
            self._lanes.enter(address, partial(self._break, address, held))
            delay_s = LOOK_MAX_S  # it may not be possible now
        else:
            delay_s = min(grace.next_s(self._grace_ns), hold_left_ns / 1e9 + 0.001)
        self._looks[address] = self._loop.call_later(delay_s, self._look, address)

    def _break(self, address: bytes, held: Held) -> None:
        """In the lock's lane: take it from a holder that kept it too long."""
        if self._held.get(address) is not held or address not in self._waiting or held.run_id is None or self._closed:
            self._lanes.leave(address)
            return
        row = Row(LOCKS, lock_key(held.tenant, held.name), _encode(_left(held)))

        def take(machine: RunMachine) -> None:
            machine.lock_broken(held.name, held.token, (row,), taken)

        def taken(error: AgentrtError | None) -> None:
            if error is None:
                self._set(address, _left(held))
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


def _ignore(error: BaseException | None) -> None:
    """A run that is gone waits for nothing; one that cannot be read is met again when it is read."""
