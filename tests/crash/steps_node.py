"""A node that runs one agent of six steps: ``python steps_node.py STORE ORDER [cancel]``; crash points by environment.

The order's id is the idempotency key, so starting the script again goes on with the same run. Prints one JSON object
when the run has ended: its id, its state, and how many runs the store holds.
"""

import asyncio
import json
import sys
from pathlib import Path

from agentrt import Runtime
from agentrt.demo.tools import ledger_add

GUEST = Path(__file__).parents[2] / "examples/guests/steps.wasm"


async def main(store: str, order: str, cancel: bool) -> None:
    async with Runtime(store=store, tools=[ledger_add]) as runtime:
        await runtime.register("steps", GUEST)
        run = await runtime.submit("steps", {"order": order, "steps": 6}, idempotency_key=order)
        if cancel:
            await run.cancel("the sweep says so")
        result = await run.wait()
        runs = await runtime.list_runs()
    print(json.dumps({"run": run.run_id, "state": result.state.value, "runs": len(runs)}))


asyncio.run(main(sys.argv[1], sys.argv[2], "cancel" in sys.argv[3:]))
