"""A node with errands for the power cut, run inside the VM: ``python errand_vm.py work|verify STORE FOLDER``.

``work`` runs errands without end and prints "accepted ORDER RUN" and "ended ORDER RUN" as they become durable.
``verify`` lets everything that the store holds end and prints one JSON object: state by run id. The folder with the
ledger is the host's, which a power cut of the VM does not touch.
"""

import asyncio
import json
import os
import sys
from itertools import count
from pathlib import Path

from errand_agents import errand
from errand_node import Operator
from errand_tools import FOLDER, TOOLS

from agentrt import Runtime, load_config

AT_ONCE = 3


async def work(runtime: Runtime, operator: Operator) -> None:
    numbers = count()

    async def errands() -> None:
        while True:
            order = f"order-{next(numbers)}"
            run = await runtime.submit("errand", {"order": order}, idempotency_key=order)
            print("accepted", order, run.run_id, flush=True)
            operator.begin(run)
            await run.result()
            operator.end(run)
            print("ended", order, run.run_id, flush=True)

    await asyncio.gather(*(errands() for _ in range(AT_ONCE)))


async def verify(runtime: Runtime, operator: Operator) -> None:
    states: dict[str, str] = {}
    while left := [info.run_id for info in await runtime.list_runs(limit=100_000) if info.run_id not in states]:
        for run_id in left:
            operator.begin(runtime.run(run_id))
        for run_id in left:  # which may spawn others meanwhile
            states[run_id] = (await runtime.run(run_id).wait()).state.value
    print(json.dumps(states), flush=True)


async def main(mode: str, store: str, folder: Path) -> None:
    config = load_config(
        arguments={
            "wasm.guests_max": 64,
            "wasm.memory_bytes_max": 1 << 24,
            "tools.start_timeout_ms": 300_000,
            "python.start_timeout_ms": 300_000,
            "limits.hot_ms": 0,
            # everything takes some twenty times as long
            "limits.lock_hold_ms": 600_000,
            "limits.lock_grace_ms": 600_000,
        }
    )
    async with Runtime(store=store, config=config, tools=TOOLS) as runtime:
        await runtime.register(errand)
        operator = Operator(runtime, folder)
        working = asyncio.ensure_future(operator.work())
        await (work if mode == "work" else verify)(runtime, operator)
        working.cancel()


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv[3]
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
