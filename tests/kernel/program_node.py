"""Programs in leaves with real limits: what became of them, as JSON."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from agentrt import Command, Run, Runtime, load_config

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, pathlib, subprocess, sys, time
from agentrt.process_client import serve

EATS = "import mmap; mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"

def greedy(ctx, input):
    subprocess.Popen(["sleep", "4343"], start_new_session=True)
    subprocess.run([sys.executable, "-c", EATS], start_new_session=True)
    return "half of it went on"

def bystander(ctx, input):
    while not pathlib.Path(input).exists():
        time.sleep(0.05)
    return "unharmed"

def leaves(ctx, input):
    child = subprocess.Popen(["sleep", "4343"], start_new_session=True)
    return child.pid

serve(globals()[sys.argv[1]])
"""


def sleepers() -> int:
    found = 0
    for entry in Path("/proc").iterdir():
        try:
            found += (entry / "cmdline").read_bytes() == b"sleep\0004343\0"
        except OSError:
            continue
    return found


async def main(folder: Path) -> None:
    settings = {
        "store.kind": "memory",
        "wasm.guests_max": 64,
        "wasm.cache_path": str(folder),
        "programs.confined": False,
        "programs.start_timeout_ms": 600_000,
        "process.stall_ms": 600_000,
    }
    (folder / "program.py").write_text(PROGRAM)
    over = folder / "over"
    async with Runtime(config=load_config(arguments=settings)) as runtime:

        async def begin(name: str, given: object = None) -> Run:
            command = Command(
                (sys.executable, str(folder / "program.py"), name),
                environment=(f"PYTHONPATH={ROOT}",),
                memory_bytes_max=96 << 20,
            )
            await runtime.register(name, command)
            return await runtime.submit(name, given)

        bystander = await begin("bystander", str(over))
        said = {}
        for name in ("greedy", "leaves"):
            ended = await (await begin(name)).wait()
            for _ in range(2_000):
                if not sleepers():
                    break
                await asyncio.sleep(0.05)
            error = json.loads(ended.error or b"null")
            said[name] = {"state": ended.state.value, "error": error, "left": sleepers()}
        over.touch()
        said["bystander"] = await bystander.result()
        said["statistics"] = (await runtime.statistics()).backends["process"]
        print(json.dumps(said))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
