"""A node bound to NUMA node 1 that has run a guest and a program: where its threads and its memory are, as JSON."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from agentrt import Command, Runtime, load_config
from agentrt.node import numa

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
from agentrt.process_client import serve
serve(lambda ctx, input: [open("/proc/self/status").read(), open("/proc/self/numa_maps").read()])
"""


def anonymous_pages(maps: str) -> dict[str, int]:
    """Pages of its own by node, as numa_maps tells."""
    found: dict[str, int] = {}
    for line in maps.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "anon" in words:
            for name, value in words.items():
                if name[0] == "N" and name[1:].isdecimal():
                    found[name[1:]] = found.get(name[1:], 0) + int(value)
    return found


def affinities() -> dict[str, list[int]]:
    """CPUs of this process's threads, by name."""
    tasks = Path("/proc/self/task").iterdir()
    return {(task / "comm").read_text().strip(): sorted(os.sched_getaffinity(int(task.name))) for task in tasks}


def split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def own_maps() -> str:
    return Path("/proc/self/numa_maps").read_text()


async def main(folder: Path) -> None:
    placed = numa.bind("1")
    settings = {
        "store.kind": "memory",
        "wasm.guests_max": 64,
        "wasm.cache_path": str(folder),
        "scheduler.pin": True,
        "programs.confined": False,
        "programs.start_timeout_ms": 600_000,
    }
    (folder / "program.py").write_text(PROGRAM)
    async with Runtime(config=load_config(arguments=settings)) as runtime:
        await runtime.register("hog", ROOT / "examples" / "guests" / "hog.wasm", fuel=10_000_000)
        await (await runtime.submit("hog", {})).wait()
        command = Command((sys.executable, str(folder / "program.py")), environment=(f"PYTHONPATH={ROOT}",))
        await runtime.register("program", command)
        status, maps = await (await runtime.submit("program")).result()
        said = {
            "node": placed.node,
            "cpus": placed.cpus,
            "memory": placed.memory,
            "threads": affinities(),
            "pages": anonymous_pages(own_maps()),
            "program_may_use": {key: value.strip() for key, _, value in map(split, status.splitlines())},
            "program_pages": anonymous_pages(maps),
        }
        print(json.dumps(said))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
