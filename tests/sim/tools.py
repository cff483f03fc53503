"""Tools with effects in a ledger that outlives every node, and the hosts that die under them."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from agentrt.errors import QueueFullError
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolRegistry, ToolSpec
from tests.sim.loop import MILLISECOND, SECOND, LifeLoop

if TYPE_CHECKING:
    from tests.sim.laws import Laws

BRIEF_TTL_NS = 20 * SECOND
#: How long the world remembers a brief key: longer than promised, by more than a call can take.
_BRIEF_KNOWN_NS = 120 * SECOND

DIED = ToolOutcome(False, b'{"code":"tool_host_died","message":"gone"}', "tool_host_died", 0, True)

SPECS = {
    spec.name: spec
    for spec in (
        ToolSpec("hash", "pure", SECOND, True, "x:hash"),
        ToolSpec("boom", "pure", SECOND, True, "x:boom"),
        ToolSpec("moved", "pure", SECOND, True, "x:moved"),  # a migrate function
        ToolSpec("put", "keyed", SECOND, True, "x:put"),
        ToolSpec("fail", "keyed", SECOND, True, "x:fail"),
        ToolSpec("ask", "reconcilable", SECOND, True, "x:ask", reconcile=True),
        ToolSpec("once", "at_most_once", SECOND, True, "x:once"),
        ToolSpec("brief", "keyed", SECOND, True, "x:brief", key_ttl_ns=BRIEF_TTL_NS),
        ToolSpec("brief_ask", "keyed", SECOND, True, "x:brief_ask", key_ttl_ns=BRIEF_TTL_NS, reconcile=True),
    )
}
DEDUPLICATES = frozenset({"put", "brief", "brief_ask"})


def result_of(name: str, args: bytes) -> ToolOutcome:
    """What the tool answers when it is done."""
    if name in ("boom", "fail"):
        return ToolOutcome(False, b'{"code":"tool_failed","message":"boom"}', "tool_failed", 5, False)
    if name == "moved":
        return ToolOutcome(True, bytes(msgspec.json.decode(args, type=dict[str, msgspec.Raw])["state"]), None, 5, False)
    return ToolOutcome(True, b"%d" % crc32(args), None, 5, False)


class Ledger:
    """Effects by idempotency key: how many there were, and the first one's time."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.first_ns: dict[str, int] = {}
        self.args: dict[str, bytes] = {}

    def effect(self, name: str, key: str, args: bytes, now: int) -> None:
        known = name in DEDUPLICATES and key in self.done
        if known and (name == "put" or now - self.first_ns[key] <= _BRIEF_KNOWN_NS):
            return
        self.done[key] = self.done.get(key, 0) + 1
        self.first_ns.setdefault(key, now)
        self.args.setdefault(key, args)


class ToolFaults:
    def __init__(self) -> None:
        self.dies = 0.0  # share of calls whose host dies, with or without the effect
        self.late = 0.0  # share that take seconds
        self.times_out = 0.0
        self.full = 0.0  # share that are refused at once
        self.cannot_tell = 0.0  # of reconcile calls
        self.latency_ns = 3 * MILLISECOND


class SimTools:
    """The pool of one life of a node."""

    def __init__(self, life: LifeLoop, ledger: Ledger, chance: random.Random, faults: ToolFaults, laws: "Laws") -> None:
        self.registry = ToolRegistry()
        for spec in SPECS.values():
            self.registry.add(spec)
        self._life, self._ledger, self._chance, self._faults, self._laws = life, ledger, chance, faults, laws

    def start(self) -> None: ...

    def cancel(self, call: Any) -> None: ...

    def statistics(self) -> Any:
        return {}

    def stop(self) -> None: ...

    def evict(self) -> None: ...

    async def close(self) -> None: ...

    def call(
        self,
        name: str,
        args: bytes,
        *,
        key: str | None,
        tenant: str,
        tier: int,
        attempt: int,
        done: Callable[[ToolOutcome], None],
        timeout_ns: int | None = None,
        reconcile: bool = False,
    ) -> None:
        chance, faults = self._chance, self._faults
        if chance.random() < faults.full:
            raise QueueFullError("injected: too many calls", limit="tools")
        self._laws.tool_called(name, key, attempt, reconcile)
        if key is not None and not reconcile:
            done = self._returning(key, done)
        scheduler = self._life.scheduler
        delay = int((0.02 + chance.random() ** 3) * faults.latency_ns)
        if faults.late and chance.random() < faults.late:
            delay += int(chance.random() * 3 * SECOND)
        acts = scheduler.now + int(delay * chance.random())
        answers = scheduler.now + delay
        dies = chance.random() < faults.dies
        if reconcile:
            scheduler.at(answers, self._reconcile, key, args, dies, done, life=self._life)
            return
        outcome = DIED if dies else result_of(name, args)
        effect = key is not None and not (dies and chance.random() < 0.5)
        if effect and not dies and faults.times_out and chance.random() < faults.times_out:
            slow = b'{"code":"tool_timeout","message":"slow"}'
            outcome = ToolOutcome(False, slow, "tool_timeout", 5, False, unknown=True)
        if effect and key is not None:
            # The host of a keyed or an at_most_once tool may have sent its request on before the node died under it;
            # a reconcile function that tells the truth needs an end to that.
            life = self._life if SPECS[name].reconcile or chance.random() < 0.5 else None
            scheduler.at(acts, self._act, name, key, args, life=life)
        scheduler.at(answers, done, outcome, life=self._life)

    def _returning(self, key: str, done: Callable[[ToolOutcome], None]) -> Callable[[ToolOutcome], None]:
        in_flight = self._laws.in_flight
        in_flight.add(key)

        def returned(outcome: ToolOutcome) -> None:
            in_flight.discard(key)
            done(outcome)

        return returned

    def _act(self, name: str, key: str, args: bytes) -> None:
        self._ledger.effect(name, key, args, self._life.scheduler.now)
        self._laws.effect(name, key)

    def _reconcile(self, key: str, args: bytes, dies: bool, done: Callable[[ToolOutcome], None]) -> None:
        if dies:
            done(DIED)
            return
        known = self._ledger.args.get(key)
        if self._chance.random() < self._faults.cannot_tell:
            found: dict[str, Any] = {"found": "unknown"}
        elif known is not None:
            found = {"found": "yes", "result": crc32(known)}
        else:
            found = {"found": "no"}
        done(ToolOutcome(True, msgspec.json.encode(found), None, 5, False))
