"""A run's steps as its journal has them."""

from typing import Final

import msgspec

from agentrt import records as r
from agentrt.decoding import UNREADABLE
from agentrt.fold import Step as Folded
from agentrt.fold import fold
from agentrt.http.types import Step, StepPage
from agentrt.records import Cost
from agentrt.runtime import Runtime
from agentrt.stores.base import Store

#: A request or result of more bytes is left out.
SHOWN_BYTES_MAX: Final = 16 * 2**10


class _Named(msgspec.Struct):
    tool: str | None = None


_decode_named: Final = msgspec.json.Decoder(_Named).decode


async def page_of_steps(runtime: Runtime, run_id: str, after: int, limit: int) -> StepPage:
    """Steps of the run's present segment, in the order in which they began, after the first ``after``."""

    def look(store: Store) -> tuple[list[Folded], Ends]:
        records = store.read_records(run_id)
        return ([*fold(records).steps.values()], ends_of(records)) if records else ([], {})

    steps, ends = await runtime.read_store(look)
    page = steps[after : after + limit]
    more = after + limit < len(steps)
    return StepPage(steps=[step_of(step, ends) for step in page], next=after + limit if more else None)


#: Path of a step -> when it was settled (Unix ns), and what its outcome has cost.
Ends = dict[str, tuple[int, Cost]]


def ends_of(records: list[r.Record]) -> Ends:
    """Of a journal: the steps that are settled, whatever the outcome."""
    ends: Ends = {}
    for record in records:
        match record:
            case r.StepCommitted():
                ends[record.path] = (record.at_ns, record.cost)
            case r.StepAborted() | r.StepEvicted() | r.OutcomeUnknown():
                ends[record.path] = (record.at_ns, Cost())
            case r.StepPrepared():
                ends.pop(record.path, None)  # once more
    return ends


def step_of(step: Folded, ends: Ends) -> Step:
    """A step as the API shows it."""
    ended_ns, cost = ends.get(step.path, (0, Cost()))
    tool = None
    if step.op == "tool.call" and step.request is not None:
        try:
            tool = _decode_named(step.request).tool
        except UNREADABLE:
            pass
    return Step(
        path=step.path,
        op=step.op,
        state=step.state.value,
        kind=step.kind,
        tool=tool,
        attempt=step.attempt,
        ok=step.ok,
        started_at=step.prepared_ns / 1e9 if step.prepared_ns else None,
        ended_at=ended_ns / 1e9 if ended_ns else None,
        cost_fuel=cost.fuel,
        cost_slot_ns=cost.slot_ns,
        cost_micro_usd=cost.micro_usd,
        cost_tokens=cost.tokens,
        request=_shown(step.request),
        result=_shown(step.result),
    )


def _shown(data: bytes | None) -> msgspec.Raw | msgspec.UnsetType:
    return msgspec.UNSET if data is None or len(data) > SHOWN_BYTES_MAX else msgspec.Raw(data)
