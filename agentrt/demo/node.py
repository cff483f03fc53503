"""The demo's node: ``python -m agentrt.demo.node FD STORE BACKEND``, a Runtime driven by the supervisor's messages."""

import asyncio
import socket
import sys
from contextlib import suppress
from typing import Any, Final

from agentrt import Run, Runtime
from agentrt.demo import tools, wire
from agentrt.demo.agents import agents
from agentrt.errors import AgentrtError, ClosedError, InputError

STATISTICS_INTERVAL_S: Final = 0.2


class Node:
    """Answers the supervisor. Each order is a task of its own, so that none waits for another."""

    def __init__(self, runtime: Runtime, writer: asyncio.StreamWriter, backend: str) -> None:
        self._runtime = runtime
        self._backend = backend
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the supervisor says so or is gone."""
        for name, module in agents(self._backend).items():
            await self._runtime.register(name, module)
        wire.send(self._writer, wire.Ready())
        statistics = asyncio.create_task(self._send_statistics())
        try:
            while (message := await wire.receive_in_node(reader)) is not None:
                match message:
                    case wire.Submit():
                        self._start(self._submit(message))
                    case wire.Watch():
                        self._start(self._watch(message.order, self._runtime.run(message.run_id)))
                    case wire.ResumeParked():
                        self._start(self._resume_parked())
                    case wire.Finish():
                        break
        finally:
            statistics.cancel()
        wire.send(self._writer, wire.Statistics(await self._counters()))
        wire.send(self._writer, wire.Closed(await self._count_runs()))
        await self._writer.drain()

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, order: wire.Submit) -> None:
        try:
            run = await self._runtime.submit(
                order.agent, order.input, tier=order.tier, tenant=order.tenant, idempotency_key=order.order
            )
        except AgentrtError as error:
            wire.send(self._writer, wire.Refused(order.order, error.code, str(error)))
            return
        wire.send(self._writer, wire.Accepted(order.order, run.run_id))
        await self._watch(order.order, run)

    async def _watch(self, order: str, run: Run) -> None:
        try:
            result = await run.wait()
        except ClosedError:
            return  # told by the next node
        exit = result.exit
        error = (result.error or b"").decode(errors="replace")
        submitted_ns, first_ns = (exit.submitted_ns, exit.first_ns) if exit is not None else (0, 0)
        wire.send(self._writer, wire.Ended(order, run.run_id, result.state.value, error, submitted_ns, first_ns))

    async def _resume_parked(self) -> None:
        parked = await self._runtime.list_runs(state="WAITING", limit=1000)
        for info in parked:
            with suppress(InputError):  # it went on by itself meanwhile
                await self._runtime.run(info.run_id).resume()
        wire.send(self._writer, wire.Resumed(len(parked)))

    async def _counters(self) -> dict[str, Any]:
        statistics = await self._runtime.statistics()
        core = statistics.backends.get("wasm", {})
        return {
            **core,
            "recovered": statistics.engine.recovered,
        }

    async def _send_statistics(self) -> None:
        while True:
            await asyncio.sleep(STATISTICS_INTERVAL_S)
            wire.send(self._writer, wire.Statistics(await self._counters()))

    async def _count_runs(self) -> int:
        count, after = 0, ""
        while page := await self._runtime.list_runs(after=after, limit=1000):
            count += len(page)
            after = page[-1].run_id
        return count


async def main(fd: int, store: str, backend: str) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    native = (tools.native_hog,) if backend == "process" else ()
    used = (tools.ledger_add, tools.read_text, tools.index_put, *native)
    async with Runtime(store=store, tools=used) as runtime:
        await Node(runtime, writer, backend).serve(reader)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
