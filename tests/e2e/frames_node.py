"""A node for tests of frames in a process of its own: accepts a run, says which when frames of it were taken (and, if
it waits, it has left memory), and waits to be killed.

    python frames_node.py STORE MODULE INPUT [SETTINGS [COUNT]]
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from frames_kit import frames_named, parked, runtime


async def main(store: Path, module: bytes, data: Any, settings: dict[str, Any], count: int) -> None:
    async with runtime(store, **settings) as made:
        await made.register("works", module)
        run = await made.submit("works", data)
        if data.get("wait"):
            await parked(made, run.run_id, count - 1)
        else:
            while len(await frames_named(made, run.run_id)) < count:
                await asyncio.sleep(0.01)
        print(run.run_id, flush=True)
        await asyncio.sleep(1000)


_, store, module, data, *more = sys.argv
settings = json.loads(more[0]) if more else {}
asyncio.run(main(Path(store), Path(module).read_bytes(), json.loads(data), settings, int(more[1]) if more[1:] else 1))
