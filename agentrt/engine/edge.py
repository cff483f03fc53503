"""Refusals at the edge: a door that would have to read a request before it asks for a place is told before that
there is none.

What is refused so costs the control loop nothing, which urgent requests want: it is answered from the last refusal of
the same kind, by the thread of the door, as long as that is fresh and its bound still full. So every `_FRESH_NS` one
request goes the whole way, and brings a new time to come back; so does whatever may repeat an accepted one, and is
answered with its run. Each refusal is told all the same, by the loop, a little later.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from agentrt.errors import QueueFullError
from agentrt.flow.admission import Admission, Refusal
from agentrt.flow.decisions import Decision

#: How long an answer may be given again.
_FRESH_NS: Final = 250_000_000
_LATER_S: Final = 0.3
_TOLD_PER_TURN: Final = 64
_UNTOLD_MAX: Final = 10_000
#: Tenants whose last refusal is known.
_TENANTS_MAX: Final = 1_000


class Edge:
    """``tell``: one was refused, on the loop. ``admission`` is asked for what is full."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        admission: Admission,
        monotonic_ns: Callable[[], int],
        tell: Callable[[Decision], None],
    ) -> None:
        self._loop = loop
        self._admission = admission
        self._monotonic_ns = monotonic_ns
        self._tell = tell
        self._last: dict[str, tuple[int, QueueFullError, Decision]] = {}  # by tenant, "" for the node
        #: Appended to by doors, taken from by the loop: what has been refused and not told.
        self._untold: deque[Decision] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def refused(self, refusal: Refusal, error: QueueFullError, decision: Decision) -> None:
        """Somebody was refused in the ordinary way. On the loop."""
        kind = refusal.limit.partition(".")[0]
        if kind not in ("node", "tenant"):
            return
        if len(self._last) >= _TENANTS_MAX:
            self._last.clear()
        self._last[decision.name if kind == "tenant" else ""] = self._monotonic_ns(), error, decision
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(_LATER_S, self._tell_some)

    def refuse(self, tier: int, tenant: str, repeats: Callable[[], bool] | None = None) -> QueueFullError | None:
        """Whether a request of the tenant at this tier or a lower one is refused without being read. ``repeats`` is
        asked, of those who would be, whether it may be the repeat of an accepted one: then it is read. Any thread."""
        full = self._admission.shut(tier, tenant)
        if full is None or len(self._untold) >= _UNTOLD_MAX:
            return None
        found = self._last.get(tenant if full == "tenant" else "")
        if found is None or self._monotonic_ns() - found[0] > _FRESH_NS:
            return None
        if repeats is not None and repeats():
            return None
        _, error, decision = found
        self._untold.append(decision)
        return error.for_another()

    def close(self) -> None:
        """Tells what has not been told."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._untold:
            self._tell(self._untold.popleft())

    def _tell_some(self) -> None:
        self._timer = None
        if self._closed:
            return
        for _ in range(min(len(self._untold), _TOLD_PER_TURN)):
            self._tell(self._untold.popleft())
        now = self._monotonic_ns()
        if self._untold:
            self._timer = self._loop.call_later(0, self._tell_some)
        elif any(now - at_ns <= 2 * _FRESH_NS for at_ns, _, _ in self._last.values()):  # more may be refused
            self._timer = self._loop.call_later(_LATER_S, self._tell_some)
