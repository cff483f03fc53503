"""What this machine gets out of agentrt: runs accepted and ended, how fast they are accepted, and how soon urgent work
is done beside guests that never yield. Seconds, with the settings in force; perf/ is for figures that are compared."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator

import msgspec

from agentrt.config import Config
from agentrt.demo.figures import percentile
from agentrt.doctor import selftest
from agentrt.errors import AgentrtError
from agentrt.run import Run
from agentrt.runtime import Runtime
from agentrt.tiers import Tier

_AT_ONCE = 256
_SHARES = 3  # of the time: many at once, one after the other, urgent ones beside hogs
_HOGS_PER_SLOT = 4


class Figures(msgspec.Struct, frozen=True):
    """Durable runs of an agent that does nothing. ``runs_per_s``: to their ends, many at once. ``accept_…``: one after
    the other, until it is durable. ``urgent_…``: the same at tier 0 to the end, while ``hogs`` runs of tier 3 that
    never yield have every CPU slot."""

    runs_per_s: float
    accept_p50_ms: float
    accept_p99_ms: float
    urgent_p50_ms: float
    urgent_p99_ms: float
    hogs: int


def measure(config: Config, seconds: float, tell: Callable[[str], None]) -> Figures:
    """Takes about so long. ``config`` names a store, or one is made in a temporary folder. Raises StoreError kinds,
    ConfigError."""
    with _folder(config) as used, Runtime(config=used, recover=False) as runtime:
        runtime.register_sync("agentrt.bench.noop", selftest.module(selftest.RETURNS))
        runtime.register_sync("agentrt.bench.hog", selftest.module(selftest.LOOPS))
        tell("many runs at once")
        runs_per_s = _many(runtime, seconds / _SHARES)
        tell("one after the other")
        accepted = _one_by_one(runtime, seconds / _SHARES, int(Tier.INTERACTIVE), to_end=False)
        tell("urgent ones beside guests that never yield")
        hogs = _HOGS_PER_SLOT * len(runtime.statistics_sync().backends["wasm"]["workers"])
        busy = _accepted(runtime.submit_many_sync("agentrt.bench.hog", [None] * hogs, tier=int(Tier.MAINTENANCE)))
        try:
            urgent = _one_by_one(runtime, seconds / _SHARES, int(Tier.CRITICAL), to_end=True)
        finally:
            for run in busy:
                run.cancel_sync("the measurement is over")
            runtime.wait_many_sync(busy)
    return Figures(
        runs_per_s,
        percentile(accepted, 50),
        percentile(accepted, 99),
        percentile(urgent, 50),
        percentile(urgent, 99),
        len(busy),
    )


@contextlib.contextmanager
def _folder(config: Config) -> Iterator[Config]:
    if config.store.kind != "lmdb" or config.store.path:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="agentrt-bench-") as folder:
        yield msgspec.structs.replace(config, store=msgspec.structs.replace(config.store, path=folder))


def _accepted(found: list[Run | AgentrtError]) -> list[Run]:
    for each in found:
        if isinstance(each, AgentrtError):
            raise each
    return [each for each in found if isinstance(each, Run)]


def _many(runtime: Runtime, seconds: float) -> float:
    began_s, count = time.monotonic(), 0
    while (took_s := time.monotonic() - began_s) < seconds or not count:
        runs = _accepted(runtime.submit_many_sync("agentrt.bench.noop", [None] * _AT_ONCE))
        runtime.wait_many_sync(runs)
        count += len(runs)
    return count / took_s


def _one_by_one(runtime: Runtime, seconds: float, tier: int, *, to_end: bool) -> list[float]:
    """Times in ms."""
    end_s = time.monotonic() + seconds
    times: list[float] = []
    while time.monotonic() < end_s or not times:
        began_ns = time.monotonic_ns()
        run = runtime.submit_sync("agentrt.bench.noop", tier=tier)
        if to_end:
            run.wait_sync()
        times.append((time.monotonic_ns() - began_ns) / 1e6)
    return times
