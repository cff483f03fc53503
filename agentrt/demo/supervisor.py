"""The demo's supervisor: starts ledger and node, orders work, kills the node half-way, judges.

It knows the node only through its messages, as a client would: an order counts as accepted when the node said so, and
an order whose answer was lost with the node is sent again under the same idempotency key.
"""

import asyncio
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agentrt.demo import wire
from agentrt.demo.agents import DemoError, interpreter
from agentrt.demo.figures import percentile, sum_counters
from agentrt.demo.ledger import Client, Report
from agentrt.demo.load import INDEXERS, STEPPERS, Order, Planner
from agentrt.demo.tools import LEDGER_VARIABLE, texts
from agentrt.demo.verdict import Verdict, judge
from agentrt.errors import InternalError

#: After the last order, everything accepted must end within this; a laptop needs a few seconds.
SETTLE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 60.0
#: A refused order (the queue is full) is sent again after this.
RETRY_S = 0.2


class Options(msgspec.Struct, frozen=True):
    """``hog_rounds``: how long one tier-3 guest computes. ``kills``: 1 is half-way, more come at random moments."""

    seconds: float
    hogs: int
    store: Path | None
    hog_rounds: int
    kills: int = 1
    seed: int | None = None
    config_file: str | None = None  # absolute
    backend: str = "wasm"  # of the hogs: wasm, process


class Progress(msgspec.Struct):
    """What a view shows while the demo runs; written by the supervisor only."""

    phase: str = "starting"
    elapsed_s: float = 0.0
    seconds: float = 0.0
    kills: int = 0
    resumed: int = 0  # by an operator: steps killed in all their attempts
    outage_ms: float = 0.0
    orders: dict[str, Order] = {}
    accepted: int = 0
    ended_by_tier: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    sent_by_tier: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    urgent_us: list[float] = []  # core submit to first guest instruction
    urgent_accept_us: list[float] = []  # order sent to first guest instruction, durable acceptance included
    lives: list[dict[str, Any]] = []  # the node's counters, one dict per life


class Result(msgspec.Struct):
    verdict: Verdict
    progress: Progress
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The last line of ``--json``: plain numbers, times in microseconds where the name says so."""
        p, v = self.progress, self.verdict
        return {
            "accepted": v.accepted,
            "finished": v.finished,
            "failed": v.failed,
            "lost": v.lost,
            "duplicates": v.duplicates,
            "dropped_by_ledger": v.dropped,
            "kills": p.kills,
            "recovered": sum_counters(p.lives, "recovered"),
            "resumed_by_operator": p.resumed,
            "outage_ms": round(p.outage_ms, 1),
            "urgent_p50_us": round(percentile(p.urgent_us, 50), 1),
            "urgent_p99_us": round(percentile(p.urgent_us, 99), 1),
            "urgent_max_us": round(max(p.urgent_us, default=0.0), 1),
            "urgent_accept_p50_us": round(percentile(p.urgent_accept_us, 50), 1),
            "urgent_accept_p99_us": round(percentile(p.urgent_accept_us, 99), 1),
            "urgent_runs": len(p.urgent_us),
            "runs_per_s_by_tier": [round(n / self.seconds, 2) for n in p.ended_by_tier],
            "preemptions": sum_counters(p.lives, "preemptions"),
            "demotions": sum_counters(p.lives, "demotions"),
            "agings": sum_counters(p.lives, "promotions_count") + sum_counters(p.lives, "promotions_wait"),
            "seconds": round(self.seconds, 1),
            "findings": v.findings,
            "passed": v.passed,
        }


class Supervisor:
    """One demo. ``run`` does it all; ``progress`` may be read meanwhile, on the same loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rng = random.Random(options.seed)
        self._planner = Planner(self._rng, options.hog_rounds, len(texts()))
        self.progress = Progress(seconds=options.seconds)
        self._node: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._open = 0  # orders without an end
        self._settled = asyncio.Event()
        self._ready: asyncio.Future[wire.Ready] | None = None
        self._closed: asyncio.Future[wire.Closed] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loading = True
        self._started_s = 0.0  # time.monotonic() when the first node accepted work; 0 before

    def elapsed_s(self) -> float:
        """Since the first node accepted work: compiling, the first time, is no part of the demo."""
        return time.monotonic() - self._started_s if self._started_s else 0.0

    # --- the whole ---------------------------------------------------------------

    async def run(self) -> Result:
        """Raises DemoError when the node or ledger cannot be started or the work does not end in time."""
        interpreter()  # before anything is started
        self.progress.phase = "starting; the first time, MicroPython is compiled"
        with tempfile.TemporaryDirectory(prefix="agentrt-demo-") as scratch:
            store = self._options.store or Path(scratch) / "store"
            ledger_path = f"{scratch}/ledger.sock"
            ledger = await self._start_ledger(ledger_path)
            try:
                await self._start_node(store, ledger_path)
                self._started_s = time.monotonic()
                await self._load(store, ledger_path)
                self.progress.phase = "letting everything finish"
                await self._settle()
                seconds = self.elapsed_s()
                runs = await self._stop_node()
                report = await self._ask_ledger(ledger_path)
            finally:
                await self._end_processes(ledger)
        self.progress.phase = "done"
        return Result(judge(self.progress.orders.values(), report, runs), self.progress, seconds)

    async def _load(self, store: Path, ledger_path: str) -> None:
        """Order work for the time asked; kill and restart the node meanwhile."""
        self.progress.phase = "running"
        loop = asyncio.get_running_loop()
        end = loop.time() + self._options.seconds
        for _ in range(self._options.hogs):
            self._order(self._planner.hog())
        for _ in range(INDEXERS):
            self._order(self._planner.index())
        for _ in range(STEPPERS):
            self._order(self._planner.steps())
        leads = asyncio.create_task(self._order_leads())
        try:
            for left in range(self._options.kills, 0, -1):
                gap_s = (end - loop.time()) / (left + 1)
                await self._pause(gap_s if self._options.kills == 1 else self._rng.uniform(0, 2 * gap_s))
                await self._kill_node(store, ledger_path)
            await self._pause(end - loop.time())
        finally:
            self._loading = False
            leads.cancel()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than the node lives. Raises what ended it."""
        assert self._reading is not None
        await asyncio.wait([self._reading], timeout=max(0.0, seconds))
        self._check_node()

    async def _order_leads(self) -> None:
        while True:
            await asyncio.sleep(self._planner.next_lead_s())
            self._order(self._planner.lead())

    async def _settle(self) -> None:
        """Wait until all has ended; after a time-out the verdict names what has not."""
        assert self._reading is not None and self._writer is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_TIMEOUT_S
        settled = asyncio.create_task(self._settled.wait())
        while self._open and not settled.done() and loop.time() < end:
            # A step that was killed in all its attempts waits for an operator; here that is the supervisor.
            wire.send(self._writer, wire.ResumeParked())
            await asyncio.wait([settled, self._reading], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            self._check_node()
        settled.cancel()

    def _check_node(self) -> None:
        """Raises what ended the reading from the node."""
        assert self._reading is not None
        if self._reading.done():
            self._reading.result()
            raise DemoError("the node ended by itself", hint="Its own messages are above")

    # --- orders --------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        self.progress.orders[order.id] = order
        self.progress.sent_by_tier[order.tier] += 1
        self._open += 1
        self._send(order)

    def _send(self, order: Order) -> None:
        order.sent_ns = time.monotonic_ns()
        order.sends += 1
        if self._writer is not None:  # else the node is down: sent when it is back
            wire.send(self._writer, wire.Submit(order.id, order.agent, order.tier, order.tenant, order.input))

    def _resend_all(self) -> None:
        """A new node: ask for what was accepted, order again what was not."""
        assert self._writer is not None
        for order in self.progress.orders.values():
            if order.run_id and not order.state:
                wire.send(self._writer, wire.Watch(order.id, order.run_id))
            elif not order.run_id:
                self._send(order)

    def _on_ended(self, message: wire.Ended) -> None:
        order = self.progress.orders[message.order]
        if order.state:
            return
        order.state = message.state
        self.progress.ended_by_tier[order.tier] += 1
        if order.tier == 0 and message.first_ns and order.sends == 1:
            self.progress.urgent_us.append((message.first_ns - message.submitted_ns) / 1000)
            self.progress.urgent_accept_us.append((message.first_ns - order.sent_ns) / 1000)
        self._open -= 1
        if self._loading and order.tier > 0:
            again: dict[int, Callable[[], Order]] = {
                1: self._planner.steps,
                2: self._planner.index,
                3: self._planner.hog,
            }
            self._order(again[order.tier]())
        if self._open == 0 and not self._loading:
            self._settled.set()

    def _on_refused(self, message: wire.Refused) -> None:
        order = self.progress.orders[message.order]
        if message.code != "queue_full":
            raise DemoError(f"the node refused {order.id}: {message.code}: {message.message}")
        asyncio.get_running_loop().call_later(RETRY_S, self._send, order)

    # --- the node ------------------------------------------------------------------

    async def _start_node(self, store: Path, ledger_path: str) -> None:
        environment = {**os.environ, LEDGER_VARIABLE: ledger_path}
        if self._options.config_file is not None:
            environment["AGENTRT_CONFIG"] = self._options.config_file
        ours, theirs = socket.socketpair()
        with theirs:
            self._node = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "agentrt.demo.node",
                str(theirs.fileno()),
                str(store),
                self._options.backend,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._closed = loop.create_future()
        self.progress.lives.append({})
        self._reading = asyncio.create_task(self._read(reader, self._ready, self._closed))
        waiting: list[asyncio.Future[Any]] = [self._ready, self._reading]
        await asyncio.wait(waiting, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise DemoError("the node did not start", hint="Its own messages are above; see also: agentrt doctor")

    async def _read(
        self, reader: asyncio.StreamReader, ready: asyncio.Future[wire.Ready], closed: asyncio.Future[wire.Closed]
    ) -> None:
        while (message := await wire.receive_in_supervisor(reader)) is not None:
            match message:
                case wire.Ready():
                    ready.set_result(message)
                case wire.Accepted():
                    order = self.progress.orders[message.order]
                    self.progress.accepted += not order.run_id
                    if order.run_id and order.run_id != message.run_id:
                        raise DemoError(f"{order.id} became two runs: {order.run_id} and {message.run_id}")
                    order.run_id = message.run_id
                case wire.Refused():
                    self._on_refused(message)
                case wire.Ended():
                    self._on_ended(message)
                case wire.Resumed():
                    self.progress.resumed += message.count
                case wire.Statistics():
                    self.progress.lives[-1] = message.values
                case wire.Closed():
                    closed.set_result(message)

    async def _kill_node(self, store: Path, ledger_path: str) -> None:
        """SIGKILL, and a new node on the same store."""
        assert self._node is not None and self._reading is not None and self._writer is not None
        self.progress.phase = "node killed with SIGKILL, starting it again"
        killed = time.monotonic()
        writer, self._writer = self._writer, None  # a write to a dead node would spoil what it still had to say
        self._node.send_signal(signal.SIGKILL)
        await self._node.wait()
        await self._reading  # what it had sent before counts
        writer.close()
        self.progress.kills += 1
        await self._start_node(store, ledger_path)
        self.progress.outage_ms += (time.monotonic() - killed) * 1000
        self._resend_all()
        self.progress.phase = "running again"

    async def _stop_node(self) -> int:
        """Ask the node to close; how many runs its store holds."""
        assert self._node is not None and self._writer is not None and self._closed is not None
        wire.send(self._writer, wire.Finish())
        try:
            closed = await asyncio.wait_for(self._closed, START_TIMEOUT_S)
        except TimeoutError:
            raise DemoError("the node did not close in time") from None
        await self._node.wait()
        return closed.runs

    # --- the ledger ----------------------------------------------------------------

    async def _start_ledger(self, path: str) -> asyncio.subprocess.Process:
        ledger = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agentrt.demo.ledger",
            path,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert ledger.stdout is not None
        if await ledger.stdout.readline() != b"ready\n":
            raise DemoError("the ledger did not start")
        return ledger

    async def _ask_ledger(self, path: str) -> Report:
        client = await Client.connect(path)
        try:
            return await client.report()
        finally:
            client.close()

    async def _end_processes(self, ledger: asyncio.subprocess.Process) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        for process in (self._node, ledger):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def run_demo(options: Options, watch: Callable[[Progress], None], interval_s: float = 0.25) -> Result:
    """Run the demo, calling ``watch`` with its progress every interval."""
    supervisor = Supervisor(options)
    task = asyncio.create_task(supervisor.run())
    while not task.done():
        await asyncio.wait([task], timeout=interval_s)
        supervisor.progress.elapsed_s = supervisor.elapsed_s()
        watch(supervisor.progress)
    try:
        return await task
    except AssertionError as error:
        raise InternalError("the demo lost track of its node") from error
