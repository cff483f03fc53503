"""A node for the power cut, run inside the VM: ``python power_node.py work|verify STORE LEDGER``.

``work`` accepts six-step runs without end and prints "accepted ORDER RUN" and "ended ORDER RUN" as they become durable.
``verify`` lets everything the store holds finish and prints one JSON object: state by run id. The ledger is a file on
the host, which a power cut of the VM does not touch; each effect is one line.
"""

import asyncio
import json
import os
import sys
from itertools import count
from pathlib import Path

from agentrt import Runtime, load_config, tool

GUEST = Path(__file__).parents[2] / "examples/guests/steps.wasm"
LEDGER_VARIABLE = "AGENTRT_TEST_LEDGER"
AT_ONCE = 4


@tool(kind="keyed", timeout=60)
async def ledger_add(order: str, place: int, *, idempotency_key: str) -> None:
    fd = os.open(os.environ[LEDGER_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, f"{idempotency_key} {order} {place}\n".encode())
    finally:
        os.close(fd)


async def work(runtime: Runtime) -> None:
    numbers = count()

    async def orders() -> None:
        while True:
            order = f"order-{next(numbers)}"
            run = await runtime.submit("steps", {"order": order, "steps": 6}, idempotency_key=order)
            print("accepted", order, run.run_id, flush=True)
            await run.result()
            print("ended", order, run.run_id, flush=True)

    await asyncio.gather(*(orders() for _ in range(AT_ONCE)))


async def verify(runtime: Runtime) -> None:
    runs = await runtime.list_runs(limit=10_000)
    results = [await runtime.run(info.run_id).wait() for info in runs]
    print(json.dumps({result.run_id: result.state.value for result in results}), flush=True)


async def main(mode: str, store: str) -> None:
    config = load_config(
        arguments={"wasm.guests_max": 64, "wasm.memory_bytes_max": 1 << 24, "tools.start_timeout_ms": 300_000}
    )
    async with Runtime(store=store, config=config, tools=[ledger_add]) as runtime:
        before = len(await runtime.list_runs(limit=10_000))
        print("found", before, flush=True)
        await runtime.register("steps", GUEST)
        await (work if mode == "work" else verify)(runtime)


if __name__ == "__main__":
    os.environ[LEDGER_VARIABLE] = sys.argv[3]
    asyncio.run(main(sys.argv[1], sys.argv[2]))
