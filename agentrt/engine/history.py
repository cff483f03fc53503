"""A run's journal made ready for replay: the fold, and for each recorded step what its guest was told and when."""

from collections.abc import Sequence
from typing import NamedTuple

from agentrt.errors import StoreCorruptError
from agentrt.fold import RunFold, Step, fold
from agentrt.records import Record, StepCommitted, StepPrepared
from agentrt.states import StepState
from agentrt.stores.frames import Kept


class Recorded(NamedTuple):
    """A step of the journal and the time (Unix ns) of the record that put it into its state."""

    step: Step
    at_ns: int

    @property
    def committed(self) -> bool:
        return self.step.state is StepState.COMMITTED


class History(NamedTuple):
    """``steps`` by path; ``journal_bytes`` counts requests and results of the segment."""

    run: RunFold
    steps: dict[str, Recorded]
    journal_bytes: int
    frame: Kept | None = None  # that its guest may go on from


def read_history(run_id: str, records: Sequence[Record]) -> History:
    """From all records of a run. Raises StoreCorruptError naming the run if they are none that a run can have."""
    try:
        run = fold(records)
        run.run()
    except StoreCorruptError as error:
        raise StoreCorruptError(error.message, run=run_id) from error
    size = 0
    for record in records:
        if type(record) is StepPrepared:
            size += len(record.request)
        elif type(record) is StepCommitted:
            size += len(record.result or b"")
    steps = {path: Recorded(step, records[step.seq - 1].at_ns) for path, step in run.steps.items()}
    return History(run, steps, size)
