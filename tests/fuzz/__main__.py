"""Runs one target, or those of one module after each other: ``python -m tests.fuzz NAME [--seconds N] [--corpus DIR]``.

Without a name: lists them. New inputs go to ``DIR/TARGET`` (default: nowhere); the seeds in ``corpus/TARGET`` are only
read. What else is given goes to libFuzzer. A crash prints its input as base64; the status is then not 0.
"""

import argparse
import base64
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

try:
    import atheris
except ImportError:  # no wheel for this Python
    atheris = None

STATUS_LEFT_OUT = 3
STARTED = time.monotonic()
SIZE_MAX = 16384


def main() -> None:
    """With one target this never returns: libFuzzer ends the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=str(__doc__).splitlines()[0])
    parser.add_argument("name", nargs="?")
    parser.add_argument("--seconds", type=int, default=60, help="of all targets together, their imports included")
    parser.add_argument("--corpus", type=Path)
    given, flags = parser.parse_known_args()
    if atheris is None and given.name is not None:
        print(f"LEFT OUT: atheris cannot be imported by Python {sys.version.split()[0]}")
        sys.exit(STATUS_LEFT_OUT)
    with nullcontext() if given.name is None else _instrumented():
        from tests.fuzz.targets import GROUPS, TARGETS
    if given.name is None:
        print(*(f"{group}: {' '.join(names)}" for group, names in GROUPS.items()), sep="\n")
    elif given.name in GROUPS:
        names = GROUPS[given.name]
        corpus = [] if given.corpus is None else [f"--corpus={given.corpus}"]
        for done, name in enumerate(names):
            share = (given.seconds - (time.monotonic() - STARTED)) / (len(names) - done)
            print(f"--- {name}", flush=True)
            command = [sys.executable, "-m", "tests.fuzz", name, f"--seconds={max(1, int(share))}"]
            subprocess.run([*command, *corpus, *flags], check=True)
    elif given.name in TARGETS:
        with tempfile.TemporaryDirectory() as scratch:
            _fuzz(given.name, given.seconds, (given.corpus or Path(scratch)) / given.name, flags)
    else:
        parser.error(f"no target {given.name}")


def _instrumented() -> Any:
    if atheris is None:
        return nullcontext()
    return atheris.instrument_imports(include=["agentrt", "rfc8785", "tomllib"], enable_loader_override=False)


def _fuzz(name: str, seconds: int, corpus: Path, flags: list[str]) -> NoReturn:
    from tests.fuzz import kit

    target = kit.TARGETS[name]
    # What a decoder written in C does with an input is beyond libFuzzer's sight, so it would keep few of the seeds.
    seeds = [path.read_bytes() for path in sorted((kit.CORPUS / name).iterdir())]

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        if seed % 3 == 0:
            data = seeds[seed // 3 % len(seeds)]
        if target.codec is not None and seed % 4:
            made = kit.mutate(data, target.codec, size_max, seed)
            if made is not None:
                return made
        if seed % 257 == 0:
            return kit.deepen(data, target.codec, size_max, seed)
        return bytes(atheris.Mutate(data, size_max))

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except Exception:
            print(f"Base64: {base64.b64encode(data).decode()}", file=sys.stderr)  # libFuzzer prints short ones only
            raise

    corpus.mkdir(parents=True, exist_ok=True)
    argv = [
        sys.argv[0],
        f"-max_total_time={max(1, int(seconds - (time.monotonic() - STARTED)))}",
        f"-max_len={SIZE_MAX}",
        "-timeout=20",
        "-rss_limit_mb=3000",
        "-print_final_stats=1",
        f"-artifact_prefix={corpus}/",
        *flags,
        str(corpus),
        str(kit.CORPUS / name),
    ]
    atheris.Setup(argv, run, custom_mutator=mutate)
    atheris.Fuzz()
    sys.exit(0)


if __name__ == "__main__":
    main()
