"""A node for test_frame_kills.py: ``python frames_node.py FOLDER``; crash points by environment.

Runs one agent that waits for an event some times and leaves memory as a frame each time, and sends what it waits for.
Started again it goes on with the same run. FOLDER has its module. Prints one JSON object when the run has ended.
"""

import asyncio
import json
import sys
from pathlib import Path

from agentrt import Runtime
from agentrt.config import load_config

WORK = {"work": "sort", "size": 60, "every": 200, "wait": 1}


async def main(folder: Path) -> None:
    settings = {
        "store.path": str(folder / "store"),
        "store.force_place": True,
        "wasm.cache_path": str(folder / "cache"),
        "wasm.frame_after_ms": 0,
        "wasm.replay_fuel_max": 1,  # so that there are second copies
        "limits.hot_ms": 0,
    }
    async with Runtime(config=load_config(arguments=settings, env={})) as runtime:
        await runtime.register("works", (folder / "module.wasm").read_bytes())
        run = await runtime.submit("works", WORK, idempotency_key="one")
        ended = asyncio.ensure_future(run.wait())
        runs, frames = runtime._engine._runs, runtime._engine.frames
        sent_at = -1
        while not ended.done():
            if run.run_id not in runs and frames.taken + frames.used > sent_at:
                sent_at = frames.taken + frames.used
                await runtime.send(run_id=run.run_id, key="go")
            await asyncio.sleep(0.002)
        end = ended.result()
        print(json.dumps({"state": end.state, "result": (end.result or b"").decode(), "fuel": end.cost.fuel}))
        print(json.dumps({"used": frames.used, "refused": frames.refused, "taken": frames.taken}))


asyncio.run(main(Path(sys.argv[1])))
