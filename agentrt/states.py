"""The durable states of runs and steps and the transitions between them, as data.

QUEUED, RUNNING and PREEMPTED are the scheduler's view of ACTIVE; they are shown to people and never journaled.
Terminal states absorb: nothing leads out of them. That a retry's attempt counts, which records make a transition and
what else they need is `fold`'s business.
"""

from enum import StrEnum
from typing import Final


class RunState(StrEnum):
    ACTIVE = "ACTIVE"
    WAITING = "WAITING"
    ENDING = "ENDING"  # unwinding on its own small allowance, towards a terminal state
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    LOOP_DETECTED = "LOOP_DETECTED"
    EXPORTED = "EXPORTED"  # it left for another store, or comes back; nobody runs it


class StepState(StrEnum):
    PREPARED = "PREPARED"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    UNCOMMITTED_EVICTED = "UNCOMMITTED_EVICTED"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"


#: What a WAITING run waits for.
WAIT_REASONS: Final = frozenset(
    {
        "step",
        "approval",
        "event",
        "timer",
        "child",
        "lock",
        "rate",
        "quota",
        "breaker",
        "pool",
        "space",
        "operator",
    }
)

#: How a step's tool must be settled when nobody saw the outcome.
STEP_KINDS: Final = frozenset({"pure", "keyed", "reconcilable", "at_most_once"})

TERMINAL: Final = frozenset(
    {
        RunState.SUCCEEDED,
        RunState.FAILED,
        RunState.CANCELLED,
        RunState.TIMED_OUT,
        RunState.BUDGET_EXHAUSTED,
        RunState.LOOP_DETECTED,
    }
)

#: Steps that were started and not settled; recovery owes each an answer.
OPEN: Final = frozenset({StepState.PREPARED, StepState.UNCOMMITTED_EVICTED, StepState.OUTCOME_UNKNOWN})

_R, _S = RunState, StepState

#: None is "does not exist yet". A run with nothing to unwind may end without passing through ENDING; only a run
#: that is running can succeed. WAITING to WAITING changes the reason, ENDING to ENDING where it unwinds. What was
#: EXPORTED goes on in the state it was in.
RUN_TRANSITIONS: Final[dict[RunState | None, frozenset[RunState]]] = {
    None: frozenset({_R.ACTIVE}),
    _R.ACTIVE: frozenset({_R.WAITING, _R.ENDING, _R.EXPORTED}) | TERMINAL,
    _R.WAITING: frozenset({_R.ACTIVE, _R.WAITING, _R.ENDING, _R.EXPORTED}) | (TERMINAL - {_R.SUCCEEDED}),
    _R.ENDING: TERMINAL | {_R.ENDING, _R.EXPORTED},
    _R.EXPORTED: frozenset({_R.ACTIVE, _R.WAITING, _R.ENDING}),
} | {terminal: frozenset() for terminal in TERMINAL}

#: None to COMMITTED is a step without phase one. A step is prepared again only after it is known that it had no
#: effect (ABORTED), was ended by the runtime (UNCOMMITTED_EVICTED) or lost (OUTCOME_UNKNOWN); its key stays. From
#: ABORTED to COMMITTED: given up, the error is its outcome.
STEP_TRANSITIONS: Final[dict[StepState | None, frozenset[StepState]]] = {
    None: frozenset({_S.PREPARED, _S.COMMITTED}),
    _S.PREPARED: frozenset({_S.COMMITTED, _S.ABORTED, _S.UNCOMMITTED_EVICTED, _S.OUTCOME_UNKNOWN}),
    _S.ABORTED: frozenset({_S.PREPARED, _S.COMMITTED}),
    _S.UNCOMMITTED_EVICTED: frozenset({_S.PREPARED, _S.COMMITTED, _S.ABORTED, _S.OUTCOME_UNKNOWN}),
    _S.OUTCOME_UNKNOWN: frozenset({_S.PREPARED, _S.COMMITTED, _S.ABORTED}),
    _S.COMMITTED: frozenset(),
}


def can_change_run(old: RunState | None, new: RunState) -> bool:
    """Whether a run may go from ``old`` (None: it does not exist) to ``new``."""
    return new in RUN_TRANSITIONS[old]


def can_change_step(old: StepState | None, new: StepState) -> bool:
    """Whether a step may go from ``old`` (None: never seen) to ``new``."""
    return new in STEP_TRANSITIONS[old]
