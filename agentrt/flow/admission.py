"""Admission: how much may be accepted and not ended, in items and bytes, for the node and per tier, class and tenant.
Full means that the caller sees it (law 8): it is refused at once with a reason, the limit, and when it is worth coming
back, or it waits at the door for as long as its tier's ``admission_wait``. (What an ensemble may have queued is its own
affair: children.py.)

- Lower tiers leave room: tier 1 may fill 95 % of the node's bounds, tier 2 90 %, tier 3 80 %; so an overload of theirs
  never meets tier 0.
- At the door, tiers come in order, and tenants by weight (`Fair`). When the door itself is full, a more urgent caller
  takes the place of the least urgent one, the latest first, which is refused as *shed*. What is accepted is never shed.
- A retry time comes from the rate at which accepted work of this node has ended lately, for as many as are ahead.

Each at the door stands in the line of the bound that keeps it out, so that an end looks at the lines that it concerns
and at nobody else: a tenant's own bound keeps nobody else waiting, and costs nobody else time.

Pure; a caller's callbacks are its own business: `enter` answers, and `leave` and `due` say who of those at the door has
come in or was refused.
"""

import heapq
from collections.abc import Iterable
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
#: For an `Applicant` that waits as long as it takes.
FOREVER_NS: Final = 2**62


class Bound(msgspec.Struct, frozen=True):
    """0: not bounded."""

    items: int = 0
    bytes: int = 0


_UNBOUNDED: Final = Bound()


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``tier_pct``: how much of the node's bounds each tier may fill. ``wait_ns``: how long each tier waits at the
    door, 0: not at all. ``door`` bounds those that wait to be accepted."""

    node: Bound = Bound(100_000, 256 << 20)
    tiers: tuple[Bound, Bound, Bound, Bound] = (_UNBOUNDED, _UNBOUNDED, _UNBOUNDED, _UNBOUNDED)
    classes: dict[str, Bound] = {}
    tenant: Bound = _UNBOUNDED  # of each
    tenants: dict[str, Bound] = {}  # those that differ
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
    """Who wants to be accepted. ``ref`` is the caller's."""

    tier: int
    tenant: str
    cls: str = "agent"
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

    def __bool__(self) -> bool:
        return bool(self.admitted or self.refused)


class _Queue:
    """One bound. ``line``: who waits at the door for it."""

    __slots__ = ("bound", "bytes", "items", "line")

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.items = self.bytes = 0
        self.line: Fair[Waits] | None = None

    def full(self, size_bytes: int) -> str | None:
        """The part of the bound that so much more would pass."""
        bound = self.bound
        if bound.items and self.items >= bound.items:
            return "items"
        if bound.bytes and self.bytes + size_bytes > bound.bytes:
            return "bytes"
        return None


class Admission:
    """One node's. Times are ns of the caller's clock; one caller at a time."""

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self._node = _Queue(_UNBOUNDED)
        self._tiers = tuple(_Queue(_UNBOUNDED) for _ in _TIER_NAMES)
        self._classes: dict[str, _Queue] = {}
        self._tenants: dict[str, _Queue] = {}
        self._moves = 0  # how often somebody came in or went
        self._refused: tuple[tuple[Any, ...], int, Refusal] | None = None  # the last: to whom, `_moves`, what
        self._set(AdmissionLimits() if limits is None else limits)
        self._door_bytes = 0
        #: By tier: those at the door by number, which is the order of their coming.
        self._waits: tuple[dict[int, Waits], ...] = tuple({} for _ in _TIER_NAMES)
        self._ends: list[tuple[int, int, int]] = []  # (until_ns, number, tier) of these; some are old
        self._more: set[_Queue] = set()  # lines that have not been looked at to the end
        self._number = 0
        self._drained = 0.0  # items that ended lately, fading
        self._drained_ns = 0  # when it was right
        self._last_ns: int | None = None  # when the last one ended, or the first one came

    @property
    def items(self) -> int:
        """Accepted and not ended."""
        return self._node.items

    @property
    def bytes(self) -> int:
        """Of these."""
        return self._node.bytes

    @property
    def waiting(self) -> int:
        """At the door."""
        return sum(map(len, self._waits))

    def shut(self, tier: int, tenant: str) -> str | None:
        """What is full for all that the tenant may ask for at this tier or a lower one: ``node`` or ``tenant``; None:
        something may come in. Any thread: what it says was so a moment ago."""
        if self._node.items >= self._shut_items[tier]:
            return "node"
        queue = self._tenants.get(tenant)
        return "tenant" if queue is not None and 0 < queue.bound.items <= queue.items else None

    def configure(self, limits: AdmissionLimits, now_ns: int) -> News:
        """Other limits from now on; what is in stays in, and those at the door look again."""
        everybody = [waits for tier in self._waits for waits in tier.values()]
        self._set(limits)
        self._more.clear()
        for queue in self._every():
            queue.line = None
        for waits in everybody:
            self._line_up(waits, *self._full(waits.applicant) or (self._node, "node.items"))
        news = News()
        self._let_in_all(self._every(), news)
        return news

    def enter(
        self, applicant: Applicant, now_ns: int, *, wait: bool = False, until_ns: int | None = None
    ) -> Waits | Refusal | None:
        """None: it is in, and `leave` is owed. ``wait``: rather than be refused, wait at the door, for as long as its
        tier may or until ``until_ns``."""
        if self._last_ns is None:
            self._last_ns = now_ns
        full = self._full(applicant)
        if full is None:
            # One that needs many bytes and stands at the door would do so for ever if small ones went past it.
            line = self._node.line
            if line is None or line.first_tier() > applicant.tier:
                self.adopt(applicant)
                return None
            full = self._node, "node.bytes"
        elif self._never(applicant):
            return self._refusal(applicant, Why.TOO_LARGE, full[1], now_ns)
        if until_ns is None:
            until_ns = now_ns + self._limits.wait_ns[applicant.tier]
        if not wait or until_ns <= now_ns:
            return self._refusal(applicant, Why.FULL, full[1], now_ns)
        if self._door_full(applicant):
            return self._refusal(applicant, Why.DOOR_FULL, "door.items", now_ns)
        if len(self._ends) > 64 and len(self._ends) > 2 * self.waiting:
            self._ends = [end for end in self._ends if end[1] in self._waits[end[2]]]
            heapq.heapify(self._ends)
        self._number += 1
        waits = Waits(applicant, self._number, until_ns, full[1])
        self._waits[applicant.tier][waits.number] = waits
        heapq.heappush(self._ends, (until_ns, waits.number, applicant.tier))
        self._door_bytes += applicant.size_bytes
        self._line_up(waits, *full)
        return waits

    def adopt(self, applicant: Applicant) -> None:
        """It is in, whatever the bounds say: it was accepted before. `leave` or `withdraw` is owed."""
        size = applicant.size_bytes
        self._moves += 1
        for queue in self._queues_of(applicant):
            queue.items += 1
            queue.bytes += size

    def withdraw(self, applicant: Applicant, now_ns: int) -> News:
        """It is not in any more, and has not ended: it was not accepted in the end, or only waits from now on."""
        queues, size = self._queues_of(applicant), applicant.size_bytes
        self._moves += 1
        for queue in queues:
            queue.items -= 1
            queue.bytes -= size
            assert queue.items >= 0 and queue.bytes >= 0, "something left twice"
        if not self._ends:
            return _NO_NEWS
        news = News()
        self._let_in_all(queues, news)
        return news

    def leave(self, applicant: Applicant, now_ns: int) -> News:
        """Accepted work has ended."""
        self._fade(now_ns)
        self._drained += 1
        self._last_ns = now_ns
        return self.withdraw(applicant, now_ns)

    def shed(self, applicant: Applicant, now_ns: int) -> News:
        """Make room at a full door for a more urgent applicant, which then may `enter` again: the least urgent of those
        who wait are refused, the latest first."""
        news = News()
        while self._door_full(applicant):
            line = next((waits for waits in reversed(self._waits[applicant.tier + 1 :]) if waits), None)
            if line is None:
                break
            worst = line[next(reversed(line))]
            self._go(worst, news)
            news.refused.append((worst.applicant, self._refusal(worst.applicant, Why.SHED, "door.items", now_ns)))
        return news

    def give_up(self, waits: Waits, now_ns: int) -> News:
        """The caller does not want to wait any more."""
        news = News()
        if not waits.over:
            self._go(waits, news)
        return news

    def due(self, now_ns: int) -> News:
        """Those whose wait is over are refused."""
        news = News()
        self._let_in_all((), news)
        while (next_ns := self.next_ns()) is not None and next_ns <= now_ns:
            if self._more and not next_ns:
                break  # the rest of a long line, in a while
            _, number, tier = heapq.heappop(self._ends)
            waits = self._waits[tier][number]
            refusal = self._refusal(waits.applicant, Why.TOO_LATE, waits.limit, now_ns)
            self._go(waits, news)
            news.refused.append((waits.applicant, refusal))
        return news

    def next_ns(self) -> int | None:
        """When `due` has something to do."""
        if self._more:
            return 0
        ends = self._ends
        while ends and ends[0][1] not in self._waits[ends[0][2]]:
            heapq.heappop(ends)
        return ends[0][0] if ends else None

    def retry_after_ns(self, ahead: int, now_ns: int) -> int:
        """How long until as many as are ahead will have ended, at the rate of lately."""
        self._fade(now_ns)
        low, high = RETRY_NS
        if self._drained < 0.5:  # fewer than one in that time: as slow as it has shown to be
            silent_ns = 0 if self._last_ns is None else now_ns - self._last_ns
            return max(low, min(high, (ahead + 1) * max(_DRAIN_NS, silent_ns)))
        return max(low, min(high, int((ahead + 1) * _DRAIN_NS / self._drained)))

    # --- within -----------------------------------------------------------------------

    def _set(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._moves += 1
        # What each tier may fill, rounded up: a bound of one item is one item for all tiers.
        items, size = limits.node.items, limits.node.bytes
        self._node_bounds = [Bound(-(-items * pct // 100), -(-size * pct // 100)) for pct in limits.tier_pct]
        self._shut_items = [max(bound.items for bound in self._node_bounds[tier:]) for tier in range(4)]
        every = (*self._node_bounds, *limits.tiers, *limits.classes.values(), *limits.tenants.values(), limits.tenant)
        self._fits_bytes = min(bound.bytes for bound in every if bound.bytes)  # so much fits in any empty queue
        for queue, bound in zip(self._tiers, limits.tiers, strict=True):
            queue.bound = bound
        for name, queue in self._classes.items():
            queue.bound = limits.classes.get(name, _UNBOUNDED)
        for name, queue in self._tenants.items():
            queue.bound = limits.tenants.get(name, limits.tenant)

    def _every(self) -> list[_Queue]:
        return [self._node, *self._tiers, *self._classes.values(), *self._tenants.values()]

    def _queues_of(self, applicant: Applicant) -> tuple[_Queue, _Queue, _Queue, _Queue]:
        limits = self._limits
        cls = self._classes.get(applicant.cls)
        if cls is None:
            bound = limits.classes.get(applicant.cls, _UNBOUNDED)
            cls = self._classes[applicant.cls] = _made(self._classes, bound)
        tenant = self._tenants.get(applicant.tenant)
        if tenant is None:
            bound = limits.tenants.get(applicant.tenant, limits.tenant)
            tenant = self._tenants[applicant.tenant] = _made(self._tenants, bound)
        return self._node, self._tiers[applicant.tier], cls, tenant

    def _full(self, applicant: Applicant) -> tuple[_Queue, str] | None:
        """What keeps it out, and the name of that bound. Its own bounds first: who waits for those waits for nobody
        else."""
        size = applicant.size_bytes
        node, tier, cls, tenant = self._queues_of(applicant)
        if tenant.bound is not _UNBOUNDED and (part := tenant.full(size)) is not None:
            return tenant, "tenant." + part
        if cls.bound is not _UNBOUNDED and (part := cls.full(size)) is not None:
            return cls, "class." + part
        if tier.bound is not _UNBOUNDED and (part := tier.full(size)) is not None:
            return tier, "tier." + part
        bound = self._node_bounds[applicant.tier]
        if node.items >= bound.items:
            return node, "node.items"
        if node.bytes + size > bound.bytes:
            return node, "node.bytes"
        return None

    def _bounds_of(self, applicant: Applicant) -> dict[str, Bound]:
        limits = self._limits
        return {
            "node": self._node_bounds[applicant.tier],
            "tier": limits.tiers[applicant.tier],
            "class": limits.classes.get(applicant.cls, _UNBOUNDED),
            "tenant": limits.tenants.get(applicant.tenant, limits.tenant),
            "door": limits.door,
        }

    def _never(self, applicant: Applicant) -> bool:
        """Whether it would not even fit in an empty queue."""
        size = applicant.size_bytes
        if size <= self._fits_bytes:
            return False
        bounds = self._bounds_of(applicant)
        return any(bound.bytes and size > bound.bytes for kind, bound in bounds.items() if kind != "door")

    def _door_full(self, applicant: Applicant) -> bool:
        door = self._limits.door
        return self.waiting >= door.items or self._door_bytes + applicant.size_bytes > door.bytes

    def _line_up(self, waits: Waits, queue: _Queue, limit: str) -> None:
        applicant = waits.applicant
        waits.limit = limit
        if queue.line is None:
            queue.line = Fair()
        weight = self._limits.weights.get(applicant.tenant, 1)
        queue.line.put(applicant.tier, applicant.tenant, weight, waits.number, waits)

    def _step_out(self, waits: Waits) -> None:
        """Out of its line."""
        queue, applicant = self._queue_for(waits), waits.applicant
        assert queue.line is not None
        queue.line.remove(applicant.tier, applicant.tenant, waits.number)
        if not len(queue.line):
            queue.line = None

    def _queue_for(self, waits: Waits) -> _Queue:
        kind = waits.limit.partition(".")[0]
        node, tier, cls, tenant = self._queues_of(waits.applicant)
        return {"node": node, "tier": tier, "class": cls, "tenant": tenant}[kind]

    def _go(self, waits: Waits, news: News) -> None:
        """Away from the door. It may have been a large one that kept others."""
        applicant = waits.applicant
        waits.over = True
        self._moves += 1
        del self._waits[applicant.tier][waits.number]
        self._door_bytes -= applicant.size_bytes
        self._step_out(waits)
        self._let_in_all(self._queues_of(applicant), news)

    def _let_in(self, queue: _Queue, news: News) -> None:
        """Let in who may of those that this bound kept out; one that another bound keeps out waits for that one from
        now on. A long line that goes over does so in several steps: `due` goes on with it."""
        self._more.discard(queue)
        for _ in range(_MOVES_MAX):
            line = queue.line
            if line is None:
                return
            for tier in line.order():
                waits = line.head(tier)
                full = self._full(waits.applicant)
                if full is None or full[0] is not queue:
                    break
            else:
                return  # the first of each tier is kept out by this bound
            if full is not None:
                self._step_out(waits)
                self._line_up(waits, *full)
                continue
            line.take(tier, 1)
            if not len(line):
                queue.line = None
            waits.over = True
            del self._waits[tier][waits.number]
            self._door_bytes -= waits.applicant.size_bytes
            self.adopt(waits.applicant)
            news.admitted.append(waits.applicant)
        self._more.add(queue)

    def _let_in_all(self, queues: Iterable[_Queue], news: News) -> None:
        for queue in (*queues, *self._more):
            if queue.line is not None:
                self._let_in(queue, news)

    def _fade(self, now_ns: int) -> None:
        """Forget what ended long ago."""
        gone = now_ns - self._drained_ns
        if gone > 0:
            self._drained *= max(0.0, 1 - gone / _DRAIN_NS) if gone < _DRAIN_NS else 0.0
            self._drained_ns = now_ns

    def _refusal(self, applicant: Applicant, why: Why, limit: str, now_ns: int) -> Refusal:
        """This is what an overloaded node does most, so it is kept quick: as long as nobody comes in or goes, all who
        ask alike within a millisecond get the same."""
        last, key = self._refused, (why, limit, applicant.tier, applicant.tenant, applicant.cls, self._number)
        if (
            last is not None
            and last[0] == key
            and last[1] == self._moves
            and now_ns - last[2].decision.at_ns < _ALIKE_NS
        ):
            return last[2]
        refusal = self._refusal_of(applicant, why, limit, now_ns)
        self._refused = key, self._moves, refusal
        return refusal

    def _refusal_of(self, applicant: Applicant, why: Why, limit: str, now_ns: int) -> Refusal:
        kind, _, unit = limit.partition(".")
        waiting = self.waiting
        after_ns = 0 if why is Why.TOO_LARGE else self.retry_after_ns(waiting, now_ns)
        name = ""
        queue: _Queue | None = None
        if kind == "node":
            queue, bound = self._node, self._node_bounds[applicant.tier]
        elif kind == "door":
            bound = self._limits.door
        elif kind == "tier":
            name, queue = _TIER_NAMES[applicant.tier], self._tiers[applicant.tier]
            bound = queue.bound
        elif kind == "class":
            name, queue = applicant.cls, self._classes.get(applicant.cls)
            bound = self._limits.classes.get(name, _UNBOUNDED)
        else:
            name, queue = applicant.tenant, self._tenants.get(applicant.tenant)
            bound = self._limits.tenants.get(name, self._limits.tenant)
        value = waiting if queue is None else queue.bytes if unit == "bytes" else queue.items
        decision = Decision(
            at_ns=now_ns,
            control=Control.ADMISSION,
            action=Action.SHED if why is Why.SHED else Action.REFUSE,
            scope=_SCOPES[kind],
            name=name,
            limit=limit,
            value=value,
            bound=bound.bytes if unit == "bytes" else bound.items,
            until_ns=now_ns + after_ns if after_ns else 0,
            detail=why.value,
        )
        return Refusal(why, limit, after_ns, decision)


#: For so long a refusal is the same for all who ask alike.
_ALIKE_NS: Final = 1_000_000
#: Of a line at once, at some 5 us each.
_MOVES_MAX: Final = 64
#: Names with bounds that nobody has to do with, beyond which they are forgotten.
_NAMES_MAX: Final = 1_000
_NO_NEWS: Final = News()


def _made(queues: dict[str, _Queue], bound: Bound) -> _Queue:
    if len(queues) >= _NAMES_MAX:
        for name in [name for name, queue in queues.items() if not queue.items and queue.line is None]:
            del queues[name]
    return _Queue(bound)


_TIER_NAMES: Final = ("0", "1", "2", "3")
_SCOPES: Final = {
    "node": Scope.NODE,
    "tier": Scope.TIER,
    "class": Scope.CLASS,
    "tenant": Scope.TENANT,
    "door": Scope.DOOR,
}
