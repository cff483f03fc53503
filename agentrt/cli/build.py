"""``agentrt build``."""

import hashlib
import os
from pathlib import Path
from typing import Final

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.cli.pack import read_file, write_file
from agentrt.cli.progress import stages_shown

_PREEMPTS: Final = ("syscalls", "anywhere")


@click.command(name="build")
@click.argument("module", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="MODULE")
@click.option("--out", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option(
    "--preempt",
    type=click.Choice(_PREEMPTS),
    default=_PREEMPTS[0],
    show_default=True,
    help="Where its guests can be captured: when they wait, or in any round of any loop, too, which makes them slower.",
)
@click.option(
    "--input",
    "proof_input",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What the guest is given that the module is proven with; default: null.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: file, bytes, version, cached, proof.")
@click.pass_obj
def command(
    config_file: str | None, module: Path, out: Path, preempt: str, proof_input: Path | None, as_json: bool
) -> exits.ExitCode:
    """Make a module whose guests can be captured: suspended, stored, and gone on with elsewhere, without a replay.

    MODULE is a wasm file, packed or not. The result is proven: a guest is captured and gone on with before it is
    written. A second for a small module, a minute for an interpreter of tens of megabytes. What cannot be captured is
    refused with the reason; such modules are used as they are, and their runs are replayed.
    """
    from agentrt.capture.build import build
    from agentrt.capture.instrument import Preempt
    from agentrt.config import load_config
    from agentrt.sizing import core_parameters

    config = load_config(config_file)
    folder = Path(
        config.wasm.cache_path or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrt"
    )
    with stages_shown(module.name, as_json) as tell:
        built = build(
            read_file(module),
            Preempt(preempt),
            core_parameters(config),
            cache_folder=folder / "captured",
            cache_bytes_max=config.wasm.cache_bytes_max,
            proof_input=b"null" if proof_input is None else read_file(proof_input),
            progress=tell,
        )
    write_file(out, built.module)
    version = hashlib.sha256(built.module).hexdigest()
    if as_json:
        report = {"file": str(out), "bytes": len(built.module), "version": version, "cached": built.cached}
        print_json(report | {"proof": built.proof._asdict()})
        return exits.OK
    proof = built.proof
    if proof.reached is None:
        click.echo(
            f"Not proven: given this input, it ended ({proof.exit}) before it could be suspended. "
            "Give it another with --input.",
            err=True,
        )
    else:
        where = "in a syscall" if proof.reached == "syscall" else "at a safe point"
        click.echo(f"Proven {where}: a frame of {proof.frame_bytes} bytes, {proof.stack_bytes} of them stack", err=True)
    if proof.as_plain is False:
        click.echo(
            "Given this input, it did other things than the plain module: "
            "right if it looks at the clock, which goes with fuel",
            err=True,
        )
    click.echo(f"{out}: {len(built.module)} bytes, version {version}", err=True)
    return exits.OK
