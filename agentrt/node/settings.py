"""Settings of agents that the node loads."""

from typing import Annotated, Literal

from agentrt.settings import Section, setting


class AgentConfig(Section, frozen=True, kw_only=True):
    """An agent under a name of the node's own. Settings that are not given are what the agent declares."""

    source: Annotated[
        str,
        setting(
            "A wasm file, or one Python function, with the tools beside it: `package.module:function` or "
            "`file.py:function`.",
            "source",
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...],
        setting(
            "Instead of a source: a program and its arguments, which speaks the process ABI (docs/process-abi.md).",
            "words",
        ),
    ] = ()
    preempt: Annotated[
        Literal["freeze", "snapshot", "discard"],
        setting(
            "What happens to the process of a command when more urgent work needs the CPU: it is stopped and goes on "
            "later; or it may hand over a snapshot before; or it is ended, and its run is replayed later."
        ),
    ] = "freeze"
    unwinds: Annotated[
        bool, setting("Whether the program of a command has something to undo when its run is ended from outside.")
    ] = True
    environment: Annotated[
        tuple[str, ...],
        setting(
            "Variables of a command's process: `NAME=value`, or `NAME` for the node's own value. It has few others.",
            "variables",
        ),
    ] = ()
    read: Annotated[
        tuple[str, ...],
        setting("What a command's process may read and execute, beside its files and what every one may.", "paths"),
    ] = ()
    write: Annotated[
        tuple[str, ...], setting("What a command's process may change beside its working folder.", "paths")
    ] = ()
    network: Annotated[bool, setting("Whether a command's process may use the network of the node.")] = False
    memory_bytes_max: Annotated[
        int, setting("Memory of a command's process. 0: `process.memory_max_bytes`.", "bytes", 0, 2**50)
    ] = 0
    files: Annotated[
        tuple[str, ...],
        setting(
            "More files that a command's program is made of: with them, its version changes. The executable and the "
            "files that the command names count anyhow.",
            "paths",
        ),
    ] = ()
    tier: Annotated[
        int, setting("Tier of runs that are started without one. -1: what the agent declares.", "tier", -1, 3)
    ] = -1
    fuel_max: Annotated[
        int,
        setting("Guest work of runs that are started without a bound. 0: `limits.run_fuel_max`.", "fuel", 0, 2**62),
    ] = 0
    short: Annotated[
        bool, setting("Callers over HTTP may wait for its runs (`?wait=`), whatever the agent declares.")
    ] = False
    on_upgrade: Annotated[
        Literal["declared", "pin", "continue", "migrate", "fail"],
        setting("What becomes of runs that an older version has begun (docs/durable-runs.md)."),
    ] = "declared"
