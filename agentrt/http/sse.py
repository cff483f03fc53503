"""A run's journal as server-sent events: what was, then what comes, until the run has ended.

The id of an event is the number of its record, so a client that comes back with Last-Event-ID misses nothing and sees
nothing twice. Nothing is held for a client but one page of records (and, bounded, what a model is just answering): what
it has not taken is in the journal, and one that does not read is cut by the server. `Streams` bounds how many there are
and ends them all when the node stops.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentrt import records as r
from agentrt.engine.modelsteps import Streamed
from agentrt.errors import ClosedError, QueueFullError
from agentrt.runtime import Runtime
from agentrt.stores.base import Store

PAGE_RECORDS: Final = 50
DATA_BYTES_MAX: Final = 64 * 2**10
KEEPALIVE_S: Final = 15.0
#: Of answers that a slow client has not been sent.
TEXT_CHARS_MAX: Final = 256 * 2**10

_encode: Final = msgspec.json.Encoder().encode


class Streams:
    """The streams there are. One loop's."""

    def __init__(self, streams_max: int, per_tenant_max: int) -> None:
        self._streams_max = streams_max
        self._per_tenant_max = per_tenant_max
        self._of_tenant: Counter[str] = Counter()
        self._wakers: set[asyncio.Event] = set()
        self._waits: set[asyncio.Timeout] = set()
        self.closed = False

    def __len__(self) -> int:
        return len(self._wakers)

    def check(self, tenant: str) -> None:
        """Raises QueueFullError, ClosedError."""
        if self.closed:
            raise ClosedError("the node is stopping")
        if len(self._wakers) >= self._streams_max:
            raise QueueFullError(f"there are {self._streams_max} streams of events", limit="http.streams_max")
        if self._of_tenant[tenant] >= self._per_tenant_max:
            raise QueueFullError(
                f"this tenant has {self._per_tenant_max} streams of events", limit="http.streams_per_tenant_max"
            )

    @contextlib.contextmanager
    def entered(self, tenant: str) -> Iterator[asyncio.Event]:
        """One of them, while it lasts; what is given wakes it up. Raises as `check`."""
        self.check(tenant)
        waker = asyncio.Event()
        self._wakers.add(waker)
        self._of_tenant[tenant] += 1
        try:
            yield waker
        finally:
            self._wakers.discard(waker)
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    @contextlib.asynccontextmanager
    async def wait(self, timeout_s: float) -> AsyncIterator[None]:
        """A client waits for one answer for so long, or until the node stops. Raises TimeoutError then."""
        async with asyncio.timeout(0 if self.closed else timeout_s) as scope:
            self._waits.add(scope)
            try:
                yield
            finally:
                self._waits.discard(scope)

    def close(self) -> None:
        """End them all, and what waits for answers: their clients come back to whoever serves then."""
        self.closed = True
        for waker in self._wakers:
            waker.set()
        for scope in self._waits:
            scope.reschedule(asyncio.get_running_loop().time())


def run_events(
    runtime: Runtime,
    streams: Streams,
    tenant: str,
    run_id: str,
    after: int,
    allowed: Callable[[], bool],
    text: bool = False,
) -> Response:
    """The events of the run with a number above ``after``, for a client of ``tenant``, as long as it is ``allowed``;
    ``text``: what models answer it, too, as it comes. Raises QueueFullError, ClosedError."""
    streams.check(tenant)
    return Stream(_events(runtime, streams, tenant, run_id, after, allowed, text))


class _Texts:
    """What models have answered and the client has not been sent: bounded, the oldest goes."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[Streamed] = deque()
        self._chars = 0
        self._lost = False

    def add(self, text: Streamed) -> None:
        self._waiting.append(text)
        self._chars += len(text.text)
        while self._chars > TEXT_CHARS_MAX:
            self._chars -= len(self._waiting.popleft().text)
            self._lost = True
        self._wake()

    def take(self) -> list[bytes]:
        """As events, without an id, since no record has them; pieces of one answer together."""
        events = []
        while self._waiting:
            first = self._waiting.popleft()
            pieces = [first.text]
            while self._waiting and self._waiting[0].path == first.path and self._waiting[0].attempt == first.attempt:
                pieces.append(self._waiting.popleft().text)
            data = {"step": first.path, "attempt": first.attempt, "text": "".join(pieces)}
            data |= {"cut": True} if self._lost else {}
            self._lost = False
            events.append(b"event: text\ndata: %b\n\n" % _encode(data))
        self._chars = 0
        return events


class Stream(StreamingResponse):
    """Lets go of its events as soon as the client is gone, and not when garbage is collected."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* (QueueFullError, ClosedError):
            pass  # the server closes the connection, which it finds unfinished
        finally:
            await self._events.aclose()


async def _events(
    runtime: Runtime, streams: Streams, tenant: str, run_id: str, after: int, allowed: Callable[[], bool], text: bool
) -> AsyncGenerator[bytes, None]:
    with contextlib.ExitStack() as stack:
        grown = stack.enter_context(streams.entered(tenant))
        stack.callback(await runtime.watch_run(run_id, grown.set))
        texts = _Texts(grown.set)
        if text:
            stack.callback(await runtime.watch_text(run_id, texts.add))
        yield b"retry: 1000\n\n"
        while not streams.closed and allowed():
            grown.clear()  # before the look
            for event in texts.take():  # before the record of the whole answer
                yield event
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
