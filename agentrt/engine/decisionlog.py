"""What flow control has decided lately: counts for metrics, and the decisions about each run for its history.

Loop thread only; bounded; of this life of the node. What a decision made of a run stands in its journal: its waits with
their reasons, its refused steps with their errors, its end with the evidence.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from agentrt.flow.decisions import Decision

#: Runs of which decisions are kept, those decided about last.
RUNS_MAX: Final = 2_000
#: Of each, the latest.
PER_RUN_MAX: Final = 50


class DecisionLog:
    """``counted``: by control, action and scope."""

    def __init__(self, runs_max: int = RUNS_MAX, per_run_max: int = PER_RUN_MAX) -> None:
        self._runs_max = runs_max
        self._per_run_max = per_run_max
        self._of_runs: OrderedDict[str, deque[Decision]] = OrderedDict()
        self.counted: Final[dict[tuple[str, str, str], int]] = {}

    def __iter__(self) -> Iterator[Decision]:
        """Those that are kept, the oldest first."""
        return iter(sorted((each for kept in self._of_runs.values() for each in kept), key=lambda each: each.at_ns))

    def __len__(self) -> int:
        """Decisions that are kept."""
        return sum(map(len, self._of_runs.values()))

    def add(self, decision: Decision) -> None:
        label = decision.control._value_, decision.action._value_, decision.scope._value_  # quicker than `value`
        self.counted[label] = self.counted.get(label, 0) + 1
        run_id = decision.run
        if run_id is None:
            return
        kept = self._of_runs.get(run_id)
        if kept is None:
            kept = self._of_runs[run_id] = deque(maxlen=self._per_run_max)
            if len(self._of_runs) > self._runs_max:
                self._of_runs.popitem(last=False)
        else:
            self._of_runs.move_to_end(run_id)
        kept.append(decision)

    def of_run(self, run_id: str) -> list[Decision]:
        """The latest about the run, in order; [] if there was none, or it is too long ago."""
        return [*self._of_runs.get(run_id, ())]
