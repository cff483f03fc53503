"""Settings of agent processes."""

from typing import Annotated

from agentrt.settings import Section, setting


class ProgramsConfig(Section, frozen=True, kw_only=True):
    """Agents that are programs: a process for each of their runs (docs/process-abi.md)."""

    processes_max: Annotated[
        int,
        setting(
            "Processes of agents at once; further runs wait for a place. An eighth of them, 8 at most, is kept for "
            "tiers 0 and 1.",
            "processes",
            1,
            10_000,
        ),
    ] = 64
    starts_max: Annotated[
        int,
        setting("Processes that are starting at once.", "processes", 1, 1_000),
    ] = 4
    start_timeout_ms: Annotated[
        int,
        setting("How long a program may take until it says that it is ready.", "ms", 100, 600_000),
    ] = 30_000
    notice_ms: Annotated[
        int,
        setting(
            "How long a process that is in the way of more urgent work may go on after SIGUSR1, so as to hand over a "
            "snapshot, where its agent declares that; then it is stopped.",
            "ms",
            1,
            10_000,
        ),
    ] = 50
    fuel_per_us: Annotated[
        int,
        setting("Fuel that a microsecond of CPU time costs.", "fuel", 1, 1_000_000),
    ] = 1_000
    kills_max: Annotated[
        int,
        setting(
            "How often others (kill -9, an OOM killer) may end the process of one run before the run ends for it.",
            "kills",
            0,
            1_000,
        ),
    ] = 5
    confined: Annotated[
        bool,
        setting(
            "Keep programs inside, as all native processes (`[process]`). Off: they run as the node's own user and may "
            "do whatever it may; for programs that you trust as the node itself.",
        ),
    ] = True
