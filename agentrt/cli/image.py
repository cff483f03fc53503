"""``agentrt image``."""

import hashlib
import os
from pathlib import Path

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.cli.pack import read_file, write_file
from agentrt.cli.progress import stages_shown


@click.command(name="image")
@click.argument("module", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="MODULE")
@click.option("--out", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option(
    "--init",
    metavar="NAME",
    help="The exported function that makes the module ready, once for all runs; it takes nothing, and returns nothing "
    "or 0. Without it the program itself is booted until it reads its standard input.",
)
@click.option("--clock", is_flag=True, help="Let the boot look at the clock, which stands at the beginning of 1970.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: file, bytes, version, at, boot_fuel, and more.")
@click.pass_obj
def command(
    config_file: str | None, module: Path, out: Path, init: str | None, clock: bool, as_json: bool
) -> exits.ExitCode:
    """Boot a module once, and make an agent of it whose runs begin there.

    MODULE is a wasm file, packed or not. Its runs have the memory of the booted guest, copied only where they write to
    it, and are not charged for the boot. What differs from run to run cannot be in an image: a boot that looks at
    the input, at random numbers or, unless that is allowed, at the clock is refused.
    """
    from agentrt.capture.image import make_image
    from agentrt.config import load_config
    from agentrt.sizing import core_parameters

    config = load_config(config_file)
    folder = Path(
        config.wasm.cache_path or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrt"
    )
    with stages_shown(module.name, as_json) as tell:
        image = make_image(
            read_file(module),
            core_parameters(config),
            init=init,
            clock=clock,
            cache_folder=folder / "images",
            cache_bytes_max=config.wasm.cache_bytes_max,
            progress=tell,
        )
    write_file(out, image.module)
    report = {"file": str(out), "bytes": len(image.module), "version": hashlib.sha256(image.module).hexdigest()}
    if as_json:
        print_json(report | {name: value for name, value in image._asdict().items() if name != "module"})
        return exits.OK
    where = "where it reads its input" if image.at == "input" else "when it is ready"
    click.echo(
        f"Runs begin {where}, with {image.memory_bytes} bytes of memory; each is spared {image.boot_fuel} fuel",
        err=True,
    )
    click.echo(f"{out}: {report['bytes']} bytes, version {report['version']}", err=True)
    return exits.OK
