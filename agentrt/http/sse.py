"""A run's journal as server-sent events: what was, then what comes, until the run has ended.

The id of an event is the number of its record, so a client that comes back with Last-Event-ID misses nothing and sees
nothing twice. Nothing is held for a client: what it has not taken is in the journal, and one that does not read is cut
after `STALL_S`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentrt import records as r
from agentrt.runtime import Runtime
from agentrt.stores.base import Store

PAGE_RECORDS: Final = 200
DATA_BYTES_MAX: Final = 64 * 2**10
KEEPALIVE_S: Final = 15.0
STALL_S: Final = 30.0

_encode: Final = msgspec.json.Encoder().encode


def run_events(runtime: Runtime, run_id: str, after: int) -> Response:
    """The events of the run with a number above ``after``."""
    return _Stream(
        _events(runtime, run_id, after),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


class _Stream(StreamingResponse):
    """Gives up a client that does not take what it is sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_stall(message: Any) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_or_stall)
        except* TimeoutError:
            pass  # the server closes the connection, which it finds unfinished


async def _events(runtime: Runtime, run_id: str, after: int) -> AsyncIterator[bytes]:
    grown = asyncio.Event()
    stop = await runtime.watch_run(run_id, grown.set)
    try:
        yield b"retry: 1000\n\n"
        while True:
            grown.clear()  # before the look
            records: list[r.Record] = await runtime.read_store(
                lambda store, seq=after: _page(store, run_id, seq)  # type: ignore[misc]
            )
            for record in records:
                after = record.seq
                yield event_of(record)
                if isinstance(record, r.RunEnded):
                    return
            if records and isinstance(records[-1], r.Exported):
                return  # it goes on elsewhere
            if len(records) == PAGE_RECORDS:
                continue
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    await grown.wait()
            except TimeoutError:
                yield b": still here\n\n"
    finally:
        stop()


def _page(store: Store, run_id: str, after: int) -> list[r.Record]:
    return store.read_records(run_id, after, PAGE_RECORDS)


def event_of(record: r.Record) -> bytes:
    """A record as an event: its kind, its number, and what people and programs may want of it."""
    kind, data = describe(record)
    data = {"seq": record.seq, "at": record.at_ns / 1e9} | data
    text = _encode(data)
    if len(text) > DATA_BYTES_MAX:
        text = _encode(
            {key: value for key, value in data.items() if not isinstance(value, msgspec.Raw)} | {"cut": True}
        )
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (record.seq, kind.encode(), text)


def describe(record: r.Record) -> tuple[str, dict[str, Any]]:
    """Kind and members. Inputs, requests and seeds stay inside; results of steps are in the list of steps."""
    match record:
        case r.RunAccepted():
            return "accepted", {"agent": record.agent, "tenant": record.tenant, "tier": record.base_tier}
        case r.StepPrepared():
            return "step_prepared", {"step": record.path, "op": record.op, "attempt": record.attempt}
        case r.StepCommitted() if record.op == "emit" and record.result is not None:
            return "emit", {"step": record.path, "data": msgspec.Raw(record.result)}
        case r.StepCommitted():
            return "step_committed", {"step": record.path, "op": record.op, "ok": record.ok, "attempt": record.attempt}
        case r.StepAborted() | r.StepEvicted() | r.OutcomeUnknown():
            return _NAMES[type(record)], {"step": record.path, "reason": record.reason}
        case r.Waiting():
            return "waiting", {"reason": record.reason, "step": record.path, "detail": record.detail}
        case r.Resumed():
            return "resumed", {"step": record.path}
        case r.Spawned():
            return "spawned", {"step": record.path, "child": record.child, "detached": record.detached}
        case r.Checkpoint():
            return "checkpoint", {"segment": record.segment}
        case r.FrameTaken():
            return "frame_taken", {"frame": record.frame}
        case r.TierChanged():
            return "tier_changed", {"tier": record.tier, "reason": record.reason}
        case r.CancelRequested():
            return "cancel_requested", {"reason": record.reason}
        case r.Ending():
            return "ending", {"towards": record.towards, "reason": record.reason}
        case r.LockBroken():
            return "lock_broken", {"lock": record.lock}
        case r.Upgraded():
            return "upgraded", {"pins": record.pins}
        case r.RunEnded():
            return "ended", {
                "state": record.state,
                "result": None if record.result is None else msgspec.Raw(record.result),
                "error": None if record.error is None else msgspec.Raw(record.error),
            }
        case r.Exported():
            return "exported", {"export_id": record.export_id}
        case r.Imported():
            return "imported", {"export_id": record.export_id}


_NAMES: Final[dict[type, str]] = {
    r.StepAborted: "step_aborted",
    r.StepEvicted: "step_evicted",
    r.OutcomeUnknown: "outcome_unknown",
}
