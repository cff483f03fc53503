"""One tool host as the pool sees it: its process, its socket, the calls it has, and their deadlines."""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.spawn import import_path
from agentrt.tools.binding import error_payload
from agentrt.tools.framesocket import FrameSocket
from agentrt.tools.outcome import EVICTED_RUNNING, ToolOutcome
from agentrt.tools.pending import PendingCall
from agentrt.tools.protocol import (
    FRAME_FILL_BYTES,
    Call,
    CallMore,
    FrameError,
    FrameReader,
    Init,
    Ready,
    Reply,
    ToolRef,
    Work,
    encode_frame,
)
from agentrt.tools.reconcile import ENVELOPE_BYTES

if TYPE_CHECKING:
    from agentrt.tools.hostpool import Domain, HostPool

#: A killed process that is not gone by then sleeps in the kernel; its callers are told all the same.
_DEATH_GRACE_S: Final = 10.0
#: How long a host may take to end by itself after its socket was closed, flushing files and running exit handlers.
_RETIRE_GRACE_S: Final = 5.0

_ready_decoder: Final = msgspec.msgpack.Decoder(Ready)
_replies_decoder: Final = msgspec.msgpack.Decoder(list[Reply])
#: For each reply: `ToolOutcome(…)` would be a call of Python, which takes five times as long.
_tuple: Final = tuple.__new__
_AFTER_UNKNOWN: Final = tuple(ToolOutcome._field_defaults.values())[1:]


class HostLink:
    """Starts the process when made. Raises OSError."""

    def __init__(self, pool: "HostPool") -> None:
        self._pool = pool
        self._limits = pool.limits
        self._loop = pool.loop
        self.domain: Domain | None = None
        self.calls: dict[int, PendingCall] = {}
        self.ready = False
        self.draining = False  # gets no more calls
        self.ending = False  # told to end, or gone
        self.bound_ns = 0
        self.idle_since_ns = 0
        self._sync_units = 0
        self._by_us = False
        self._expired: set[int] = set()
        self._unsent: list[Call] = []
        self._unsent_bytes = 0
        self._cancels: list[int] = []
        self._notice = False
        self._evicted = False
        self._flush_due = False
        self._tools_known = 0
        self._reader = FrameReader()
        self._buffer = pool.receive_buffer
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_ns = 0
        self._end_timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._mad = False  # it sent what is no frame: nothing after that is believed
        limits = self._limits
        self._process = pool.starter.start(
            self._on_process_gone,
            self._on_doomed,
            limits.host_nice,
            limits.host_memory_bytes_max,
            limits.host_uid_base,
        )
        self._fd = self._process.socket.fileno()
        self._out = FrameSocket(self._process.socket, self._loop, self._on_drained)
        self._loop.add_reader(self._fd, self._on_readable)
        self._end_timer = self._loop.call_later(self._limits.start_timeout_ns / 1e9, self._on_start_timeout)
        self._out.put(self._init_frame())

    def _init_frame(self) -> bytearray:
        limits = self._limits
        return encode_frame(
            Init(
                import_path(),
                os.environ.get("PYTHONPATH"),
                limits.result_bytes_max,
                4 * limits.result_bytes_max,
                limits.host_memory_bytes_max,
                self._new_tools(),
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tier(self) -> int:
        """Of its domain; a spare has the lowest."""
        return self.domain.tier if self.domain is not None else 3

    @property
    def domain_queued(self) -> int:
        return self.domain.queued if self.domain is not None else 0

    # --- calls out -------------------------------------------------------------

    def has_room(self, is_sync: bool) -> bool:
        return (
            self.ready
            and not (self.draining or self.ending or self._out)
            and len(self.calls) < self._limits.calls_per_host_max
            and not (is_sync and self._sync_units >= self._limits.sync_calls_per_host_max)
        )

    def send(self, unit: PendingCall) -> None:
        """Give the host a call or a batch; it goes out at the end of this turn of the loop with whatever else is
        ready."""
        # The host stops what overruns; it is watched from here, in case it cannot.
        watch_ns = int(self._loop.time() * 1e9) + unit.timeout_ns + self._limits.cancel_grace_ns
        if unit.is_sync:
            self._sync_units += 1
            watch_ns += self._limits.start_timeout_ns  # its time begins once it has a worker
        if self._deadline_timer is None or watch_ns < self._deadline_ns:
            self._arm_deadline(watch_ns)
        if unit.batch is None:
            self._give(unit, watch_ns, 0)
        else:
            calls = unit.live()
            unit.batch.left = len(calls)
            for call in calls:
                self._give(call, watch_ns, unit.id if len(calls) > 1 else 0)
        if self._unsent_bytes >= FRAME_FILL_BYTES:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._on_flush)

    def _give(self, call: PendingCall, watch_ns: int, batch: int) -> None:
        self.calls[call.id] = call
        call.host = self
        call.deadline_ns = watch_ns
        more = None
        if batch or call.reconcile or call.secrets:
            more = CallMore(batch, call.reconcile, call.secrets)
        self._unsent.append(Call(call.id, call.number, call.args, call.key, call.attempt, call.timeout_ns, more))
        self._unsent_bytes += len(call.args)

    def rank(self, tier: int) -> None:
        """It serves this tier from now on."""
        self._process.rank(tier)

    def cancel(self, call: PendingCall) -> None:
        """Tell the host that nobody wants the call any more."""
        self._cancels.append(call.id)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._on_flush)

    def notice(self) -> None:
        """Tell what runs there that the node stops."""
        self._notice = True
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._on_flush)

    def evict(self) -> None:
        """End it with its calls, whose outcomes say so."""
        self._by_us = self._evicted = True
        self.kill()

    def _on_flush(self) -> None:
        self._flush_due = False
        if (self._unsent or self._cancels or self._notice) and not self.ending:
            self._flush()

    def _flush(self) -> None:
        frame = encode_frame(Work(self._unsent, self._new_tools(), self._cancels, self._notice))
        self._notice = False
        self._unsent = []
        self._unsent_bytes = 0
        self._cancels = []
        self._out.put(frame)

    def _new_tools(self) -> list[ToolRef]:
        registry = self._pool.registry
        if self._tools_known == len(registry):
            return []
        first = self._tools_known
        self._tools_known = len(registry)
        return [ToolRef(number, spec.name, spec.ref) for number, spec in registry.importable_from(first)]

    def _on_drained(self) -> None:
        if not self._out:
            self._pool.on_room(self)

    # --- answers in ------------------------------------------------------------

    def _on_readable(self) -> None:
        """One read a turn, so that a talkative host does not keep others from theirs."""
        if self._receive() == 0:
            self._loop.remove_reader(self._fd)
            if not self.ending:  # it closed its socket: whatever it is still doing, it cannot be told about
                self._end()
        elif not self._gone:
            self._pool.on_room(self)

    def _receive(self) -> int | None:
        """Bytes read; 0 at the end, None if there are none now."""
        if self._mad:
            return 0
        try:
            count = self._process.socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        try:
            # Decoded values are copies (bytes and str), so the buffer may serve the next host.
            for body in self._reader.feed(self._buffer[:count]):
                if self.ready:
                    for reply in _replies_decoder.decode(body):
                        self._on_reply(reply)
                else:
                    _ready_decoder.decode(body)
                    self._on_ready()
        except (FrameError, *UNREADABLE):
            self._mad = True
            self._end()
        return count

    def _on_ready(self) -> None:
        self.ready = True
        if not self.ending:
            if self._end_timer is not None:
                self._end_timer.cancel()
                self._end_timer = None
            self.idle_since_ns = int(self._loop.time() * 1e9)
            self._pool.on_ready(self)

    def _on_reply(self, reply: Reply) -> None:
        call = self.calls.pop(reply.id, None)
        if call is None:
            return
        if call.is_sync:
            batch = call.batch
            if batch is not None:
                batch.left -= 1
            if batch is None or batch.left == 0:
                self._sync_units -= 1
        if self.domain is not None:
            self.domain.deaths = 0  # it works
        code = reply.code
        if (
            code is None and len(reply.payload) > self._limits.result_bytes_max + ENVELOPE_BYTES
        ):  # not our code any more
            payload = error_payload("tool_result_too_big", f"the result has {len(reply.payload)} bytes")
            self._pool.finish(call, ToolOutcome(False, payload, "tool_result_too_big", reply.cost_ns, False))
            return
        died = code == "tool_host_died"
        fields = (code is None, reply.payload, code, reply.cost_ns, died, reply.unknown, *_AFTER_UNKNOWN)
        self._pool.finish(call, _tuple(ToolOutcome, fields))

    # --- deadlines -------------------------------------------------------------

    def _arm_deadline(self, at_ns: int) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_ns = at_ns
        self._deadline_timer = self._loop.call_at(at_ns / 1e9, self._on_deadline)

    def _on_deadline(self) -> None:
        """One timer for all calls of the host: it fires at most once per time-out, not per call."""
        self._deadline_timer = None
        now = int(self._loop.time() * 1e9) + 1_000_000  # loop timers are a millisecond coarse
        self._expired.update(call.id for call in self.calls.values() if call.deadline_ns <= now)
        if self._expired:
            # Nothing stops a thread, or a coroutine that will not be cancelled, short of ending its process.
            self._by_us = True
            self.kill()
        elif self.calls:
            self._arm_deadline(min(call.deadline_ns for call in self.calls.values()))

    def _on_start_timeout(self) -> None:
        self._end_timer = None
        self._end()

    # --- the end ---------------------------------------------------------------

    def retire(self) -> None:
        """End it in order: it sees the end of its socket, runs its exit handlers and goes."""
        if self.ending:
            return
        self._by_us = True
        self.ending = True
        try:
            self._process.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.kill()
            return
        self._set_end_timer(_RETIRE_GRACE_S, self.kill)

    def kill(self) -> None:
        """End it now. Its calls are finished when it is gone, so that nothing of theirs runs on beside a repetition."""
        self.ending = True
        if not self._gone:
            self._process.kill()
            self._set_end_timer(_DEATH_GRACE_S, self._on_exit_overdue)

    def _end(self) -> None:
        """It misbehaved: end it as one that died."""
        if not self.ending:
            self.kill()

    def _set_end_timer(self, seconds: float, then: Callable[[], None]) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = self._loop.call_later(seconds, then)

    def _on_doomed(self) -> None:
        """It is about to die with its template: it gets nothing more."""
        self.draining = True
        self._pool.on_doomed(self)

    def _on_process_gone(self, status: str, excused: bool) -> None:
        self.ending = True  # a done callback below may call again: not this host
        if excused:
            self._by_us = True
            self._pool.hosts_started -= 1  # it never came to be
        while self._receive():  # what it answered before it went
            pass
        self._close(status)

    def _on_exit_overdue(self) -> None:
        self._end_timer = None
        self._close("killed, and did not go")

    def abandon(self) -> None:
        """Stop watching it; for the end of the loop."""
        self._close("abandoned")

    def _close(self, status: str) -> None:
        if self._gone:
            return
        self._gone = self.ending = True
        for timer in (self._deadline_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._process.close()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            if call.id in self._expired:
                seconds = f"{call.timeout_ns / 1e9:g} seconds"
                payload = error_payload("tool_timeout", f"not finished within {seconds}; its host was ended")
                self._pool.finish(call, ToolOutcome(False, payload, "tool_timeout", call.timeout_ns, False, True))
            elif self._evicted:
                self._pool.finish(call, EVICTED_RUNNING)
            else:
                payload = error_payload("tool_host_died", f"the tool's host ended before it answered ({status})")
                self._pool.finish(call, ToolOutcome(False, payload, "tool_host_died", 0, True, True))
        self._pool.on_gone(self, was_ready=self.ready, by_us=self._by_us, status=status)
