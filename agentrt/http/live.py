"""The node as the dashboard shows it, once a second, to whoever may look.

One sample serves all who look, and is taken only while somebody does. Figures are sums since the start of the node:
whoever wants rates subtracts two.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from agentrt.backends.base import Slice
from agentrt.engine.flowview import FlowView
from agentrt.http.keys import ANY_TENANT, KeyRing, StoredKey
from agentrt.http.sse import Stream, Streams
from agentrt.observe.histogram import Buckets
from agentrt.observe.prometheus import waits_of
from agentrt.runtime import Runtime

PERIOD_S: Final = 1.0
#: How long a busy control loop is waited for before a sample says that it does not answer.
_ASK_S: Final = 5.0
_QUANTILES: Final = (0.5, 0.95, 0.99)
#: The second of slices that a sample shows, and how many of all slots: some 80 bytes each, to everybody who looks.
_SHOWN_NS: Final = 1_000_000_000
_SLICES_MAX: Final = 800
_SLICES_MIN: Final = 16  # of each slot


class TierNow(msgspec.Struct, frozen=True):
    """``waits``: for a CPU slot, as counts by the bounds of `NodeNow.wait_bounds_ns` and what is above them.
    ``run_ms``: p50, p95 and p99 of runs that ended, since the start; null: none has."""

    queued: int
    picks: int
    slot_ns: int
    waits: tuple[int, ...]
    accepted: int
    ended: dict[str, int]
    run_ms: tuple[float | None, ...]


class SliceNow(msgspec.Struct, frozen=True):
    """A slice of the last second: when it began, from the beginning of that second, and how long it took. ``end``:
    `agentrt.backends.base.Slice`. ``run``: null of a host's and of runs that have ended."""

    from_us: int
    took_us: int
    tier: int
    end: str
    run: str | None
    host: bool


class WorkerNow(msgspec.Struct, frozen=True):
    """A CPU slot. Time is counted when a slice ends. ``last``: slices of the last second, the longest of them if there
    were very many: ``last_count``."""

    slices: int
    preemptions: int
    demotions: int
    slot_ns: tuple[int, ...]  # by tier
    last: tuple[SliceNow, ...]
    last_count: int


class TargetNow(msgspec.Struct, frozen=True):
    name: str
    runs: int
    good: int
    objective: float
    latency_ms: int


class NodeNow(msgspec.Struct, frozen=True):
    """``answers``: whether the control loop does; if not, the rest is what was last known."""

    at: float
    answers: bool
    accepting: bool
    heartbeat_age_ms: int
    long_turns: int
    live: int
    parked: int
    recovering: int
    stuck: int
    wait_bounds_ns: tuple[int, ...]
    tiers: tuple[TierNow, ...]
    workers: tuple[WorkerNow, ...]
    targets: tuple[TargetNow, ...]
    tool_failures: int
    tool_calls: int
    cost_micro_usd: int
    tokens: int
    flow: FlowView


_encode: Final = msgspec.json.Encoder().encode


class Live:
    """One loop's."""

    def __init__(self, runtime: Runtime, keys: KeyRing, streams: Streams) -> None:
        self._runtime = runtime
        self._keys = keys
        self._streams = streams
        self._last: NodeNow | None = None
        self._taking: asyncio.Task[NodeNow | None] | None = None
        self._next_s = 0.0

    def stream(self, key: StoredKey) -> Stream:
        """The samples from now on, as long as there is the key. Raises QueueFullError, ClosedError."""
        self._streams.check(key.tenant)
        return Stream(self._events(key))

    async def _events(self, key: StoredKey) -> AsyncGenerator[bytes, None]:
        with self._streams.entered(key.tenant) as closing:
            yield b"retry: 1000\n\n"
            last: NodeNow | None = None
            while not self._streams.closed and self._keys.has(key.id):
                now = await self._sample()
                if now is None:
                    yield b": the control loop does not answer\n\n"
                elif now is not last:  # a timer may ring a little early
                    last = now
                    yield b"id: %d\nevent: node\ndata: %b\n\n" % (round(now.at * 1e3), _encode(_for(key, now)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.005, self._next_s - time.monotonic())):
                        await closing.wait()

    async def _sample(self) -> NodeNow | None:
        """A sample no older than the period; whoever comes first has it taken."""
        if self._taking is None and time.monotonic() >= self._next_s:
            self._taking = asyncio.create_task(self._take())
            self._taking.add_done_callback(self._taken)
        if self._taking is not None:
            # Shielded: who asked first may be gone before it is there, and the others wait for it.
            self._last = await asyncio.shield(self._taking)
        return self._last

    def _taken(self, task: asyncio.Task[NodeNow | None]) -> None:
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; there may be nobody any more
        self._taking = None
        self._next_s = time.monotonic() + PERIOD_S

    async def _take(self) -> NodeNow | None:
        runtime = self._runtime
        try:
            async with asyncio.timeout(_ASK_S):
                since_ns = time.monotonic_ns() - _SHOWN_NS
                found, flow = await asyncio.gather(runtime.statistics(), runtime.flow_view())
                most = max(_SLICES_MIN, _SLICES_MAX // len(found.backends["wasm"]["workers"]))
                slots = await runtime.slices(since_ns, most)
        except TimeoutError:
            last = self._last
            if last is None:
                return None
            return msgspec.structs.replace(
                last, at=time.time(), answers=False, heartbeat_age_ms=runtime.loop_watch.age_ms()
            )
        measured, core = runtime.meter.snapshot(), found.backends["wasm"]
        waits = waits_of(core)
        tiers = []
        for number, wait in enumerate(waits):
            tier = str(number)
            ended: dict[str, int] = {}
            for (of_tier, _, state), count in measured.ended.items():
                if of_tier == tier:
                    ended[state] = ended.get(state, 0) + count
            tiers.append(
                TierNow(
                    core["queued"][number],
                    core["pops"][number],
                    core["slot_ns"][number],
                    wait.counts,
                    sum(count for (of_tier, _), count in measured.accepted.items() if of_tier == tier),
                    ended,
                    _run_ms([each for (of_tier, _), each in measured.run_ns.items() if of_tier == tier]),
                )
            )
        return NodeNow(
            at=time.time(),
            answers=True,
            accepting=runtime.accepting,
            heartbeat_age_ms=runtime.loop_watch.age_ms(),
            long_turns=found.loop_long_turns,
            live=found.engine.live,
            parked=found.engine.parked,
            recovering=found.engine.recovering,
            stuck=found.engine.stuck,
            wait_bounds_ns=waits[0].bounds,
            tiers=tuple(tiers),
            workers=tuple(
                WorkerNow(
                    each["slices"],
                    each["preemptions"],
                    each["demotions"],
                    tuple(each["slot_ns"]),
                    tuple(_slice(slice, since_ns) for slice in slot.slices),
                    slot.total,
                )
                for each, slot in zip(core["workers"], slots, strict=True)
            ),
            targets=tuple(
                TargetNow(
                    each.target.name, each.runs, each.good, each.target.objective, each.target.latency_ns // 1_000_000
                )
                for each in measured.targets
            ),
            tool_failures=found.tools.failures,
            tool_calls=found.tools.calls,
            cost_micro_usd=measured.micro_usd,
            tokens=measured.tokens,
            flow=flow,
        )


def _run_ms(classes: list[Buckets]) -> tuple[float | None, ...]:
    counts = tuple(map(sum, zip(*(each.counts for each in classes), strict=True)))
    merged = Buckets(classes[0].bounds, counts, 0)
    return tuple(None if (found := merged.quantile(q)) is None else found / 1e6 for q in _QUANTILES)


def _slice(slice: Slice, since_ns: int) -> SliceNow:
    start_ns = max(slice.start_ns, since_ns)
    return SliceNow(
        (start_ns - since_ns) // 1000,
        max(0, slice.end_ns - start_ns) // 1000,
        slice.tier,
        slice.end,
        slice.run_id,
        slice.foreign,
    )


def _for(key: StoredKey, now: NodeNow) -> NodeNow:
    """What this key may see."""
    if key.sees(ANY_TENANT):
        return now
    nameless = tuple(
        msgspec.structs.replace(worker, last=tuple(msgspec.structs.replace(slice, run=None) for slice in worker.last))
        for worker in now.workers
    )
    return msgspec.structs.replace(now, flow=flow_for(key, now.flow), workers=nameless)


def flow_for(key: StoredKey, flow: FlowView) -> FlowView:
    """What this key may see: names of other tenants, of their agents and tools only if it may act for any."""
    if key.sees(ANY_TENANT):
        return flow
    own = tuple(each for each in flow.budgets if key.sees(each.tenant))
    return msgspec.structs.replace(flow, budgets=own, breakers=())
