"""Settings of native processes, and of those that are tools."""

from typing import Annotated, Literal

from agentrt.settings import GIB, MIB, Section, setting


class ProcessConfig(Section, frozen=True, kw_only=True):
    """Native processes: commands that are tools. A process of its own per call, confined, in a cgroup leaf of its own
    where the system has delegated one ([operations](operations.md#native-processes))."""

    cgroup: Annotated[
        str,
        setting(
            "The cgroup v2 group that the node divides: `auto` is its own, if it is delegated or the top of the "
            "hierarchy; `none`; or the folder of one that you have delegated. Without one, limits of memory and of the "
            "number of processes are those of `setrlimit`.",
        ),
    ] = "auto"
    processes_max: Annotated[
        int,
        setting("Native processes at the same time, what they start not counted.", "processes", 1, 10_000),
    ] = 256
    uid_base: Annotated[
        int,
        setting(
            "A node of root runs each process as a user of its own: this one, and the `processes_max` - 1 after it. "
            "They need no entry anywhere and must be nobody else's.",
            "uid",
            1,
            2**31 - 1_000_000,
        ),
    ] = 1_900_000_000
    memory_high_bytes: Annotated[
        int,
        setting("Where a process is slowed down. One that then stands still is ended.", "bytes", MIB, 2**50),
    ] = 2 * GIB
    memory_max_bytes: Annotated[
        int,
        setting(
            "Where the kernel kills. Above `memory_high_bytes` by more than a process needs to write its state.",
            "bytes",
            MIB,
            2**50,
        ),
    ] = 2 * GIB + 512 * MIB
    swap_bytes_max: Annotated[int, setting("Swap of a process.", "bytes", 0, 2**50)] = 0
    pids_max: Annotated[
        int, setting("Processes and threads that one may have, itself included.", "processes", 1, 100_000)
    ] = 64
    cpu_pct_max: Annotated[
        int,
        setting(
            "CPU time of a process, of one core; 250 is two and a half cores. 0: what its tier's weight gives it. Only "
            "where the node has the `cpu` controller.",
            "%",
            0,
            100_000,
        ),
    ] = 0
    stall_ms: Annotated[
        int,
        setting(
            "How long a process may stand still above `memory_high_bytes`. A fifth of that later at most it is frozen "
            "and killed; one whose `preempt` is `snapshot` has a second before that, and the room up to "
            "`memory_max_bytes`, to hand over its state.",
            "ms",
            100,
            600_000,
        ),
    ] = 2_000
    folder_bytes_max: Annotated[
        int, setting("What a process may write into its working folder.", "bytes", 64 * 1024, 2**40)
    ] = 256 * MIB
    folder_files_max: Annotated[int, setting("Files and folders in its working folder.", "files", 8, 10_000_000)] = (
        10_000
    )
    nice: Annotated[int, setting("Niceness of native processes.", "nice", 0, 19)] = 19
    read: Annotated[
        tuple[str, ...],
        setting(
            "Files and folders that every native process may read and execute, beside `/usr`, `/bin`, `/lib` and what "
            "the dynamic linker needs. A process runs as a user of its own, which must have the right to.",
            "paths",
        ),
    ] = ()
    allow_unsandboxed: Annotated[
        bool,
        setting(
            "Run native processes also where the kernel lacks what confines them (landlock, seccomp, namespaces). "
            "Otherwise their calls fail with `sandbox`."
        ),
    ] = False


class CommandConfig(Section, frozen=True, kw_only=True):
    """A native command that agents may call as the tool `NAME` ([tools](tools.md#native-commands))."""

    command: Annotated[
        tuple[str, ...],
        setting("The program, an absolute path or a name in `/usr/local/bin`, `/usr/bin`, `/bin`, and its arguments."),
    ] = ()
    kind: Annotated[
        Literal["pure", "keyed", "at_most_once"], setting("What is safe when nobody saw how a call ended.")
    ] = "at_most_once"
    cls: Annotated[str, setting("Its class, whose pool bounds it.")] = "code"
    timeout_ms: Annotated[int, setting("Of one execution, while it is not frozen.", "ms", 1, 86_400_000)] = 30_000
    input: Annotated[
        Literal["json", "text"],
        setting("Its standard input: the arguments as JSON, or the text in their member `text`."),
    ] = "json"
    output: Annotated[Literal["json", "text"], setting("What its standard output is, and so the result.")] = "json"
    environment: Annotated[
        tuple[str, ...], setting("Its environment, `NAME=value`, beside `PATH`, `HOME`, `TMPDIR` and `LANG`.")
    ] = ()
    network: Annotated[bool, setting("Whether it may use the network of the node.")] = False
    read: Annotated[tuple[str, ...], setting("What it may read and execute beside what every one may.", "paths")] = ()
    write: Annotated[tuple[str, ...], setting("What it may change beside its working folder.", "paths")] = ()
    memory_bytes_max: Annotated[int, setting("Its memory. 0: `process.memory_max_bytes`.", "bytes", 0, 2**50)] = 0
    processes_max: Annotated[
        int, setting("Processes and threads that it may have. 0: `process.pids_max`.", "processes", 0, 100_000)
    ] = 0
    preempt: Annotated[
        Literal["freeze", "snapshot", "discard"],
        setting(
            "What becomes of it when urgent work needs the machine: it is frozen, or told, so that it can hand over a "
            "state, or killed and begun again."
        ),
    ] = "freeze"
    secrets: Annotated[tuple[str, ...], setting("Secrets that its arguments may refer to.", "names")] = ()
