"""``agentrt frame show|diff|verify``."""

import hashlib
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from agentrt.cli import exits
from agentrt.cli.main import console, print_json
from agentrt.cli.pack import read_file
from agentrt.cli.remote import connected, node_options
from agentrt.errors import FrameError, InputError

if TYPE_CHECKING:
    from agentrt import _core

_PAGE: Final = 4096
_KINDS: Final = ("i32", "i64", "f32", "f64", "v128")
_FORMATS: Final = ("<i12x", "<q8x", "<f12x", "<d8x", "<QQ")
_MEMORY_BYTES_MAX: Final = 4 << 30
_MAP_SHOWN_MAX: Final = 20

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_module = click.option(
    "--module", type=_FILE, metavar="MODULE", help="The module it is of, whose first memory it may refer to."
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@click.group(name="frame")
def command() -> None:
    """Look at frames: the state of suspended runs (docs/frames.md). A store has one for a run in its folder frames."""


@command.command(name="show")
@click.argument("file", type=_FILE, metavar="[FRAME]", required=False)
@click.option("--run", "run_id", metavar="RUN", help="Instead of a file: of that run of a node, as it waits now.")
@node_options
@click.option("--module", type=_FILE, metavar="MODULE", help="What it is of: says what it was doing.")
@click.option("--base", type=_FILE, metavar="FRAME", help="If it is a delta, what it is a delta to; for --module.")
@_json
def show(
    file: Path | None,
    run_id: str | None,
    url: str | None,
    key: str | None,
    module: Path | None,
    base: Path | None,
    as_json: bool,
) -> exits.ExitCode:
    """Say whose state it is and what is in it: position, globals, memory and what its pages are.

    With --module also the names of globals, and the functions on its stack, the innermost first. With --run it is
    asked of the run's node, with a key that has the scope admin."""
    if (file is None) == (run_id is None):
        raise click.UsageError("name a file, or a run with --run")
    before = None if base is None else _opened(base)
    if run_id is not None:
        frame, before = _of_run(run_id, url, key)
    else:
        assert file is not None
        frame = _opened(file)
    told = _told(frame)
    memory = _memory_map(frame)
    calls = None
    if module is not None:
        code = read_file(module)
        calls = _calls(frame, code, before)
        for each, name in zip(told["globals"], _global_names(code), strict=False):
            each["name"] = name
    if as_json:
        print_json(told | {"memory": memory} | ({} if calls is None else {"calls": calls}))
        return exits.OK
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in told.items():
        if isinstance(value, dict):
            value = ", ".join(f"{count} {kind}" for kind, count in value.items() if count)
        elif isinstance(value, list):
            value = " ".join(f"{each.get('name') or each['kind']}:{each['value']}" for each in value)
        table.add_row(name, str(value))
    console().print(table)
    for part in memory[:_MAP_SHOWN_MAX]:
        click.echo(f"memory {part['from']:#010x}: {part['bytes']} bytes {part['kind']}")
    if len(memory) > _MAP_SHOWN_MAX:
        click.echo(f"and {len(memory) - _MAP_SHOWN_MAX} more stretches: --json has all")
    for call in calls or ():
        click.echo(f"in {call['function']} at {call['offset']:#x}")
    return exits.OK


@command.command(name="verify")
@click.argument("files", type=_FILE, nargs=-1, required=True, metavar="FRAME...")
@_module
@_json
def verify(files: tuple[Path, ...], module: Path | None, as_json: bool) -> exits.ExitCode:
    """Check frames to the last byte. Those that refer to their module's first memory need --module for their pages."""
    image = None if module is None else _image(module)
    found: dict[str, str] = {}
    for file in files:
        try:
            frame = _opened(file)
            if any(frame.image) and image is None:
                raise InputError(f"{file} refers to its module's first memory", hint="Name it with --module")
            frame.memory(image=image if any(frame.image) else None)
        except FrameError as error:
            found[str(file)] = error.message
    if as_json:
        print_json({"checked": len(files), "damaged": found})
    else:
        for name, why in found.items():
            click.echo(f"{name}: {why}")
        click.echo(f"{len(files)} checked, {len(found)} damaged", err=True)
    return exits.FAILED if found else exits.OK


@command.command(name="diff")
@click.argument("one", type=_FILE, metavar="FRAME")
@click.argument("two", type=_FILE, metavar="FRAME")
@_module
@_json
def diff(one: Path, two: Path, module: Path | None, as_json: bool) -> exits.ExitCode:
    """Say in what two frames differ: fields, globals, and stretches of memory."""
    image = None if module is None else _image(module)
    frames = [_opened(one), _opened(two)]
    told = [_told(frame) for frame in frames]
    fields = {name: [told[0][name], told[1][name]] for name in told[0] if told[0][name] != told[1][name]}
    memories = []
    for file, frame in zip((one, two), frames, strict=True):
        if any(frame.image) and image is None:
            raise InputError(f"{file} refers to its module's first memory", hint="Name it with --module")
        memories.append(frame.memory(image=image if any(frame.image) else None))
    memory = _stretches(*memories)
    if as_json:
        print_json({"fields": fields, "memory": [{"from": start, "bytes": length} for start, length in memory]})
        return exits.OK
    for name, (before, after) in fields.items():
        click.echo(f"{name}: {before} -> {after}")
    for start, length in memory:
        click.echo(f"memory {start:#010x}: {length} bytes of pages differ")
    return exits.OK


def _opened(file: Path) -> "_core.Frame":
    from agentrt import _core

    return _core.Frame(read_file(file), memory_bytes_max=_MEMORY_BYTES_MAX)


def _of_run(run_id: str, url: str | None, key: str | None) -> "tuple[_core.Frame, _core.Frame | None]":
    """Its frame, and what that is a delta to."""
    from agentrt import _core

    with connected(url, key) as client:
        frame = _core.Frame(client.frame(run_id), memory_bytes_max=_MEMORY_BYTES_MAX)
        if frame.base_id is None:
            return frame, None
        return frame, _core.Frame(client.frame(run_id, frame.base_id.hex()), memory_bytes_max=_MEMORY_BYTES_MAX)


def _told(frame: "_core.Frame") -> dict[str, Any]:
    from agentrt import _core

    tags = {tag: name for name, tag in _core.FRAME_SECTIONS.items()}
    sections = frame.sections
    return {
        "id": frame.id.hex(),
        "base_id": None if frame.base_id is None else frame.base_id.hex(),
        "module": frame.module.hex(),
        "engine": frame.engine,
        "abi": frame.abi,
        "segment": frame.segment,
        "seq": frame.seq,
        "fuel": frame.fuel,
        "clock_ns": frame.clock_ns,
        "memory_bytes": frame.memory_bytes,
        "pages": frame.pages,
        "sections": {tags.get(tag, str(tag)): len(data) for tag, data in sorted(sections.items())},
        "globals": _globals(sections.get(_core.FRAME_SECTIONS["globals"], b"")),
    }


def _memory_map(frame: "_core.Frame") -> list[dict[str, Any]]:
    """Stretches of pages of one kind."""
    from agentrt import _core

    kinds = frame.page_kinds()
    found: list[dict[str, Any]] = []
    for match in re.finditer(rb"(.)\1*", kinds, re.DOTALL):
        pages = match.end() - match.start()
        kind = _core.PAGE_KINDS[kinds[match.start()]]
        found.append({"from": match.start() * _PAGE, "bytes": pages * _PAGE, "kind": kind})
    return found


def _calls(frame: "_core.Frame", module: bytes, base: "_core.Frame | None") -> list[dict[str, Any]]:
    from agentrt.capture.backtrace import backtrace
    from agentrt.config import load_config
    from agentrt.sizing import core_parameters

    if frame.module != hashlib.sha256(module).digest():
        raise InputError(f"the frame is of module {frame.module.hex()}, not of this one")
    return [call._asdict() for call in backtrace(module, frame, core_parameters(load_config()), base)]


def _global_names(module: bytes) -> list[str]:
    """Of the mutable globals, in the order of a frame; "" where the module does not say."""
    from agentrt.backends import wasi
    from agentrt.capture.instrument import GLOBAL
    from agentrt.capture.sections import GLOBAL_EXPORT, Sections

    sections = Sections(wasi.unpack(module)[0])
    names, found = sections.global_names(), list[str]()
    while each := sections.find(f"{GLOBAL}{len(found)}", GLOBAL_EXPORT):
        found.append(names.get(each.number, ""))
    return found


def _globals(data: bytes) -> list[dict[str, Any]]:
    found = []
    for at in range(0, len(data) - 23, 24):
        kind = int.from_bytes(data[at : at + 8], "little")
        if kind >= len(_KINDS):
            break
        value = struct.unpack(_FORMATS[kind], data[at + 8 : at + 24])
        found.append({"kind": _KINDS[kind], "value": value[0] if kind < 4 else data[at + 8 : at + 24].hex()})
    return found


def _stretches(one: bytes, two: bytes) -> list[tuple[int, int]]:
    """Where pages differ: beginning and length; what one lacks at its end differs."""
    found: list[tuple[int, int]] = []
    for at in range(0, max(len(one), len(two)), _PAGE):
        if one[at : at + _PAGE] != two[at : at + _PAGE]:
            if found and sum(found[-1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + _PAGE)
            else:
                found.append((at, _PAGE))
    return found


def _image(module: Path) -> "_core.FrameImage":
    """What guests of the module begin with."""
    from agentrt import _core
    from agentrt.backends import wasi
    from agentrt.backends.wasm import image_digest
    from agentrt.config import load_config
    from agentrt.sizing import core_parameters, engine_limits

    code, packed = wasi.unpack(read_file(module))
    parameters = core_parameters(load_config())
    parameters |= {"guests_max": 2, "stacks_max": 2, "workers": 1}
    artifact = _core.compile_module(parameters["engine_lib"], code, **engine_limits(parameters))
    core = _core.Core(**parameters)
    try:
        loaded = core.load(artifact, None if packed is None or packed.entry is None else packed.entry.encode())
        return loaded.image(image_digest(hashlib.sha256(code).hexdigest()))
    finally:
        core.close()
