"""The tool host: forked from a node's template, or ``python -m agentrt.tools.host FD LIFE_FD NODE_PID NICE HELD_FD``,
with the uid and the folder of a user of its own behind that.

One process, one trust domain, one tier. Async tools run on its loop; sync tools run in workers, its children, one each.
A time-out cancels an async tool and kills the worker of a sync one: other calls go on. Nothing can stop an async tool
that does not heed its cancellation or keeps the loop, so the node ends the whole host then.

The host dies with its parent: by PR_SET_PDEATHSIG, and by the end of its socket. It and its children hold one end of
the life pipe, by which the node sees that all of them are gone.
"""

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from itertools import groupby
from typing import Any, NoReturn

import msgspec
import uvloop

from agentrt import users
from agentrt.spawn import die_with_parent
from agentrt.tools.binding import Binding
from agentrt.tools.execution import Stop, cancelled, execute, execute_batch, timed_out
from agentrt.tools.forking import Fork, ForkClient, Forker
from agentrt.tools.framesocket import FrameSocket
from agentrt.tools.loading import Loader
from agentrt.tools.protocol import (
    FRAME_FILL_BYTES,
    RECEIVE_BYTES,
    Call,
    FrameReader,
    Init,
    Ready,
    Reply,
    ToolRef,
    Work,
    encode_frame,
)
from agentrt.tools.worker import end_process, serve_jobs
from agentrt.tools.workers import Workers


class Host:
    """The host's state; everything runs on its loop."""

    def __init__(
        self,
        sock: socket.socket,
        init: Init,
        reader: FrameReader,
        loop: asyncio.AbstractEventLoop,
        forker: socket.socket,
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._reader = reader
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._decoder = msgspec.msgpack.Decoder(Work)
        self._result_bytes_max = init.result_bytes_max
        self._out_bytes_max = init.out_bytes_max
        self._loader = Loader()
        self._refs: dict[int, ToolRef] = {}
        self._bindings: dict[int, Binding | tuple[bytes, str]] = {}  # or why it cannot be called
        #: async -> (deadline, monotonic ns; calls; why it was cancelled)
        self._running: dict[asyncio.Task[Any], tuple[int, Call | list[Call], Stop]] = {}
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._next_deadline_ns = 0
        self._replies: list[Reply] = []
        self._replies_bytes = 0
        self._flush_due = False
        self._out = FrameSocket(sock, loop, self._on_drained)
        self._paused = False
        client = ForkClient(forker, loop, on_lost=self._on_forker_lost)
        self._workers = Workers(client, loop, self.reply)
        self._load(init.tools)

    def _load(self, refs: list[ToolRef]) -> None:
        for ref in refs:
            self._refs[ref.number] = ref
            self._bindings[ref.number] = self._loader.load(ref)

    def _on_forker_lost(self) -> None:
        """Its workers are gone with it."""
        print("a tool host lost the process that forks its workers", file=sys.stderr)
        os._exit(1)

    # --- in --------------------------------------------------------------------

    def start(self) -> None:
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._on_readable)
        self._out.put(encode_frame(Ready(os.getpid())))

    def close(self) -> None:
        self._workers.close()

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
            for batch, calls in groupby(work.calls, _batch_of):
                if batch:
                    self._begin(list(calls))
                else:
                    for call in calls:
                        self._begin(call)
            for call_id in work.cancels:
                self._cancel(call_id)
            if work.notice:
                self._notice()

    def _begin(self, work: Call | list[Call]) -> None:
        """A call, or a batch."""
        first = work if isinstance(work, Call) else work[0]
        binding = self._bindings[first.number]
        if isinstance(binding, tuple):
            for call in _calls_of(work):
                self.reply(Reply(call.id, *binding, 0))
            return
        if not binding.is_async:
            self._workers.run(self._refs[first.number], _calls_of(work))
            return
        stop = Stop()
        coroutine: Coroutine[Any, Any, Any]
        if isinstance(work, Call):
            coroutine = execute(binding, work, stop, self._result_bytes_max)
        else:
            coroutine = execute_batch(binding, work, stop, self._result_bytes_max)
        task = self._loop.create_task(coroutine)
        timeout_ns = first.timeout_ns
        deadline = time.monotonic_ns() + timeout_ns
        self._running[task] = (deadline, work, stop)
        task.add_done_callback(self._on_done)
        if self._deadline_timer is None:
            self._deadline_timer = self._loop.call_later(timeout_ns / 1e9, self._on_deadline)
        elif deadline < self._next_deadline_ns:
            self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_later(timeout_ns / 1e9, self._on_deadline)
        else:
            return
        self._next_deadline_ns = deadline

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        _, work, stop = self._running.pop(task)
        if task.cancelled():  # before its first step
            payload, code = stop.reason or cancelled()
            for call in _calls_of(work):
                self.reply(Reply(call.id, payload, code, 0))
            return
        result = task.result()
        if isinstance(result, Reply):
            self.reply(result)
            return
        for reply in result:
            self.reply(reply)

    def _on_deadline(self) -> None:
        """Cancel what is due. One timer for all calls: it fires at most once per time-out, not per call."""
        now = time.monotonic_ns()
        waiting = []
        for task, (deadline, work, stop) in self._running.items():
            if deadline > now:
                waiting.append(deadline)
            elif stop.reason is None:
                stop.reason = timed_out(_calls_of(work)[0].timeout_ns)
                task.cancel()
        self._deadline_timer = None
        if waiting:
            self._next_deadline_ns = min(waiting)
            self._deadline_timer = self._loop.call_later((self._next_deadline_ns - now) / 1e9, self._on_deadline)

    def _cancel(self, call_id: int) -> None:
        """An async tool is cancelled; a sync one is ended if it is pure, and left to finish else. A batch goes on."""
        for task, (_, work, stop) in self._running.items():
            if isinstance(work, Call) and work.id == call_id:
                if stop.reason is None:
                    stop.reason = cancelled()
                    task.cancel()
                return
        self._workers.cancel(call_id, self._is_pure)

    def _notice(self) -> None:
        """Whatever runs is told that the node stops; nothing is stopped here."""
        self._workers.notice()
        if self._running:
            os.kill(os.getpid(), signal.SIGUSR1)

    def _is_pure(self, number: int) -> bool:
        binding = self._bindings[number]
        return isinstance(binding, Binding) and binding.kind == "pure"

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
        self._out.put(frame)
        if not self._paused and self._out.bytes_waiting > self._out_bytes_max:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def _flush(self) -> None:
        self._flush_due = False
        if self._replies:
            self._pack()

    def _on_drained(self) -> None:
        if self._paused and self._out.bytes_waiting <= self._out_bytes_max:
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._on_readable)


def _batch_of(call: Call) -> int:
    return 0 if call.more is None else call.more.batch


def _calls_of(work: Call | list[Call]) -> list[Call]:
    return [work] if isinstance(work, Call) else work


# --- process -------------------------------------------------------------------


def enter_process(parent_pid: int, nice: int) -> None:
    """Cut what ties this process to how it was started, and tie it to its parent."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    die_with_parent(parent_pid)
    keep = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these two
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *keep}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # kept by the C library
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def hold(fd: int) -> None:
    """This process and what it forks keep the descriptor, if there is one (orphans.py); what they execute does not."""
    if fd >= 0:
        os.set_inheritable(fd, False)


def heed_notices() -> None:
    """SIGUSR1, which would end the process, does nothing until a tool wants to hear of it; nor does it in workers. A
    handler and not SIG_IGN, which what tools execute would inherit."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, False)


def set_import_path(sys_path: list[str], environment_path: str | None) -> None:
    """Modules are found as in the node, here and in what is started from here."""
    sys.path[:] = sys_path
    if environment_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = environment_path


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


def _start_forker(node: socket.socket, result_bytes_max: int) -> socket.socket:
    """Fork the process from which workers are forked, while there is no loop yet and no tool was imported here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        node.close()
        _fork_workers(theirs, result_bytes_max)
    theirs.close()
    return ours


def _fork_workers(host: socket.socket, result_bytes_max: int) -> NoReturn:
    os.setpgid(0, 0)  # it outlives the host's group for as long as it takes to end the workers' groups
    pid = os.getpid()

    def become_worker(_: Fork, fds: list[int]) -> NoReturn:
        serve_jobs(socket.socket(fileno=fds[0]), pid, result_bytes_max)

    Forker(host, become_worker).run()


def serve_node(sock: socket.socket, life_fd: int) -> NoReturn:
    """Serve calls until the node closes the socket."""
    os.set_inheritable(life_fd, False)  # held open by this process and its workers, and by nothing they execute
    reader = FrameReader()
    init = _read_init(sock, reader)
    set_import_path(init.sys_path, init.environment_path)
    if init.memory_bytes_max:
        _limit_memory(init.memory_bytes_max)
    heed_notices()
    forker = _start_forker(sock, init.result_bytes_max)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    host = Host(sock, init, reader, loop, forker)
    host.start()
    status = 0
    try:
        loop.run_forever()
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    host.close()
    end_process(status)


def main() -> NoReturn:
    """A host that was not forked from a template."""
    fd, life_fd, node_pid, nice, held_fd = map(int, sys.argv[1:6])
    user = sys.argv[6:8]
    sys.argv[1:] = []
    if user:
        users.become(int(user[0]), user[1])
    enter_process(node_pid, nice)
    hold(held_fd)
    os.set_inheritable(fd, False)
    serve_node(socket.socket(fileno=fd), life_fd)


if __name__ == "__main__":
    main()
