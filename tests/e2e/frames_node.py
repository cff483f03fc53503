"""A node for test_run_frames.py in a process of its own: accepts a run, says which when that has left memory as a
frame, and waits to be killed.

    python frames_node.py STORE MODULE INPUT
"""

import asyncio
import json
import sys
from pathlib import Path

from frames_kit import parked, runtime


async def main(store: Path, module: bytes, data: object) -> None:
    async with runtime(store) as made:
        await made.register("works", module)
        run = await made.submit("works", data)
        await parked(made, run.run_id)
        print(run.run_id, flush=True)
        await asyncio.sleep(1000)


asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), json.loads(sys.argv[3])))
