"""What a caller of tools gets, and what the pool of hosts may use."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

MIB = 1 << 20


class ToolOutcome(NamedTuple):
    """How one call ended.

    ``payload`` is JSON: the result if ``ok``, else ``{"code", "message"}`` with the same ``code``. ``cost_ns`` is the
    wall time of the execution as its host saw it, 0 if unknown. ``host_died``: the call was given to a host that ended
    before it answered, so nobody saw whether it had its effect (OUTCOME_UNKNOWN).

    Codes: tool_args, tool_failed (it raised), tool_timeout, tool_result (no JSON), tool_result_too_big, tool_import
    (the tool cannot be loaded), tool_host_start (no host comes up; the call never began), tool_host_died.
    """

    ok: bool
    payload: bytes
    code: str | None
    cost_ns: int
    host_died: bool


Done = Callable[[ToolOutcome], None]


class ToolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a `ToolPool`."""

    hosts_max: int = 64  # processes, spares included
    hosts_per_domain_max: int = 4  # of one tenant and tier
    calls_per_host_max: int = 256  # running at once in one host
    sync_calls_per_host_max: int = 16  # of these, sync ones: each has a thread
    starts_max: int = 64  # hosts that are starting at once
    spares: int = 1  # hosts started ahead, without a tenant yet
    queue_items_max: int = 100_000  # calls accepted and not ended
    queue_bytes_max: int = 256 * MIB  # their arguments
    request_bytes_max: int = MIB
    result_bytes_max: int = 4 * MIB
    host_memory_bytes_max: int = 2 << 30  # data segment of one host; 0: no limit
    host_nice: int = 19
    start_timeout_ns: int = 30_000_000_000
    start_attempts_max: int = 3  # failed starts in a row, after which waiting calls are answered tool_host_start
    idle_timeout_ns: int = 60_000_000_000
    turn_ns: int = 1_000_000_000  # a host serves one domain at least so long before it makes room for another
    cancel_grace_ns: int = 500_000_000  # for an async tool to end after its cancellation, before its host is ended
    backoff_min_ns: int = 50_000_000  # after a host died, doubling up to
    backoff_max_ns: int = 10_000_000_000


class ToolStatistics(NamedTuple):
    """A snapshot of a pool's counters."""

    hosts: int
    spares: int
    running: int
    queued: int
    queued_bytes: int  # of running and queued calls
    calls: int
    failures: int
    timeouts: int
    hosts_started: int
    hosts_died: int  # not ended by the pool
