"""Callers, a gate and a provider in virtual time: what flow control does to a whole, measured without a clock.

Used by the plots of docs/flow-control.md and by the tests that hold the same figures to bounds.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from agentrt.flow.decisions import Decision
from agentrt.flow.gate import SUCCESS, Call, Gate, Moved, Outcome, Refused, State, Ticket, Waiting
from agentrt.flow.limits import GateLimits
from agentrt.flow.retry import Again, Failure

S: Final = 10**9
START_NS: Final = 1_700_000_000 * S


class Provider:
    """Allows ``limit`` requests in any ``window_ns``, answers the others with 429, and takes ``latency_ns``. ``down``:
    spans in which nobody answers. ``places``: at once; 0: any number."""

    def __init__(
        self,
        limit: int,
        window_ns: int,
        latency_ns: int = S // 5,
        *,
        retry_after: bool = False,
        down: tuple[tuple[int, int], ...] = (),
        places: int = 0,
    ) -> None:
        self.limit = limit
        self.window_ns = window_ns
        self.latency_ns = latency_ns
        self.retry_after = retry_after
        self.down = down
        self.places = places
        self.busy = 0
        self.log: list[tuple[int, str, str]] = []  # (ns, tenant, answer) of every attempt
        self._lately: deque[int] = deque()

    def answer(self, call: Call, now_ns: int) -> Failure | None:
        """What the attempt will get."""
        while self._lately and self._lately[0] <= now_ns - self.window_ns:
            self._lately.popleft()
        failure = None
        if any(start <= now_ns - START_NS < end for start, end in self.down):
            failure = Failure.TRANSPORT
        elif len(self._lately) >= self.limit or (self.places and self.busy >= self.places):
            failure = Failure.RATE
        else:
            self._lately.append(now_ns)
        self.log.append((now_ns, call.tenant, "ok" if failure is None else failure.value))
        return failure

    def retry_after_ns(self, now_ns: int) -> int | None:
        return self._lately[0] + self.window_ns - now_ns if self.retry_after and self._lately else None

    def most_in_a_window(self) -> int:
        """The most attempts in any one window."""
        times = [at_ns for at_ns, _, _ in self.log]
        most, first = 0, 0
        for last, at_ns in enumerate(times):
            while times[first] <= at_ns - self.window_ns:
                first += 1
            most = max(most, last - first + 1)
        return most


class Done(msgspec.Struct, frozen=True):
    """How a call ended: ``failure`` None: it succeeded; "refused": the gate never let it begin."""

    call: Call
    at_ns: int
    failure: str | None


class World:
    """Virtual time from `START_NS`. All that happens follows from the seed."""

    def __init__(self, limits: GateLimits, seed: int = 1) -> None:
        self.gate = Gate(limits)
        self.now_ns = START_NS
        self.random = random.Random(seed)
        self.done: list[Done] = []
        self.decisions: list[Decision] = []
        self.waiting_most = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._granted: dict[Ticket, Callable[[Ticket], None]] = {}

    def after(self, ns: int, then: Callable[[], None]) -> None:
        """Have ``then`` happen in ``ns``."""
        self._number += 1
        heapq.heappush(self._events, (self.now_ns + ns, self._number, then))

    def call(self, call: Call, provider: Provider, then: Callable[[Done], None] | None = None) -> None:
        """One call with all its attempts; ``then`` follows its end."""
        self._attempt(call, provider, 0, then)

    def run(self, until_ns: int | None = None) -> None:
        """Until nothing is left to happen, or for so long."""
        end_ns = None if until_ns is None else START_NS + until_ns
        while True:
            event_ns = self._events[0][0] if self._events else None
            gate_ns = self.gate.next_ns()
            next_ns = min((at for at in (event_ns, gate_ns) if at is not None), default=None)
            if next_ns is None or (end_ns is not None and next_ns > end_ns):
                return
            self.now_ns = max(self.now_ns, next_ns)
            if event_ns is not None and event_ns <= self.now_ns:
                heapq.heappop(self._events)[2]()
            else:
                self._moved(self.gate.due(self.now_ns))

    def _attempt(self, call: Call, provider: Provider, not_before_ns: int, then: Callable[[Done], None] | None) -> None:
        def begin(ticket: Ticket) -> None:
            if ticket.state is State.REFUSED:
                self._end(call, "refused", then)
                return
            failure = provider.answer(call, self.now_ns)
            provider.busy += 1
            self.after(self._latency(provider, failure), lambda: end(ticket, failure))

        def end(ticket: Ticket, failure: Failure | None) -> None:
            provider.busy -= 1
            after = provider.retry_after_ns(self.now_ns) if failure is Failure.RATE else None
            outcome = SUCCESS if failure is None else Outcome(failure, retry_after_ns=after, draw=self.random.random())
            moved = self.gate.finish(ticket, outcome, self.now_ns)
            retry = moved.retry
            self._moved(moved)
            if isinstance(retry, Again):
                again = msgspec.structs.replace(call, attempt=retry.number)
                self._attempt(again, provider, retry.at_ns, then)
            else:
                self._end(call, None if failure is None else failure.value, then)

        answer = self.gate.request(call, self.now_ns, not_before_ns)
        if isinstance(answer, Refused):
            self.decisions.append(answer.decision)
            self._end(call, "refused", then)
        elif isinstance(answer, Waiting):
            self._granted[answer.ticket] = begin
            self.waiting_most = max(self.waiting_most, self.gate.waiting)
        else:
            begin(answer)

    def _latency(self, provider: Provider, failure: Failure | None) -> int:
        """A refusal is quick, as a provider's edge is; an answer takes its time, give or take a fifth."""
        if failure is Failure.RATE:
            return S // 50
        return int(provider.latency_ns * (0.8 + 0.4 * self.random.random()))

    def _moved(self, moved: Moved) -> None:
        self.decisions += moved.decisions
        for ticket in moved.tickets:
            self._granted.pop(ticket)(ticket)

    def _end(self, call: Call, failure: str | None, then: Callable[[Done], None] | None) -> None:
        done = Done(call, self.now_ns, failure)
        self.done.append(done)
        if then is not None:
            then(done)
