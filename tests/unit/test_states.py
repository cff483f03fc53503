import itertools

import pytest

from agentrt.states import (
    OPEN,
    RUN_TRANSITIONS,
    STEP_TRANSITIONS,
    TERMINAL,
    RunState,
    StepState,
    can_change_run,
    can_change_step,
)

# Written out a second time, so that a slip in the table is a difference.
RUN_PAIRS = {
    "- ACTIVE",
    "ACTIVE WAITING",
    "ACTIVE ENDING",
    "ACTIVE SUCCEEDED",
    "ACTIVE FAILED",
    "ACTIVE CANCELLED",
    "ACTIVE TIMED_OUT",
    "ACTIVE BUDGET_EXHAUSTED",
    "ACTIVE LOOP_DETECTED",
    "ACTIVE EXPORTED",
    "WAITING EXPORTED",
    "ENDING EXPORTED",
    "ENDING ENDING",
    "EXPORTED ACTIVE",
    "EXPORTED WAITING",
    "EXPORTED ENDING",
    "WAITING ACTIVE",
    "WAITING WAITING",
    "WAITING ENDING",
    "WAITING FAILED",
    "WAITING CANCELLED",
    "WAITING TIMED_OUT",
    "WAITING BUDGET_EXHAUSTED",
    "WAITING LOOP_DETECTED",
    "ENDING SUCCEEDED",
    "ENDING FAILED",
    "ENDING CANCELLED",
    "ENDING TIMED_OUT",
    "ENDING BUDGET_EXHAUSTED",
    "ENDING LOOP_DETECTED",
}
STEP_PAIRS = {
    "- PREPARED",
    "- COMMITTED",
    "PREPARED COMMITTED",
    "PREPARED ABORTED",
    "PREPARED UNCOMMITTED_EVICTED",
    "PREPARED OUTCOME_UNKNOWN",
    "ABORTED PREPARED",
    "ABORTED COMMITTED",
    "UNCOMMITTED_EVICTED PREPARED",
    "UNCOMMITTED_EVICTED COMMITTED",
    "UNCOMMITTED_EVICTED ABORTED",
    "UNCOMMITTED_EVICTED OUTCOME_UNKNOWN",
    "OUTCOME_UNKNOWN PREPARED",
    "OUTCOME_UNKNOWN COMMITTED",
    "OUTCOME_UNKNOWN ABORTED",
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product([None, *RunState], RunState)))
def test_every_pair_of_run_states(old: RunState | None, new: RunState) -> None:
    allowed = f"{old or '-'} {new}" in RUN_PAIRS
    assert can_change_run(old, new) is allowed


@pytest.mark.parametrize(("old", "new"), list(itertools.product([None, *StepState], StepState)))
def test_every_pair_of_step_states(old: StepState | None, new: StepState) -> None:
    allowed = f"{old or '-'} {new}" in STEP_PAIRS
    assert can_change_step(old, new) is allowed


def test_fault_C24_terminal_states_absorb() -> None:
    assert {state for state, after in RUN_TRANSITIONS.items() if not after} == TERMINAL
    assert {state for state, after in STEP_TRANSITIONS.items() if not after} == {StepState.COMMITTED}


def test_every_state_can_be_reached_and_left_towards_an_end() -> None:
    assert set(RUN_TRANSITIONS) == {None, *RunState}
    assert set(STEP_TRANSITIONS) == {None, *StepState}
    assert set().union(*RUN_TRANSITIONS.values()) == set(RunState)
    assert set().union(*STEP_TRANSITIONS.values()) == set(StepState)
    for state in set(RunState) - TERMINAL - {RunState.EXPORTED}:
        assert RUN_TRANSITIONS[state] & TERMINAL
    for step in set(StepState) - {StepState.COMMITTED}:
        assert StepState.COMMITTED in STEP_TRANSITIONS[step]
    assert set(StepState) - {StepState.COMMITTED, StepState.ABORTED} == OPEN
