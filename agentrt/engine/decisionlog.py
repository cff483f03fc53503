"""What flow control has decided lately: counts for metrics, and the decisions about each run for its history.

The latest `PER_RUN_MAX` about a run are rows of the store, which go with the run's next commit, whatever that is for.
None is written for a decision alone: a run whose node is killed has lost those since its last commit. They are erased
with their run. Of the runs decided about last they are in memory as well. Loop thread only; bounded.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.flow.decisions import Decision
from agentrt.stores.base import DECISIONS, Row, Store
from agentrt.stores.keys import decision_key, run_prefix

#: Runs of which decisions are in memory, those decided about last.
RUNS_MAX: Final = 2_000
#: Of each run, the latest.
PER_RUN_MAX: Final = 50

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[int, Decision]).decode


class _Kept:
    """``unsaved``: how many of the latest no commit has taken along."""

    __slots__ = ("latest", "unsaved")

    def __init__(self, most: int) -> None:
        self.latest: deque[Decision] = deque(maxlen=most)
        self.unsaved = 0


class DecisionLog:
    """``counted``: by control, action and scope. ``unsaved``: runs about which something was decided since their last
    commit."""

    def __init__(self, runs_max: int = RUNS_MAX, per_run_max: int = PER_RUN_MAX) -> None:
        self._runs_max = runs_max
        self._per_run_max = per_run_max
        self._of_runs: OrderedDict[str, _Kept] = OrderedDict()
        self._next: dict[str, int] = {}  # number of the next row, of runs in memory that have any
        self.unsaved: Final[set[str]] = set()
        self.counted: Final[dict[tuple[str, str, str], int]] = {}

    def __iter__(self) -> Iterator[Decision]:
        """Those in memory, the oldest first."""
        found = (each for kept in self._of_runs.values() for each in kept.latest)
        return iter(sorted(found, key=lambda each: each.at_ns))

    def __len__(self) -> int:
        """Decisions in memory."""
        return sum(len(kept.latest) for kept in self._of_runs.values())

    def add(self, decision: Decision) -> None:
        label = decision.control._value_, decision.action._value_, decision.scope._value_  # quicker than `value`
        self.counted[label] = self.counted.get(label, 0) + 1
        run_id = decision.run
        if run_id is None:
            return
        kept = self._of_runs.get(run_id)
        if kept is None:
            kept = self._of_runs[run_id] = _Kept(self._per_run_max)
            if len(self._of_runs) > self._runs_max:
                self.unsaved.discard(self._of_runs.popitem(last=False)[0])
        else:
            self._of_runs.move_to_end(run_id)
        kept.latest.append(decision)
        kept.unsaved = min(kept.unsaved + 1, self._per_run_max)
        self.unsaved.add(run_id)

    # --- rows ---------------------------------------------------------------------------

    def take(self, run_id: str) -> tuple[Row, ...]:
        """The rows of those in ``unsaved`` about the run, which is in memory: for its next commit."""
        self.unsaved.discard(run_id)
        kept = self._of_runs[run_id]
        first = self._next.get(run_id, 0)
        new = islice(kept.latest, len(kept.latest) - kept.unsaved, None)
        rows = tuple(
            Row(DECISIONS, decision_key(run_id, number % self._per_run_max), _encode((number, decision)))
            for number, decision in enumerate(new, first)
        )
        self._next[run_id], kept.unsaved = first + kept.unsaved, 0
        return rows

    def returned(self, run_id: str, count: int) -> None:
        """The run is in memory again; so many were `saved`."""
        self._next.pop(run_id, None)
        if count:
            self._next[run_id] = count

    def left(self, run_id: str) -> None:
        """The run is not in memory any more."""
        self._next.pop(run_id, None)

    # --- what has been decided -------------------------------------------------------------

    def of_run(self, run_id: str, saved: tuple[Decision, ...] = ()) -> list[Decision]:
        """The latest about the run, in order, with what was ``saved`` of it; [] if there was none."""
        kept = self._of_runs.get(run_id)
        if kept is None:
            return [*saved]
        known = frozenset(kept.latest)
        return [*(each for each in saved if each not in known), *kept.latest][-self._per_run_max :]


def saved(store: Store, run_id: str) -> tuple[int, tuple[Decision, ...]]:
    """On a reader thread: how many decisions about the run were ever saved, and the latest, in order. Raises
    StoreCorruptError."""
    try:
        rows = store.scan_rows(DECISIONS, run_prefix(run_id), limit=PER_RUN_MAX)
        found = sorted((_decode(value) for _, value in rows), key=lambda each: each[0])
    except UNREADABLE as error:
        raise StoreCorruptError(f"a decision about {run_id} cannot be read: {error}") from error
    return (found[-1][0] + 1 if found else 0), tuple(decision for _, decision in found)
