"""Graphs as agents, on real hosts: nodes are steps, interrupts are waits, a restart repeats nothing."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from trip import trip, trip_node

from agentrt import Runtime

RESULT = ["plan", "look Rome", "look Oslo", "asked Rome yes", "book"]


async def interrupted(runtime: Runtime, run_id: str, number: int) -> dict[str, Any]:
    """The number-th interrupt of the run, once it has been made."""
    seen: list[dict[str, Any]] = []
    met = asyncio.Event()
    stop = await runtime.watch_run(run_id, met.set)
    try:
        while len(seen) < number:
            met.clear()
            records = await runtime.read_store(lambda store: store.read_records(run_id))
            seen = [found for record in records if (found := emitted(record)) is not None]
            assert type(records[-1]).__name__ != "RunEnded", records[-1]
            if len(seen) < number:
                await asyncio.wait_for(met.wait(), 60)
    finally:
        stop()
    return seen[number - 1]


def emitted(record: Any) -> dict[str, Any] | None:
    if getattr(record, "op", None) != "emit" or type(record).__name__ != "StepCommitted":
        return None
    return dict(msgspec.json.decode(record.result)["interrupt"])


def test_a_graph_with_branches_sends_commands_and_interrupts(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with Runtime(store=tmp_path / "store", tools=[trip_node]) as runtime:
            await runtime.register(trip)
            run = await runtime.submit("trip", str(ledger))
            first = await interrupted(runtime, run.run_id, 1)
            assert first["value"] == {"question": "book?"} and first["node"] == "ask"
            run_id = run.run_id
        # Another process would do the same: nothing but the store knows of the run.
        async with Runtime(store=tmp_path / "store", tools=[trip_node]) as runtime:
            await runtime.register(trip)
            await runtime.send("Rome", topic=first["topic"], key=first["key"])
            second = await interrupted(runtime, run_id, 2)
            assert second["value"] == {"question": "sure about Rome?"}
            await runtime.send("yes", topic=second["topic"], key=second["key"])
            assert await runtime.run(run_id).result() == RESULT

    asyncio.run(main())
    assert sorted(ledger.read_text().split("\n")) == sorted([*RESULT, ""])  # each once


def test_a_node_that_fails_fails_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with Runtime(store=tmp_path / "store", tools=[trip_node]) as runtime:
            await runtime.register(trip)
            result = await (await runtime.submit("trip", str(tmp_path))).wait()  # a folder cannot be written to
            assert result.error is not None and "IsADirectoryError" in str(result.error)

    asyncio.run(main())
