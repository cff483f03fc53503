"""``agentrt pack``."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.cli.progress import progress_shown
from agentrt.errors import InputError

_MICROPYTHON: Final = "micropython"


@click.command(name="pack")
@click.argument("module", metavar="MODULE")
@click.option("--out", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Program for an interpreter: packed as /NAME, and that path is the last argument.",
)
@click.option("--arg", "args", multiple=True, metavar="TEXT", help="An argument, after the program's name; repeatable.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable; repeatable.")
@click.option(
    "--file",
    "given",
    multiple=True,
    metavar="PATH=SOURCE",
    help="A file, or all files of a folder, that the program finds at PATH; repeatable.",
)
@click.option("--entry", metavar="NAME", help="For a module without _start: the exported function like C's main.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: file, bytes, version, files.")
def command(
    module: str,
    out: Path,
    script: Path | None,
    args: tuple[str, ...],
    variables: tuple[str, ...],
    given: tuple[str, ...],
    entry: str | None,
    as_json: bool,
) -> exits.ExitCode:
    """Make one agent of a WASI program and what it starts with: arguments, variables, files.

    MODULE is a wasm file, or the word micropython for the interpreter that comes with agentrt. Run the result with
    `agentrt run`. What was packed into MODULE before is replaced.
    """
    from agentrt.backends import wasi

    place = wasi.micropython() if module == _MICROPYTHON else Path(module)
    files: dict[str, bytes] = {}
    with progress_shown(as_json) as progress:
        for text in given:
            path, source = _pair(text, "--file")
            for name, file in _files(path, Path(source)):
                files[name] = read_file(file)
                progress("reading files", len(files), 0)
        arguments = [place.stem if module != _MICROPYTHON else module, *args]
        if script is not None:
            files[f"/{script.name}"] = read_file(script)
            arguments.append(f"/{script.name}")
        environment = dict(_pair(text, "--env") for text in variables)
        progress("packing", 0, 0)
        packed = wasi.pack(read_file(place), args=arguments, env=environment, files=files, entry=entry)
        progress("writing", 0, 0)
        write_file(out, packed)
    version = hashlib.sha256(packed).hexdigest()
    if as_json:
        print_json({"file": str(out), "bytes": len(packed), "version": version, "files": sorted(files)})
    else:
        click.echo(f"{out}: {len(packed)} bytes, {len(files)} files, version {version}", err=True)
    return exits.OK


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InputError(f"{option} {text!r:.200} is no NAME=VALUE")
    return name, value


def _files(path: str, source: Path) -> list[tuple[str, Path]]:
    """Where files are to be found, and which they are."""
    if not source.is_dir():
        return [(path, source)]
    found = sorted(each for each in source.rglob("*") if each.is_file())
    return [(f"{path.rstrip('/')}/{each.relative_to(source).as_posix()}", each) for each in found]


def read_file(path: Path) -> bytes:
    """All of a file. Raises InputError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def write_file(path: Path, data: bytes) -> None:
    """All of it or nothing, whatever happens. Raises InputError."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}-", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(file.fileno(), 0o666 & ~mask)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
