"""What a caller of tools gets, and what the pool of hosts may use."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

MIB = 1 << 20


class ToolOutcome(NamedTuple):
    """How one call ended.

    ``payload`` is JSON: the result if ``ok``, else ``{"code", "message"}`` with the same ``code``. For a call with
    ``reconcile`` it is ``{"found": "yes"|"no"|"unknown", "result": any}``. ``cost_ns`` is the wall time of the
    execution as its process saw it, a batch's divided by its calls, 0 if not known. ``host_died``: the call was given
    to a process that ended before it answered. ``unknown``: nobody saw whether the call had its effect
    (OUTCOME_UNKNOWN): its process died, or its code was stopped by a time-out or a cancel. ``evicted``: the runtime
    ended it, because the node stops; ``unknown`` says whether it had begun. ``fuel``: guest work of calls that are
    guests themselves; with ``cost_ns``, slot time then, it is the step's cost, and counts against the run's fuel.

    Codes: tool_args, tool_failed (it raised), tool_timeout, tool_result (no JSON), tool_result_too_big, tool_import
    (the tool cannot be loaded), tool_unavailable, tool_rate_limited (with ``retry_after_s`` if it is known) and
    tool_conflict (it raised the error of that code),
    tool_secret (a secret is missing, or not for this tool), tool_host_start (no host comes
    up; the call never began), tool_host_died, tool_memory (a native command was killed for memory; with ``memory``, the
    kernel's numbers), sandbox (it cannot be confined here and was not started), cancelled.
    """

    ok: bool
    payload: bytes
    code: str | None
    cost_ns: int
    host_died: bool
    unknown: bool = False
    evicted: bool = False
    fuel: int = 0


def _evicted(unknown: bool) -> ToolOutcome:
    return ToolOutcome(
        False, b'{"code":"tool_evicted","message":"the node stopped"}', "tool_evicted", 0, False, unknown, True
    )


EVICTED_WAITING: Final = _evicted(False)
EVICTED_RUNNING: Final = _evicted(True)


Done = Callable[[ToolOutcome], None]


class ToolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a `ToolPool`, per class of tools; ``starts_max``, ``template`` and ``secret_timeout_ns`` are the
    default class's and hold for all."""

    hosts_max: int = 64  # processes, spares included
    hosts_per_domain_max: int = 4  # of one tenant and tier
    calls_per_host_max: int = 256  # running at once in one host
    sync_calls_per_host_max: int = 16  # of these, sync ones: each has a worker process; a batch is one
    starts_max: int = 64  # hosts that are starting at once
    spares: int = 1  # hosts started ahead, without a tenant yet
    queue_items_max: int = 100_000  # calls accepted and not ended
    queue_bytes_max: int = 256 * MIB  # their arguments
    request_bytes_max: int = MIB
    result_bytes_max: int = 4 * MIB
    host_memory_bytes_max: int = 2 << 30  # data segment of one host; 0: no limit
    host_nice: int = 19
    host_uid_base: int = 0  # of root's node: a user of its own for each host, from this one on; 0: as the node
    start_timeout_ns: int = 30_000_000_000
    start_attempts_max: int = 3  # failed starts in a row, after which waiting calls are answered tool_host_start
    idle_timeout_ns: int = 60_000_000_000
    turn_ns: int = 1_000_000_000  # a host serves one domain at least so long before it makes room for another
    cancel_grace_ns: int = 500_000_000  # for an async tool to end after its cancellation, before its host is ended
    backoff_min_ns: int = 50_000_000  # after a host died, doubling up to
    backoff_max_ns: int = 10_000_000_000
    secret_timeout_ns: int = 10_000_000_000  # for the provider of secrets to answer
    #: How hosts start: forked from a process that has the tools' modules ("import"), that has not ("bare"), or each
    #: from nothing ("exec"). The first two step down by themselves where they do not work.
    template: str = "import"


class ClassStatistics(NamedTuple):
    """The counters of one class of tools; see `ToolStatistics`."""

    hosts: int = 0
    running: int = 0
    queued: int = 0
    queued_bytes: int = 0
    calls: int = 0
    failures: int = 0
    timeouts: int = 0
    hosts_started: int = 0
    hosts_died: int = 0


class ToolStatistics(NamedTuple):
    """A snapshot of the counters of all classes, and by class."""

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
    start_mode: str = ""  # what ``template`` has come to
    classes: Mapping[str, ClassStatistics] = {}  # every class that there may be
    processes: Mapping[str, Any] = MappingProxyType({})  # native ones, once there was a command
