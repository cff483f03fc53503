"""A Python host: the runs of one tenant, bundle and tier in one process, one activation at a time on its main thread.

`serve` is where a forked child of a template ends up. It reads messages, executes one activation for each, and answers
with what the run asked for. Answers leave at the end of a batch, or when the oldest waits for `FLUSH_NS`.

What must hold:
- The page says which run is executing while one is, so that the node knows whom to charge.
- Nothing is written to the socket during an activation: a stopped host may be left for good at any point of it.
- The collector runs between activations only.
"""

import asyncio
import gc
import os
import signal
import socket
import time
import zlib
from types import FrameType
from typing import Final, NoReturn

from agentrt.agents.bundle import Bundle, RunModules, find, run_builtins
from agentrt.agents.context import Context
from agentrt.agents.current import current
from agentrt.agents.declare import Entry, agent
from agentrt.agents.protocol import (
    EXIT_MEMORY,
    PAGE_ACTIVATIONS,
    PAGE_CHARGED,
    PAGE_RUN,
    Answer,
    Ask,
    Complete,
    Drop,
    Ended,
    FromHost,
    HostLimits,
    Start,
    Suspended,
    ToHost,
    host_frame,
    to_host_decoder,
)
from agentrt.agents.run import AgentRun
from agentrt.agents.weigh import weigh
from agentrt.errors import ModuleError
from agentrt.tools.protocol import FrameReader

FLUSH_NS: Final = 200_000
FLUSH_BYTES: Final = 1 << 20
_RECEIVE_BYTES: Final = 256 * 1024
#: One that took longer may have been stopped meanwhile; the thread's CPU clock costs half a microsecond to read.
_CPU_LOOK_NS: Final = 1_000_000
#: Young objects at which the collector runs, and every how many of its runs it looks further.
_GC_YOUNG: Final = 5_000
_GC_OLDER_EVERY: Final = 20

_now_ns: Final = time.perf_counter_ns  # bound before agentrt.agents.determinism replaces it
_cpu_ns: Final = time.thread_time_ns


class BundleProgram:
    """One agent of a bundle."""

    def __init__(self, bundle: Bundle, qualname: str, entry: Entry) -> None:
        self._bundle = bundle
        self._qualname = qualname
        self._entry = entry

    def entry(self, run: AgentRun) -> Entry:
        """The agent's function in a fresh copy of its modules."""
        run.modules = modules = RunModules(self._bundle)
        function = find(modules.load(self._bundle.module), self._qualname)
        if function is None:
            raise ModuleError(f"{self._qualname} is not there when the module is executed again")
        return self._entry.of(function, self._bundle.sources)


class Host:
    """The state of one host. ``page``: shared words, see agentrt.agents.protocol."""

    def __init__(
        self, sock: socket.socket, page: "memoryview[int]", programs: dict[str, BundleProgram], limits: HostLimits
    ) -> None:
        self._sock = sock
        self._page = page
        self._programs = programs
        self._limits = limits
        self._runs: dict[int, AgentRun] = {}
        self._out: list[FromHost] = []
        self._out_bytes = 0
        self._activations = 0
        self._collections = 0
        self._cpu_ns = 0
        self._out_of_memory = False

    def serve(self) -> NoReturn:
        """Work until the node closes the socket, which ends the process."""
        reader = FrameReader()
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            count = self._sock.recv_into(buffer)
            if not count:
                os._exit(0)
            for body in reader.feed(buffer[:count]):
                self._batch(to_host_decoder.decode(body))
            self._collect()

    def _batch(self, messages: list[ToHost]) -> None:
        flushed_ns = _now_ns()
        self._cpu_ns = _cpu_ns()
        for message in messages:
            self._handle(message)
            now = _now_ns()
            if now - flushed_ns > FLUSH_NS or self._out_bytes > FLUSH_BYTES:
                self._flush()
                flushed_ns = now
        self._flush()

    def _flush(self) -> None:
        if self._out:
            self._sock.sendall(host_frame(self._out))
            self._out.clear()
            self._out_bytes = 0

    def _handle(self, message: ToHost) -> None:
        number = message.number
        run = self._runs.get(number)
        if isinstance(message, Start):
            self._start(message)
        elif run is None:  # it ended meanwhile; the node has been told
            return
        elif isinstance(message, Drop):
            self._drop(run)
        else:
            began = self._enter(number)
            if isinstance(message, Complete):
                run.complete(message.answer)
            else:
                run.unwind(message.reason)
            self._report(run, self._leave(began), b"")

    def _start(self, start: Start) -> None:
        earlier = self._runs.get(start.number)
        if earlier is not None:  # it was taken elsewhere, and comes back
            self._drop(earlier)
        began = self._enter(start.number)
        run = AgentRun(self._programs[start.entry], start, self._limits)
        self._runs[start.number] = run
        run.start()
        checks = bytearray()
        for answer in start.history:
            if run.exit is not None:
                break
            self._check(run, checks)
            # Each record is an activation of its own for whoever watches: bringing a run back is nobody's fault.
            self._activations += 1
            self._page[PAGE_ACTIVATIONS] = self._activations
            if answer.handle:
                run.complete(answer)
            else:
                run.unwind(answer.payload.decode())
        if start.history and run.exit is None:
            self._check(run, checks)
        self._report(run, self._leave(began), bytes(checks))

    @staticmethod
    def _check(run: AgentRun, checks: bytearray) -> None:
        """What it asked for was answered once: its checks are enough."""
        for ask in run.requests:
            if ask.handle:
                checks += request_check(ask).to_bytes(4, "little")
        run.requests.clear()
        run.abandoned.clear()

    def _enter(self, number: int) -> int:
        page = self._page
        self._activations += 1
        page[PAGE_RUN] = number
        page[PAGE_ACTIVATIONS] = self._activations
        return _now_ns()

    def _leave(self, began_ns: int) -> int:
        """Nanoseconds of CPU time that the activation took; no clock of it is read for a short one."""
        taken = _now_ns() - began_ns
        self._page[PAGE_RUN] = 0
        if taken > _CPU_LOOK_NS:
            before, self._cpu_ns = self._cpu_ns, _cpu_ns()
            taken = min(taken, self._cpu_ns - before)
        return taken

    def _report(self, run: AgentRun, taken_ns: int, checks: bytes) -> None:
        requests, run.requests = run.requests, []
        abandoned, run.abandoned = run.abandoned, []
        self._out_bytes += sum(len(each.payload) for each in requests)
        if run.exit is None:
            self._out.append(Suspended(run.number, requests, abandoned, taken_ns, checks))
            return
        if run.exit.reason == "memory":
            self._charge_biggest(run)
        self._out_bytes += len(run.exit.output or b"")
        self._out.append(Ended(run.number, requests, abandoned, taken_ns, *run.exit, checks))
        self._drop(run)
        if run.exit.reason == "memory":
            self._out_of_memory = True

    def _drop(self, run: AgentRun) -> None:
        del self._runs[run.number]
        began = self._enter(run.number)
        run.drop()
        self._leave(began)

    def _charge_biggest(self, run: AgentRun) -> None:
        """A run got no memory: if another holds most of it, that one has to go, and the whole host with it."""
        try:
            shared = {id(self), id(self._runs), id(run_builtins), id(self._limits), *map(id, self._programs.values())}
            weights = {number: weigh(each, shared | {id(current)}) for number, each in self._runs.items()}
        except MemoryError:
            return
        number = max(weights, key=weights.__getitem__)
        biggest = weights[number]
        if biggest > 2 * weights[run.number] and biggest > self._limits.memory_bytes_max // 4:
            self._page[PAGE_CHARGED] = number
            os._exit(EXIT_MEMORY)

    def _collect(self) -> None:
        if self._out_of_memory:
            self._out_of_memory = False
            gc.collect()
        if gc.get_count()[0] < _GC_YOUNG:
            return
        self._collections += 1
        gc.collect(1 if self._collections % _GC_OLDER_EVERY == 0 else 0)

    def notice(self, signum: int, frame: FrameType | None) -> None:
        """SIGUSR1: the activation that runs has used up its time."""
        if current.run is not None:
            current.run.notified = True


class _Rehearsal:
    """A program that is no agent's."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._entry = Entry(_rehearse)

    def entry(self, run: AgentRun) -> Entry:
        run.modules = modules = RunModules(self._bundle)
        try:
            modules.load(self._bundle.module)
        except Exception:  # its runs will be told
            run.modules = None
        return self._entry


@agent
async def _rehearse(ctx: Context) -> list[int]:
    return list(await asyncio.gather(ctx.tool("none", x=1), ctx.tool("none", x=2)))


def rehearse(bundle: Bundle, limits: HostLimits) -> None:
    """Bring one run to its end, and nothing out of it: the first real one finds all pages of the process touched."""
    run = AgentRun(_Rehearsal(bundle), Start(0, "", "", "", b"null", None, bytes(16), 0, []), limits)
    run.start()
    frame = host_frame([Suspended(0, run.requests, [], 0)])
    for handle in (1, 2):
        run.complete(Answer(handle, 0, b"1", handle))
    run.drop()
    del frame


def request_check(ask: Ask) -> int:
    """CRC-32 of a request, to see whether a run that is brought back asks for the same."""
    return zlib.crc32(ask.payload, ask.op)


def serve(
    sock: socket.socket, page: "memoryview[int]", programs: dict[str, BundleProgram], limits: HostLimits
) -> NoReturn:
    """Be a host from now on. The process is confined, and the node has been told."""
    gc.disable()
    host = Host(sock, page, programs, limits)
    signal.signal(signal.SIGUSR1, host.notice)
    try:
        host.serve()
    except ConnectionError:
        os._exit(0)


__all__ = ["BundleProgram", "Host", "rehearse", "request_check", "serve"]
