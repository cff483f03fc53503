"""The laws of tier lending: who is waited for runs at the tier of whoever waits, and nobody for longer than that.

What everyone should be lent is found anew from what is durable: the rows of locks and of who waits for them, and the
joins that the journals have open. What guests were told has to follow within a time that the world's latencies allow.
"""

from typing import TYPE_CHECKING

from agentrt.engine.steps import lock_address
from agentrt.states import StepState
from agentrt.stores.base import WAITS
from agentrt.stores.keys import parse_wait_key
from tests.sim.laws import Laws, Violation, _decode_json

if TYPE_CHECKING:
    from agentrt.engine.engine import Engine
    from tests.sim.guests import SimGuest

Late = tuple[int, "SimGuest"]  # since when, and who


def wanted_tiers(laws: Laws, *, held_back: bool) -> dict[str, int]:
    """What each run that somebody waits for should be lent. ``held_back``: also by runs that an operator has to let go
    on first, and by those that wait for themselves and have not been told yet."""
    holders = {lock_address(held.tenant, held.name): held.run_id for held in laws.held() if held.run_id is not None}
    edges: list[tuple[str, str, int]] = []  # who waits, for whom, at which tier of its own
    for key in laws.disk.tables[WAITS]:
        address, _, run_id, _ = parse_wait_key(key)
        wait = laws.folds[run_id].wait
        kept = (wait is not None and wait.reason == "operator") or holders.get(address) == run_id
        if address in holders and (held_back or not kept):
            edges.append((run_id, holders[address], laws.folds[run_id].run().base_tier))
    if not edges:
        return {}
    for run_id, fold in laws.folds.items():
        for step in fold.open.values():
            if step.op == "run.join" and step.state is StepState.PREPARED:
                edges.append((run_id, _decode_json(step.request or b"")["run_id"], 4))
    lent: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for source, target, tier in edges:
            flows = min(tier, lent.get(source, 4))
            if flows < lent.get(target, 4):
                lent[target] = flows
                changed = True
    return lent


def _lent(wanted: int | None, base: int, foreign: dict[str, str]) -> tuple[int | None, ...]:
    """What a guest may be lent: with locks elsewhere its own tier as well, for a grace."""
    if not foreign:
        return (wanted,)
    return (wanted, base if wanted is None else min(base, wanted))


class LendingLaws:
    """``late_ns``: how long what is durable may take to be followed."""

    def __init__(self, laws: Laws, late_ns: int) -> None:
        self._laws = laws
        self._late_ns = late_ns
        self._wanted: dict[str, int] = {}
        self._all: dict[str, int] = {}  # with those that an operator keeps, who may lend and need not
        self._seen = -1
        self._late: dict[str, Late] = {}

    def begin_life(self) -> None:
        self._late.clear()

    def after_event(self, now_ns: int, guests: "dict[str, SimGuest]", engine: "Engine") -> None:
        """Raises Violation."""
        laws = self._laws
        if laws.batches != self._seen:
            self._seen = laws.batches
            self._wanted = wanted_tiers(laws, held_back=False)
            self._all = wanted_tiers(laws, held_back=True)
        elif not self._late:
            return
        for run_id, guest in guests.items():
            wanted = self._wanted.get(run_id)
            fold = laws.folds[run_id]
            machine = engine._runs.get(run_id)
            base = fold.run().base_tier
            right = any(
                guest.lent in _lent(tier, base, fold.foreign_locks)
                and fold.tier == (base if tier is None else min(base, tier))
                for tier in (wanted, self._all.get(run_id))
            )
            if right or fold.ending is not None or machine is None or machine.guest is not guest:
                self._late.pop(run_id, None)
                continue
            since, who = self._late.setdefault(run_id, (now_ns, guest))
            if who is not guest:
                self._late[run_id] = now_ns, guest
            elif now_ns - since > self._late_ns:
                told = f"{run_id} is lent {guest.lent} and runs at {fold.tier} of {base}, and should be lent {wanted}"
                if wanted is not None and (guest.lent is None or guest.lent > wanted or fold.tier > wanted):
                    raise Violation("a holder runs at no lower tier than its highest waiter", told)
                raise Violation("a lent tier ends with the wait", told)
