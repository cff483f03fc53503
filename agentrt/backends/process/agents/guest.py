"""One run as a process: what it asks for and is answered, in the order of its journal.

    queued -> started -> (computing -> waiting)* -> ended            computing: it owes a line; waiting: it is owed one

The process is a sequential program. It numbers its steps, goes on computing after each, and says when it waits for any
one of a set; it gets exactly one answer then, the one with the lowest seq. So what it does depends on its input and its
answers only, and one that was killed comes to the same place when it gets the recorded answers in order.

An unwinding reaches it where it waits next and no answer is left that came before; what it asks for until then the
engine does not hear. One that ends before it comes there is brought back to where it waited last, and unwinds then:
what it has asked for since is passed over, so that its handlers' steps have handles of their own.
"""

import asyncio
import signal
import socket
import time
from typing import TYPE_CHECKING, Final

import msgspec

from agentrt.agents.randomness import RandomStream
from agentrt.backends.base import Exit, GuestEvents, Request, Status
from agentrt.backends.process.agents.command import ProcessProgram
from agentrt.backends.process.agents.launch import AgentProcess, End
from agentrt.backends.process.agents.launched import Launched
from agentrt.backends.process.agents.output import Tail
from agentrt.backends.process.agents.protocol import (
    ABI,
    FRAME_BYTES_MAX,
    Abandon,
    Ask,
    Begin,
    Failed,
    Line,
    LineError,
    LineReader,
    Ready,
    Returned,
    Snapshot,
    Unwinding,
    Unwound,
    Wait,
    answer_line,
    decode_line,
    refused_line,
    start_lines,
    unwind_line,
    value_line,
)
from agentrt.backends.process.agents.turn import Turn
from agentrt.decoding import UNREADABLE
from agentrt.spawn import describe_status
from agentrt.syscalls import BY_OP

if TYPE_CHECKING:
    from agentrt.backends.process.agents.pool import ProcessPool

_LOG: Final = BY_OP["log"].number
_CLOCK: Final = BY_OP["clock.now"].number
_CHECKPOINT: Final = BY_OP["checkpoint"].number
_BLOCK_BYTES: Final = 64 * 1024  # read at once; the rest in the next turn of the loop
_RANDOM_BYTES_MAX: Final = 64 * 1024
_OUT_BYTES_MAX: Final = 1 << 20  # that it has not read: more is not made for it before it has
#: What reading the clock adds to it, so that time passes for code that measures it.
_TICK_NS: Final = 1_000
#: Of a process that has ended in a way that nobody outside brings about, or whose own fault that is.
_OWN_SIGNALS: Final = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
)


#: Ends that a program does not bring about by saying so.
_CUT_SHORT: Final = frozenset(("fuel", "host_died", "memory", "trap", "unwound"))


class _Count(msgspec.Struct, forbid_unknown_fields=True):
    count: int


_decode_count: Final = msgspec.json.Decoder(_Count).decode


class ProcessGuest:
    """Implements agentrt.backends.base.Guest. On the control loop's thread."""

    def __init__(
        self,
        pool: "ProcessPool",
        number: int,
        program: ProcessProgram,
        events: GuestEvents,
        *,
        run_id: str,
        tenant: str,
        tier: int,
        input: bytes,
        restored: bytes | None,
        fuel: int,
        seed: bytes,
        clock_ns: int,
        replay: bool,
    ) -> None:
        self._pool = pool
        self._loop = pool.loop
        self.number: Final = number
        self.program: Final = program
        self.events: Final = events
        self.run_id: Final = run_id
        self.tenant: Final = tenant
        self.tier: Final = tier
        self.fuel: Final = fuel
        self._input = input
        self._restored = restored
        self._random = RandomStream(seed)
        self._clock_ns = clock_ns
        self._read_ns = 0  # the last reading of the clock
        self._live = not replay
        self.ended = False  # the engine has been told
        self.queued = False
        self.waiting: tuple[int, ...] | None = None
        self._handles = 0  # how many steps it has asked for
        self._skipped = 0  # handles that its unwinding handlers do not use
        self._given = 0  # answers
        self._survived = -1  # of these, those after which it has waited again; -1: it has never waited
        self._open: set[int] = set()  # asked for and not given up
        self._answers: dict[int, tuple[int, int, bytes, int]] = {}  # handle -> seq, status, payload, clock
        self._requests: list[Request] = []
        self._why: str | None = None  # it is to unwind
        self._told = False  # and knows
        self._handlers = False  # and does
        self._unwind_cpu_ns = self._unwind_at_ns = 0  # since when it may do so
        self._killed: str | None = None  # with this reason, by us
        self._kill_message = ""
        self._last: Exit | None = None
        # the process:
        self.process: AgentProcess | None = None
        self.turn: Turn | None = None
        self.afloat = False  # it had its slot taken for not using it
        self.seen_cpu_ns = self.seen_at_ns = 0  # for the watch
        self.ready = False  # its program is there
        self._socket: socket.socket | None = None
        self._reader = LineReader(max(pool.limits.request_bytes_max, pool.limits.result_bytes_max) + FRAME_BYTES_MAX)
        self._out = bytearray()
        self._writing = self._reading = self._closing = False
        self._tail: Tail | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._noticed: asyncio.TimerHandle | None = None
        self._lent: int | None = None
        self._submitted_ns = time.monotonic_ns()
        self._first_ns = 0

    # --- for the engine -------------------------------------------------------------------

    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None:
        """See agentrt.backends.base.Guest."""
        if self.ended or handle not in self._open or handle in self._answers:
            return
        if self._why is not None and not self._handlers:
            return  # it came after the end was: the program does not get it
        self._answers[handle] = (seq, status, payload, clock_ns)
        if self.waiting is not None and handle in self.waiting:
            self._give()

    def go_live(self) -> None:
        """See agentrt.backends.base.Guest."""
        self._live = True
        if self.waiting is not None:
            self._give()

    def unwind(self, reason: str, skipped: int = 0) -> None:
        """See agentrt.backends.base.Guest."""
        if self.ended or self._why is not None:
            return
        self._why, self._skipped = reason, skipped
        if self.process is None and self._live:
            self._loop.call_soon(self.end, "unwound", 0, None, "it was stopped before it began")
            return
        self._open = set(self._answers)
        self._unwind_at_ns = time.monotonic_ns()
        self._unwind_cpu_ns = self.cpu_ns()
        if self.waiting is not None and not any(handle in self._answers for handle in self.waiting):
            self._tell_unwind()

    def kill(self) -> None:
        """See agentrt.backends.base.Guest."""
        self.stop("killed", "killed")

    def lend(self, tier: int | None) -> bool:
        """See agentrt.backends.base.Guest."""
        self._lent = tier
        self._weigh()
        if self.turn is not None:
            self.turn.lend(tier)
        return True

    def _weigh(self) -> None:
        if self.process is not None:
            self.process.change_tier(self.tier if self._lent is None else min(self._lent, self.tier))

    @property
    def ran_ns(self) -> int:
        """CPU time of its process."""
        return self.cpu_ns()

    # --- for the pool ------------------------------------------------------------------------

    def cpu_ns(self) -> int:
        return 0 if self.process is None else self.process.cpu_ns()

    @property
    def computing(self) -> bool:
        """Whether it has something to do."""
        return self.process is not None and self.waiting is None and self._last is None and self._killed is None

    @property
    def leaving(self) -> bool:
        """Whether its process is on its way out."""
        return self.process is not None and (self.ended or self._killed is not None)

    @property
    def starting(self) -> bool:
        """Whether its program has not shown yet that it is there."""
        return self.process is not None and not self.ready and self._last is None and self._killed is None

    @property
    def fuel_used(self) -> int:
        return self.cpu_ns() * self._pool.limits.fuel_per_us // 1000

    def began(self, launched: Launched) -> None:
        """It has a process, which is given its start in its first turn; `on_start` or `on_end` follows."""
        self.process, self._socket, self._tail = launched.process, launched.socket, launched.tail
        limits = self._pool.limits
        begin = Begin(
            ABI,
            self.run_id,
            self.tenant,
            self._clock_ns,
            limits.request_bytes_max,
            limits.result_bytes_max,
            self._restored is not None,
        )
        self._out += start_lines(begin, self._input, self._restored)

    def took_over(self, launched: Launched, turn: Turn, said: bytes) -> None:
        """It has a process that was started before, is ready, and has ``said`` something after that; `on_end`
        follows."""
        self.began(launched)
        self.ready = True
        self.seen_at_ns = time.monotonic_ns()
        turn.hand_over(self.tenant, self.tier, self._on_granted, self._on_preempted)
        self.turn = turn
        self._begin_turns(launched.socket)
        if said:
            self._reader.add(said)
            self._loop.call_soon(self._hear)

    def on_start(self) -> None:
        """Its process runs."""
        process, own = self.process, self._socket
        assert process is not None and own is not None
        self.seen_at_ns = time.monotonic_ns()
        try:
            self.turn = Turn(
                self._pool.slots, self._loop, process, self.tenant, self.tier, self._on_granted, self._on_preempted
            )
        except OSError as error:
            self.stop("evicted", f"the node has no descriptor left: {error.strerror}")
            return
        self._timer = self._loop.call_later(self._pool.limits.start_timeout_ns / 1e9, self._on_start_timeout)
        self._begin_turns(own)

    def _begin_turns(self, own: socket.socket) -> None:
        assert self.turn is not None
        self._reading = True
        self._loop.add_reader(own.fileno(), self._on_readable)
        self._weigh()
        self.turn.lend(self._lent)
        self.turn.want()

    def on_end(self, end: End) -> None:
        """Nothing of its process is left, or it never was."""
        while self._killed is None and self._last is None and self._receive():
            pass  # what it said before it went
        self._cancel_timers()
        if self._socket is not None:
            self._deaf()
            if self._writing:
                self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self.turn is not None:
            self.turn.close()
        output = self._tail.close() if self._tail is not None else b""
        if end.error is not None and self._killed is None:
            self.process = self._tail = None  # it may get another
            self._out.clear()
        elif not self.ended:
            self._gone(end.status, end.memory, output)

    def stop(self, reason: str, message: str) -> None:
        """End it; ``on_exit`` with this reason follows, not from inside this call."""
        if self.ended or self._killed is not None:
            return
        self._killed, self._kill_message = reason, message
        if self.process is None:
            self._loop.call_soon(self.end, reason, 0, None, message)
        else:
            self.process.kill()

    def _on_start_timeout(self) -> None:
        """It counts only while it is not stopped."""
        timeout_s = self._pool.limits.start_timeout_ns / 1e9
        if self.turn is not None and (self.turn.granted or self.afloat):
            self._fail("protocol", f"the program did not say ready within {timeout_s:g} seconds")
        else:
            self._timer = self._loop.call_later(timeout_s, self._on_start_timeout)

    # --- turns ----------------------------------------------------------------------------------

    def _on_granted(self) -> None:
        if self._noticed is not None:
            self._noticed.cancel()
            self._noticed = None
        self.afloat = False
        self.seen_at_ns = time.monotonic_ns()
        if not self._first_ns:
            self._first_ns = self.seen_at_ns
        self._flush()
        if self.computing:
            self._pool.watch(self)
        elif self.turn is not None:
            self.turn.rest()

    def _on_preempted(self) -> None:
        """Work of a higher tier has its slot; it is stopped."""
        if not self.computing or self.process is None:
            return
        self._pool.preemptions += 1
        if self.program.preempt == "discard" and self._pool.may_discard(self):
            self.stop("evicted", "its process made room for more urgent work")
        elif self._hands_over() and self._noticed is None:
            self.process.thaw()
            self.process.send_signal(signal.SIGUSR1)
            self._noticed = self._loop.call_later(self._pool.limits.notice_ns / 1e9, self._on_notice_over)

    def _hands_over(self) -> bool:
        return self.program.preempt == "snapshot" and self.ready and self._live

    def on_stall(self) -> bool:
        """It stands still for lack of memory, and is about to be killed: whether it was asked for its state before."""
        if self.process is None or not (self._hands_over() and self._pool.may_hand_over(self)):
            return False
        self.process.send_signal(signal.SIGUSR1)
        return True

    def _on_notice_over(self) -> None:
        self._noticed = None
        if self.process is not None and self.turn is not None and not self.turn.granted and self.computing:
            self.process.freeze()

    # --- lines out --------------------------------------------------------------------------------

    def _give(self) -> None:
        """It waits: give it the oldest of the answers that it waits for, if there is one."""
        assert self.waiting is not None
        ready = [(self._answers[handle][0], handle) for handle in self.waiting if handle in self._answers]
        if not ready:
            if self._why is not None and not self._handlers:
                self._tell_unwind()
            return
        handle = min(ready)[1]
        _, status, payload, clock_ns = self._answers.pop(handle)
        self._open.discard(handle)
        self._given += 1
        self._clock_ns = max(self._clock_ns, clock_ns)
        self._resume(answer_line(self._number(handle), status == Status.OK, payload, self._clock_ns))

    def _tell_unwind(self) -> None:
        if not self._told:
            self._told = True
            self._resume(unwind_line(self._why or ""))

    def _resume(self, line: bytes) -> None:
        self.waiting = None
        self.seen_cpu_ns, self.seen_at_ns = self.cpu_ns(), time.monotonic_ns()
        self._unwind_at_ns = self.seen_at_ns
        self._out += line
        if self.turn is not None:
            if self.turn.granted:
                self._flush()
                self._pool.watch(self)
            else:
                self.turn.want()

    def _reply(self, line: bytes) -> None:
        """To a question between two waits, while it has its turn anyhow."""
        self._out += line
        self._flush()

    def _flush(self) -> None:
        own = self._socket
        if own is None or not self._out:
            return
        try:
            while self._out:
                sent = own.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(own.fileno(), self._on_writable)
            return
        except OSError:  # it is gone, and its pidfd will say so
            self._closing = True
            self._out.clear()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(own.fileno())

    def _on_writable(self) -> None:
        self._flush()
        if not self._out:
            self._read_on()

    def _read_on(self) -> None:
        """It has read what it was told: go on hearing it."""
        if self._socket is not None and self._last is None and not self._reading and not self._closing:
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
            self._hear()

    def _deaf(self) -> None:
        if self._reading and self._socket is not None:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    # --- lines in ------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._receive()

    def _receive(self) -> bool:
        """What it has sent; false: there is nothing more for now, or for good."""
        own = self._socket
        if own is None or self._last is not None:
            return False
        try:
            data = own.recv(_BLOCK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._closing = True
            self._deaf()
            if self._killed is None:  # it has closed the socket, or is about to be gone
                self._cancel_timers()
                self._timer = self._loop.call_later(self._pool.limits.exit_ns / 1e9, self.end_process)
            return False
        self._reader.add(data)
        self._hear()
        return not self.ended and self._last is None

    def _hear(self) -> None:
        """The lines that are there, as long as it reads what it is told."""
        try:
            while not self.ended and self._last is None and self._killed is None:
                if len(self._out) > _OUT_BYTES_MAX:  # it asks and does not listen
                    self._deaf()
                    break
                line = self._reader.line()
                if line is None:
                    break
                self._on_line(decode_line(line))
        except LineError as error:
            self._fail("protocol", str(error))
        if self._requests and not self.ended:
            self._tell(None)

    def _on_line(self, line: Line) -> None:
        if isinstance(line, Ready) is self.ready:
            raise LineError("the first line is ready, and no other is")
        if self.waiting is not None:
            raise LineError("the process has said that it waits, and was not answered yet")
        match line:
            case Ready(abi):
                if abi != ABI:
                    raise LineError(f"the process speaks ABI {abi}, the node {ABI}")
                self.ready = True
                self._cancel_timers()
                self._pool.on_ready()
            case Ask(handle, op, payload):
                self._on_ask(handle, op, payload)
            case Wait(handles):
                self._on_wait(handles)
            case Abandon(handles):
                self._on_abandon(handles)
            case Snapshot(state):
                self._on_snapshot(state)
            case Unwinding():
                if not self._told or self._handlers:
                    raise LineError("the process was not told to unwind")
                self._requests.clear()
                self._handlers = True
                self._handles += self._skipped
                self._open.clear()
                self._answers.clear()
                self._unwind_cpu_ns, self._unwind_at_ns = self.cpu_ns(), time.monotonic_ns()
                self._pool.tell(self.events.on_unwinding)
            case Unwound():
                if not self._handlers:
                    raise LineError("the process is not unwinding")
                self._finish("unwound", 0, None, self._why or "")
            case Returned(result):
                self._returned(result)
            case Failed(error):
                self._failed(error)

    def _returned(self, result: bytes) -> None:
        if self._told:
            raise LineError("the process was told to unwind, and says neither unwinding nor unwound")
        if len(result) > self._pool.limits.result_bytes_max:
            self._fail("result", f"the result has {len(result)} bytes, more than {self._pool.limits.result_bytes_max}")
        else:
            self._finish("returned", 0, result, "")

    def _failed(self, error: bytes) -> None:
        if self._told:
            self._finish("unwound", 0, None, self._why or "")
        elif len(error) > self._pool.limits.result_bytes_max:
            self._fail("result", "the process failed with an error that is too long to be kept")
        else:
            self._finish("failed", 1, error, "the process said so")

    def _on_ask(self, handle: int, op: int, payload: bytes) -> None:
        limits = self._pool.limits
        if len(payload) > limits.request_bytes_max:
            raise LineError(f"a request has {len(payload)} bytes, more than {limits.request_bytes_max}")
        if op == _LOG:
            self._requests.append(Request(0, op, payload))
            return
        if handle == 0:
            self._reply(value_line(self._computed(op, payload)))
            return
        if handle != self._number(self._handles + 1):
            raise LineError(f"the next step is number {self._number(self._handles + 1)}, and not {handle}")
        if len(self._open) >= limits.inflight_max:
            raise LineError(f"{limits.inflight_max} steps of the process wait for their answers already")
        self._handles += 1
        if self._why is None or self._handlers:
            self._open.add(self._handles)
        self._requests.append(Request(self._handles, op, payload))

    def _computed(self, op: int, payload: bytes) -> bytes:
        if op == _CLOCK:
            self._read_ns = max(self._read_ns, self._clock_ns) + _TICK_NS
            return b"%d" % self._read_ns
        try:
            count = _decode_count(payload).count
        except UNREADABLE as error:
            raise LineError(f"random.bytes: {error}") from None
        if not 0 <= count <= _RANDOM_BYTES_MAX:
            raise LineError(f"random.bytes gives 0 to {_RANDOM_BYTES_MAX} bytes at once")
        return b'"%b"' % self._random.take(count).hex().encode()

    def _number(self, handle: int) -> int:
        """What the process calls it."""
        return handle - self._skipped if self._handlers else handle

    def _handle(self, number: int) -> int:
        """What the engine calls it."""
        return number + self._skipped if self._handlers else number

    def _on_wait(self, numbers: tuple[int, ...]) -> None:
        handles = tuple(map(self._handle, numbers)) if self._skipped else numbers
        over = self._why is not None and not self._handlers
        if over and self._told:
            raise LineError("the process was told to unwind, and waits for the answers of its program")
        wrong = next((h for h in handles if h not in self._open and not (over and h <= self._handles)), None)
        if wrong is not None:
            raise LineError(f"there is no step {self._number(wrong)} that could be waited for")
        self.waiting = handles
        self._survived = self._given
        if over or (self._live and any(handle in self._answers for handle in handles)):
            self._tell(None)
            if self.waiting is not None and not self.ended:
                self._give()
        else:
            self._tell(handles)
        if self.waiting is not None and not self._out and self.turn is not None:
            self._loop.call_soon(self._maybe_rest)

    def _maybe_rest(self) -> None:
        """Give the slot back, once the engine had its chance to answer at once."""
        if self.waiting is not None and self.turn is not None:
            self.turn.rest()

    def _on_abandon(self, numbers: tuple[int, ...]) -> None:
        known = tuple(handle for number in numbers if (handle := self._handle(number)) in self._open)
        for handle in known:
            self._open.discard(handle)
            self._answers.pop(handle, None)
        self._tell(None)
        if known and not self.ended:
            self._pool.tell(self.events.on_abandoned, known)

    def _on_snapshot(self, state: bytes) -> None:
        self._tell(None)
        if self.ended:
            return
        limits = self._pool.limits
        if len(state) > limits.result_bytes_max:
            self._reply(refused_line(f"the state has {len(state)} bytes, more than {limits.result_bytes_max}"))
        elif not self._live or self._open or not self.events.may_snapshot():
            self._reply(refused_line("the run cannot be put away where it is"))
        else:
            self._pool.snapshots += 1
            self._handles += 1
            self._requests.append(Request(self._handles, _CHECKPOINT, b'{"state":%b}' % state))
            self._open.add(self._handles)
            self.waiting = (self._handles,)  # it is ended when the state is durable
            self._tell(self.waiting)

    def _tell(self, waiting: tuple[int, ...] | None) -> None:
        requests, self._requests = self._requests, []
        if requests or waiting is not None:
            self._pool.tell(self.events.on_syscalls, requests, waiting)

    # --- the end ---------------------------------------------------------------------------------------

    def _fail(self, code: str, message: str) -> None:
        """It does what an agent process may not do."""
        error = msgspec.json.encode({"code": code, "message": message})
        self._finish("failed", 1, error, message)
        if self.process is not None:
            self.process.kill()

    def _finish(self, reason: str, code: int, output: bytes | None, message: str) -> None:
        """It has said its last. The engine hears of it now; the process is given a moment to go by itself."""
        self._tell(None)
        if self.ended or self._killed is not None:
            return
        self._last = self._exit(reason, code, output, message)
        self._deaf()
        self._cancel_timers()
        self._timer = self._loop.call_later(self._pool.limits.exit_ns / 1e9, self.end_process)
        if self.turn is not None:
            self.turn.rest()
        self._told_exit(self._last)

    def end_process(self) -> None:
        """It goes now, whatever the engine knows of it."""
        if self.process is not None:
            self.process.kill()

    def _gone(self, status: int, memory: str | None, output: bytes) -> None:
        """The process has ended without a last word."""
        if self._killed is not None:
            self.end(self._killed, 0, None, self._kill_message)
        elif memory is not None:
            self.end("memory", 0, None, memory)
        elif status == 0 and not self._told:
            self.end("returned", 0, None, "")
        elif self._told and not (status == -signal.SIGKILL and self._pool.may_come_back(self)):
            self.end("unwound", 0, None, f"its process ended while it unwound ({describe_status(status)})")
        elif status > 0:
            self.end("failed", status, None, "", output)
        elif -status in _OWN_SIGNALS:
            self.end("trap", status, None, f"the process ended with {describe_status(status)}")
        elif self._told or self._pool.may_come_back(self):
            self.end("evicted", 0, None, f"its process was ended from outside ({describe_status(status)})")
        else:
            self.end("host_died", 0, None, f"the agent's process was ended too often ({describe_status(status)})")

    def end(self, reason: str, code: int, output: bytes | None, message: str, stderr: bytes = b"") -> None:
        """It is over: tell the engine, once."""
        if not self.ended:
            self._told_exit(self._exit(reason, code, output, message)._replace(stderr=stderr))

    def _exit(self, reason: str, code: int, output: bytes | None, message: str) -> Exit:
        preemptions = 0 if self.turn is None else self.turn.preemptions
        back = reason in _CUT_SHORT and not self._told
        return Exit(
            reason,
            code,
            output,
            message,
            self.fuel_used,
            self.cpu_ns(),
            self._submitted_ns,
            self._first_ns,
            preemptions,
            0,
            answers=self._survived if back else -1,
            steps=self._handles if back else -1,
        )

    def _told_exit(self, exit: Exit) -> None:
        self.ended = True
        self._pool.forget(self, exit.reason)
        self._pool.tell(self.events.on_exit, exit)

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._noticed):
            if timer is not None:
                timer.cancel()
        self._timer = self._noticed = None

    # --- for the watch -------------------------------------------------------------------------------------

    def fuel_is_spent(self, cpu_ns: int) -> bool:
        """Whether its fuel is; unwinding has an allowance of its own."""
        return not self._told and cpu_ns * self._pool.limits.fuel_per_us // 1000 >= self.fuel

    def unwinding_is_spent(self, now_ns: int, cpu_ns: int) -> bool:
        """Whether it has had the time to unwind, or to come to that."""
        if self._why is None or self.ended or not (self._live or self._told):
            return False
        limits = self._pool.limits
        spent_ns, passed_ns = cpu_ns - self._unwind_cpu_ns, now_ns - self._unwind_at_ns
        return spent_ns >= limits.unwind_ns or passed_ns >= limits.unwind_wall_ns
