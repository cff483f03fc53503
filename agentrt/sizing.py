"""What the C core gets: the configuration in its own units, with the sizes that depend on the machine worked out.

The mapping limit decides how many guests fit. A memory slot is up to four mappings once used, a stack slot two from the
start, or none where the kernel has light guards (since 6.13). None is ever given back, and a full table makes any
mapping in the process fail, so a fifth of it stays free:

    (0 or 2) * stacks + 4 * memories + margin <= 0.8 * vm.max_map_count
"""

import importlib.util
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

from agentrt.config import Config
from agentrt.errors import ConfigError, EngineError
from agentrt.machine import Machine, read_machine
from agentrt.syscalls import TABLE

if TYPE_CHECKING:
    from agentrt.backends.process.agents.limits import ProcessLimits
    from agentrt.backends.python.limits import PythonLimits
    from agentrt.tools.outcome import ToolLimits

_MS: Final = 1_000_000  # ns
#: Mappings of the process itself: Python, libraries, thread stacks, the store, compiled modules.
MAPS_MARGIN: Final = 2_000
MAPS_PER_STACK: Final = 2
MAPS_PER_MEMORY: Final = 4
#: The kernel's default, if the file cannot be read.
MAP_COUNT_DEFAULT: Final = 65_530
#: 4 GiB slots fit into the address space up to here with room to spare (21,000 map, 30,000 do not).
GUESTS_DERIVED_MAX: Final = 10_000


class EngineLimits(TypedDict):
    """The keyword arguments of ``agentrt._core.compile_module``; the core must be made with the same."""

    guests_max: int
    stacks_max: int
    memory_bytes_max: int
    wasm_stack_bytes: int
    table_elements_max: int
    request_bytes_max: int
    result_bytes_max: int
    inflight_max: int


class CoreParameters(EngineLimits):
    """The keyword arguments of ``agentrt._core.Core``."""

    engine_lib: str
    workers: int
    micro_slice_fuel: int
    quantum_ns: tuple[int, int, int, int]
    queue_items_max: int
    queue_bytes_max: int
    aging_threshold: int
    aging_wait_ns: tuple[int, int, int, int]
    tier0_share_pct: int
    tenants_max: int
    base_tier_ops: int
    nice: int
    pin: bool


def core_parameters(config: Config, machine: Machine | None = None) -> CoreParameters:
    """The core's arguments. Raises ConfigError if the guests do not fit the machine, EngineError without an engine."""
    machine = read_machine() if machine is None else machine
    guests, stacks = pool_sizes(config, machine)
    scheduler, wasm, limits = config.scheduler, config.wasm, config.limits
    return CoreParameters(
        engine_lib=wasm.engine_lib or engine_library(),
        workers=scheduler.workers or machine.workers,
        micro_slice_fuel=scheduler.micro_slice_fuel,
        quantum_ns=_ns(scheduler.quantum_ms),
        guests_max=guests,
        stacks_max=stacks,
        memory_bytes_max=wasm.memory_bytes_max,
        wasm_stack_bytes=wasm.wasm_stack_bytes,
        table_elements_max=wasm.table_elements_max,
        request_bytes_max=limits.request_bytes_max,
        result_bytes_max=limits.result_bytes_max,
        inflight_max=wasm.inflight_max,
        queue_items_max=scheduler.queue_items_max,
        queue_bytes_max=scheduler.queue_bytes_max,
        aging_threshold=scheduler.aging_threshold,
        aging_wait_ns=_ns(scheduler.aging_wait_ms),
        tier0_share_pct=scheduler.tier0_share_pct,
        tenants_max=scheduler.tenants_max,
        # Only a step or a wait returns a demoted task to its base tier; cheap syscalls are work like any other.
        base_tier_ops=sum(1 << row.number for row in TABLE if row.step or row.waits),
        nice=scheduler.worker_nice,
        pin=scheduler.pin,
    )


def engine_limits(parameters: CoreParameters) -> EngineLimits:
    """The part of the core's arguments that compiling needs."""
    return EngineLimits(
        guests_max=parameters["guests_max"],
        stacks_max=parameters["stacks_max"],
        memory_bytes_max=parameters["memory_bytes_max"],
        wasm_stack_bytes=parameters["wasm_stack_bytes"],
        table_elements_max=parameters["table_elements_max"],
        request_bytes_max=parameters["request_bytes_max"],
        result_bytes_max=parameters["result_bytes_max"],
        inflight_max=parameters["inflight_max"],
    )


def tool_limits(config: Config, machine: Machine | None = None, cls: str | None = None) -> "ToolLimits":
    """The bounds of the tool hosts of a class; of those that the configuration does not name, without one."""
    from agentrt.tools.outcome import ToolLimits

    tools, limits = config.tools if cls is None else config.tools.of_class(cls), config.limits
    starts_max = tools.starts_max or max(1, (read_machine() if machine is None else machine).workers // 2)
    return ToolLimits(
        hosts_max=tools.hosts_max,
        hosts_per_domain_max=tools.hosts_per_domain_max,
        calls_per_host_max=tools.calls_per_host_max,
        sync_calls_per_host_max=tools.sync_calls_per_host_max,
        starts_max=starts_max,
        spares=tools.spares,
        queue_items_max=tools.queue_items_max,
        queue_bytes_max=tools.queue_bytes_max,
        request_bytes_max=limits.request_bytes_max,
        result_bytes_max=limits.result_bytes_max,
        host_memory_bytes_max=tools.host_memory_bytes_max,
        host_nice=tools.host_nice,
        host_uid_base=tools.uid_base,
        start_timeout_ns=tools.start_timeout_ms * _MS,
        idle_timeout_ns=tools.idle_timeout_ms * _MS,
        template=tools.template,
    )


def tool_class_limits(config: Config, machine: Machine | None = None) -> "dict[str, ToolLimits]":
    """The bounds of each class that the configuration names."""
    return {cls: tool_limits(config, machine, cls) for cls in config.tools.classes}


def python_limits(config: Config, secret: bytes) -> "PythonLimits":
    """The bounds of the hosts of Python agents; their hash seed follows from the store's secret."""
    from agentrt.backends.python.limits import PythonLimits

    python, limits = config.python, config.limits
    seed = blake2b(secret, digest_size=4, person=b"agentrt hashes").digest()
    return PythonLimits(
        hosts_max=python.hosts_max,
        hosts_per_domain_max=python.hosts_per_domain_max,
        runs_per_host_max=python.runs_per_host_max,
        spares=python.spares,
        quantum_ns=python.quantum_ms * _MS,
        quantum_wall_ns=python.quantum_wall_ms * _MS,
        hang_ns=python.hang_ms * _MS,
        fuel_per_us=python.fuel_per_us,
        memory_bytes_max=python.host_memory_bytes_max,
        request_bytes_max=limits.request_bytes_max,
        result_bytes_max=limits.result_bytes_max,
        answers_bytes_max=python.answers_bytes_max,
        start_timeout_ns=python.start_timeout_ms * _MS,
        idle_timeout_ns=python.idle_timeout_ms * _MS,
        deaths_max=python.deaths_max,
        nice=python.nice,
        uid_base=python.uid_base,
        hash_seed=int.from_bytes(seed, "big"),
        allow_unsandboxed=python.allow_unsandboxed,
    )


def process_limits(config: Config) -> "ProcessLimits":
    """The bounds of agent processes."""
    from agentrt.backends.process.agents.limits import ProcessLimits

    process, limits = config.programs, config.limits
    return ProcessLimits(
        processes_max=process.processes_max,
        reserved=min(process.processes_max // 8, 8),
        starts_max=process.starts_max,
        start_timeout_ns=process.start_timeout_ms * _MS,
        notice_ns=process.notice_ms * _MS,
        fuel_per_us=process.fuel_per_us,
        kills_max=process.kills_max,
        request_bytes_max=limits.request_bytes_max,
        result_bytes_max=limits.result_bytes_max,
        confined=process.confined,
    )


def pool_sizes(config: Config, machine: Machine) -> tuple[int, int]:
    """(guests_max, stacks_max): as configured if that fits, else as many as do. Raises ConfigError."""
    map_count = machine.map_count_max or MAP_COUNT_DEFAULT
    budget = map_count * 4 // 5 - MAPS_MARGIN
    guests, stacks = config.wasm.guests_max, config.wasm.stacks_max
    per_stack = 0 if machine.light_guards else MAPS_PER_STACK
    # Stacks keep their pages: at most a quarter of the memory may end up in those that nobody asked for.
    stacks_in_memory = machine.memory_bytes // 4 // config.wasm.wasm_stack_bytes or 1
    if not machine.memory_bytes:
        stacks_in_memory = GUESTS_DERIVED_MAX
    if not guests and not stacks:
        fitting = budget // (per_stack + MAPS_PER_MEMORY)
        guests = stacks = max(1, min(GUESTS_DERIVED_MAX, stacks_in_memory, fitting))
    elif not guests:
        guests = max(stacks, min(GUESTS_DERIVED_MAX, (budget - per_stack * stacks) // MAPS_PER_MEMORY))
    elif not stacks:
        stacks = min(guests, stacks_in_memory)
    needed = per_stack * stacks + MAPS_PER_MEMORY * guests
    if needed > budget:
        raise ConfigError(
            f"wasm.guests_max {guests} with wasm.stacks_max {stacks} needs {needed + MAPS_MARGIN} mappings, "
            f"and vm.max_map_count {map_count} leaves {max(budget, 0) + MAPS_MARGIN}",
            hint=f"Fewer guests, or sysctl vm.max_map_count={(needed + MAPS_MARGIN) * 5 // 4 + 1}",
        )
    return guests, stacks


def engine_library() -> str:
    """The wasmtime package's own shared library, found without importing the package. Raises EngineError."""
    spec = importlib.util.find_spec("wasmtime")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder).glob("linux-*/_libwasmtime.so")):
            return str(library)
    raise EngineError("the wasmtime package, or its shared library, is not installed", hint="pip install wasmtime")


def _ns(per_tier_ms: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    a, b, c, d = per_tier_ms
    return a * _MS, b * _MS, c * _MS, d * _MS
