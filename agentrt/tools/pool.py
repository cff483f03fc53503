"""The node's side of tool hosts: calls in, outcomes out, on the control loop and without blocking it.

    call -> domain (tenant, tier): two lanes, async and sync, each first in first out
         -> one of the domain's hosts with room -> its socket -> `done`

A host serves one domain. When hosts are short, waiting domains get the next free one by tier, then by arrival. Who
holds a host for longer than a turn while others wait gives it up once its calls have ended; the last places are kept
for the higher tiers. Nothing here is a task: all are callbacks of the loop, and only its thread may call.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from typing import Final

from agentrt.errors import ClosedError, InputError, QueueFullError
from agentrt.tools.binding import error_payload
from agentrt.tools.link import HostLink
from agentrt.tools.outcome import Done, ToolLimits, ToolOutcome, ToolStatistics
from agentrt.tools.pending import PendingCall
from agentrt.tools.spec import ToolRegistry

_CLOSE_GRACE_S: Final = 1.0
_RECEIVE_BYTES: Final = 256 * 1024


class Domain:
    """The calls and hosts of one tenant at one tier."""

    __slots__ = ("deaths", "forget_ns", "hosts", "lanes", "not_before_ns", "tenant", "tier")

    def __init__(self, tenant: str, tier: int) -> None:
        self.tenant = tenant
        self.tier = tier
        self.lanes: tuple[deque[PendingCall], deque[PendingCall]] = (deque(), deque())  # async, sync
        self.hosts: list[HostLink] = []
        self.deaths = 0  # of hosts, since the last good answer
        self.not_before_ns = 0  # no new host until then
        self.forget_ns = 0  # the deaths

    @property
    def queued(self) -> int:
        return len(self.lanes[0]) + len(self.lanes[1])


class ToolPool:
    """All tool hosts of a node. Make it, use it and close it on the loop's thread, which must outlive the hosts."""

    def __init__(
        self, registry: ToolRegistry, loop: asyncio.AbstractEventLoop, limits: ToolLimits | None = None
    ) -> None:
        self.registry: Final = registry
        self.loop: Final = loop
        self.limits: Final = ToolLimits() if limits is None else limits
        self._domains: dict[tuple[str, int], Domain] = {}
        self._hosts: set[HostLink] = set()  # all that are not reaped
        self._spares: list[HostLink] = []
        #: Per tier, in order of arrival: domains with calls that no host of theirs has room for.
        self._waiting: Final[tuple[dict[str, Domain], ...]] = ({}, {}, {}, {})
        #: Shared by all hosts: what is decoded from it is copied.
        self.receive_buffer: Final = memoryview(bytearray(_RECEIVE_BYTES))
        self._start_failures = 0  # in a row
        self._start_failed: str = ""
        self._start_not_before_ns = 0
        self._pump_due = False
        self._pump_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._emptied: asyncio.Future[None] | None = None
        self._next_id = 0
        self._items = 0
        self._bytes = 0
        self._calls = self._failures = self._timeouts = self._hosts_started = self._hosts_died = 0

    # --- for the engine --------------------------------------------------------

    def start(self) -> None:
        """Start the spare hosts, so that the first call need not wait for one."""
        self._pump_soon()

    def call(
        self,
        name: str,
        args: bytes,
        *,
        key: str | None,
        tenant: str,
        tier: int,
        attempt: int,
        done: Done,
        timeout_ns: int | None = None,
    ) -> None:
        """Call a tool. ``args`` is a JSON object as text, ``key`` the step's idempotency key (None for pure tools).

        ``timeout_ns`` shortens the tool's own time-out; it begins when a host gets the call. ``done`` is called once,
        on the loop, never from inside this call, and not at all after `close`. Raises UnknownToolError, InputError
        (args above the limit), QueueFullError, ClosedError; nothing was accepted then.
        """
        if self._closed:
            raise ClosedError("the tools are closed")
        number = self.registry.number(name)
        spec = self.registry.get(name)
        size = len(args)
        if size > self.limits.request_bytes_max:
            raise InputError(
                f"arguments of {size} bytes for tool {name}, more than {self.limits.request_bytes_max}",
                limit="limits.request_bytes_max",
            )
        if self._items >= self.limits.queue_items_max or self._bytes + size > self.limits.queue_bytes_max:
            raise QueueFullError(f"{self._items} tool calls with {self._bytes} bytes are waiting or running")
        limit_ns = spec.timeout_ns if timeout_ns is None else min(timeout_ns, spec.timeout_ns)
        self._next_id += 1
        call = PendingCall(self._next_id, number, args, key, attempt, limit_ns, not spec.is_async, done)
        domain = self._domains.get((tenant, tier))
        if domain is None:
            domain = self._domains[tenant, tier] = Domain(tenant, tier)
        self._items += 1
        self._bytes += size
        self._calls += 1
        lane = domain.lanes[call.is_sync]
        if not lane:
            for host in domain.hosts:
                if host.has_room(call.is_sync):
                    host.send(call)
                    return
        lane.append(call)
        self._want_host(domain)

    def statistics(self) -> ToolStatistics:
        running = sum(len(host.calls) for host in self._hosts)
        return ToolStatistics(
            hosts=len(self._hosts),
            spares=len(self._spares),
            running=running,
            queued=sum(domain.queued for domain in self._domains.values()),
            queued_bytes=self._bytes,
            calls=self._calls,
            failures=self._failures,
            timeouts=self._timeouts,
            hosts_started=self._hosts_started,
            hosts_died=self._hosts_died,
        )

    async def close(self) -> None:
        """End all hosts: by closing their sockets, after a second by force. No outcome is delivered from now on."""
        if self._closed:
            return
        self._closed = True
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        for host in self._hosts:
            host.retire()
        if not self._hosts:
            return
        self._emptied = self.loop.create_future()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._emptied), _CLOSE_GRACE_S)
        for host in tuple(self._hosts):
            host.kill()
        with contextlib.suppress(TimeoutError):  # one in an uninterruptible sleep is left to its PR_SET_PDEATHSIG
            await asyncio.wait_for(asyncio.shield(self._emptied), _CLOSE_GRACE_S)
        for host in tuple(self._hosts):
            host.abandon()
        self._hosts.clear()

    # --- from hosts ------------------------------------------------------------

    def on_ready(self, host: HostLink) -> None:
        """The host has imported the tools."""
        self._start_failures = 0
        if host.domain is not None:
            host.bound_ns = self._now_ns()  # its turn begins
            self._fill(host.domain, host)
        self._pump_soon()

    def on_room(self, host: HostLink) -> None:
        """The host has answered something, or its socket takes bytes again."""
        domain = host.domain
        if domain is None or host.ending:
            return
        if host.draining:
            if not host.calls:
                host.retire()
            return
        if domain.lanes[0] or domain.lanes[1]:
            self._fill(domain, host)
        elif not host.calls:
            host.idle_since_ns = self._now_ns()
            if any(self._waiting):
                self._pump_soon()
            else:
                self._pump_later(host.idle_since_ns + self.limits.idle_timeout_ns)

    def finish(self, call: PendingCall, outcome: ToolOutcome) -> None:
        """Give a call its outcome and its room back."""
        self._items -= 1
        self._bytes -= len(call.args)
        if not outcome.ok:
            self._failures += 1
            if outcome.code == "tool_timeout":
                self._timeouts += 1
        if self._closed:
            return
        try:
            call.done(outcome)
        except Exception as error:
            self.loop.call_exception_handler({"message": "a tool's done callback raised", "exception": error})

    def on_answered(self, host: HostLink) -> None:
        """A call of this host was answered by the host itself: it works."""
        if host.domain is not None:
            host.domain.deaths = 0

    def on_gone(self, host: HostLink, *, was_ready: bool, by_us: bool, status: str) -> None:
        """The process is reaped and its calls are finished."""
        self._hosts.discard(host)
        if host in self._spares:
            self._spares.remove(host)
        domain = host.domain
        if domain is not None:
            domain.hosts.remove(host)
        now = self._now_ns()
        if not by_us:
            self._hosts_died += 1
            if not was_ready:
                self._start_failures += 1
                self._start_failed = status
                self._start_not_before_ns = now + self._backoff_ns(self._start_failures)
            elif domain is not None:
                domain.deaths += 1
                # Remembered for a while, so that calls made one after the other do not get round the back-off.
                domain.forget_ns = now + 2 * self.limits.backoff_max_ns
                self.loop.call_at(domain.forget_ns / 1e9 + 0.002, self._settle, domain)
                if domain.deaths > 1:  # the first successor starts at once
                    domain.not_before_ns = now + self._backoff_ns(domain.deaths - 1)
        if self._closed:
            if not self._hosts and self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)
            return
        if domain is not None:
            self._settle(domain)
        self._pump_soon()

    # --- deciding --------------------------------------------------------------

    def _now_ns(self) -> int:
        return int(self.loop.time() * 1e9)

    def _backoff_ns(self, failures: int) -> int:
        return min(self.limits.backoff_max_ns, self.limits.backoff_min_ns << min(failures - 1, 20))

    def _fill(self, domain: Domain, host: HostLink) -> None:
        for is_sync in (False, True):
            lane = domain.lanes[is_sync]
            while lane and host.has_room(is_sync):
                host.send(lane.popleft())
        self._settle(domain)

    def _settle(self, domain: Domain) -> None:
        """Bring the tables in line with what the domain has and wants."""
        if domain.queued:
            self._want_host(domain)
            return
        self._waiting[domain.tier].pop(domain.tenant, None)
        if not domain.hosts and domain.forget_ns <= self._now_ns():
            self._domains.pop((domain.tenant, domain.tier), None)

    def _want_host(self, domain: Domain) -> None:
        waiting = self._waiting[domain.tier]
        if domain.tenant not in waiting:
            waiting[domain.tenant] = domain
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_due and not self._closed:
            self._pump_due = True
            self.loop.call_soon(self._pump)

    def _pump_later(self, at_ns: int) -> None:
        at = at_ns / 1e9
        if self._pump_timer is not None:
            if self._pump_timer.when() <= at:
                return
            self._pump_timer.cancel()
        self._pump_timer = self.loop.call_at(at, self._on_pump_timer)

    def _on_pump_timer(self) -> None:
        self._pump_timer = None
        self._pump_soon()

    def _pump(self) -> None:
        """Hand out hosts, most urgent domain first; then see to spares and to hosts that nobody needs."""
        self._pump_due = False
        if self._closed:
            return
        now = self._now_ns()
        if self._start_failures >= self.limits.start_attempts_max and now < self._start_not_before_ns:
            self._refuse_waiting()
        self._serve_waiting(now)
        self._retire_idle(now)
        room = self.limits.hosts_max - any(self._waiting)  # the last place is for who waits, not for a spare
        while len(self._spares) < self.limits.spares and len(self._hosts) < room:
            if self._start_host(now) is None:
                break

    def _serve_waiting(self, now: int) -> None:
        for waiting in self._waiting:
            for domain in tuple(itertools.islice(waiting.values(), self.limits.hosts_max * 2)):
                if not self._serve(domain, now):
                    return

    def _serve(self, domain: Domain, now: int) -> bool:
        """Give the domain a host if it may have one. False if there is none to be had, for it and all after it."""
        if any(not host.ready for host in domain.hosts):
            return True
        if sum(not (host.draining or host.ending) for host in domain.hosts) >= self.limits.hosts_per_domain_max:
            return True
        if domain.not_before_ns > now:
            self._pump_later(domain.not_before_ns)
            return True
        bound = len(self._hosts) - len(self._spares)
        if bound >= self._hosts_allowed(domain.tier) or (not self._spares and bound >= self.limits.hosts_max):
            self._reclaim(domain, now)
            return False
        host = next((spare for spare in self._spares if spare.ready), None) or next(iter(self._spares), None)
        if host is None:
            host = self._start_host(now)
            if host is None:
                return False
        self._spares.remove(host)
        host.domain = domain
        host.bound_ns = now
        domain.hosts.append(host)
        del self._waiting[domain.tier][domain.tenant]
        if host.ready:
            self._fill(domain, host)
        else:
            self._settle(domain)  # to the end of its tier's order, for a further host if one does not do
        return True

    def _hosts_allowed(self, tier: int) -> int:
        """The last place is tier 0's, the one before tiers 0 and 1 share: a low tier cannot shut out a higher one."""
        return max(1, self.limits.hosts_max - min(tier, 2))

    def _reclaim(self, domain: Domain, now: int) -> None:
        """Let a host of someone else come free for this domain: an idle one at once, else one that had its turn."""
        others = [host for host in self._hosts if host.domain is not None and host.domain is not domain]
        if any(host.draining or host.ending for host in others):
            return
        idle = [host for host in others if host.ready and not host.calls and not host.domain_queued]
        if idle:
            min(idle, key=lambda host: host.idle_since_ns).retire()
            return
        best: HostLink | None = None
        soonest = now + self.limits.turn_ns
        for host in others:
            if not host.ready:
                continue
            # A more urgent domain is asked later, not never.
            patience = self.limits.turn_ns * (10 if host.tier < domain.tier else 1)
            if host.bound_ns + patience > now:
                soonest = min(soonest, host.bound_ns + patience)
            elif best is None or (host.tier, -host.bound_ns) > (best.tier, -best.bound_ns):
                best = host
        if best is None:
            self._pump_later(soonest)
            return
        best.draining = True
        if not best.calls:
            best.retire()

    def _retire_idle(self, now: int) -> None:
        for host in tuple(self._hosts):
            if host.domain is None or not host.ready or host.ending or host.calls or host.domain_queued:
                continue
            due = host.idle_since_ns + self.limits.idle_timeout_ns
            if due <= now:
                host.retire()
            else:
                self._pump_later(due)

    def _start_host(self, now: int) -> HostLink | None:
        """A new spare, or None if starting has to wait."""
        if sum(not (host.ready or host.ending) for host in self._hosts) >= self.limits.starts_max:
            return None  # one of them will be ready, or gone, and either pumps again
        if self._start_failures and self._start_not_before_ns > now:
            self._pump_later(self._start_not_before_ns)
            return None
        try:
            host = HostLink(self)
        except OSError as error:
            self._start_failures += 1
            self._start_failed = f"it cannot be started: {error.strerror}"
            self._start_not_before_ns = now + self._backoff_ns(self._start_failures)
            self._pump_later(self._start_not_before_ns)
            return None
        self._hosts_started += 1
        self._hosts.add(host)
        self._spares.append(host)
        return host

    def _refuse_waiting(self) -> None:
        """Hosts do not start: answer what waits for one, until it is time to try again."""
        payload = error_payload("tool_host_start", f"no tool host came up: {self._start_failed}")
        for domain in [domain for waiting in self._waiting for domain in waiting.values()]:
            if any(host.ready for host in domain.hosts):
                continue
            calls = [*domain.lanes[0], *domain.lanes[1]]
            domain.lanes[0].clear()
            domain.lanes[1].clear()
            self._settle(domain)
            for call in calls:
                self.finish(call, ToolOutcome(False, payload, "tool_host_start", 0, False))
