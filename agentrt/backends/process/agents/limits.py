"""Bounds of agent processes."""

import msgspec

MIB = 1 << 20


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in ns, memory in bytes."""

    processes_max: int = 64
    reserved: int = 8  # places of those that only tiers 0 and 1 may take, and half of them only tier 0
    guests_max: int = 100_000  # that have a process or wait for one
    starts_max: int = 4  # processes that are not ready yet, at once
    start_timeout_ns: int = 30_000_000_000  # until it is ready
    notice_ns: int = 50_000_000  # from SIGUSR1 until it is stopped, for the policy snapshot
    idle_slot_ns: int = 40_000_000  # in a CPU slot without using the CPU, after which the slot is another's
    unwind_ns: int = 200_000_000  # CPU time, to come to the unwinding and again for it
    unwind_wall_ns: int = 10_000_000_000  # the same in wall time
    exit_ns: int = 1_000_000_000  # from its last line until it is ended
    fuel_per_us: int = 1_000  # of CPU time
    kills_max: int = 5  # of one run's process by others (kill -9, OOM), before the run ends for that
    discards_max: int = 3  # of one run in a row, before its process is stopped instead
    stalls_max: int = 3  # states that one run hands over because its memory is used up, before that ends it
    request_bytes_max: int = MIB
    result_bytes_max: int = 4 * MIB
    inflight_max: int = 10_000  # unanswered steps of one run
    output_bytes_kept: int = 8_192  # of stdout and stderr: the end
    confined: bool = True
