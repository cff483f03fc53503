"""The side rows that follow from a run's journal. Pure: checks compare with them, a run that moves takes them along."""

from typing import Final

from agentrt.engine.machine import DEADLINE_PATH, HOLD_PATH, START_PATH
from agentrt.engine.steps import registration
from agentrt.fold import RunFold
from agentrt.records import RunAccepted
from agentrt.stores.base import READY, TIMERS, WAITS, Row
from agentrt.stores.keys import idempotency_row_key, origin_row_key, ready_key, ready_value, timer_key

#: The tables they are in, each of whose rows follows from one run's journal or is a schedule's timer.
FOLLOWING: Final = (READY, TIMERS, WAITS)


def idempotency_keys(accepted: RunAccepted) -> tuple[bytes, ...]:
    """The keys of IDEMPOTENCY under which the run is found: by the request and the event that it was made of."""
    keys: list[bytes] = []
    if accepted.idempotency_key is not None:
        keys.append(idempotency_row_key(accepted.tenant, accepted.idempotency_key))
    if accepted.origin is not None:
        keys.append(origin_row_key(accepted.origin))
    return tuple(keys)


def rows_of(run_id: str, run: RunFold) -> tuple[Row, ...]:
    """Those of READY, TIMERS and WAITS that the run has while nothing of it is under way, with their values."""
    accepted = run.run()
    if run.ended is not None or run.exported is not None:
        return ()
    rows: list[Row] = []
    if run.wait is None or run.wait.reason == "operator":
        key = ready_key(accepted.base_tier, accepted.at_ns, run_id)
        rows.append(Row(READY, key, ready_value(run.pins.get("agent", accepted.version), accepted.agent)))
    if accepted.deadline_ns:
        rows.append(Row(TIMERS, timer_key(accepted.deadline_ns, run_id, DEADLINE_PATH), b"deadline"))
    if run.wait is not None and run.wait.path == START_PATH:
        rows.append(Row(TIMERS, timer_key(accepted.start_ns, run_id, START_PATH), b"start"))
    if run.wait is not None and run.wait.until_ns:
        rows.append(Row(TIMERS, timer_key(run.wait.until_ns, run_id, HOLD_PATH), b"hold"))
    for step in run.open.values():
        if step.op != "tool.call":
            request = step.request or b""
            rows += registration(run_id, accepted.tenant, step.op, step.path, request, step.prepared_ns).rows
    return tuple(rows)
