"""A run's steps as its journal has them."""

from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.fold import Step as Folded
from agentrt.fold import fold
from agentrt.http.types import Step, StepPage
from agentrt.runtime import Runtime
from agentrt.stores.base import Store

#: A request or result of more bytes is left out.
SHOWN_BYTES_MAX: Final = 16 * 2**10


class _Named(msgspec.Struct):
    tool: str | None = None


_decode_named: Final = msgspec.json.Decoder(_Named).decode


async def page_of_steps(runtime: Runtime, run_id: str, after: int, limit: int) -> StepPage:
    """Steps of the run's present segment, in the order in which they began, after the first ``after``."""

    def look(store: Store) -> list[Folded]:
        records = store.read_records(run_id)
        return [*fold(records).steps.values()] if records else []

    steps: list[Folded] = await runtime.read_store(look)
    page = steps[after : after + limit]
    more = after + limit < len(steps)
    return StepPage(steps=[step_of(step) for step in page], next=after + limit if more else None)


def step_of(step: Folded) -> Step:
    """A step as the API shows it."""
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
        request=_shown(step.request),
        result=_shown(step.result),
    )


def _shown(data: bytes | None) -> msgspec.Raw | msgspec.UnsetType:
    return msgspec.UNSET if data is None or len(data) > SHOWN_BYTES_MAX else msgspec.Raw(data)
