"""A host's workers: one process per sync job at a time, kept for the next, ended alone when its job overruns.

The host has as many as there ever were jobs at once; the node bounds that. A job's time begins when its worker has the
tool, so that an import is not charged to it.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.spawn import describe_status
from agentrt.tools.binding import failure
from agentrt.tools.execution import cancelled, timed_out
from agentrt.tools.forking import Child, ForkClient
from agentrt.tools.framesocket import FrameSocket
from agentrt.tools.protocol import (
    RECEIVE_BYTES,
    Call,
    FrameError,
    FrameReader,
    Job,
    Loaded,
    Reply,
    ToolRef,
    encode_frame,
)

#: For a worker to start and import its tool.
_LOAD_TIMEOUT_S: Final = 30.0

_loaded_decoder: Final = msgspec.msgpack.Decoder(Loaded)
_replies_decoder: Final = msgspec.msgpack.Decoder(list[Reply])


class _Worker:
    """One process and what it does."""

    def __init__(self, workers: "Workers") -> None:
        """Raises OSError."""
        self._workers = workers
        self._loop = workers.loop
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.child: Child = workers.client.fork(0, [theirs.fileno()], self._on_exit)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self._out = FrameSocket(ours, self._loop)
        self._reader = FrameReader()
        self._loaded: set[int] = set()
        self._loop.add_reader(ours.fileno(), self._on_readable)
        self._reading = True
        self.job: Job | None = None
        self._began = False
        self._stopped: tuple[bytes, str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def run(self, job: Job) -> None:
        self.job = job
        self._stopped = None
        self._began = job.tool.number in self._loaded
        self._out.put(encode_frame(job))
        if self._began:
            self._set_timer(job.calls[0].timeout_ns / 1e9)
        else:
            self._set_timer(_LOAD_TIMEOUT_S)

    def stop(self, reason: tuple[bytes, str]) -> None:
        """End the process; its job gets this reason once it is gone."""
        if self._stopped is None:
            self._stopped = reason
            self.child.kill()

    def _set_timer(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, self._on_overrun)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_overrun(self) -> None:
        self._timer = None
        assert self.job is not None
        if self._began:
            self.stop(timed_out(self.job.calls[0].timeout_ns))
        else:
            name = self.job.tool.name
            self.stop(failure("tool_import", f"tool {name} was not imported within {_LOAD_TIMEOUT_S:g} seconds"))

    def _on_readable(self) -> None:
        if self._receive() == 0:
            self._stop_reading()  # it goes, or was gone; its exit is reported

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def _receive(self) -> int | None:
        """Bytes read; 0 at the end, None if there are none now. A worker that sends what is no frame is ended."""
        buffer = self._workers.buffer
        try:
            count = self._sock.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        try:
            for body in self._reader.feed(buffer[:count]):
                self._take(body)
        except (FrameError, *UNREADABLE):
            self.child.kill()
            return 0
        return count

    def _take(self, body: memoryview) -> None:
        job = self.job
        if job is None:
            raise FrameError("an answer without a job")
        if not self._began:
            number = _loaded_decoder.decode(body).number
            self._loaded.add(number)
            self._began = True
            self._set_timer(job.calls[0].timeout_ns / 1e9)
            return
        replies = _replies_decoder.decode(body)
        if {reply.id for reply in replies} != {call.id for call in job.calls}:
            raise FrameError("an answer to something else")
        self._cancel_timer()
        self.job = None
        self._workers.on_done(self, replies)

    def _on_exit(self, status: int | None) -> None:
        if self._reading:
            while self._receive():  # what it answered before it went
                pass
        self._stop_reading()
        self._cancel_timer()
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        job, self.job = self.job, None
        self._workers.on_gone(self)
        if job is None:
            return
        if self._stopped is not None:
            payload, code = self._stopped
            unknown = self._began
        elif self.child.pid == 0:
            payload, code = failure("tool_host_start", f"no worker could be started: {self.child.refused}")
            unknown = False
        else:
            payload, code = failure(
                "tool_host_died", f"the tool's process ended before it answered ({describe_status(status)})"
            )
            unknown = self._began
        cost_ns = job.calls[0].timeout_ns if code == "tool_timeout" else 0
        self._workers.reply_all(Reply(call.id, payload, code, cost_ns, unknown) for call in job.calls)

    def close(self) -> None:
        """For the end of the host: an idle one ends by itself, a busy one is killed."""
        if self.job is not None:
            self.child.kill()
        self._sock.close()


class Workers:
    """``reply`` gets every reply. ``client`` is the host's forker."""

    def __init__(self, client: ForkClient, loop: asyncio.AbstractEventLoop, reply: Callable[[Reply], None]) -> None:
        self.client = client
        self.loop = loop
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._reply = reply
        self._all: set[_Worker] = set()
        self._idle: list[_Worker] = []

    def run(self, tool: ToolRef, calls: list[Call]) -> None:
        """Execute one call, or a batch, in an idle worker or a new one."""
        try:
            worker = self._idle.pop() if self._idle else self._start()
        except OSError as error:
            payload, code = failure("tool_host_start", f"no worker could be started: {os.strerror(error.errno or 0)}")
            self.loop.call_soon(self.reply_all, [Reply(call.id, payload, code, 0) for call in calls])
            return
        worker.run(Job(tool, calls))

    def cancel(self, call_id: int, may_end: Callable[[int], bool]) -> None:
        """End the worker of this call, if it is alone in its job and its tool (by number) may be ended."""
        for worker in self._all:
            job = worker.job
            if job is not None and len(job.calls) == 1 and job.calls[0].id == call_id:
                if may_end(job.tool.number):
                    worker.stop(cancelled())
                return

    def notice(self) -> None:
        """Tell what works that the node stops."""
        for worker in self._all:
            if worker.job is not None:
                worker.child.notice()

    def close(self) -> None:
        for worker in self._all:
            worker.close()
        self.client.finish()

    def _start(self) -> _Worker:
        worker = _Worker(self)
        self._all.add(worker)
        return worker

    def reply_all(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self._reply(reply)

    def on_done(self, worker: _Worker, replies: list[Reply]) -> None:
        if worker._stopped is None:
            self._idle.append(worker)
        self.reply_all(replies)

    def on_gone(self, worker: _Worker) -> None:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
