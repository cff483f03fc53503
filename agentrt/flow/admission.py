"""Admission: how much may be accepted and not ended, in items and bytes, for the node and per tier, class, tenant and
ensemble. Full means that the caller sees it (law 8): it is refused at once with a reason, the limit, and when it is
worth coming back, or it waits at the door for as long as its tier's ``admission_wait``.

- Lower tiers leave room: tier 1 may fill 95 % of the node's bounds, tier 2 90 %, tier 3 80 %; so an overload of theirs
  never meets tier 0.
- At the door, tiers come in order, and tenants by weight (`Fair`). When the door itself is full, a more urgent caller
  takes the place of the least urgent one, the latest first, which is refused as *shed*. What is accepted is never shed.
- A retry time comes from the rate at which accepted work of this node has ended lately, for as many as are ahead.

Pure; a caller's callbacks are its own business: `enter` answers, and `leave` and `due` say who of those at the door has
come in or was refused.
"""

from enum import StrEnum
from typing import Any, Final

import msgspec

from agentrt.errors import ConfigError
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.flow.fair import Fair

_S: Final = 10**9
#: A drain rate is measured over about this long; longer remembers a burst that is over.
_DRAIN_NS: Final = 10 * _S
#: Bounds of a retry time: nobody profits from less, and nobody can say more.
RETRY_NS: Final = (_S, 600 * _S)


class Bound(msgspec.Struct, frozen=True):
    """0: not bounded."""

    items: int = 0
    bytes: int = 0


_UNBOUNDED: Final = Bound()


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``tier_pct``: how much of the node's bounds each tier may fill. ``door_*`` bound those that wait to be
    accepted."""

    node: Bound = Bound(100_000, 256 << 20)
    tiers: tuple[Bound, Bound, Bound, Bound] = (_UNBOUNDED, _UNBOUNDED, _UNBOUNDED, _UNBOUNDED)
    classes: dict[str, Bound] = {}
    tenant: Bound = _UNBOUNDED  # of each
    tenants: dict[str, Bound] = {}  # those that differ
    ensemble: Bound = _UNBOUNDED  # of each
    tier_pct: tuple[int, int, int, int] = (100, 95, 90, 80)
    wait_ns: tuple[int, int, int, int] = (_S, 10 * _S, 300 * _S, 1800 * _S)
    door: Bound = Bound(1_000, 16 << 20)
    weights: dict[str, int] = {}

    def __post_init__(self) -> None:
        if not self.node.items or not self.node.bytes or not self.door.items or not self.door.bytes:
            raise ConfigError("admission without bounds of the node or the door", hint="Every queue is bounded")
        if not all(1 <= pct <= 100 for pct in self.tier_pct) or min(self.wait_ns) < 0:
            raise ConfigError(f"admission: tiers fill {self.tier_pct} %", hint="1 to 100 each")


class Applicant(msgspec.Struct, frozen=True):
    """Who wants to be accepted. ``ensemble``: the root run of a child; empty for a root. ``ref`` is the caller's."""

    tier: int
    tenant: str
    cls: str = "agent"
    ensemble: str = ""
    size_bytes: int = 0
    ref: Any = None


class Why(StrEnum):
    FULL = "full"
    TOO_LARGE = "too_large"  # it would not fit into an empty queue
    DOOR_FULL = "door_full"
    TOO_LATE = "too_late"  # it has waited for its tier's admission_wait
    SHED = "shed"


class Refusal(msgspec.Struct, frozen=True):
    """``limit`` names the bound that is full, e.g. ``tenant.items``; ``retry_after_ns`` 0: it never will fit."""

    why: Why
    limit: str
    retry_after_ns: int
    decision: Decision


class Waits(msgspec.Struct):
    """At the door. `Admission.give_up` takes it back."""

    applicant: Applicant
    number: int
    until_ns: int
    limit: str
    over: bool = False


class News(msgspec.Struct):
    """Of those at the door: who is in, and who is not."""

    admitted: list[Applicant] = []
    refused: list[tuple[Applicant, Refusal]] = []


class _Queue:
    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items = self.bytes = 0


class Admission:
    """One node's. Times are ns of the caller's clock; one caller at a time."""

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self._set(AdmissionLimits() if limits is None else limits)
        self._queues: dict[tuple[str, str], _Queue] = {("node", ""): _Queue()}
        self._door: Fair[Waits] = Fair()
        self._door_bytes = 0
        self._waits: dict[int, Waits] = {}  # by number: in the order of their coming
        self._number = 0
        self._drained = 0.0  # items that ended lately, fading
        self._drained_ns = 0

    @property
    def items(self) -> int:
        """Accepted and not ended."""
        return self._queues["node", ""].items

    @property
    def bytes(self) -> int:
        """Of these."""
        return self._queues["node", ""].bytes

    @property
    def waiting(self) -> int:
        """At the door."""
        return len(self._door)

    def configure(self, limits: AdmissionLimits, now_ns: int) -> News:
        """Other limits from now on; what is in stays in."""
        self._set(limits)
        return self._let_in(now_ns)

    def enter(self, applicant: Applicant, now_ns: int, *, wait: bool = False) -> Waits | Refusal | None:
        """None: it is in, and `leave` is owed. ``wait``: rather than be refused, wait at the door."""
        full = self._full(applicant)
        if full is None:
            if not self._starves(applicant):
                self._count(applicant, 1)
                return None
            full = "node.bytes"
        elif self._never(applicant, full):
            return self._refusal(applicant, Why.TOO_LARGE, full, now_ns)
        if not wait:
            return self._refusal(applicant, Why.FULL, full, now_ns)
        if self._door_full(applicant):
            return self._refusal(applicant, Why.DOOR_FULL, "door", now_ns)
        return self._stand(applicant, full, now_ns)

    def shed(self, applicant: Applicant, now_ns: int) -> News:
        """Make room at a full door for a more urgent applicant, which then may `enter` again: the least urgent of those
        who wait are refused, the latest first."""
        news = News()
        while self._door_full(applicant):
            worst: Waits | None = None
            for waits in self._waits.values():  # the door is short
                if worst is None or waits.applicant.tier >= worst.applicant.tier:
                    worst = waits
            if worst is None or worst.applicant.tier <= applicant.tier:
                break
            self._go(worst)
            news.refused.append((worst.applicant, self._refusal(worst.applicant, Why.SHED, "door", now_ns)))
        if news.refused:
            news.admitted += self._let_in(now_ns).admitted
        return news

    def leave(self, applicant: Applicant, now_ns: int) -> News:
        """Accepted work has ended."""
        self._count(applicant, -1)
        self._fade(now_ns)
        self._drained += 1
        return self._let_in(now_ns)

    def give_up(self, waits: Waits, now_ns: int) -> News:
        """The caller does not want to wait any more."""
        if waits.over:
            return News()
        self._go(waits)
        return self._let_in(now_ns)

    def due(self, now_ns: int) -> News:
        """Those whose tier's wait is over are refused."""
        news = News()
        late = [waits for waits in self._waits.values() if waits.until_ns <= now_ns]
        for waits in late:
            self._go(waits)
            refusal = self._refusal(waits.applicant, Why.TOO_LATE, waits.limit, now_ns)
            news.refused.append((waits.applicant, refusal))
        if late:
            more = self._let_in(now_ns)
            news.admitted += more.admitted
        return news

    def next_ns(self) -> int | None:
        """When `due` has something to do."""
        return min((waits.until_ns for waits in self._waits.values()), default=None)

    def retry_after_ns(self, ahead: int, now_ns: int) -> int:
        """How long until as many as are ahead will have ended, at the rate of lately."""
        self._fade(now_ns)
        low, high = RETRY_NS
        if self._drained < 0.5:
            return high
        return max(low, min(high, int((ahead + 1) * _DRAIN_NS / self._drained)))

    # --- within -----------------------------------------------------------------------

    def _set(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        # What each tier may fill, rounded up: a bound of one item is one item for all tiers.
        items, size = limits.node.items, limits.node.bytes
        self._node_bounds = [Bound(-(-items * pct // 100), -(-size * pct // 100)) for pct in limits.tier_pct]

    def _keys(self, applicant: Applicant) -> tuple[tuple[str, str, Bound], ...]:
        limits = self._limits
        node = ("node", "", self._node_bounds[applicant.tier])
        tier = ("tier", _TIER_NAMES[applicant.tier], limits.tiers[applicant.tier])
        cls = ("class", applicant.cls, limits.classes.get(applicant.cls, _UNBOUNDED))
        tenant = ("tenant", applicant.tenant, limits.tenants.get(applicant.tenant, limits.tenant))
        if not applicant.ensemble:
            return node, tier, cls, tenant
        return node, tier, cls, tenant, ("ensemble", applicant.ensemble, limits.ensemble)

    def _full(self, applicant: Applicant) -> str | None:
        """The bound that keeps it out."""
        queues, size = self._queues, applicant.size_bytes
        for kind, name, bound in self._keys(applicant):
            if bound is not _UNBOUNDED:
                queue = queues.get((kind, name), _EMPTY)
                if bound.items and queue.items >= bound.items:
                    return f"{kind}.items"
                if bound.bytes and queue.bytes + size > bound.bytes:
                    return f"{kind}.bytes"
        return None

    def _starves(self, applicant: Applicant) -> bool:
        """Whether one that needs many bytes stands at the door, and would for ever if small ones went past it. Others
        at the door are kept by what is not the applicant's, or by their tier."""
        return any(
            waits.limit == "node.bytes" and waits.applicant.tier <= applicant.tier for waits in self._waits.values()
        )

    def _never(self, applicant: Applicant, limit: str) -> bool:
        """Whether it would not even fit in an empty queue."""
        if not limit.endswith(".bytes"):
            return False
        return any(bound.bytes and applicant.size_bytes > bound.bytes for _, _, bound in self._keys(applicant))

    def _count(self, applicant: Applicant, sign: int) -> None:
        for kind, name, _ in self._keys(applicant):
            queue = self._queues.get((kind, name))
            if queue is None:
                queue = self._queues[kind, name] = _Queue()
            queue.items += sign
            queue.bytes += sign * applicant.size_bytes
            assert queue.items >= 0 and queue.bytes >= 0, "something left twice"
            if not queue.items and kind != "node":
                del self._queues[kind, name]

    def _door_full(self, applicant: Applicant) -> bool:
        door = self._limits.door
        return len(self._door) >= door.items or self._door_bytes + applicant.size_bytes > door.bytes

    def _stand(self, applicant: Applicant, limit: str, now_ns: int) -> Waits:
        self._number += 1
        waits = Waits(applicant, self._number, now_ns + self._limits.wait_ns[applicant.tier], limit)
        self._waits[waits.number] = waits
        weight = self._limits.weights.get(applicant.tenant, 1)
        self._door.put(applicant.tier, applicant.tenant, weight, waits.number, waits)
        self._door_bytes += applicant.size_bytes
        return waits

    def _go(self, waits: Waits) -> None:
        waits.over = True
        del self._waits[waits.number]
        self._door.remove(waits.applicant.tier, waits.applicant.tenant, waits.number)
        self._door_bytes -= waits.applicant.size_bytes

    def _let_in(self, now_ns: int) -> News:
        """Let in who may, in the order of the door. One that its own tenant or ensemble keeps out keeps out nobody
        else: it is passed by, and asked again the next time."""
        news = News()
        if not len(self._door):
            return news
        passed: list[Waits] = []
        while len(self._door):
            tier = self._door.order()[0]
            waits = self._door.head(tier)
            full = self._full(waits.applicant)
            if full is None:
                self._door.take(tier, 1)
                del self._waits[waits.number]
                waits.over = True
                self._door_bytes -= waits.applicant.size_bytes
                self._count(waits.applicant, 1)
                news.admitted.append(waits.applicant)
                continue
            waits.limit = full
            self._door.remove(tier, waits.applicant.tenant, waits.number)
            passed.append(waits)
            if full == "node.items" and tier == self._door_first(passed):
                break  # nobody behind it has more room
        for waits in passed:
            applicant = waits.applicant
            weight = self._limits.weights.get(applicant.tenant, 1)
            self._door.put(applicant.tier, applicant.tenant, weight, waits.number, waits)
        return news

    def _door_first(self, passed: list[Waits]) -> int:
        return min(min(waits.applicant.tier for waits in passed), self._door.first_tier())

    def _fade(self, now_ns: int) -> None:
        """Forget what ended long ago."""
        gone = now_ns - self._drained_ns
        if gone > 0:
            self._drained *= max(0.0, 1 - gone / _DRAIN_NS) if gone < _DRAIN_NS else 0.0
            self._drained_ns = now_ns

    def _refusal(self, applicant: Applicant, why: Why, limit: str, now_ns: int) -> Refusal:
        kind, _, unit = limit.partition(".")
        name = {"tier": str(applicant.tier), "class": applicant.cls, "tenant": applicant.tenant}.get(kind, "")
        if kind == "ensemble":
            name = applicant.ensemble
        queue = self._queues.get((kind, name), _EMPTY)
        bound = next((bound for key, _, bound in self._keys(applicant) if key == kind), self._limits.door)
        after_ns = 0 if why is Why.TOO_LARGE else self.retry_after_ns(len(self._door), now_ns)
        value = len(self._door) if kind == "door" else queue.bytes if unit == "bytes" else queue.items
        decision = Decision(
            at_ns=now_ns,
            control=Control.ADMISSION,
            action=Action.SHED if why is Why.SHED else Action.REFUSE,
            scope=_SCOPES[kind],
            name=name,
            limit=f"{kind}.{unit or 'items'}",
            value=value,
            bound=bound.bytes if unit == "bytes" else bound.items,
            until_ns=now_ns + after_ns if after_ns else 0,
            detail=why.value,
        )
        return Refusal(why, limit, after_ns, decision)


_EMPTY: Final = _Queue()
_TIER_NAMES: Final = ("0", "1", "2", "3")
_SCOPES: Final = {
    "node": Scope.NODE,
    "tier": Scope.TIER,
    "class": Scope.CLASS,
    "tenant": Scope.TENANT,
    "ensemble": Scope.ENSEMBLE,
    "door": Scope.DOOR,
}
