"""The tool host: ``python -m agentrt.tools.host FD NODE_PID NICE``, started by a node's `ToolPool`.

One process, one trust domain, one tier. Async tools run on its loop, sync tools in its threads; the node never sends
more sync calls than there are threads, so none waits here. A time-out cancels an async tool. Nothing can stop a thread,
so the node ends the whole host for a sync tool that overran, or for an async one that did not heed its cancellation.

The host dies with its node: by PR_SET_PDEATHSIG, and by the end of its socket.
"""

import asyncio
import atexit
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any, Final, NoReturn

import msgspec
import uvloop

from agentrt.errors import ToolError
from agentrt.spawn import die_with_parent
from agentrt.tools.binding import Binding, encode_result, failure
from agentrt.tools.importing import resolve
from agentrt.tools.protocol import (
    FRAME_FILL_BYTES,
    Call,
    FrameReader,
    Init,
    Ready,
    Reply,
    ToolRef,
    Work,
    encode_frame,
)

RECEIVE_BYTES: Final = 256 * 1024


class Host:
    """The host's state; everything but the bodies of sync tools runs on its loop."""

    def __init__(self, sock: socket.socket, init: Init, reader: FrameReader, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._reader = reader
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._decoder = msgspec.msgpack.Decoder(Work)
        self._result_bytes_max = init.result_bytes_max
        self._out_bytes_max = init.out_bytes_max
        self._bindings: dict[int, Binding | tuple[bytes, str]] = {}  # or why it cannot be called
        self._broken_sources: dict[str, str] = {}
        self._running: dict[asyncio.Task[None], tuple[int, Call]] = {}  # async -> (deadline, monotonic ns; call)
        self._cancelled: set[int] = set()  # ids of calls past their deadline, still running
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._next_deadline_ns = 0
        self._replies: list[Reply] = []
        self._replies_bytes = 0
        self._flush_due = False
        self._out: list[memoryview] = []
        self._paused = False
        self._threads = _Threads(self)
        self._load(init.tools)

    # --- tools -----------------------------------------------------------------

    def _load(self, refs: list[ToolRef]) -> None:
        for ref in refs:
            source = ref.ref.rpartition(":")[0]
            problem = self._broken_sources.get(source)
            if problem is None:
                try:
                    self._bindings[ref.number] = Binding(resolve(ref.name, ref.ref))
                    continue
                except BaseException as error:  # SystemExit at import must not end the host
                    problem = f"{type(error).__name__}: {error}"
                    if isinstance(error, (ImportError, SyntaxError, SystemExit)):
                        self._broken_sources[source] = problem
            self._bindings[ref.number] = failure("tool_import", f"tool {ref.name} cannot be loaded: {problem}")

    # --- in --------------------------------------------------------------------

    def start(self) -> None:
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._on_readable)
        self._queue_frame(encode_frame(Ready(os.getpid())))

    def _on_readable(self) -> None:
        try:
            self._receive()
        except Exception:  # not one of a tool: nothing here can be trusted any more
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    def _receive(self) -> None:
        try:
            count = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count == 0:
            self._loop.stop()
            return
        for body in self._reader.feed(self._buffer[:count]):
            work = self._decoder.decode(body)
            if work.tools:
                self._load(work.tools)
            for call in work.calls:
                self._begin(call)

    def _begin(self, call: Call) -> None:
        binding = self._bindings[call.number]
        if isinstance(binding, tuple):
            self.reply(Reply(call.id, binding[0], binding[1], 0))
            return
        try:
            keywords = binding.arguments(call.args, call.key, call.attempt)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.reply(Reply(call.id, *failure("tool_args", f"the arguments do not fit: {error}"), 0))
            return
        if not binding.is_async:
            self._threads.run(call, binding, keywords)
            return
        task = self._loop.create_task(self._run_async(call, binding, keywords))
        deadline = time.monotonic_ns() + call.timeout_ns
        self._running[task] = (deadline, call)
        task.add_done_callback(self._forget)
        if self._deadline_timer is None:
            self._deadline_timer = self._loop.call_later(call.timeout_ns / 1e9, self._on_deadline)
        elif deadline < self._next_deadline_ns:
            self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_later(call.timeout_ns / 1e9, self._on_deadline)
        else:
            return
        self._next_deadline_ns = deadline

    # --- async tools -----------------------------------------------------------

    async def _run_async(self, call: Call, binding: Binding, keywords: dict[str, Any]) -> None:
        began = time.monotonic_ns()
        payload: bytes
        code: str | None
        try:
            payload, code = encode_result(await binding.function(**keywords), self._result_bytes_max)
        except asyncio.CancelledError:
            if call.id in self._cancelled:
                payload, code = timed_out(call)
            else:
                payload, code = failure("tool_failed", "CancelledError")
        except BaseException as error:  # SystemExit would end the loop and with it the calls of others
            payload, code = raised(error)
        self.reply(Reply(call.id, payload, code, time.monotonic_ns() - began))

    def _forget(self, task: asyncio.Task[None]) -> None:
        _, call = self._running.pop(task)
        self._cancelled.discard(call.id)
        if task.cancelled():  # before its first step
            self.reply(Reply(call.id, *timed_out(call), 0))

    def _on_deadline(self) -> None:
        """Cancel what is due. One timer for all calls: it fires at most once per time-out, not per call."""
        now = time.monotonic_ns()
        waiting = []
        for task, (deadline, call) in self._running.items():
            if deadline <= now:
                self._cancelled.add(call.id)
                task.cancel()
            else:
                waiting.append(deadline)
        self._deadline_timer = None
        if waiting:
            self._next_deadline_ns = min(waiting)
            self._deadline_timer = self._loop.call_later((self._next_deadline_ns - now) / 1e9, self._on_deadline)

    # --- out -------------------------------------------------------------------

    def reply(self, reply: Reply) -> None:
        """Send with whatever else is ready at the end of this turn of the loop."""
        self._replies.append(reply)
        self._replies_bytes += len(reply.payload)
        if self._replies_bytes >= FRAME_FILL_BYTES:
            self._pack()
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _pack(self) -> None:
        frame = encode_frame(self._replies)
        self._replies = []
        self._replies_bytes = 0
        self._queue_frame(frame)

    def _flush(self) -> None:
        self._flush_due = False
        if self._replies:
            self._pack()

    def _queue_frame(self, frame: bytearray) -> None:
        self._out.append(memoryview(frame))
        if len(self._out) == 1 and not self._write():
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        if not self._paused and sum(map(len, self._out)) > self._out_bytes_max:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def _on_writable(self) -> None:
        if self._write():
            self._loop.remove_writer(self._sock.fileno())
        if self._paused and sum(map(len, self._out)) <= self._out_bytes_max:
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _write(self) -> bool:
        """Whether everything is written."""
        try:
            while self._out:
                first = self._out[0]
                sent = self._sock.send(first)
                if sent < len(first):
                    self._out[0] = first[sent:]
                    return False
                del self._out[0]
        except BlockingIOError:
            return False
        except OSError:  # the node is gone
            self._out.clear()
            self._loop.stop()
        return True

    # --- sync tools, called from threads ---------------------------------------

    def run_sync(self, call: Call, binding: Binding, keywords: dict[str, Any]) -> Reply:
        began = time.monotonic_ns()
        payload: bytes
        code: str | None
        try:
            payload, code = encode_result(binding.function(**keywords), self._result_bytes_max)
        except BaseException as error:
            payload, code = raised(error)
        return Reply(call.id, payload, code, time.monotonic_ns() - began)

    def hand_over(self, drain: "_Threads") -> None:
        self._loop.call_soon_threadsafe(drain.collect)


class _Threads:
    """Threads for sync tools, made when a call finds none idle and kept: as many as there ever were calls at once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._work: queue.SimpleQueue[tuple[Call, Binding, dict[str, Any]]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._idle = 0  # on the loop only: a thread counts as idle once its reply was collected
        self._count = 0

    def run(self, call: Call, binding: Binding, keywords: dict[str, Any]) -> None:
        if self._idle:
            self._idle -= 1
        else:
            self._count += 1
            threading.Thread(target=self._serve, name=f"tool-{self._count}", daemon=True).start()
        self._work.put((call, binding, keywords))

    def _serve(self) -> None:
        while True:
            self._done.put(self._host.run_sync(*self._work.get()))
            self._host.hand_over(self)

    def collect(self) -> None:
        while True:
            try:
                reply = self._done.get_nowait()
            except queue.Empty:
                return
            self._idle += 1
            self._host.reply(reply)


def raised(error: BaseException) -> tuple[bytes, str]:
    """(payload, code) for what a tool raised. A ToolError keeps its own words."""
    if isinstance(error, ToolError):
        return failure("tool_failed", error.message)
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    name = type(error).__name__
    return failure("tool_failed", f"{name}: {text}" if text else name)


def timed_out(call: Call) -> tuple[bytes, str]:
    """(payload, code) for a call cancelled at its time-out."""
    return failure("tool_timeout", f"not finished within {call.timeout_ns / 1e9:g} seconds")


# --- process -------------------------------------------------------------------


def _enter_process(node_pid: int, nice: int) -> None:
    """Cut what ties this process to how it was started, and tie it to its node."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    die_with_parent(node_pid)
    keep = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these two
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *keep}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # kept by the C library
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _limit_memory(memory_bytes_max: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory_bytes_max if hard == resource.RLIM_INFINITY else min(hard, memory_bytes_max)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _read_init(sock: socket.socket, reader: FrameReader) -> Init:
    """Wait for the first frame; the node sends nothing more before it has seen `Ready`."""
    while True:
        data = sock.recv(RECEIVE_BYTES)
        if not data:
            os._exit(0)
        for body in reader.feed(memoryview(data)):
            return msgspec.msgpack.decode(body, type=Init)


def main() -> NoReturn:
    """Serve calls until the node closes the socket."""
    fd, node_pid, nice = map(int, sys.argv[1:4])
    _enter_process(node_pid, nice)
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    reader = FrameReader()
    init = _read_init(sock, reader)
    sys.path[:] = init.sys_path
    if init.environment_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = init.environment_path
    if init.memory_bytes_max:
        _limit_memory(init.memory_bytes_max)
    sys.argv[1:] = []
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    Host(sock, init, reader, loop).start()
    status = 0
    try:
        loop.run_forever()
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    finally:
        # Threads of sync tools may never end, so not by the ordinary way; but files are flushed and handlers run.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(status)


if __name__ == "__main__":
    main()
