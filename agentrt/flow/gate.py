"""The gate: may this call begin now? Breakers, then places (bulkheads, AIMD), then rates, all or nothing.

A call that may not waits at the one limit that keeps it, in that limit's `Fair` line, holding nothing anywhere; when
that limit has room it is looked at again, and goes, or on to the next limit that keeps it. A newcomer does not pass
those of its tier or above that wait at a limit it needs. A retry waits out its back-off first.

Pure. The caller asks `request`, says `finish` or `cancel` once for each ticket, and calls `due` at `next_ns`; the last
three return what has moved. What must hold:

- A ticket is WAITING, GRANTED, or over (REFUSED, DONE). Only a granted one is counted by places.
- A line with somebody in it has its head kept by that very limit: by its places, whose next `finish` looks at the
  line, or by time, and then a wake-up is in the heap for no later than the moment it may go.
- Limits, lines and tickets are bounded: by ``waiting_max`` and ``names_max``, and by the calls that are under way.
"""

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import msgspec

from agentrt.flow.aimd import Aimd
from agentrt.flow.breaker import Breaker, BreakerState
from agentrt.flow.buckets import Bucket, RateLimit
from agentrt.flow.bulkhead import Bulkhead
from agentrt.flow.capacity import Headroom
from agentrt.flow.decisions import WAIT_REASON, Action, Control, Decision, Scope
from agentrt.flow.fair import Fair
from agentrt.flow.limits import GateLimits
from agentrt.flow.retry import Again, Attempts, Failure, GiveUp, Retries

_NEVER: Final = 1 << 63
_CLOSED: Final = BreakerState.CLOSED
#: After 429s in a row without a `Retry-After`, a model gets no call for this long, doubling up to the retries' cap.
_PAUSE_NS: Final = 250_000_000
#: A clock that goes back by more was set; by less, two callers were a little out of order.
_SET_BACK_NS: Final = 1_000_000_000


class Call(msgspec.Struct, frozen=True):
    """What wants to begin. ``attempt`` above 1 is a retry: it waits where a first attempt is refused by an open
    breaker. ``handed_down``: a layer above retries. ``ref`` is the caller's."""

    tenant: str
    tier: int
    cls: str = "tool"
    tool: str = ""
    provider: str = ""
    model: str = ""
    caller: str = ""  # agents, with `target`
    target: str = ""
    pool: str = ""
    tokens: int = 0  # at most; settled by `Outcome.tokens`
    attempt: int = 1
    handed_down: Attempts | None = None
    deadline_ns: int = 0
    run: str | None = None
    step: str | None = None
    ref: Any = None


class Outcome(msgspec.Struct, frozen=True):
    """How a granted call ended. ``failure`` None: it succeeded. ``overloaded``: a time-out, or a context that went past
    its budget. ``tokens``: used; None: as asked for. ``draw``: random, 0 <= draw < 1, for the jitter of a retry.
    ``retried``: False: somebody else owns the retries of this kind of failure."""

    failure: Failure | None = None
    overloaded: bool = False
    tokens: int | None = None
    retry_after_ns: int | None = None
    draw: float = 0.0
    retried: bool = True


SUCCESS: Final = Outcome()


class State(IntEnum):
    WAITING = 0
    GRANTED = 1
    REFUSED = 2
    DONE = 3


_WAITING, _GRANTED, _REFUSED, _DONE = State.WAITING, State.GRANTED, State.REFUSED, State.DONE


class Ticket(msgspec.Struct, eq=False):
    """A call at the gate. ``refusal`` is set when it is REFUSED."""

    call: Call
    route: "_Route"
    number: int
    began: int  # its number among those that were granted
    state: State = _WAITING
    began_ns: int = 0
    not_before_ns: int = 0
    place: "_Place | None" = None  # where it waits; None: for its back-off
    refusal: "Refused | None" = None

    @property
    def free(self) -> bool:
        """Whether it is of `Gate.free`, and its call has not been said."""
        return self.call is _NO_CALL


class Waiting(msgspec.Struct, frozen=True):
    """``reason`` is one of `states.WAIT_REASONS`; ``until_ns`` an estimate of when it goes, None if it depends on
    others."""

    ticket: Ticket
    reason: str
    until_ns: int | None
    decision: Decision


class Refused(msgspec.Struct, frozen=True):
    """The facts of an error for the caller: code breaker_open, rate_too_large or queue_full."""

    code: str
    message: str
    decision: Decision
    retry_after_ns: int | None = None


class Moved(msgspec.Struct):
    """What an event has led to: tickets that are GRANTED or REFUSED now, and decisions for history and metrics.
    ``retry`` is for a finished call that failed."""

    tickets: list[Ticket] = []
    decisions: list[Decision] = []
    retry: Again | GiveUp | None = None


NOTHING_MOVED: Final = Moved()


class _Place:
    """One limit with its line. ``kind``: which of the three it is."""

    __slots__ = (
        "breaker", "bucket", "control", "head", "kind", "limit", "line", "name", "pause_ns", "row", "scope", "since",
        "tokens", "wake_ns",
    )  # fmt: skip

    def __init__(self, kind: str, control: Control, scope: Scope, name: str) -> None:
        self.kind = kind
        self.control = control
        self.scope = scope
        self.name = name
        self.limit = ""  # as decisions call it
        self.line: Fair[Ticket] = Fair()
        self.wake_ns = _NEVER
        self.breaker: Breaker = _BREAKER
        self.head: Bulkhead = _HEAD
        self.bucket: Bucket = _BUCKET
        self.tokens = False  # of a rate: it counts tokens
        self.since = 0  # of breakers and AIMD: calls that began with this number or a lower one are of an older epoch
        self.pause_ns = 0  # of AIMD: nothing begins before
        self.row = 0  # of AIMD: 429s in a row

    def idle(self, now_ns: int) -> bool:
        """Whether nothing would be lost with it."""
        return (
            not self.line
            and not self.head.held
            and self.breaker.state is _CLOSED
            and self.bucket.full_ns <= now_ns
            and self.pause_ns <= now_ns
        )


_BREAKER: Final = Breaker()
_HEAD: Final = Bulkhead(1)
_BUCKET: Final = Bucket(RateLimit(1))


class _Route(msgspec.Struct, frozen=True, gc=False):
    """The limits of calls that are alike, in the order in which they are asked."""

    weight: int
    breakers: tuple[_Place, ...]
    heads: tuple[_Place, ...]
    adaptive: _Place | None  # of `heads`, the one with AIMD
    rates: tuple[_Place, ...]
    free: bool = False  # a call that all its breakers let pass takes nothing from anybody


_NO_CALL: Final = Call("", 0)


class Gate:
    """See above. One caller at a time. ``now_ns`` is Unix ns throughout; a clock that is set moves all states along."""

    def __init__(self, limits: GateLimits | None = None) -> None:
        self._places: dict[tuple[str, Scope, str, str], _Place] = {}
        self._routes: dict[tuple[str, ...], _Route] = {}
        self._of_tools: dict[tuple[str, str], _Route] = {}  # of these, by tenant and tool
        self._wakes: list[tuple[int, int, _Place]] = []
        self._later: list[tuple[int, int, Ticket]] = []
        self._number = 0
        self._now_ns = 0
        self.waiting = 0  # tickets
        self._waiting_max = 0
        self.limits = GateLimits() if limits is None else limits
        self.configure(self.limits, 0)

    # --- for the caller -------------------------------------------------------------

    def request(self, call: Call, now_ns: int, not_before_ns: int = 0) -> Ticket | Waiting | Refused:
        """A granted ticket, one that waits, or the refusal. ``not_before_ns``: a retry's back-off."""
        if now_ns < self._now_ns:
            now_ns = self._clock(now_ns)
        self._now_ns = now_ns
        route = self._route_of(call, now_ns)
        number = self._number = self._number + 1
        ticket = Ticket(call, route, number, number)
        if not_before_ns > now_ns:
            return self._wait_out(ticket, not_before_ns)
        if self._passes(route, call, now_ns):
            ticket.state = _GRANTED
            ticket.began_ns = now_ns
            return ticket
        kept = self._keeps(ticket, now_ns, None)
        if kept is None:
            self._grant(ticket, now_ns)
            return ticket
        if type(kept) is Refused:
            ticket.state = _REFUSED
            return kept
        if self.waiting >= self._waiting_max:
            ticket.state = _REFUSED
            return self._full(call, now_ns)
        place: _Place = kept  # type: ignore[assignment]
        self.waiting += 1
        if self._file(ticket, place, now_ns):
            self.waiting -= 1
            return ticket
        assert ticket.place is not None
        return self._says(ticket, ticket.place, now_ns)

    def free(self, tenant: str, tool: str, class_of: Callable[[str], str], now_ns: int) -> Ticket | None:
        """`request` of a tool's call, in the common case and at a fraction of its cost: no limit but closed breakers
        has a say. The ticket holds nothing, so that it may be forgotten; before it is finished as anything but SUCCESS
        its ``call`` is to be set. None: it is not that case."""
        key = tenant, tool
        route = self._of_tools.get(key)
        if route is None:
            route = self._of_tools[key] = self._route_of(Call(tenant, 0, class_of(tool), tool), now_ns)
        if not route.free:
            return None
        for place in route.breakers:
            if place.breaker.state is not _CLOSED or place.line.count:
                return None
        if now_ns < self._now_ns:
            now_ns = self._clock(now_ns)
        self._now_ns = now_ns
        number = self._number = self._number + 1
        return Ticket(_NO_CALL, route, number, number, _GRANTED, now_ns)

    def finish(self, ticket: Ticket, outcome: Outcome, now_ns: int) -> Moved:
        """A granted call has ended."""
        if now_ns < self._now_ns:
            now_ns = self._clock(now_ns)
        self._now_ns = now_ns
        assert ticket.state is _GRANTED, "a ticket that is not granted was finished"
        ticket.state = _DONE
        route, call = ticket.route, ticket.call
        failure = outcome.failure
        if failure is None and not outcome.overloaded:
            moved = self._succeeded(ticket, now_ns)
        else:
            moved = self._failed(ticket, outcome, now_ns)
        if outcome.tokens is not None and outcome.tokens != call.tokens:
            for place in route.rates:
                if place.tokens:
                    place.bucket.settle(call.tokens, outcome.tokens, now_ns)
        for place in route.heads:
            place.head.held -= 1
        return self._look(route, moved, now_ns) if self.waiting else moved

    def cancel(self, ticket: Ticket, now_ns: int, *, begun: bool = False) -> Moved:
        """Nobody wants the call any more, whether it waits or was granted. ``begun``: it was granted and may have gone
        out; then what it took of rates stays taken. A ticket that is over is left alone."""
        if now_ns < self._now_ns:
            now_ns = self._clock(now_ns)
        self._now_ns = now_ns
        if ticket.state is _GRANTED:
            ticket.state = _DONE
            for place in ticket.route.breakers:
                if ticket.began > place.since:
                    place.breaker.leave(place.breaker.epoch)
            for place in ticket.route.heads:
                place.head.held -= 1
            if not begun:
                for place in ticket.route.rates:
                    place.bucket.settle(ticket.call.tokens if place.tokens else 1, 0, now_ns)
            return self._look(ticket.route, NOTHING_MOVED, now_ns)
        if ticket.state is not _WAITING:
            return NOTHING_MOVED
        ticket.state = _DONE
        self.waiting -= 1
        if ticket.place is None:  # in `_later`, where it is passed by
            if len(self._later) > 64 and len(self._later) > 2 * self.waiting:
                self._later = [entry for entry in self._later if entry[2].state is _WAITING]
                heapq.heapify(self._later)
            return NOTHING_MOVED
        moved = Moved()
        place, ticket.place = ticket.place, None
        place.line.remove(ticket.call.tier, ticket.call.tenant, ticket.number)
        self._pump(place, moved, now_ns)
        return moved

    def due(self, now_ns: int) -> Moved:
        """What time has brought."""
        if now_ns < self._now_ns:
            now_ns = self._clock(now_ns)
        self._now_ns = now_ns
        moved = Moved()
        while self._later and self._later[0][0] <= now_ns:
            ticket = heapq.heappop(self._later)[2]
            if ticket.state is _WAITING:
                self._again(ticket, moved, now_ns)
        while self._wakes and self._wakes[0][0] <= now_ns:
            at_ns, _, place = heapq.heappop(self._wakes)
            if place.wake_ns == at_ns:
                place.wake_ns = _NEVER
                self._pump(place, moved, now_ns)
        return moved

    def next_ns(self) -> int | None:
        """When `due` has something to do; None: nothing waits for time."""
        while self._wakes and (self._wakes[0][2].wake_ns != self._wakes[0][0] or not self._wakes[0][2].line.count):
            at_ns, _, place = heapq.heappop(self._wakes)
            if place.wake_ns == at_ns:
                place.wake_ns = _NEVER
        while self._later and self._later[0][2].state is not _WAITING:
            heapq.heappop(self._later)
        first = min(self._wakes[0][0] if self._wakes else _NEVER, self._later[0][0] if self._later else _NEVER)
        return None if first == _NEVER else first

    def reason(self, ticket: Ticket, now_ns: int) -> Waiting:
        """What a waiting ticket waits for, now."""
        if ticket.place is None:
            return self._backs_off(ticket)
        return self._says(ticket, ticket.place, now_ns)

    def configure(self, limits: GateLimits, now_ns: int) -> Moved:
        """Other limits from now on. What was taken stays taken, who waits is looked at again."""
        self.limits = limits
        self._waiting_max = limits.waiting_max
        self._trim_at = 2 * limits.names_max
        self._routes.clear()
        self._of_tools.clear()
        waiting = sorted(
            (ticket for place in self._places.values() for ticket in place.line), key=lambda ticket: ticket.number
        )
        for ticket in waiting:
            ticket.place.line.remove(ticket.call.tier, ticket.call.tenant, ticket.number)  # type: ignore[union-attr]
        old, self._places = self._places, {}
        self._wakes.clear()
        for key, place in old.items():
            # Those that no rule names any more live on with the calls that hold them, and are then forgotten.
            place.wake_ns = _NEVER
            if self._named(key) is not None:
                self._places[key] = place
                self._set(place, key)
        moved = Moved()
        for ticket in waiting:
            self._reroute(ticket, now_ns)
            self._again(ticket, moved, now_ns)
        for _, _, ticket in self._later:
            self._reroute(ticket, now_ns)
        return moved

    def headroom(self, call: Call, now_ns: int) -> list[Headroom]:
        """What the call's limits have left now."""
        route = self._route_of(call, now_ns)
        found = []
        for place in (*route.heads, *route.rates):
            if place.kind == "rate":
                left = place.bucket.left(now_ns)
                until_ns = 0 if left else place.bucket.free_ns(call.tier, 1, now_ns)
            else:
                left = max(0, place.head.limit - place.head.held)
                until_ns = place.pause_ns if place.pause_ns > now_ns else 0
            found.append(Headroom(place.scope.value, place.name, place.limit, left, until_ns))
        return found

    def breakers(self) -> list[tuple[Scope, str, Breaker]]:
        """Those that are not closed."""
        return [
            (place.scope, place.name, place.breaker)
            for place in self._places.values()
            if place.kind == "breaker" and place.breaker.state is not _CLOSED
        ]

    def snapshot(self) -> list[tuple[str, tuple[int, ...]]]:
        """What must survive a restart, as (name, numbers): rates, adaptive limits, breakers that are not closed.
        Holders do not: whoever held a place has gone with the node."""
        rows: list[tuple[str, tuple[int, ...]]] = []
        for (kind, scope, name, unit), place in self._places.items():
            values: tuple[int, ...] = ()
            if kind == "rate" and place.bucket.full_ns > self._now_ns:
                values = (place.bucket.full_ns,)
            elif kind == "breaker" and place.breaker.state is not _CLOSED:
                values = place.breaker.snapshot
            elif isinstance(place.head, Aimd):
                values = (place.head.state, place.pause_ns, place.row)
            if values:
                rows.append(("\0".join((kind, scope.value, unit, name)), values))
        return rows

    def restore(self, rows: list[tuple[str, tuple[int, ...]]], now_ns: int) -> None:
        """Go on from a snapshot, at the start; what was taken before stays taken. Rows that no rule names any more, or
        that cannot be read, are left out."""
        for name, values in rows:
            parts = name.split("\0", 3)
            if len(parts) != 4 or parts[1] not in Scope.__members__.values():
                continue
            key = (parts[0], Scope(parts[1]), parts[3], parts[2])
            if len(self._places) >= self.limits.names_max or self._named(key) is None:
                continue
            place = self._place(*key)
            if parts[0] == "rate" and len(values) == 1:
                place.bucket.restore(values[0], now_ns)
            elif parts[0] == "breaker" and len(values) == 2:
                place.breaker.restore(values[0], values[1], now_ns)
            elif isinstance(place.head, Aimd) and len(values) == 3:
                place.head.restore(values[0])
                place.pause_ns = min(values[1], now_ns + self.limits.retry.retry_after_max_ns)
                place.row = min(max(values[2], 0), 64)

    # --- what keeps a call ------------------------------------------------------------

    def _passes(self, route: _Route, call: Call, now_ns: int) -> bool:
        """The common case, in one go: nobody waits, nothing is broken, there is room; then it is taken."""
        tier = call.tier
        for place in route.breakers:
            if place.breaker.state is not _CLOSED or place.line.count:
                return False
        for place in route.heads:
            head = place.head
            if head.held >= (head.low_limit if tier else head.limit) or place.line.count or place.pause_ns > now_ns:
                return False
        rates = route.rates
        for place in rates:
            bucket = place.bucket
            slack = bucket.low_slack_ns if tier else bucket.slack_ns
            if place.tokens:
                if not call.tokens:
                    continue
                if bucket.free_ns(tier, call.tokens, now_ns) > now_ns:
                    return False
            elif bucket.full_ns - now_ns > slack:
                return False
            if place.line.count:
                return False
        for place in route.heads:
            place.head.held += 1
        for place in rates:
            bucket = place.bucket
            if place.tokens:
                if call.tokens:
                    bucket.take(call.tokens, now_ns)
            else:
                full = bucket.full_ns
                bucket.full_ns = (full if full > now_ns else now_ns) + bucket.unit_ns
        return True

    def _keeps(self, ticket: Ticket, now_ns: int, at: _Place | None) -> "_Place | Refused | None":
        """The limit that keeps the call now, whether it waits there or not; None: none does. ``at``: where it is the
        head of the line, which therefore does not keep it."""
        route, call = ticket.route, ticket.call
        tier = call.tier
        for place in route.breakers:
            breaker = place.breaker
            if breaker.state is not _CLOSED and not breaker.admits(now_ns):
                return place if call.attempt > 1 else self._open(place, call, now_ns)
            if place is not at and place.line.count and place.line.first_tier() <= tier:
                return place
        for place in route.heads:
            head = place.head
            if head.held >= (head.low_limit if tier else head.limit) or place.pause_ns > now_ns:
                return place
            if place.line.count and place is not at and place.line.first_tier() <= tier:
                return place
        for place in route.rates:
            cost = call.tokens if place.tokens else 1
            if not cost:
                continue
            if place.bucket.free_ns(tier, cost, now_ns) > now_ns:
                return place if cost <= place.bucket.rate.limit else self._too_large(place, call, now_ns)
            if place.line.count and place is not at and place.line.first_tier() <= tier:
                return place
        return None

    def _grant(self, ticket: Ticket, now_ns: int) -> None:
        """Take everything; `_keeps` has said None."""
        route = ticket.route
        for place in route.heads:
            place.head.held += 1
        for place in route.rates:
            cost = ticket.call.tokens if place.tokens else 1
            if cost:
                place.bucket.take(cost, now_ns)
        for place in route.breakers:
            breaker = place.breaker
            if breaker.state is not _CLOSED:
                epoch = breaker.epoch
                if breaker.enter(now_ns) != epoch:
                    place.since = self._number
        self._number += 1
        ticket.began = self._number
        ticket.began_ns = now_ns
        ticket.state = _GRANTED

    # --- waiting ----------------------------------------------------------------------

    def _file(self, ticket: Ticket, place: _Place, now_ns: int) -> bool:
        """Let the ticket wait there. True: it is its tenant's turn there, it is kept by nothing, and was granted."""
        call = ticket.call
        line = place.line
        line.put(call.tier, call.tenant, ticket.route.weight, ticket.number, ticket)
        if line.count > 1 and line.order()[0] == call.tier and line.head(call.tier) is ticket:
            kept = self._keeps(ticket, now_ns, place)
            if kept is None:
                line.take(call.tier, call.tokens if place.tokens else 1)
                self._grant(ticket, now_ns)
                return True
            if isinstance(kept, _Place) and kept is not place and self._is_shut(kept, ticket, now_ns):
                line.remove(call.tier, call.tenant, ticket.number)
                return self._file(ticket, kept, now_ns)  # an earlier one each time
        ticket.place = place
        self._wake_for(place, now_ns)
        return False

    @staticmethod
    def _is_shut(place: _Place, ticket: Ticket, now_ns: int) -> bool:
        """Whether the limit itself keeps the ticket, not only who waits there."""
        tier = ticket.call.tier
        if place.kind == "rate":
            return place.bucket.free_ns(tier, ticket.call.tokens if place.tokens else 1, now_ns) > now_ns
        if place.kind == "breaker":
            return place.breaker.state is not _CLOSED and not place.breaker.admits(now_ns)
        head = place.head
        return head.held >= (head.low_limit if tier else head.limit) or place.pause_ns > now_ns

    def _wake_for(self, place: _Place, now_ns: int) -> None:
        """See to it that the line is looked at when time may let its head go."""
        at_ns = _NEVER
        line = place.line
        order = line.order()
        for tier in order:  # the most urgent, and before it one that has aged; those behind may not go anyway
            at_ns = min(at_ns, self._opens_ns(place, line.head(tier), now_ns))
            if tier == min(order):
                break
        if at_ns < place.wake_ns:
            place.wake_ns = at_ns
            self._number += 1
            heapq.heappush(self._wakes, (at_ns, self._number, place))

    def _opens_ns(self, place: _Place, ticket: Ticket, now_ns: int) -> int:
        """When time lets the ticket pass this limit; _NEVER: it depends on others."""
        if place.kind == "rate":
            cost = ticket.call.tokens if place.tokens else 1
            return place.bucket.free_ns(ticket.call.tier, cost, now_ns)
        if place.kind == "breaker":
            return place.breaker.until_ns if place.breaker.state is BreakerState.OPEN else _NEVER
        return place.pause_ns if place.pause_ns > now_ns else _NEVER

    def _pump(self, place: _Place, moved: Moved, now_ns: int) -> None:
        """Let go who may."""
        line = place.line
        while line.count:
            order = line.order()
            first = min(order)
            for tier in order:
                ticket = line.head(tier)
                kept = self._keeps(ticket, now_ns, place)
                if kept is place:
                    if tier == first:
                        order = []
                        break
                    continue  # an aged one; the others may fare better
                call = ticket.call
                if kept is None:
                    line.take(tier, call.tokens if place.tokens else 1)
                    self._grant(ticket, now_ns)
                    self._moved(ticket, place, moved, now_ns)
                else:
                    line.remove(tier, call.tenant, ticket.number)
                    if type(kept) is Refused:
                        self._refuse(ticket, kept, moved)
                    elif self._file(ticket, kept, now_ns):  # type: ignore[arg-type]
                        self._moved(ticket, place, moved, now_ns)
                    elif ticket.place is place:  # it is next in that line, too, and this limit is shut for it
                        order = []
                break
            if not order:
                break
        if line.count:
            self._wake_for(place, now_ns)

    def _moved(self, ticket: Ticket, place: _Place | None, moved: Moved, now_ns: int) -> None:
        self.waiting -= 1
        ticket.place = None
        moved.tickets.append(ticket)
        if place is not None:
            moved.decisions.append(self._decision(place, ticket.call, Action.GRANT, now_ns))

    def _refuse(self, ticket: Ticket, refusal: Refused, moved: Moved) -> None:
        self.waiting -= 1
        ticket.place = None
        ticket.state = _REFUSED
        ticket.refusal = refusal
        moved.tickets.append(ticket)
        moved.decisions.append(refusal.decision)

    def _again(self, ticket: Ticket, moved: Moved, now_ns: int) -> None:
        """A ticket that waits at no limit (any more) is looked at."""
        ticket.place = None
        kept = self._keeps(ticket, now_ns, None)
        if kept is None:
            self._grant(ticket, now_ns)
            self._moved(ticket, None, moved, now_ns)
        elif type(kept) is Refused:
            self._refuse(ticket, kept, moved)
        elif self._file(ticket, kept, now_ns):  # type: ignore[arg-type]
            self._moved(ticket, None, moved, now_ns)

    def _look(self, route: _Route, moved: Moved, now_ns: int) -> Moved:
        """Something of the route was given back."""
        if moved is NOTHING_MOVED:
            moved = Moved()
        for place in (*route.breakers, *route.heads, *route.rates):
            if place.line.count:
                self._pump(place, moved, now_ns)
        return moved

    def _wait_out(self, ticket: Ticket, not_before_ns: int) -> Waiting | Refused:
        if self.waiting >= self._waiting_max:
            ticket.state = _REFUSED
            return self._full(ticket.call, self._now_ns)
        self.waiting += 1
        ticket.not_before_ns = not_before_ns
        heapq.heappush(self._later, (not_before_ns, ticket.number, ticket))
        return self._backs_off(ticket)

    # --- outcomes -----------------------------------------------------------------------

    def _succeeded(self, ticket: Ticket, now_ns: int) -> Moved:
        route, began = ticket.route, ticket.began
        moved = NOTHING_MOVED
        for place in route.breakers:
            if began > place.since:
                breaker = place.breaker
                if not breaker.settled and breaker.record(breaker.epoch, False, now_ns) is not None:
                    place.since = self._number
                    moved = self._note(moved, place, ticket.call, Action.CLOSE, now_ns)
        adaptive = route.adaptive
        if adaptive is not None:
            adaptive.row = 0
            head: Aimd = adaptive.head  # type: ignore[assignment]
            if 2 * head.held >= head.limit and head.succeeded(now_ns - ticket.began_ns):
                moved = self._note(moved, adaptive, ticket.call, Action.RAISE, now_ns)
        return moved

    def _failed(self, ticket: Ticket, outcome: Outcome, now_ns: int) -> Moved:
        route, began, call = ticket.route, ticket.began, ticket.call
        moved = Moved()
        failure = outcome.failure
        for place in route.breakers:
            if began <= place.since:
                continue
            if failure is Failure.RATE and place.breaker.state is _CLOSED:
                continue  # it says that the other side works, not how well
            failed = failure is Failure.TRANSPORT
            if place.breaker.record(place.breaker.epoch, failed, now_ns) is not None:
                place.since = self._number
                self._note(moved, place, call, Action.OPEN if failed else Action.CLOSE, now_ns)
        adaptive = route.adaptive
        if adaptive is not None and (failure is Failure.RATE or outcome.overloaded) and began > adaptive.since:
            head: Aimd = adaptive.head  # type: ignore[assignment]
            adaptive.since = self._number
            if head.overloaded(head.epoch):
                self._note(moved, adaptive, call, Action.LOWER, now_ns)
        if failure is Failure.RATE:
            self._pause(route, adaptive, outcome.retry_after_ns, now_ns)
        if failure is not None and outcome.retried:
            moved.retry = Retries(self.limits.retry, call.handed_down).decide(
                failure,
                call.attempt,
                now_ns,
                outcome.draw,
                window_ns=max((p.bucket.rate.window_ns for p in route.rates if p.scope in _OTHER_SIDE), default=0),
                retry_after_ns=outcome.retry_after_ns,
                deadline_ns=call.deadline_ns or None,
            )
            gives_up = isinstance(moved.retry, GiveUp)
            moved.decisions.append(
                Decision(
                    at_ns=now_ns,
                    control=Control.RETRY,
                    action=Action.GIVE_UP if gives_up else Action.RETRY,
                    scope=_scope(call)[0],
                    name=_scope(call)[1],
                    limit="attempts",
                    value=call.attempt,
                    bound=self.limits.retry.attempts_max,
                    run=call.run,
                    step=call.step,
                    until_ns=0 if isinstance(moved.retry, GiveUp) else moved.retry.at_ns,
                    detail=moved.retry.reason if isinstance(moved.retry, GiveUp) else failure.value,
                )
            )
        return moved

    def _pause(self, route: _Route, adaptive: _Place | None, retry_after_ns: int | None, now_ns: int) -> None:
        """The other side takes nothing for now: neither this call again nor the others."""
        retry = self.limits.retry
        if retry_after_ns is not None:
            until_ns = now_ns + min(max(0, retry_after_ns), retry.retry_after_max_ns)
            for place in route.rates:
                if place.scope in _OTHER_SIDE:
                    place.bucket.pause(until_ns)
        elif adaptive is not None:
            until_ns = now_ns + min(retry.cap_ns, _PAUSE_NS << min(adaptive.row, 16))
        if adaptive is not None:
            adaptive.row += 1
            adaptive.pause_ns = max(adaptive.pause_ns, until_ns)

    # --- words ---------------------------------------------------------------------------

    def _says(self, ticket: Ticket, place: _Place, now_ns: int) -> Waiting:
        until_ns = self._opens_ns(place, ticket, now_ns)
        if place.kind == "rate":
            until_ns += (len(place.line) - 1) * place.bucket.unit_ns * (ticket.call.tokens if place.tokens else 1)
        until_ns = (
            0 if until_ns == _NEVER else max(now_ns, until_ns)
        )  # past: those in front of it are what it waits for
        decision = self._decision(place, ticket.call, Action.WAIT, now_ns, until_ns)
        return Waiting(ticket, WAIT_REASON[place.control], decision.until_ns or None, decision)

    def _backs_off(self, ticket: Ticket) -> Waiting:
        call = ticket.call
        scope, name = _scope(call)
        decision = Decision(
            at_ns=self._now_ns,
            control=Control.RETRY,
            action=Action.WAIT,
            scope=scope,
            name=name,
            limit="attempts",
            value=call.attempt,
            bound=self.limits.retry.attempts_max,
            run=call.run,
            step=call.step,
            until_ns=ticket.not_before_ns,
        )
        return Waiting(ticket, WAIT_REASON[Control.RETRY], ticket.not_before_ns, decision)

    def _decision(self, place: _Place, call: Call, action: Action, now_ns: int, until_ns: int = 0) -> Decision:
        if place.kind == "rate":
            value, bound = place.bucket.left(now_ns), place.bucket.rate.limit
        elif place.kind == "breaker":
            value, bound = int(place.breaker.state), 0
        else:
            value, bound = place.head.held, place.head.limit
        return Decision(
            at_ns=now_ns,
            control=place.control,
            action=action,
            scope=place.scope,
            name=place.name,
            limit=place.limit,
            value=value,
            bound=bound,
            run=call.run,
            step=call.step,
            until_ns=until_ns,
        )

    def _note(self, moved: Moved, place: _Place, call: Call, action: Action, now_ns: int) -> Moved:
        if moved is NOTHING_MOVED:
            moved = Moved()
        until_ns = place.breaker.until_ns if action is Action.OPEN else 0
        moved.decisions.append(self._decision(place, call, action, now_ns, until_ns))
        return moved

    def _open(self, place: _Place, call: Call, now_ns: int) -> Refused:
        breaker = place.breaker
        # While the probe is out, nobody knows more than that it was closed for so long.
        until_ns = breaker.until_ns if breaker.state is BreakerState.OPEN else now_ns + breaker.limits.open_ns
        return Refused(
            "breaker_open",
            f"calls of {place.scope.value} {place.name} failed too often and are not tried for now",
            self._decision(place, call, Action.REFUSE, now_ns, until_ns),
            until_ns - now_ns,
        )

    def _too_large(self, place: _Place, call: Call, now_ns: int) -> Refused:
        return Refused(
            "rate_too_large",
            f"a call of {call.tokens} tokens can never pass {place.limit} = {place.bucket.rate.limit} of"
            f" {place.scope.value} {place.name}",
            self._decision(place, call, Action.REFUSE, now_ns),
        )

    def _full(self, call: Call, now_ns: int) -> Refused:
        scope, name = _scope(call)
        decision = Decision(
            at_ns=now_ns,
            control=Control.ADMISSION,
            action=Action.REFUSE,
            scope=scope,
            name=name,
            limit="waiting_max",
            value=self.waiting,
            bound=self._waiting_max,
            run=call.run,
            step=call.step,
        )
        return Refused("queue_full", f"{self.waiting} calls wait already", decision)

    # --- limits by name --------------------------------------------------------------------

    def _route_of(self, call: Call, now_ns: int) -> _Route:
        key = (call.tenant, call.tool, call.provider, call.model, call.cls, call.pool, call.caller, call.target)
        return self._routes.get(key) or self._make_route(key, now_ns)

    def _make_route(self, key: tuple[str, ...], now_ns: int) -> _Route:
        tenant, tool, provider, model, cls, pool, caller, target = key
        limits = self.limits
        if len(self._routes) + len(self._places) >= self._trim_at:
            self._trim(now_ns)
        names = {
            Scope.TENANT: tenant,
            Scope.CLASS: cls,
            Scope.POOL: pool,
            Scope.TOOL: tool,
            Scope.PROVIDER: provider,
            Scope.MODEL: f"{provider}/{model}" if model else "",
            Scope.PAIR: f"{caller}>{target}" if target else "",
        }
        breakers = self._found("breaker", [(rule.scope, rule.name) for rule in limits.breakers], names)
        heads = self._found("bulkhead", [(rule.scope, rule.name) for rule in limits.bulkheads], names)
        adaptive = None
        if model:
            by_class = {Scope.MODEL: f"{cls}/{provider}/{model}"}
            if self._named(("aimd", Scope.MODEL, by_class[Scope.MODEL], "")) is not None:
                adaptive = self._place("aimd", Scope.MODEL, by_class[Scope.MODEL], "")
                heads = (*heads, adaptive)
        rates: list[_Place] = []
        for rate in dict.fromkeys((rule.scope, rule.rate.text) for rule in limits.rates):
            name = names[rate[0]]
            key_of = ("rate", rate[0], name, rate[1])
            if name and self._named(key_of) is not None:
                rates.append(self._place(*key_of))
        route = _Route(limits.weights.get(tenant, 1), breakers, heads, adaptive, tuple(rates), not heads and not rates)
        self._routes[key] = route
        return route

    def _found(self, kind: str, rules: list[tuple[Scope, str]], names: dict[Scope, str]) -> tuple[_Place, ...]:
        found = []
        for scope in dict.fromkeys(scope for scope, _ in rules):
            name = names[scope]
            if name and self._named((kind, scope, name, "")) is not None:
                found.append(self._place(kind, scope, name, ""))
        return tuple(found)

    def _named(self, key: tuple[str, Scope, str, str]) -> Any:
        """The rule for a name: the exact one, else that for all."""
        kind, scope, name, unit = key
        limits = self.limits
        rules: dict[str, Any]
        if kind == "rate":
            rules = {rule.name: rule for rule in limits.rates if (rule.scope, rule.rate.text) == (scope, unit)}
        elif kind == "aimd":
            rules = {rule.name: rule for rule in limits.aimd}
            name = name.partition("/")[2]  # without the class
        else:
            of_kind: tuple[Any, ...] = limits.breakers if kind == "breaker" else limits.bulkheads
            rules = {rule.name: rule for rule in of_kind if rule.scope is scope}
        return rules.get(name, rules.get("*"))

    def _place(self, kind: str, scope: Scope, name: str, unit: str) -> _Place:
        key = (kind, scope, name, unit)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(kind, _CONTROL[kind], scope, name)
            self._set(place, key)
        return place

    def _set(self, place: _Place, key: tuple[str, Scope, str, str]) -> None:
        """Give a place the numbers of its rule."""
        rule = self._named(key)
        if place.kind == "rate":
            place.limit = rule.rate.text
            place.tokens = rule.rate.unit == "tokens"
            if place.bucket is _BUCKET:
                place.bucket = Bucket(rule.rate)
            else:
                place.bucket.resize(rule.rate)
        elif place.kind == "breaker":
            place.limit = "failures"
            if place.breaker is _BREAKER or place.breaker.limits != rule.limits:
                place.breaker = Breaker(rule.limits)
        elif place.kind == "aimd":
            place.limit = "at_once"
            if place.head is _HEAD or place.head.limits != rule.limits:  # type: ignore[attr-defined]
                held = place.head.held
                place.head = Aimd(rule.limits)
                place.head.held = held
        else:
            place.limit = "at_once"
            if place.head is _HEAD:
                place.head = Bulkhead(rule.limit, rule.kept_pct)
            else:
                place.head.kept_pct = rule.kept_pct
                place.head.resize(rule.limit)

    def _trim(self, now_ns: int) -> None:
        """Let go of names that nobody uses; their adaptive limits begin anew."""
        self._routes.clear()
        self._of_tools.clear()
        for key in [key for key, place in self._places.items() if place.idle(now_ns)]:
            del self._places[key]
        # Not at every call: those that are left are in use.
        self._trim_at = len(self._places) + 2 * self.limits.names_max

    def _reroute(self, ticket: Ticket, now_ns: int) -> None:
        ticket.route = self._route_of(ticket.call, now_ns)

    # --- time ------------------------------------------------------------------------------

    def _clock(self, now_ns: int) -> int:
        """The clock went back: a little, and time stands still; or it was set, and every moment moves along."""
        delta = now_ns - self._now_ns
        if delta > -_SET_BACK_NS:
            return self._now_ns
        for place in self._places.values():
            if place.bucket is not _BUCKET:
                place.bucket.shift(delta)
            if place.breaker is not _BREAKER:
                place.breaker.shift(delta)
            if place.pause_ns:
                place.pause_ns += delta
            if place.wake_ns != _NEVER:
                place.wake_ns += delta
        self._wakes = [(at_ns + delta, number, place) for at_ns, number, place in self._wakes]
        self._later = [(at_ns + delta, number, ticket) for at_ns, number, ticket in self._later]
        self._now_ns = now_ns
        return now_ns


_CONTROL: Final = {
    "rate": Control.RATE,
    "breaker": Control.BREAKER,
    "aimd": Control.CONCURRENCY,
    "bulkhead": Control.BULKHEAD,
}
#: Limits of the other side, which a `Retry-After` speaks of.
_OTHER_SIDE: Final = frozenset({Scope.TOOL, Scope.PROVIDER, Scope.MODEL})


def _scope(call: Call) -> tuple[Scope, str]:
    """What a decision about the call itself names."""
    if call.provider:
        return Scope.PROVIDER, call.provider
    if call.tool:
        return Scope.TOOL, call.tool
    return Scope.TENANT, call.tenant
