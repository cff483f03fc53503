"""The configuration: every setting with its type, default, unit, range and effect, in one place.

Values come from four sources, each over the one before: the defaults below, a TOML file, the environment
(``AGENTRT_SECTION__KEY``), arguments. A `Config` that exists is valid: values are checked when a section is made,
relations between settings when the `Config` is made; both raise ConfigError naming the setting and its source.
docs/config.md is generated from this file (see agentrt/reference.py).

Settings are as people write them (ms, MiB); what the C core wants (ns, sizes derived from the machine) is computed
from them in agentrt/sizing.py, once.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec

from agentrt.backends.process.agents.settings import ProgramsConfig
from agentrt.backends.process.settings import CommandConfig, ProcessConfig
from agentrt.errors import ConfigError
from agentrt.http.settings import HttpConfig
from agentrt.ingress.settings import IngressConfig
from agentrt.models.catalog import Catalog
from agentrt.models.settings import ModelConfig, ProfileConfig, ProviderConfig, RouteConfig
from agentrt.node.settings import AgentConfig
from agentrt.observe.labels import CLASSES
from agentrt.observe.settings import LogsConfig, SloConfig, TracesConfig
from agentrt.settings import (
    GIB,
    KIB,
    MIB,
    TIB,
    Overrides,
    Section,
    Tables,
    check_value,
    is_section_name,
    setting,
    types_of,
)

ENV_PREFIX: Final = "AGENTRT_"
#: ``[plugins.NAME]`` belongs to plugins: what may be in it they say (agentrt/hooks.py).
PLUGINS: Final = "plugins"

T = TypeVar("T", bound=msgspec.Struct)

PerTier = tuple[int, int, int, int]


class NodeConfig(Section, frozen=True, kw_only=True):
    """The control plane: its thread, what it waits for, and what `agentrt serve` loads."""

    tables: ClassVar[Mapping[str, type[Section]]] = {"agents": AgentConfig}

    load: Annotated[
        tuple[str, ...],
        setting(
            "What `agentrt serve` loads: Python modules and files, or one function of them (`package.module`, "
            "`file.py:function`), with the agents and tools that they declare, of an agent's function the tools beside "
            "it; and wasm files, each an agent of the file's name.",
            "sources",
        ),
    ] = ()
    agents: Annotated[
        Tables, setting("`[node.agents.NAME]`: agents that `agentrt serve` loads with settings of their own.")
    ] = {}  # noqa: RUF012
    numa_node: Annotated[
        str,
        setting(
            "The NUMA node that `agentrt serve` runs on, with all that it starts: its number, or `auto` for the one "
            "with the most free memory. Empty: wherever its CPUs are. Each node has a store of its own.",
        ),
    ] = ""
    control_nice: Annotated[
        int,
        setting(
            "Niceness of the control thread and the store's writer, where the system permits it. They must "
            "rank above the workers, or answers wait for guests; 0 leaves them as they are.",
            "nice",
            -20,
            19,
        ),
    ] = -10
    control_realtime: Annotated[
        bool,
        setting(
            "Run the control thread under SCHED_RR (reset on fork) where permitted: it then answers in tens"
            " of microseconds beside any load, and a bug that spins in it holds a core.",
        ),
    ] = False
    switch_interval_us: Annotated[
        int,
        setting(
            "How long one Python thread may keep the interpreter from another. Group commits beside a busy "
            "thread take 0.4 ms at 100 us and 5 ms at Python's own default of 5,000 us.",
            "us",
            10,
            5_000,
        ),
    ] = 100
    gc_threshold: Annotated[
        int,
        setting(
            "New objects between two collections of young garbage while a runtime is open; older generations follow "
            "50 and 1,000 times more rarely. Python's own 700 cost a busy node a third of its control loop's time and "
            "pauses of 100 ms. 0 leaves the interpreter's collector as it is.",
            "objects",
            0,
            10_000_000,
        ),
    ] = 50_000
    loop_block_max_ms: Annotated[
        int,
        setting(
            "CPU time that one turn of the control loop may use before it is reported as blocked.",
            "ms",
            1,
            10_000,
        ),
    ] = 20
    policies: Annotated[
        str,
        setting(
            "Names of the policies in force, with commas between them; plugins bring them. They are asked before a run "
            "is accepted and before one goes on that was brought back.",
        ),
    ] = ""
    observers: Annotated[
        tuple[str, ...],
        setting("Observers in force, by name: plugins bring them. They see the life of every run."),
    ] = ()
    notifiers: Annotated[
        tuple[str, ...],
        setting(
            "Notifiers in force, by name: plugins bring them. They are told when runs end or wait for a person, for "
            "as long as the node lives; what must arrive is a callback (docs/http.md)."
        ),
    ] = ()
    close_timeout_ms: Annotated[
        int,
        setting(
            "How long closing waits for steps in flight to be recorded. Runs that go on are picked up again"
            " by the next start.",
            "ms",
            0,
            3_600_000,
        ),
    ] = 5_000


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """CPU slots, tiers and the run queue."""

    workers: Annotated[
        int,
        setting(
            "CPU slots, one worker thread each. 0: as many as this process may use cores.",
            "threads",
            0,
            64,
        ),
    ] = 0
    worker_nice: Annotated[
        int,
        setting(
            "Niceness of the workers. At 19 the control thread wakes up within tens of microseconds beside "
            "them; a foreign process on the same cores then takes nearly all of their time.",
            "nice",
            0,
            19,
        ),
    ] = 19
    pin: Annotated[
        bool,
        setting(
            "Bind each worker to a core of its own. For machines, or cpusets, that run nothing else.",
        ),
    ] = False
    micro_slice_fuel: Annotated[
        int,
        setting(
            "Guest work between two looks at the preemption flag. Less lets urgent work start sooner and "
            "costs every guest more: an interpreter loses 2.7 % at 50,000 and 11 % at 20,000.",
            "fuel",
            1_000,
            10_000_000,
        ),
    ] = 50_000
    quantum_ms: Annotated[
        PerTier,
        setting(
            "Slot time a task may use at its tier before it is demoted to the next one, for tiers 0 to 3. A"
            " step or a wait returns it to the tier it was submitted at.",
            "ms",
            1,
            10**9,
        ),
    ] = (50, 200, 500, 1_000)
    aging_threshold: Annotated[
        int,
        setting(
            "Times a waiting tier may be passed over for a higher one before its head runs as tier 1, for as long "
            "as one of those that passed it, or 1 ms if that is more. Less is fairer to low tiers and weakens the "
            "order of tiers.",
            "picks",
            1,
            1_000_000,
        ),
    ] = 50
    aging_wait_ms: Annotated[
        PerTier,
        setting(
            "Waiting time of a tier's oldest task after which the head of the tier runs as tier 1 for one "
            "quantum, for tiers 0 to 3; 0: never by time. Tiers 0 and 1 do not age.",
            "ms",
            0,
            10**9,
        ),
    ] = (0, 0, 5 * 60_000, 30 * 60_000)
    tier0_share_pct: Annotated[
        int,
        setting(
            "Share of the slot time of one second that tier 0 may take while others have work; above it "
            "tier-0 tasks wait behind them.",
            "%",
            1,
            100,
        ),
    ] = 80
    queue_items_max: Annotated[
        int,
        setting(
            "Tasks that may be admitted and not yet ended. When full, submitting fails with `queue_full` "
            "and nothing is accepted.",
            "tasks",
            1,
            10_000_000,
        ),
    ] = 100_000
    queue_bytes_max: Annotated[
        int,
        setting(
            "Inputs of admitted tasks, in sum; when full, as above.",
            "bytes",
            MIB,
            TIB,
        ),
    ] = 256 * MIB
    tenants_max: Annotated[
        int,
        setting(
            "Tenants that share the slots. Each takes 256 bytes from the start.",
            "tenants",
            1,
            100_000,
        ),
    ] = 10_000


class WasmConfig(Section, frozen=True, kw_only=True):
    """The wasm engine, its pools, and what one guest may take."""

    engine_lib: Annotated[
        str,
        setting(
            "The wasmtime shared library. Empty: the one of the installed `wasmtime` package.",
            "path",
        ),
    ] = ""
    frame_after_ms: Annotated[
        int,
        setting(
            "A guest that leaves memory while its run waits is kept as a frame if it has had this much CPU time since "
            "it began, or went on, and if its module can be captured (`agentrt build`). Else it is replayed.",
            "ms",
            0,
            86_400_000,
        ),
    ] = 20
    frames_bytes_max: Annotated[
        int,
        setting(
            "Disk space for frames, beside the store; what does not fit is replayed. 0: no frames are taken.",
            "bytes",
            0,
            1 << 50,
        ),
    ] = 10 << 30
    replay_fuel_max: Annotated[
        int,
        setting(
            "What bringing a run back by replay may cost. A guest that can be captured (`agentrt build`) has a frame "
            "taken, while it goes on, as soon as it has done more since its last one; one that cannot stays in memory "
            "from then on. 0: anything.",
            "fuel",
            0,
            10**18,
        ),
    ] = 10**10
    guests_max: Annotated[
        int,
        setting(
            "Guests in memory at once. 0: as many as `vm.max_map_count` and memory allow, at most 10,000. More"
            " than the mapping limit allows is refused.",
            "guests",
            0,
            1_000_000,
        ),
    ] = 0
    stacks_max: Annotated[
        int,
        setting(
            "Guests that have started and not ended. 0: as many as `guests_max`. A stack keeps the memory of "
            "the deepest call it ever held, so count `stacks_max` x `wasm_stack_bytes` as spendable.",
            "guests",
            0,
            1_000_000,
        ),
    ] = 0
    memory_bytes_max: Annotated[
        int,
        setting(
            "Linear memory of one guest. A module that declares more is refused; growing beyond fails "
            "inside the guest.",
            "bytes",
            64 * KIB,
            4 * GIB,
        ),
    ] = 512 * MIB
    wasm_stack_bytes: Annotated[
        int,
        setting(
            "Native stack of one guest; deeper recursion traps.",
            "bytes",
            32 * KIB,
            8 * MIB,
        ),
    ] = 128 * KIB
    table_elements_max: Annotated[
        int,
        setting(
            "Elements of one guest's tables (function pointers).",
            "elements",
            1,
            10_000_000,
        ),
    ] = 20_000
    inflight_max: Annotated[
        int,
        setting(
            "Syscalls a guest may have submitted and not yet closed.",
            "syscalls",
            1,
            10_000,
        ),
    ] = 64
    module_bytes_max: Annotated[
        int,
        setting(
            "Size of a module; larger ones are refused before they are read.",
            "bytes",
            KIB,
            GIB,
        ),
    ] = 64 * MIB
    compile_timeout_ms: Annotated[
        int,
        setting(
            "CPU time, and twice that in wall time, for compiling one module in its child process.",
            "ms",
            100,
            3_600_000,
        ),
    ] = 60_000
    compile_memory_bytes_max: Annotated[
        int,
        setting(
            "Memory of that child process.",
            "bytes",
            64 * MIB,
            64 * GIB,
        ),
    ] = 2 * GIB
    cache_path: Annotated[
        str,
        setting(
            "Folder of compiled modules (native code, so it is private to the user: 0700). Empty: "
            "`agentrt/modules` in the user's cache folder.",
            "path",
        ),
    ] = ""
    cache_bytes_max: Annotated[
        int,
        setting(
            "Size of that folder; the longest unused modules go first. 0: keep nothing.",
            "bytes",
            0,
            TIB,
        ),
    ] = GIB


class StoreConfig(Section, frozen=True, kw_only=True):
    """Where runs are kept."""

    kind: Annotated[
        str,
        setting(
            "Which store: `lmdb`, `memory` (lost with the process), or one that a plugin brings.",
        ),
    ] = "lmdb"
    path: Annotated[
        str,
        setting(
            "The store's folder; made if it is missing. Empty, and the kind is `lmdb`: a temporary folder "
            "that goes with the runtime.",
            "path",
        ),
    ] = ""
    force_place: Annotated[
        bool,
        setting(
            "Open the store even on a network or overlay file system. Such file systems may lose or mix up "
            "what was reported durable.",
        ),
    ] = False
    map_bytes: Annotated[
        int,
        setting(
            "Size of the journal's map at first; it grows by doubling.",
            "bytes",
            MIB,
            16 * TIB,
        ),
    ] = 256 * MIB
    map_bytes_max: Annotated[
        int,
        setting(
            "Size at which it stops growing; then the store is full and nothing more is accepted.",
            "bytes",
            MIB,
            16 * TIB,
        ),
    ] = 64 * GIB
    blob_bytes_max: Annotated[
        int,
        setting(
            "Size to which the file of the blobs (inputs, results and states of more than 16 KiB) may grow.",
            "bytes",
            MIB,
            16 * TIB,
        ),
    ] = 64 * GIB
    free_bytes_min: Annotated[
        int,
        setting(
            "Free space on the disk below which nothing more is accepted; what was accepted can then still "
            "be finished.",
            "bytes",
            0,
            TIB,
        ),
    ] = 64 * MIB
    backlog_items_max: Annotated[
        int,
        setting(
            "Batches given to the writer and not yet durable; when full, submitting fails with `queue_full`.",
            "batches",
            1,
            1_000_000,
        ),
    ] = 20_000
    backlog_bytes_max: Annotated[
        int,
        setting(
            "Their size in sum; when full, as above.",
            "bytes",
            MIB,
            64 * GIB,
        ),
    ] = 128 * MIB
    commit_delay_us: Annotated[
        int,
        setting(
            "How long a step's outcome may wait for the next step, to be committed with it in one transaction. "
            "Ten times as long while the store is busy, 250 times while its guest waits for a CPU slot, or has gone on "
            "and the control loop has not heard of it.",
            "us",
            0,
            1_000_000,
        ),
    ] = 200


class ToolsConfig(Section, frozen=True, kw_only=True):
    """Tool hosts: the processes in which Python tools run; and who else executes tools."""

    providers: Annotated[
        tuple[str, ...],
        setting("Tool providers in force beside the built-in one, by name: plugins bring them, and tools with them."),
    ] = ()
    hosts_max: Annotated[
        int,
        setting(
            "Tool host processes, of all tenants together.",
            "processes",
            1,
            1_000,
        ),
    ] = 64
    hosts_per_domain_max: Annotated[
        int,
        setting(
            "Tool host processes of one tenant and tier.",
            "processes",
            1,
            1_000,
        ),
    ] = 4
    calls_per_host_max: Annotated[
        int,
        setting(
            "Calls that one host runs at the same time.",
            "calls",
            1,
            10_000,
        ),
    ] = 256
    sync_calls_per_host_max: Annotated[
        int,
        setting(
            "Of these, calls of tools that are not async: each takes a thread of the host.",
            "calls",
            1,
            1_000,
        ),
    ] = 16
    starts_max: Annotated[
        int,
        setting(
            "Hosts that may be starting at once, the most urgent tier's first. Starting Python takes a quarter of a "
            "second of CPU, and more starts than idle cores keep the workers off them, urgent work included. 0: half "
            "as many as workers fit, at least one.",
            "processes",
            0,
            64,
        ),
    ] = 0
    spares: Annotated[
        int,
        setting(
            "Hosts started ahead, so that a tenant's first call does not wait for Python to start.",
            "processes",
            0,
            64,
        ),
    ] = 1
    queue_items_max: Annotated[
        int,
        setting(
            "Calls accepted and not ended.",
            "calls",
            1,
            10_000_000,
        ),
    ] = 100_000
    queue_bytes_max: Annotated[
        int,
        setting(
            "Their arguments, in sum.",
            "bytes",
            MIB,
            TIB,
        ),
    ] = 256 * MIB
    host_memory_bytes_max: Annotated[
        int,
        setting(
            "Memory (data segment) of one host; 0: no limit.",
            "bytes",
            0,
            TIB,
        ),
    ] = 2 * GIB
    host_nice: Annotated[
        int,
        setting(
            "Niceness of the hosts.",
            "nice",
            0,
            19,
        ),
    ] = 19
    uid_base: Annotated[
        int,
        setting(
            "A node of root runs each host as a user of its own, one of the 100,000 from this one on, in an empty "
            "folder that is his. They must be nobody else's, and any user must be able to read the interpreter, "
            "installed packages and the tools' code. 0: as the node, with all that its user may.",
            "uid",
            0,
            2**31 - 1_000_000,
        ),
    ] = 0
    idle_timeout_ms: Annotated[
        int,
        setting(
            "How long a host without calls is kept.",
            "ms",
            0,
            86_400_000,
        ),
    ] = 60_000
    start_timeout_ms: Annotated[
        int,
        setting(
            "How long a host may take to start and import its tools.",
            "ms",
            100,
            600_000,
        ),
    ] = 30_000
    template: Annotated[
        Literal["import", "bare", "exec"],
        setting(
            "How hosts start: forked from a process that has imported the tools, from one that has not, or each from "
            "nothing. The first two step down by themselves where they do not work.",
        ),
    ] = "import"
    classes: Annotated[
        Overrides,
        setting(
            "Classes of tools, `[tools.classes.NAME]`: bounds of their own for a built-in one (`tool`, `code`, "
            "`model`), or a further one for `@tool(cls=NAME)`. What a class does not set is as above.",
        ),
    ] = {}  # noqa: RUF012

    commands: Annotated[
        Tables, setting("`[tools.commands.NAME]`: native commands that agents may call as the tool `NAME`.")
    ] = {}  # noqa: RUF012

    tables: ClassVar[Mapping[str, type[Section]]] = {"commands": CommandConfig}
    overridable: ClassVar[tuple[str, ...]] = (
        "hosts_max",
        "hosts_per_domain_max",
        "calls_per_host_max",
        "sync_calls_per_host_max",
        "spares",
        "queue_items_max",
        "queue_bytes_max",
        "host_memory_bytes_max",
        "host_nice",
        "uid_base",
        "idle_timeout_ms",
    )

    def of_class(self, name: str) -> "ToolsConfig":
        """What holds for a class of tools."""
        return msgspec.structs.replace(self, classes={}, commands={}, **self.classes.get(name, {}))


class SecretsConfig(Section, frozen=True, kw_only=True):
    """Where the values behind `secret://NAME` come from: one of the two, or nowhere."""

    folder: Annotated[
        str,
        setting(
            "Folder with a file `TENANT/NAME` for each, `NAME` for the node's own (keys of model providers), which "
            "only this user may read and only it may write to.",
        ),
    ] = ""
    environment_prefix: Annotated[
        str,
        setting(
            "What the names of environment variables begin with that hold them, `<prefix>TENANT__NAME`, "
            "`<prefix>__NAME` for the node's own. Hosts of "
            "tools and agents do not get these variables.",
        ),
    ] = ""


class PythonConfig(Section, frozen=True, kw_only=True):
    """Hosts of Python agents."""

    hosts_max: Annotated[
        int,
        setting(
            "Host processes of Python agents, spares included.",
            "processes",
            1,
            1_000,
        ),
    ] = 64
    hosts_per_domain_max: Annotated[
        int,
        setting(
            "Hosts of one tenant, bundle and tier.",
            "processes",
            1,
            1_000,
        ),
    ] = 4
    runs_per_host_max: Annotated[
        int,
        setting(
            "Runs in one host; all of them are brought back elsewhere when it dies.",
            "runs",
            1,
            100_000,
        ),
    ] = 256
    spares: Annotated[
        int,
        setting(
            "Hosts of each bundle in use that are started ahead.",
            "processes",
            0,
            64,
        ),
    ] = 1
    quantum_ms: Annotated[
        int,
        setting(
            "CPU time of one activation, the stretch between two waits; then its host is stopped if work waits.",
            "ms",
            1,
            10_000,
        ),
    ] = 5
    quantum_wall_ms: Annotated[
        int,
        setting(
            "The same in wall time, for an activation that is not stopped.",
            "ms",
            1,
            60_000,
        ),
    ] = 40
    hang_ms: Annotated[
        int,
        setting(
            "How long a host may hold a CPU slot without using the CPU before it is ended.",
            "ms",
            100,
            3_600_000,
        ),
    ] = 10_000
    fuel_per_us: Annotated[
        int,
        setting(
            "Fuel that a microsecond of CPU time costs.",
            "fuel",
            1,
            1_000_000,
        ),
    ] = 1_000
    host_memory_bytes_max: Annotated[
        int,
        setting(
            "Data of one host.",
            "bytes",
            64 * MIB,
            TIB,
        ),
    ] = 512 * MIB
    answers_bytes_max: Annotated[
        int,
        setting(
            "Answers given to one run that are kept in memory, so that it can go on in another host at once; past it "
            "its journal is read for that.",
            "bytes",
            0,
            GIB,
        ),
    ] = 256 * KIB
    start_timeout_ms: Annotated[
        int,
        setting(
            "How long a bundle may take to be imported, and a host to start.",
            "ms",
            100,
            600_000,
        ),
    ] = 30_000
    idle_timeout_ms: Annotated[
        int,
        setting(
            "How long a host without runs is kept.",
            "ms",
            100,
            86_400_000,
        ),
    ] = 60_000
    deaths_max: Annotated[
        int,
        setting(
            "Hosts ended in a row by one version of an agent, after which it is quarantined.",
            "hosts",
            1,
            1_000,
        ),
    ] = 5
    nice: Annotated[
        int,
        setting(
            "Niceness of hosts at the lowest tier: 19 leaves the CPU to everything else. Each tier above ranks 3 "
            "before it where that is permitted, so that who computes without end holds up nobody above him.",
            "nice",
            0,
            19,
        ),
    ] = 19
    uid_base: Annotated[
        int,
        setting(
            "A node of root runs each host as a user of its own, this one or one of the following, if any user may "
            "read what it has to: the interpreter, installed packages, the agents' code. They must be nobody else's. "
            "0: as the node.",
            "uid",
            0,
            2**31 - 1_000_000,
        ),
    ] = 1_950_000_000
    allow_unsandboxed: Annotated[
        bool,
        setting("Run agents although the kernel lacks landlock or seccomp."),
    ] = False


class ModelsConfig(Section, frozen=True, kw_only=True):
    """Models, and the way to them (docs/models.md). Each `[models.…]` table has a name that you choose."""

    providers: Annotated[Tables, setting("Where models are to be had: `[models.providers.NAME]`.")] = {}  # noqa: RUF012
    catalog: Annotated[Tables, setting("The models there are: `[models.catalog.NAME]`.")] = {}  # noqa: RUF012
    profiles: Annotated[Tables, setting("What agents ask for: `[models.profiles.NAME]`.")] = {}  # noqa: RUF012
    routes: Annotated[Tables, setting("Calls that go to another profile: `[models.routes.NAME]`.")] = {}  # noqa: RUF012
    calls_max: Annotated[
        int,
        setting(
            "Calls under way. When full, further ones fail with `queue_full`.",
            "calls",
            1,
            1_000_000,
        ),
    ] = 10_000
    calls_bytes_max: Annotated[
        int,
        setting(
            "Their conversations, in sum; when full, as above.",
            "bytes",
            MIB,
            TIB,
        ),
    ] = 256 * MIB

    tables: ClassVar[Mapping[str, type[Section]]] = {
        "providers": ProviderConfig,
        "catalog": ModelConfig,
        "profiles": ProfileConfig,
        "routes": RouteConfig,
    }


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What one run, step or message may be or use."""

    request_bytes_max: Annotated[
        int,
        setting(
            "A run's input, or the request of one syscall.",
            "bytes",
            64,
            256 * MIB,
        ),
    ] = MIB
    result_bytes_max: Annotated[
        int,
        setting(
            "A run's result, or the answer to one syscall.",
            "bytes",
            64,
            256 * MIB,
        ),
    ] = 4 * MIB
    journal_bytes_max: Annotated[
        int,
        setting(
            "Journal of one run since its last checkpoint; past it the run fails.",
            "bytes",
            64 * KIB,
            16 * GIB,
        ),
    ] = 64 * MIB
    run_fuel_max: Annotated[
        int,
        setting(
            "Guest work of one run unless it was submitted with less; past it the run ends as "
            "BUDGET_EXHAUSTED. A tight loop uses some 3 x 10^10 a second.",
            "fuel",
            1,
            2**62,
        ),
    ] = 10**13
    step_attempts_max: Annotated[
        int,
        setting(
            "Executions of one step, those after a crash included; then the run waits for an operator.",
            "attempts",
            1,
            1_000,
        ),
    ] = 5
    rehydrate_per_s: Annotated[
        int,
        setting(
            "Runs started again per second after a restart, most urgent first.",
            "runs/s",
            1,
            1_000_000,
        ),
    ] = 5_000
    rehydrate_bytes_per_s: Annotated[
        int,
        setting(
            "Memory that comes back from frames per second: while more does, no run is started again after a restart.",
            "bytes/s",
            1 * MIB,
            1 << 50,
        ),
    ] = 1 * GIB
    stuck_ms: Annotated[
        int,
        setting(
            "How long a run may make no progress while nothing is under way for it and it waits for nothing that could "
            "come. Then it is reported and replayed, the second time it waits for an operator. 0 switches this off.",
            "ms",
            0,
            86_400_000,
        ),
    ] = 60_000
    hot_ms: Annotated[
        int,
        setting(
            "How long the guest of a run that only waits (for a timer, an event, an approval, a child, a lock) stays "
            "in memory. After that it is replayed when what it waits for comes.",
            "ms",
            0,
            86_400_000,
        ),
    ] = 1_000
    hot_runs_max: Annotated[
        int,
        setting(
            "Guests in memory that only wait; above it the one idle for longest of the least urgent tier goes early.",
            "runs",
            0,
            1_000_000,
        ),
    ] = 10_000
    hot_bytes_max: Annotated[
        int,
        setting(
            "Memory of wasm guests that only wait, by the length of their linear memories; above it the one idle for "
            "longest of the least urgent tier goes early, as it does when the machine is short of memory. 0: a quarter "
            "of the machine's memory, or of what its cgroup allows.",
            "bytes",
            0,
            1 << 50,
        ),
    ] = 0
    event_ttl_s: Annotated[
        int,
        setting(
            "How long an event that nobody takes is kept, and its id remembered.",
            "s",
            1,
            31_622_400,
        ),
    ] = 86_400
    depth_max: Annotated[
        int,
        setting(
            "How many runs may be above one: a child's child has two. Deeper spawns are refused.",
            "runs",
            0,
            1_000,
        ),
    ] = 16
    fan_out_max: Annotated[
        int,
        setting(
            "Children that one run may start, ended ones included; further spawns are refused.",
            "runs",
            0,
            10_000_000,
        ),
    ] = 10_000
    lock_hold_ms: Annotated[
        int,
        setting(
            "How long a lock may be held while somebody waits for it; then it is broken.",
            "ms",
            100,
            86_400_000,
        ),
    ] = 60_000
    lock_grace_ms: Annotated[
        int,
        setting(
            "How long a lock's holder may run while somebody waits for it; then it is broken. Its waits do not count.",
            "ms",
            1,
            86_400_000,
        ),
    ] = 150
    retention_s: Annotated[
        int,
        setting(
            "How long ended runs are kept.",
            "s",
            1,
            315_360_000,
        ),
    ] = 604_800


class FlowConfig(Section, frozen=True, kw_only=True):
    """What tenants, agents and the node may use; what keeps steps from beginning, or runs from going on."""

    file: Annotated[
        str,
        setting(
            "A TOML file with the limits and quotas in force (`[base]`), and others to be put over them "
            "(`[profiles.NAME]`): see durable-runs.md. Empty: none.",
            "path",
        ),
    ] = ""
    requests_per_minute: Annotated[
        int,
        setting(
            "Calls of tools per minute, of each tenant that has no table of its own; 0: any number. What is more "
            "waits, in tier order, and holds nothing.",
            "calls/min",
            0,
            10**9,
        ),
    ] = 0
    tokens_per_minute: Annotated[
        int,
        setting(
            "Tokens of model calls per minute, in the same way.",
            "tokens/min",
            0,
            10**12,
        ),
    ] = 0
    at_once: Annotated[
        int,
        setting(
            "Calls of tools at once, in the same way.",
            "calls",
            0,
            1_000_000,
        ),
    ] = 0
    latency_ms: Annotated[
        int,
        setting(
            "How long a call of a model should take at most, of each that has no table of its own: while calls take "
            "longer, no more of them are made at once than now. 0: no matter how long.",
            "ms",
            0,
            3_600_000,
        ),
    ] = 0
    weight: Annotated[
        int,
        setting(
            "Share of a tenant in what it waits for together with others of its tier.",
            "shares",
            1,
            10_000,
        ),
    ] = 1
    tenants: Annotated[
        Overrides,
        setting("Tenants with limits or a weight of their own, `[flow.tenants.NAME]`."),
    ] = {}  # noqa: RUF012
    tools: Annotated[
        Overrides,
        setting("Tools with limits, of all tenants together, `[flow.tools.NAME]`."),
    ] = {}  # noqa: RUF012
    classes: Annotated[
        Overrides,
        setting("Classes of tools with limits, of all tenants together, `[flow.classes.NAME]`."),
    ] = {}  # noqa: RUF012
    providers: Annotated[
        Overrides,
        setting("Providers of models with limits, of all tenants together, `[flow.providers.NAME]`."),
    ] = {}  # noqa: RUF012
    models: Annotated[
        Overrides,
        setting("Models of the catalog with limits, of all tenants together, `[flow.models.NAME]`."),
    ] = {}  # noqa: RUF012
    waiting_max: Annotated[
        int,
        setting(
            "Calls that may wait in memory; more are refused with `queue_full`.",
            "calls",
            1,
            10_000_000,
        ),
    ] = 100_000
    breaker_failures: Annotated[
        int,
        setting(
            "Failures in a row (nobody answered, time-outs, dead hosts) after which a tool or provider is left alone "
            "and calls of it are refused at once; 0: never.",
            "failures",
            0,
            1_000,
        ),
    ] = 5
    breaker_open_ms: Annotated[
        int,
        setting(
            "How long, before one call tries whether it works again. Doubles with each that shows that it does not, "
            "up to five minutes.",
            "ms",
            1,
            300_000,
        ),
    ] = 5_000
    retry_base_ms: Annotated[
        int,
        setting(
            "The most before a second attempt of what failed in a way that is worth one; doubles with each attempt. "
            "How many there are is limits.step_attempts_max.",
            "ms",
            1,
            3_600_000,
        ),
    ] = 500
    retry_cap_ms: Annotated[
        int,
        setting(
            "The most between two attempts.",
            "ms",
            1,
            3_600_000,
        ),
    ] = 60_000
    retry_after_max_ms: Annotated[
        int,
        setting(
            "The most that a `Retry-After` is believed.",
            "ms",
            0,
            86_400_000,
        ),
    ] = 300_000
    loop_iterations: Annotated[
        int,
        setting(
            "Steps of a run and all that it has started, together, since any of them emitted something; past it the "
            "one that asks ends as LOOP_DETECTED. 0: any number.",
            "steps",
            0,
            10**9,
        ),
    ] = 10_000
    loop_spend_microdollars: Annotated[
        int,
        setting(
            "What they may have cost since then, in the same way.",
            "micro-dollars",
            0,
            10**15,
        ),
    ] = 0
    loop_repeats: Annotated[
        int,
        setting(
            "How often a run may do the same step, or the same round of up to four steps, in a row; then it ends as "
            "LOOP_DETECTED. 0: any number, 1 is none.",
            "times",
            0,
            1_000_000,
        ),
    ] = 200
    loop_rallies: Annotated[
        int,
        setting(
            "How often agents may hand the same work to and fro; then the one that does it again ends as "
            "LOOP_DETECTED. 0: any number, 1 is none.",
            "times",
            0,
            1_000_000,
        ),
    ] = 8

    queue_items_max: Annotated[
        int,
        setting(
            "Runs accepted, not ended and not waiting in the store, of each tenant that has no table of its own; 0: as "
            "many as the node takes. `[flow.classes.agent]` and `[flow.classes.code]` may bound theirs as well.",
            "runs",
            0,
            10_000_000,
        ),
    ] = 0
    queue_bytes_max: Annotated[
        int,
        setting("Their inputs, in the same way.", "bytes", 0, TIB),
    ] = 0
    queue_tier_items_max: Annotated[
        PerTier,
        setting(
            "The same runs by tier, of all tenants, for tiers 0 to 3; 0: as many as the node takes.", "runs", 0, 10**7
        ),
    ] = (0, 0, 0, 0)
    queue_tier_bytes_max: Annotated[
        PerTier,
        setting("Their inputs, in the same way.", "bytes", 0, TIB),
    ] = (0, 0, 0, 0)
    queue_tier_pct: Annotated[
        PerTier,
        setting(
            "How much of scheduler.queue_items_max and queue_bytes_max each tier may fill: what is left is room for "
            "more urgent ones.",
            "%",
            1,
            100,
        ),
    ] = (100, 95, 90, 80)
    profiles_tenant: Annotated[
        str,
        setting(
            "The tenant whose events at the topic `APPLY_PROFILE`, from outside or from its runs, change the profiles "
            "in force. Empty: nobody's do.",
            "tenant",
        ),
    ] = ""
    max_tier: Annotated[
        int,
        setting("The most urgent tier that runs of a tenant may have, whoever asks and however.", "tier", 0, 3),
    ] = 0
    urgent_per_minute: Annotated[
        int,
        setting(
            "Runs of tier 0 that a tenant may begin, a tenth of them at once; more are refused with `queue_full` and "
            "the time until the next may be. What they spawn does not count. 0: as many as it likes.",
            "runs/min",
            0,
            10_000_000,
        ),
    ] = 0
    admission_wait_ms: Annotated[
        PerTier,
        setting(
            "How long a program that embeds the runtime waits for a run to be accepted when there is no room; then it "
            "is refused with `queue_full`. 0: at once, as callers over HTTP always are.",
            "ms",
            0,
            86_400_000,
        ),
    ] = (1_000, 10_000, 300_000, 1_800_000)
    door_items_max: Annotated[
        int,
        setting(
            "Runs that may wait to be accepted. Beyond that the most urgent ones stay, others are refused.",
            "runs",
            1,
            1_000_000,
        ),
    ] = 1_000
    door_bytes_max: Annotated[
        int,
        setting("Their inputs, in sum.", "bytes", MIB, TIB),
    ] = 16 * MIB

    overridable: ClassVar[tuple[str, ...]] = (
        "requests_per_minute",
        "tokens_per_minute",
        "at_once",
        "latency_ms",
        "weight",
        "queue_items_max",
        "queue_bytes_max",
        "max_tier",
        "urgent_per_minute",
    )


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Attributes are the sections, theirs the settings: ``config.scheduler.workers``."""

    node: NodeConfig = NodeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    wasm: WasmConfig = WasmConfig()
    store: StoreConfig = StoreConfig()
    tools: ToolsConfig = ToolsConfig()
    secrets: SecretsConfig = SecretsConfig()
    python: PythonConfig = PythonConfig()
    programs: ProgramsConfig = ProgramsConfig()
    process: ProcessConfig = ProcessConfig()
    models: ModelsConfig = ModelsConfig()
    http: HttpConfig = HttpConfig()
    limits: LimitsConfig = LimitsConfig()
    flow: FlowConfig = FlowConfig()
    slo: SloConfig = SloConfig()
    logs: LogsConfig = LogsConfig()
    traces: TracesConfig = TracesConfig()
    ingress: IngressConfig = IngressConfig()
    #: ``[plugins.NAME]`` as given; `plugin` reads one.
    plugins: dict[str, dict[str, Any]] = {}

    def __post_init__(self) -> None:
        for problem in _broken_relations(self):
            raise ConfigError(problem)
        Catalog.of(self.models)
        if self.tools.commands:
            from agentrt.tools.commands import command_specs  # late: with it comes all that runs tools

            list(command_specs(self.tools.commands))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The settings as plain data, section by section; those of plugins as given."""
        known = {name: msgspec.structs.asdict(getattr(self, name)) for name in SECTIONS}
        return known | ({PLUGINS: dict(self.plugins)} if self.plugins else {})

    def plugin(self, name: str, kind: type[T]) -> T:
        """The section ``[plugins.NAME]`` of a plugin, with its defaults. Raises ConfigError naming the setting."""
        given = self.plugins.get(name, {})
        try:
            # Not strict, for the environment has text only.
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
            raise ConfigError(f"plugins.{name}: {error}", hint=f"Settings: {known or 'none'}") from error


SECTIONS: Final[Mapping[str, type[Section]]] = {
    "node": NodeConfig,
    "scheduler": SchedulerConfig,
    "wasm": WasmConfig,
    "store": StoreConfig,
    "tools": ToolsConfig,
    "secrets": SecretsConfig,
    "python": PythonConfig,
    "programs": ProgramsConfig,
    "process": ProcessConfig,
    "models": ModelsConfig,
    "http": HttpConfig,
    "limits": LimitsConfig,
    "flow": FlowConfig,
    "slo": SloConfig,
    "logs": LogsConfig,
    "traces": TracesConfig,
    "ingress": IngressConfig,
}


_OF_RUNS: Final = {"queue_items_max", "queue_bytes_max", "max_tier", "urgent_per_minute"}


def _broken_relations(config: Config) -> Iterator[str]:
    """What is wrong between settings that are fine one by one."""
    if config.wasm.guests_max and config.wasm.stacks_max > config.wasm.guests_max:
        yield "wasm.stacks_max is more than wasm.guests_max; only guests have stacks"
    if config.store.map_bytes > config.store.map_bytes_max:
        yield "store.map_bytes is more than store.map_bytes_max"
    if config.limits.request_bytes_max > config.scheduler.queue_bytes_max:
        yield "limits.request_bytes_max is more than scheduler.queue_bytes_max: the largest input could never be queued"
    largest = max(config.limits.request_bytes_max, config.limits.result_bytes_max)
    if largest > config.limits.journal_bytes_max:
        yield "limits.journal_bytes_max is less than limits.request_bytes_max or limits.result_bytes_max"
    if largest > config.store.backlog_bytes_max:
        yield "store.backlog_bytes_max is less than limits.request_bytes_max or limits.result_bytes_max"
    every = {"tools": config.tools}
    every |= {f"tools.classes.{name}": config.tools.of_class(name) for name in config.tools.classes}
    for name, tools in every.items():
        if config.limits.request_bytes_max > tools.queue_bytes_max:
            yield f"limits.request_bytes_max is more than {name}.queue_bytes_max: the largest call could never wait"
        if tools.hosts_per_domain_max > tools.hosts_max:
            yield f"{name}.hosts_per_domain_max is more than {name}.hosts_max"
        if tools.sync_calls_per_host_max > tools.calls_per_host_max:
            yield f"{name}.sync_calls_per_host_max is more than {name}.calls_per_host_max"
    if config.process.memory_max_bytes - config.process.memory_high_bytes < config.limits.result_bytes_max:
        yield (
            "process.memory_max_bytes is less than limits.result_bytes_max above process.memory_high_bytes: there is "
            "no room to write a state"
        )
    if config.flow.retry_base_ms > config.flow.retry_cap_ms:
        yield "flow.retry_base_ms is more than flow.retry_cap_ms"
    for table in ("tools", "providers", "models"):
        for name, limits in getattr(config.flow, table).items():
            for key in _OF_RUNS & limits.keys():
                yield f"flow.{table}.{name}.{key} bounds no runs; only tenants and classes of agents have it"
    for name, limits in config.flow.classes.items():
        for key in ("max_tier", "urgent_per_minute"):
            if key in limits:
                yield f"flow.classes.{name}.{key}: tenants have one, classes have none"
        if name not in CLASSES and (wrong := _OF_RUNS & limits.keys()):
            yield f"flow.classes.{name}.{min(wrong)}: agents have the classes {' and '.join(CLASSES)}"
    if 0 < config.flow.queue_bytes_max < config.limits.request_bytes_max:
        yield "limits.request_bytes_max is more than flow.queue_bytes_max: the largest input could never be accepted"
    if config.limits.request_bytes_max > config.flow.door_bytes_max:
        yield "limits.request_bytes_max is more than flow.door_bytes_max: the largest input could never wait"
    for table in ("tenants", "tools", "classes", "providers"):
        for name, limits in getattr(config.flow, table).items():
            if "latency_ms" in limits:
                yield f"flow.{table}.{name}.latency_ms: only models have one"
    for name in config.flow.models:
        if name not in config.models.catalog:
            yield f"flow.models.{name}: there is no model of that name in models.catalog"
    for name, source in config.ingress.sources.items():
        for key in ("kind", "topic", "agent"):
            if not source.get(key):
                yield f"ingress.sources.{name}.{key} is not set"
    if 1 in (config.flow.loop_repeats, config.flow.loop_rallies):
        yield "flow.loop_repeats or flow.loop_rallies is 1, which is less than a repetition; 0 switches it off"
    if config.secrets.folder and config.secrets.environment_prefix:
        yield "secrets.folder is more than needed beside secrets.environment_prefix: set one of them"
    if bool(config.http.certificate) is not bool(config.http.private_key):
        yield "http.certificate and http.private_key go together"
    if config.limits.request_bytes_max > config.http.body_bytes_max:
        yield "limits.request_bytes_max is more than http.body_bytes_max: the largest input could never be sent"
    if config.limits.request_bytes_max > config.models.calls_bytes_max:
        yield "limits.request_bytes_max is more than models.calls_bytes_max: the largest call could never be made"


# --- sources -------------------------------------------------------------------


def load_config(
    file: str | os.PathLike[str] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration from a TOML ``file``, the environment and ``arguments`` (``{"scheduler.workers": 2}``).

    ``env`` is os.environ by default. ``file`` may also come from AGENTRT_CONFIG; without either there is none. A value
    of None in ``arguments`` leaves the setting alone. Raises ConfigError naming the source and the setting.
    """
    env = os.environ if env is None else env
    file = file if file is not None else env.get(ENV_PREFIX + "CONFIG") or None
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    plugins: dict[str, dict[str, Any]] = {}
    for section, key, value, source in (*_from_file(file), *_from_env(env), *_from_arguments(arguments or {})):
        if section == PLUGINS:
            _merge_plugin(plugins, key, value, source)
            continue
        if section not in SECTIONS:
            raise ConfigError(f"{source}: there is no section {section!r}", hint=f"Sections: {', '.join(SECTIONS)}")
        table, *inner = key.split(".")
        if inner and types_of(SECTIONS[section]).get(table) is not None and len(inner) == 2:  # one of an override
            name, setting = inner
            checked = check_value(SECTIONS[section], table, {name: {setting: value}}, source)
            values[section].setdefault(table, {}).setdefault(name, {}).update(checked[name])
            continue
        if key not in types_of(SECTIONS[section]):
            raise ConfigError(f"{source}: there is no setting {section}.{key}", hint=_nearest(section, key))
        values[section][key] = check_value(SECTIONS[section], key, value, source)
    made: dict[str, Any] = {name: SECTIONS[name](**given) for name, given in values.items()}
    return Config(**made, plugins=plugins)


def _merge_plugin(plugins: dict[str, dict[str, Any]], key: str, value: Any, source: str) -> None:
    """``key``: NAME, or NAME.SETTING…. Raises ConfigError."""
    name, *inner = key.split(".")
    if not is_section_name(name) or not (inner or isinstance(value, dict)):
        raise ConfigError(
            f"{source}: plugins.{name:.200} is no table with a name", hint="Write [plugins.NAME], NAME in lower case"
        )
    table = plugins.setdefault(name, {})
    if not inner:
        table.update(value)
        return
    for part in inner[:-1]:
        there = table.get(part)
        table[part] = table = dict(there) if isinstance(there, dict) else {}
    if isinstance(value, str) and value[:1] in ("[", "{"):  # a list or a table from the environment
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{source}: is no JSON: {error}") from error
    table[inner[-1]] = value


def _from_file(file: str | os.PathLike[str] | None) -> Iterator[tuple[str, str, Any, str]]:
    if file is None:
        return
    path = Path(file)
    try:
        with path.open("rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not text, not TOML, a number of thousands of digits, deep nesting
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section!r} stands outside a section", hint=f"Sections: {', '.join(SECTIONS)}")
        if section not in SECTIONS and section != PLUGINS:  # also when it is empty
            raise ConfigError(f"{path}: there is no section {section!r}", hint=f"Sections: {', '.join(SECTIONS)}")
        yield from ((section, key, value, str(path)) for key, value in table.items())


def _from_env(env: Mapping[str, str]) -> Iterator[tuple[str, str, Any, str]]:
    # Only names with the separator are settings: AGENTRT_CONFIG and variables of plugins are not ours to judge.
    for name in sorted(env):
        if name.startswith(ENV_PREFIX) and "__" in name:
            section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
            yield section, key.replace("__", "."), env[name], f"environment variable {name}"


def _from_arguments(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    for name, value in arguments.items():
        if value is not None:
            section, _, key = name.partition(".")
            yield section, key, value, f"argument {name}"


def _nearest(section: str, key: str) -> str:
    close = difflib.get_close_matches(key, types_of(SECTIONS[section]), n=1)
    return f"Did you mean {section}.{close[0]}?" if close else f"See docs/config.md, section {section}"
