"""Bounds of the Python backend."""

import msgspec

MIB = 1 << 20


class PythonLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in ns, memory in bytes."""

    hosts_max: int = 64  # processes, spares included
    hosts_per_domain_max: int = 4  # of one tenant, bundle and tier; those that a run has to itself not counted
    runs_per_host_max: int = 256  # bounds what has to be brought back when one of them takes the host with it
    runs_per_host_good: int = 16  # above it a further host is preferred, while there are any
    guests_max: int = 100_000
    spares: int = 1  # of each bundle in use, started ahead
    starts_max: int = 4  # hosts that are starting at once
    quantum_ns: int = 5_000_000  # CPU time of one activation
    quantum_wall_ns: int = 40_000_000  # of one activation that is not stopped
    hang_ns: int = 10_000_000_000  # in a slot without using the CPU, after which the host is ended
    fuel_per_us: int = 1_000  # of CPU time
    memory_bytes_max: int = 512 * MIB  # data of one host
    request_bytes_max: int = MIB
    result_bytes_max: int = 4 * MIB
    answers_bytes_max: int = 256 * 1024  # of one run, kept to bring it back in another host without its journal
    inflight_max: int = 10_000  # unanswered steps of one run
    start_timeout_ns: int = 30_000_000_000  # of a template with its imports, and of a host
    idle_timeout_ns: int = 60_000_000_000  # of a host without runs
    deaths_max: int = 5  # of hosts in a row by one agent version, before it is quarantined
    kills_max: int = 5  # of a run's host by others (kill -9, OOM) while it was executing, before it ends for that
    nice: int = 19
    uid_base: int = 0  # of root's node: users of hosts, from this one on; 0: as the node
    hash_seed: int = 2_654_435_761  # PYTHONHASHSEED; part of a run's pins, so it must stay as it is for a store
    allow_unsandboxed: bool = False  # run agents without landlock and seccomp
    environment: tuple[str, ...] = ()  # further variables of the node that agents may see
