"""What does a node do with a hundred times what it can serve?

The node takes 40 runs at once, of a second each. First only an urgent run is asked for ten times a second, then beside
40 others a second, which is all that the node can take, then beside 4,000, of all other tiers, for 30 s each.
``urgent_accept_idle_ms``, ``urgent_accept_full_ms``, ``urgent_accept_ms``: from asking for the urgent run until it is
accepted, durably, in the store of the test; medians, ``…_p99_ms`` their 99th percentile. What the second has more than
the first is the price of work that is done, on the disk above all; what the third has more than the second is that of
refusing.
``rss_growth_mib``: by how much the process, asker included, is larger in the last third than in the first.
``refused_pct``: of the others. ``unanswered``: asked for and neither accepted nor refused; 0, or it is no measurement.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from agentrt import Run, Runtime, Via
from agentrt.config import load_config
from agentrt.errors import QueueFullError
from perf.bench import run_async
from perf.report import Report, disk, machine

_GUEST = Path(__file__).parents[1] / "examples/guests/sequence.wasm"
_SECOND = [[3, {"seconds": 1}]]
_PLACES = 40
_ASKED_PER_S = 4_000
_CHUNKS_PER_S = 100
_AT_ONCE = Via("perf")
_NO_ENV: dict[str, str] = {}


class Seen(NamedTuple):
    """Of one measurement. Times in s since its start; what the node can take is asked for from ``full_s`` on, the
    overload begins at ``from_s`` and ends at ``until_s``."""

    urgent: list[tuple[float, float]]  # when, s until it was accepted
    inside: list[tuple[float, float]]  # accepted and not ended
    refused: list[tuple[float, float]]  # by second
    rss_bytes: list[tuple[float, float]]
    retry_after_s: list[tuple[float, float]]
    asked: int
    answered: int
    full_s: float
    from_s: float
    until_s: float


async def overflow(folder: Path, idle_s: float, overload_s: float, full_s: float = 0.0) -> Seen:
    """See above; then ``idle_s`` without the others again."""
    settings = {
        "store.path": str(folder / "store"), "store.force_place": True, "wasm.cache_path": str(folder / "cache"),
        "limits.hot_ms": 60_000, "scheduler.queue_items_max": _PLACES, "flow.queue_tier_pct": (100, 75, 70, 60),
        "flow.admission_wait_ms": (60_000, 0, 0, 0),
    }  # fmt: skip
    seen = Seen([], [], [], [], [], 0, 0, idle_s, idle_s + full_s, idle_s + full_s + overload_s)
    asked = answered = 0
    made = Runtime(config=load_config(arguments=settings, env=_NO_ENV))
    await made.start()
    await made.register("sequence", _GUEST)
    start_s = time.monotonic()

    def now_s() -> float:
        return time.monotonic() - start_s

    async def urgent() -> None:
        while (at_s := now_s()) < seen.until_s + idle_s:
            await made.submit("sequence", [], tier="urgent")  # a place is kept for it; else it would wait
            seen.urgent.append((at_s, now_s() - at_s))
            await asyncio.sleep(max(0, at_s + 0.1 - now_s()))

    async def look() -> None:
        while (at_s := now_s()) < seen.until_s + idle_s:
            found = await made.statistics()
            seen.inside.append((at_s, float(found.engine.live)))
            seen.rss_bytes.append((at_s, float(_rss_bytes())))
            await asyncio.sleep(0.25)

    async def others() -> None:
        nonlocal asked, answered
        await asyncio.sleep(idle_s)
        by_second: dict[int, int] = {}
        number = 0
        while (at_s := now_s()) < seen.from_s:
            await made.submit_many("sequence", [_SECOND], tier=1, via=_AT_ONCE)
            await asyncio.sleep(max(0, at_s + 1 / _PLACES - now_s()))
        while (at_s := now_s()) < seen.until_s:
            number += 1
            count = _ASKED_PER_S // _CHUNKS_PER_S
            found = await made.submit_many("sequence", [_SECOND] * count, tier=1 + number % 3, via=_AT_ONCE)
            refused = [error for error in found if isinstance(error, QueueFullError)]
            asked += count
            answered += len(refused) + sum(isinstance(run, Run) for run in found)
            by_second[int(at_s)] = by_second.get(int(at_s), 0) + len(refused)
            if refused and refused[-1].retry_after_s is not None:
                seen.retry_after_s.append((at_s, refused[-1].retry_after_s))
            await asyncio.sleep(max(0, at_s + 1 / _CHUNKS_PER_S - now_s()))
        seen.refused.extend((second + 0.5, float(many)) for second, many in sorted(by_second.items()))

    try:
        await asyncio.gather(urgent(), look(), others())
    finally:
        await made.close()
    return seen._replace(asked=asked, answered=answered)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(tiny: bool) -> Report:
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        seen = run_async(overflow(Path(folder), *((0.5, 1.0, 1.0) if tiny else (5.0, 30.0, 30.0))))
    idle = sorted(took for at, took in seen.urgent if not seen.full_s <= at < seen.until_s)
    full = sorted(took for at, took in seen.urgent if seen.full_s <= at < seen.from_s)
    busy = sorted(took for at, took in seen.urgent if seen.from_s <= at < seen.until_s)
    third = (seen.until_s - seen.from_s) / 3
    early = [size for at, size in seen.rss_bytes if seen.from_s <= at < seen.from_s + third]
    late = [size for at, size in seen.rss_bytes if seen.until_s - third <= at < seen.until_s]
    figures = {
        "urgent_accept_idle_ms": statistics.median(idle) * 1e3,
        "urgent_accept_full_ms": statistics.median(full) * 1e3,
        "urgent_accept_ms": statistics.median(busy) * 1e3,
        "urgent_accept_idle_p99_ms": idle[int(len(idle) * 0.99)] * 1e3,
        "urgent_accept_full_p99_ms": full[int(len(full) * 0.99)] * 1e3,
        "urgent_accept_p99_ms": busy[int(len(busy) * 0.99)] * 1e3,
        "rss_growth_mib": (statistics.median(late) - statistics.median(early)) / 2**20,
        "refused_pct": 100 * sum(many for _, many in seen.refused) / seen.asked,
        "unanswered": float(seen.asked - seen.answered),
    }
    return Report("overflow", figures, {"capacity_per_s": float(_PLACES)}, machine() | disk())
