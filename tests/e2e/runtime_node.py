"""A node for the crash tests: ``runtime_node.py STORE GUEST_FOLDER COUNT`` submits COUNT orders of 6 steps, each with
its own idempotency key, and prints a line per acknowledged and per finished run. Started again, it goes on."""

import asyncio
import sys
from pathlib import Path

from agentrt import Runtime

sys.path.insert(0, str(Path(__file__).parent))
import runtime_tools


async def main(store: str, guests: Path, count: int) -> None:
    async with Runtime(store=store, tools=[runtime_tools.ledger_add]) as runtime:
        await runtime.register("steps", guests / "steps.wasm")

        async def order(number: int) -> None:
            name = f"order-{number}"
            run = await runtime.submit("steps", {"order": name, "steps": 6}, idempotency_key=name)
            print("accepted", name, run.run_id, flush=True)
            result = await run.result()
            print("finished", name, run.run_id, result["steps"], flush=True)

        await asyncio.gather(*(order(number) for number in range(count)))
        assert await runtime.drain(30)


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
