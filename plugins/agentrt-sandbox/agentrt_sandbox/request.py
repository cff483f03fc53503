"""What a call asks for. Pure."""

import hashlib
import struct
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentrt.errors import InputError
from agentrt_sandbox.settings import MEMORY_BYTES_MIN, OUTPUT_BYTES_MAX, SandboxSettings

FILES_MAX: Final = 256
_VARIABLES_MAX: Final = 256


class Bytes(msgspec.Struct, forbid_unknown_fields=True):
    """A file that is no text."""

    base64: bytes


class Limits(msgspec.Struct, frozen=True):
    """What one call may use; the names are those of the arguments."""

    fuel: int
    memory_bytes: int
    time_ms: int
    output_bytes: int
    result_bytes: int


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """As an agent passes them. ``variables``: JSON by name, global to the code."""

    code: str
    files: dict[str, str | Bytes] = {}
    variables: dict[str, msgspec.Raw] = {}
    runtime: str = ""
    fuel: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    memory_bytes: Annotated[int, Meta(ge=MEMORY_BYTES_MIN)] | UnsetType = UNSET
    time_ms: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    output_bytes: Annotated[int, Meta(ge=0, le=OUTPUT_BYTES_MAX)] | UnsetType = UNSET


class Request(msgspec.Struct, frozen=True):
    """One call, checked. ``input``: for the harness; ``files``: paths and contents; ``seed``: 16 bytes."""

    runtime: str
    input: bytes
    files: tuple[tuple[str, bytes], ...]
    limits: Limits
    seed: bytes


_decode: Final = msgspec.json.Decoder(Arguments).decode


def parse(args: bytes, runtimes: tuple[str, ...], settings: SandboxSettings, *, reserved: tuple[str, ...]) -> Request:
    """``runtimes``: those that the tool may use, the first without being asked. ``reserved``: paths that are taken.
    Raises InputError saying which argument is wrong."""
    try:
        asked = _decode(args)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InputError(f"the arguments do not fit: {error}") from None
    runtime = asked.runtime or runtimes[0]
    if runtime not in runtimes:
        raise InputError(f"there is no runtime {runtime!r}", hint=f"There is: {', '.join(runtimes)}")
    if len(asked.files) > FILES_MAX or len(asked.variables) > _VARIABLES_MAX:
        raise InputError(f"there may be {FILES_MAX} files and {_VARIABLES_MAX} variables")
    for name in asked.variables:
        if not name.isidentifier():
            raise InputError(f"{name[:80]!r} is no name for a variable")
    limits = Limits(
        _limit("fuel", asked.fuel, settings.fuel, settings.fuel_max),
        _limit("memory_bytes", asked.memory_bytes, settings.memory_bytes, settings.memory_bytes_max),
        _limit("time_ms", asked.time_ms, settings.time_ms, settings.time_ms_max),
        _limit("output_bytes", asked.output_bytes, settings.output_bytes, OUTPUT_BYTES_MAX),
        settings.result_bytes,
    )
    files = tuple(_file(path, content, reserved) for path, content in asked.files.items())
    given: dict[str, Any] = {
        "code": asked.code,
        "variables": asked.variables,
        "result_bytes": limits.result_bytes,
    }
    seed = hashlib.sha256(args).digest()[:16]
    if runtime == "quickjs":  # which draws its own while it boots: the same in all calls that begin booted
        given["seed"] = struct.unpack("<4I", seed)
    return Request(runtime, msgspec.json.encode(given), files, limits, seed)


def _limit(name: str, asked: int | UnsetType, usual: int, most: int) -> int:
    if asked is UNSET:
        return min(usual, most)
    if asked > most:
        raise InputError(f"{name} may be {most} at most, not {asked}", limit=f"plugins.sandbox.{name}_max")
    return asked


def _file(path: str, content: str | Bytes, reserved: tuple[str, ...]) -> tuple[str, bytes]:
    name = path.removeprefix("./").removeprefix("/")
    if name in reserved or name.startswith("dev/"):
        raise InputError(f"a file cannot be called {name[:80]!r} here")
    return name, content.encode() if isinstance(content, str) else content.base64
