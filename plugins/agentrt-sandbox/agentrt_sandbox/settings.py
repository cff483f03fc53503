"""Settings of the plugin: ``[plugins.sandbox]``."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

MIB: Final = 1 << 20
#: What the core keeps of each stream of a guest.
OUTPUT_BYTES_MAX: Final = 64 << 10
#: Below this no interpreter starts.
MEMORY_BYTES_MIN: Final = 8 * MIB


class SandboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a call may use. A call may ask for less of each, or for more up to the ``…_max`` of it."""

    fuel: Annotated[
        int,
        Meta(
            ge=1,
            description="Work of one call, in fuel, if it does not say. Some 10 billion are a second of MicroPython "
            "or QuickJS, or of CPython. Booting counts where there is no image.",
        ),
    ] = 5_000_000_000
    fuel_max: Annotated[int, Meta(ge=1)] = 100_000_000_000
    memory_bytes: Annotated[int, Meta(ge=MEMORY_BYTES_MIN, description="Memory of one call, if it does not say.")] = (
        32 * MIB
    )
    memory_bytes_max: Annotated[
        int, Meta(ge=MEMORY_BYTES_MIN, description="With calls_max the memory that all calls may use together.")
    ] = 256 * MIB
    time_ms: Annotated[
        int,
        Meta(ge=1, description="CPU time of one call, if it does not say; for code that takes long at little fuel."),
    ] = 10_000
    time_ms_max: Annotated[int, Meta(ge=1)] = 60_000
    timeout_ms: Annotated[
        int,
        Meta(ge=1, description="Wall time of one call once it has begun; past it the step fails with tool_timeout."),
    ] = 300_000
    output_bytes: Annotated[
        int,
        Meta(ge=0, le=OUTPUT_BYTES_MAX, description="Kept of stdout, and of stderr: the end of it."),
    ] = 16 << 10
    result_bytes: Annotated[int, Meta(ge=1024, description="Value and files that come out of one call, as JSON.")] = MIB
    calls_max: Annotated[
        int, Meta(ge=1, le=10_000, description="Calls under way; tier 1 may use 7/8 of them, tier 2 6/8, tier 3 5/8.")
    ] = 16
    waiting_max: Annotated[int, Meta(ge=0, description="Calls that may wait; more are refused with queue_full.")] = (
        10_000
    )
    waiting_bytes_max: Annotated[int, Meta(ge=0, description="Their arguments.")] = 64 * MIB
    python: Annotated[
        Literal["micropython", "cpython"],
        Meta(description="What runs python.exec if a call does not say. cpython needs agentrt-sandbox[cpython]."),
    ] = "micropython"
    clock: Annotated[
        Literal["fixed", "real"],
        Meta(
            description="What time it is for the code when a call begins: always 2000-01-01, so that a call can be "
            "repeated to the byte, or the node's time. Then it goes on with the work done."
        ),
    ] = "fixed"
    images: Annotated[
        bool,
        Meta(
            description="Have calls of QuickJS and CPython begin booted, from images. Each is made once for a machine, "
            "by a child process, in seconds or minutes; calls of it wait for that. Needs agentrt[capture], without "
            "which, or false, they boot each time, CPython for a tenth of a second."
        ),
    ] = True
    cls: Annotated[str, Meta(description="The class of the tools, for limits and metrics.")] = "code"
    digests: Annotated[
        dict[str, str],
        Meta(description="Sha256 of micropython, quickjs or cpython, where another build than the pinned is meant."),
    ] = {}
