"""One Python host as the pool sees it: its process, its socket, its runs, and its turns in a CPU slot.

A turn: something to send -> a slot is asked for -> granted: all that waits is sent, and what comes meanwhile -> all is
answered: the slot is given back. "preempted": the core has stopped the process; nothing is sent until the next grant.
A slot is asked for again only after "released", so that no stop meant for the last turn hits the next.
"""

import asyncio
import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from agentrt.agents.protocol import (
    PAGE_ACTIVATIONS,
    PAGE_CHARGED,
    PAGE_RUN,
    Complete,
    Drop,
    Ended,
    Ready,
    Start,
    ToHost,
    from_host_decoder,
    host_frame,
)
from agentrt.backends.python.guest import PythonGuest
from agentrt.backends.python.template import ForkedHost, Template
from agentrt.backends.slots import Lease, SlotEvent
from agentrt.tools.protocol import FRAME_FILL_BYTES, FrameError, FrameReader

if TYPE_CHECKING:
    from agentrt.backends.python.pool import Bundle, HostPool

Domain = tuple[str, str, int]
"""Tenant, digest of the bundle, tier."""

_DEATH_GRACE_S: Final = 10.0
#: When a slot is just being queued or picked, its tier is changed a little later.
_LEND_AGAIN_S: Final = 0.001
#: The kernel takes the rank of a session ten times a second from the unprivileged.
_RANK_AGAIN_S: Final = 0.11
_NOT_LENT: Final = 4


class HostLink:
    """A forked host, until it is reaped."""

    def __init__(self, pool: "HostPool", bundle: "Bundle", template: Template, forked: ForkedHost) -> None:
        self._pool = pool
        self._loop = pool.loop
        self.bundle: Final = bundle
        self.template: Final = template
        self.pid: Final = forked.pid
        self._pidfd = forked.pidfd
        self._socket = forked.socket
        self._fd = forked.socket.fileno()
        self._page = forked.page
        self._words = memoryview(forked.page).cast("Q")
        #: The process's CPU clock; see clock_getcpuclockid(3).
        self._cpu_clock = (~forked.pid << 3) | 2
        self.domain: Domain | None = None
        self.guests: dict[int, PythonGuest] = {}
        self._own: PythonGuest | None = None
        self.exiled = False  # the others are gone from it
        self.left_behind: list[int] = []  # their numbers: it still has what they were
        self.slot_tier = 3  # see `work_at`
        self._leaf = forked.leaf
        self._ranked = -1  # the tier that it ranks at
        self._ranking: asyncio.TimerHandle | None = None  # to be tried again
        self.ready = False
        self.ending = False
        self.by_us = False
        self.condemned = False  # ended for what it did
        self.gone = False
        self.idle_since_ns = 0
        #: Activations that are sent and not answered: the guest, and its `stay` then. A guest that has left and come
        #: back does not take the answers of its earlier stay.
        self.inflight: deque[tuple[PythonGuest, int]] = deque()
        self._queue: list[tuple[PythonGuest, ToHost]] = []
        self._lease: Lease | None = None
        self._lent: int | None = None  # what the lease is lent
        self._lending = False  # the lease was busy: it is asked again
        self.granted = False
        self._releasing = False
        self.stopped = False  # it may be, and nobody but us will continue it
        self._flush_due = False
        self._idle_due = False
        self._out: list[memoryview] = []
        self._reader = FrameReader()
        self._mad = False
        # For the pool's watch: the activation seen last, and the clocks when it was seen first.
        self.activation = 0
        self.cpu_base_ns = 0
        self.wall_base_ns = 0
        self.progress_cpu_ns = 0
        self.progress_wall_ns = 0
        self.noticed = False
        self._loop.add_reader(self._fd, self._on_readable)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(
            pool.limits.start_timeout_ns / 1e9, self.kill, False
        )

    @property
    def own(self) -> PythonGuest | None:
        """Who has overrun: the host is its own when others have work."""
        return self._own

    @own.setter
    def own(self, guest: PythonGuest | None) -> None:
        if (guest is None) != (self._own is None):
            self._pool.ranks.outrank(guest is not None)
        self._own = guest

    # --- the page ------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of the run that it executes, 0 if none."""
        return self._words[PAGE_RUN]

    @property
    def activations(self) -> int:
        return self._words[PAGE_ACTIVATIONS]

    @property
    def charged(self) -> int:
        """Number of the run that is to blame for its end, 0 if nobody knows."""
        return self._words[PAGE_CHARGED] or self._words[PAGE_RUN]

    def cpu_ns(self) -> int:
        """CPU time of the process so far. Raises OSError when it is gone."""
        return time.clock_gettime_ns(self._cpu_clock)

    def running_ns(self, number: int) -> int:
        """CPU time of the activation that is under way, if it is this run's and the watch has seen it."""
        if self.running != number or self.activation != self.activations:
            return 0
        try:
            return max(0, self.cpu_ns() - self.cpu_base_ns)
        except OSError:
            return 0

    def is_runnable(self) -> bool:
        """Whether it runs or waits for a CPU, not for something else."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read(512).rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError):
            return False

    # --- messages out ----------------------------------------------------------------------

    def adopt(self, guest: PythonGuest) -> None:
        """The guest lives here from now on."""
        guest.host = self
        self.guests[guest.number] = guest
        for message in guest.messages():
            self.send(guest, message)

    def send(self, guest: PythonGuest, message: ToHost) -> None:
        """Queue a message; it goes out in the host's turn."""
        self._queue.append((guest, message))
        if self.granted:
            if not self._flush_due:
                self._flush_due = True
                self._loop.call_soon(self._flush)
        else:
            self._want_slot()
        if guest.lent is not None:
            self.raise_turn()

    def remove(self, guest: PythonGuest) -> None:
        """The guest is somewhere else now; answers that still come for it are not taken."""
        if self.guests.pop(guest.number, None) is not None:
            guest.host = None
            guest.stay += 1
            if self._queue:
                self._queue = [(each, message) for each, message in self._queue if each is not guest]

    def _flush(self) -> None:
        self._flush_due = False
        if not self.granted or not self._queue or self.ending:
            return
        if not self.inflight:
            self.wall_base_ns = time.monotonic_ns()
        queue, self._queue = self._queue, []
        if self._lent is not None:  # whom others wait for goes first; a guest's own messages keep their order
            queue.sort(key=_urgency)
        messages: list[ToHost] = []
        size = 0
        for guest, message in queue:
            messages.append(message)
            if not isinstance(message, Drop):
                self.inflight.append((guest, guest.stay))
                size += _payload_bytes(message)
                if size >= FRAME_FILL_BYTES:
                    self._queue_frame(messages)
                    messages, size = [], 0
        if messages:
            self._queue_frame(messages)
        self._pool.watch(self)
        if not self.inflight:
            self._idle_soon()

    def _queue_frame(self, messages: list[ToHost]) -> None:
        self._out.append(memoryview(host_frame(messages)))
        if len(self._out) == 1 and not self._write():
            self._loop.add_writer(self._fd, self._on_writable)

    def _on_writable(self) -> None:
        if self._write():
            self._loop.remove_writer(self._fd)

    def _write(self) -> bool:
        try:
            while self._out:
                first = self._out[0]
                sent = self._socket.send(first)
                if sent < len(first):
                    self._out[0] = first[sent:]
                    return False
                del self._out[0]
        except BlockingIOError:
            return False
        except OSError:
            self._out.clear()
        return True

    # --- turns -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._queue or self.inflight)

    def _want_slot(self) -> None:
        if self._lease is None and self.busy and self.ready and not self.ending:
            assert self.domain is not None
            self._lease = self._pool.slots.ask(self, self._pidfd, tenant=self.domain[0], tier=self.slot_tier)
            self._lent = None
            self.raise_turn()
            self._rank()

    def work_at(self, tier: int) -> None:
        """The tier of its turns from the next one on, and of its process at once."""
        self.slot_tier = tier
        self._rank()

    def _rank(self) -> None:
        tier = self.slot_tier if self._lent is None else min(self.slot_tier, self._lent)
        if tier == self._ranked or self._ranking is not None or self.ending:
            return
        if self._pool.ranks.rank(self.pid, self._leaf, tier):
            self._ranked = tier
        else:
            self._ranking = self._loop.call_later(_RANK_AGAIN_S, self._rank_again)

    def _rank_again(self) -> None:
        self._ranking = None
        self._rank()

    def raise_turn(self) -> None:
        """The slot of this turn is lent the highest tier that a guest with work here is lent."""
        lease = self._lease
        if lease is None or self._releasing or self._lending or not self.busy:
            return  # without work it is given back, and asked for again when there is some
        wanted = min(
            (guest.lent for guest in self.guests.values() if guest.lent is not None and guest.has_work), default=None
        )
        if wanted == self._lent:
            return
        if lease.lend(wanted):
            self._lent = wanted
            self._rank()
        else:
            self._lending = True
            self._loop.call_later(_LEND_AGAIN_S, self._raise_again)

    def _raise_again(self) -> None:
        self._lending = False
        self.raise_turn()

    def on_slot(self, event: SlotEvent) -> None:
        """See agentrt.backends.slots."""
        if event.kind == "granted":
            if self._releasing or self.gone:
                return
            if self.stopped:
                self.stopped = False
                self._signal(signal.SIGCONT)
            self.granted = True
            self.wall_base_ns = self.progress_wall_ns = time.monotonic_ns()
            self._flush()
            if self.inflight:
                self._pool.watch(self)
            else:
                self._idle_soon()
        elif event.kind == "preempted":
            self.granted = False
        elif event.kind == "released":
            self._lease = self._lent = None
            self.granted = self._releasing = False
            if event.preemptions:
                self.stopped = True
            if self.gone:
                os.close(self._pidfd)
            else:
                self._want_slot()

    def _idle_soon(self) -> None:
        if not self._idle_due:
            self._idle_due = True
            self._loop.call_soon(self._maybe_idle)

    def _maybe_idle(self) -> None:
        """Give the slot back if all is answered, once the engine had its chance to ask for more."""
        self._idle_due = False
        if not self.busy:
            self.give_slot_back()
            if self.domain is not None:
                self.work_at(self.domain[2])
            self.idle_since_ns = time.monotonic_ns()
            self._pool.on_idle()

    def give_slot_back(self) -> None:
        if self._lease is not None and not self._releasing:
            self._releasing = True
            self.granted = False
            self._release(self._lease)

    def _release(self, lease: Lease) -> None:
        if lease is self._lease and not lease.release():
            self._loop.call_later(_LEND_AGAIN_S, self._release, lease)

    def stop(self) -> None:
        """Stop the process and let its slot go; it asks for another at `slot_tier`."""
        self._signal(signal.SIGSTOP)
        self.stopped = True
        self.give_slot_back()

    def notice(self) -> None:
        """Tell it that its activation has overrun."""
        self._signal(signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except (ProcessLookupError, OSError):
            pass

    # --- messages in -----------------------------------------------------------------------

    def _on_readable(self) -> None:
        if self._receive() == 0:
            self._loop.remove_reader(self._fd)
            if not self.ending:
                self.kill(False)
        elif not self.gone:
            self._idle_soon()

    def _receive(self) -> int | None:
        if self._mad:
            return 0
        buffer = self._pool.receive_buffer
        try:
            count = self._socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        try:
            for body in self._reader.feed(buffer[:count]):
                for message in from_host_decoder.decode(body):
                    if isinstance(message, Ready):
                        self._on_ready()
                        continue
                    guest, stay = self.inflight.popleft()
                    if guest.number != message.number:
                        raise FrameError("an answer out of order")
                    if isinstance(message, Ended):
                        self._forget_inflight(guest, stay)
                    if guest.host is self and guest.stay == stay and not guest.ended:
                        guest.on_message(message)
                        if guest is self.own:
                            self._pool.on_overrun_over(self)
        except (FrameError, msgspec.MsgspecError, IndexError, OverflowError):
            self._mad = True
            self.condemn()
        if self._lent is not None:
            self.raise_turn()
        return count

    def _forget_inflight(self, guest: PythonGuest, stay: int) -> None:
        """The guest has ended: what was on its way to it meets nobody, and is not answered."""
        over = guest, stay
        if over in self.inflight:
            self.inflight = deque(each for each in self.inflight if each != over)

    def _on_ready(self) -> None:
        if not self.ready:
            self.ready = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._pool.on_ready(self)
            self._want_slot()

    # --- the end -----------------------------------------------------------------------------

    def kill(self, by_us: bool = True) -> None:
        """End it now; the pool is told when it is gone."""
        if self.ending:
            return
        self.ending = True
        self.by_us = by_us
        self._signal(signal.SIGKILL)
        self.give_slot_back()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_DEATH_GRACE_S, self._close)

    def condemn(self) -> None:
        """End it for what it does; the run that it executes is to blame."""
        self.condemned = True
        self.kill(False)

    def _on_exit(self) -> None:
        self.ending = True
        while self._receive():  # what it answered before it went
            pass
        self._close()

    def _close(self) -> None:
        if self.gone:
            return
        self.gone = self.ending = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ranking is not None:
            self._ranking.cancel()
        for fd in (self._fd, self._pidfd):
            self._loop.remove_reader(fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        charged = self.charged
        self._words.release()
        self._page.close()
        if self._lease is None:
            os.close(self._pidfd)
        else:
            self.give_slot_back()
        self._queue.clear()
        self.inflight.clear()
        self.own = None
        self._pool.on_gone(self, charged)


def _payload_bytes(message: ToHost) -> int:
    """About what a message adds to its frame."""
    if isinstance(message, Complete):
        return len(message.answer.payload)
    if isinstance(message, Start):
        return len(message.input) + len(message.restored or b"") + sum(len(each.payload) for each in message.history)
    return 0


def _urgency(queued: tuple[PythonGuest, ToHost]) -> int:
    guest, message = queued
    if isinstance(message, Drop):  # maybe of another, which comes back behind it
        return -1
    return _NOT_LENT if guest.lent is None else guest.lent
