"""The hosts of one class of tools: calls in, outcomes out, on the control loop and without blocking it.

    call -> domain (trust domain, tier): two lanes, async and sync, each first in first out
         -> one of the domain's hosts with room -> its socket -> `done`

A host serves one domain. When hosts are short, waiting domains get the next free one by tier, then by arrival. Who
holds a host for longer than a turn while others wait gives it up once its calls have ended; the last places are kept
for the higher tiers. Nothing here is a task: all are callbacks of the loop, and only its thread may call.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

from agentrt.tools.binding import error_payload
from agentrt.tools.link import HostLink
from agentrt.tools.outcome import EVICTED_WAITING, ClassStatistics, ToolLimits, ToolOutcome
from agentrt.tools.pending import Batch, PendingCall
from agentrt.tools.spec import ToolRegistry
from agentrt.tools.starter import HostStarter

#: Cancelled calls in a lane are taken out when they are so many and more than half of it.
_DEAD_MIN: Final = 64


class Domain:
    """The calls and hosts of one trust domain at one tier."""

    __slots__ = ("dead", "deaths", "forget_ns", "gathering", "hosts", "lanes", "name", "not_before_ns", "pool", "tier")

    def __init__(self, pool: "HostPool", name: str, tier: int) -> None:
        self.pool = pool
        self.name = name
        self.tier = tier
        self.lanes: tuple[deque[PendingCall], deque[PendingCall]] = (deque(), deque())  # async, sync; of units
        #: Batches that take more calls, by tool and time-out; in a lane, or waiting for company.
        self.gathering: dict[tuple[int, int], PendingCall] = {}
        self.dead = 0  # units in the lanes that nobody wants
        self.hosts: list[HostLink] = []
        self.deaths = 0  # of hosts, since the last good answer
        self.not_before_ns = 0  # no new host until then
        self.forget_ns = 0  # the deaths

    @property
    def queued(self) -> int:
        return len(self.lanes[0]) + len(self.lanes[1]) - self.dead


class Shared:
    """What the pools of all classes have in common. ``pump``: see to all of them."""

    def __init__(
        self,
        registry: ToolRegistry,
        loop: asyncio.AbstractEventLoop,
        starter: HostStarter,
        starts_max: int,
        finish: Callable[[PendingCall, ToolOutcome], None],
        receive_buffer: memoryview,
    ) -> None:
        self.registry = registry
        self.loop = loop
        self.starter = starter
        self.starts_max = starts_max
        self.finish = finish
        self.receive_buffer = receive_buffer
        self.pools: dict[str, HostPool] = {}

    def starting(self) -> int:
        return sum(not (host.ready or host.ending) for pool in self.pools.values() for host in pool.hosts)

    def pump(self) -> None:
        for pool in self.pools.values():
            pool.pump_soon()


class HostPool:
    """The hosts of one class and the calls for them. ``emptied`` is called when the last host of a closed one goes."""

    def __init__(self, shared: Shared, limits: ToolLimits, emptied: Callable[[], None]) -> None:
        self._shared = shared
        self._emptied = emptied
        self.registry: Final = shared.registry
        self.loop: Final = shared.loop
        self.limits: Final = limits
        self.starter: Final = shared.starter
        #: Shared by all hosts: what is decoded from it is copied.
        self.receive_buffer: Final = shared.receive_buffer
        self.finish: Final = shared.finish
        self._domains: dict[tuple[str, int], Domain] = {}
        self.hosts: set[HostLink] = set()  # all that are not gone
        self.spares: list[HostLink] = []
        self._prewarm = 0  # spares that a profile asks for
        #: Per tier, in order of arrival: domains with calls that no host of theirs has room for.
        self._waiting: Final[tuple[dict[str, Domain], ...]] = ({}, {}, {}, {})
        self._start_failures = 0  # in a row
        self._start_failed: str = ""
        self._start_not_before_ns = 0
        self._pump_due = False
        self._pump_timer: asyncio.TimerHandle | None = None
        self._closed = self._stopping = False
        self.items = 0  # calls accepted and not ended
        self.bytes = 0  # their arguments
        self.calls = self.failures = self.timeouts = 0
        self.hosts_started = self.hosts_died = 0

    # --- calls -----------------------------------------------------------------

    def domain(self, name: str, tier: int) -> Domain:
        domain = self._domains.get((name, tier))
        if domain is None:
            domain = self._domains[name, tier] = Domain(self, name, tier)
        return domain

    def prewarm(self, count: int) -> None:
        """Keep so many spares, as far as `hosts_max` allows, if that is more than the ordinary ones. Those that are too
        many go to who comes next."""
        if count != self._prewarm:
            self._prewarm = count
            self.pump_soon()

    def put(self, call: PendingCall) -> None:
        """Send the call to a host with room, or queue it."""
        if call.spec.max_batch > 1 and not call.reconcile:
            self._gather(call)
        else:
            self._enqueue(call)

    def _enqueue(self, unit: PendingCall) -> None:
        domain = unit.domain
        lane = domain.lanes[unit.is_sync]
        if not lane:
            for host in domain.hosts:
                if host.has_room(unit.is_sync):
                    self._send(host, unit)
                    return
        unit.queued = True
        lane.append(unit)
        self._want_host(domain)

    def _send(self, host: HostLink, unit: PendingCall) -> None:
        if unit.batch is not None:
            self._close_batch(unit)
        host.send(unit)

    def _gather(self, call: PendingCall) -> None:
        """Add the call to the batch that takes more, or begin one."""
        gathering = call.domain.gathering
        key = (call.number, call.timeout_ns)
        call.queued = True
        leader = gathering.get(key)
        if leader is not None and leader.batch is not None:
            call.batch = leader.batch
            call.batch.calls.append(call)
            if len(call.batch.calls) >= call.spec.max_batch:
                self._close_batch(leader)
                self._gathered(leader)
            return
        call.batch = Batch(call)
        gathering[key] = call
        # Without a wait: whatever else arrives in this turn of the loop, and while no host has room.
        call.batch.timer = self.loop.call_later(call.spec.max_wait_ns / 1e9, self._gathered, call)

    def _gathered(self, leader: PendingCall) -> None:
        """Its batch has waited long enough, or is full."""
        batch = leader.batch
        if batch is None or batch.timer is None:  # it is in a lane already
            return
        batch.timer.cancel()
        batch.timer = None
        if self._closed:
            return
        if leader.live():
            self._enqueue(leader)
        else:
            self._close_batch(leader)

    def _close_batch(self, leader: PendingCall) -> None:
        gathering = leader.domain.gathering
        key = (leader.number, leader.timeout_ns)
        if gathering.get(key) is leader:
            del gathering[key]

    def on_dead(self, call: PendingCall) -> None:
        """A call that no host has was cancelled. Its place in a lane goes with the next ones, or in a sweep."""
        domain = call.domain
        leader = call
        if call.batch is not None:
            leader = call.batch.calls[0]
            if call.batch.timer is not None or leader.live():
                return
            self._close_batch(leader)
        domain.dead += 1
        if domain.dead >= _DEAD_MIN and domain.dead > domain.queued:
            for lane in domain.lanes:
                alive = [unit for unit in lane if unit.live()]
                lane.clear()
                lane.extend(alive)
            domain.dead = 0
        self._settle(domain)

    def stop(self) -> None:
        """Begin nothing more: what has no host ends as evicted, what runs is told that the node stops."""
        self._stopping = True
        for domain in tuple(self._domains.values()):
            units = [*domain.gathering.values(), *domain.lanes[0], *domain.lanes[1]]
            domain.lanes[0].clear()
            domain.lanes[1].clear()
            domain.gathering.clear()
            domain.dead = 0
            for unit in units:
                if unit.batch is not None and unit.batch.timer is not None:
                    unit.batch.timer.cancel()
                    unit.batch.timer = None
            for call in [call for unit in units for call in unit.live()]:
                self.finish(call, EVICTED_WAITING)
            self._settle(domain)
        for host in self.hosts:
            if host.calls:
                host.notice()

    def evict(self) -> None:
        """End the hosts that have calls."""
        for host in tuple(self.hosts):
            if host.calls:
                host.evict()

    def close(self) -> None:
        """End the hosts in order."""
        self._closed = True
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        for domain in self._domains.values():
            for leader in domain.gathering.values():
                if leader.batch is not None and leader.batch.timer is not None:
                    leader.batch.timer.cancel()
        for host in self.hosts:
            host.retire()

    def kill(self) -> None:
        for host in tuple(self.hosts):
            host.kill()

    def abandon(self) -> None:
        for host in tuple(self.hosts):
            host.abandon()
        self.hosts.clear()

    def statistics(self) -> ClassStatistics:
        """As it is now."""
        running = sum(len(host.calls) for host in self.hosts)
        return ClassStatistics(
            len(self.hosts),
            running,
            max(0, self.items - running),
            self.bytes,
            self.calls,
            self.failures,
            self.timeouts,
            self.hosts_started,
            self.hosts_died,
        )

    # --- from hosts ------------------------------------------------------------

    def on_ready(self, host: HostLink) -> None:
        """The host has imported the tools."""
        self._start_failures = 0
        if host.domain is not None:
            host.bound_ns = self._now_ns()  # its turn begins
            self._fill(host.domain, host)
        self._shared.pump()  # another class may have waited for this start

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
                self.pump_soon()
            else:
                self._pump_later(host.idle_since_ns + self.limits.idle_timeout_ns)

    def on_doomed(self, host: HostLink) -> None:
        """The host will not live."""
        if host in self.spares:
            self.spares.remove(host)

    def on_gone(self, host: HostLink, *, was_ready: bool, by_us: bool, status: str) -> None:
        """The process is reaped and its calls are finished."""
        self.hosts.discard(host)
        if host in self.spares:
            self.spares.remove(host)
        domain = host.domain
        if domain is not None:
            domain.hosts.remove(host)
        now = self._now_ns()
        if not by_us:
            self.hosts_died += 1
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
        self.starter.sweep()
        if self._closed:
            if not self.hosts:
                self._emptied()
            return
        if domain is not None:
            self._settle(domain)
        self._shared.pump()

    # --- deciding --------------------------------------------------------------

    def _now_ns(self) -> int:
        return int(self.loop.time() * 1e9)

    def _backoff_ns(self, failures: int) -> int:
        return min(self.limits.backoff_max_ns, self.limits.backoff_min_ns << min(failures - 1, 20))

    def _fill(self, domain: Domain, host: HostLink) -> None:
        for is_sync in (False, True):
            lane = domain.lanes[is_sync]
            while lane and host.has_room(is_sync):
                unit = lane.popleft()
                if unit.live():
                    self._send(host, unit)
                else:
                    domain.dead -= 1
        self._settle(domain)

    def _settle(self, domain: Domain) -> None:
        """Bring the tables in line with what the domain has and wants."""
        if domain.queued:
            self._want_host(domain)
            return
        self._waiting[domain.tier].pop(domain.name, None)
        if not domain.hosts and not domain.gathering and domain.forget_ns <= self._now_ns():
            self._domains.pop((domain.name, domain.tier), None)

    def _want_host(self, domain: Domain) -> None:
        waiting = self._waiting[domain.tier]
        if domain.name not in waiting:
            waiting[domain.name] = domain
            self.pump_soon()

    def pump_soon(self) -> None:
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
        self.pump_soon()

    def _pump(self) -> None:
        """Hand out hosts, most urgent domain first; then see to spares and to hosts that nobody needs."""
        self._pump_due = False
        if self._closed or self._stopping:
            return
        now = self._now_ns()
        if self._start_failures >= self.limits.start_attempts_max and now < self._start_not_before_ns:
            self._refuse_waiting()
        self._serve_waiting(now)
        self._retire_idle(now)
        room = self.limits.hosts_max - any(self._waiting)  # the last place is for who waits, not for a spare
        while len(self.spares) < max(self.limits.spares, self._prewarm) and len(self.hosts) < room:
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
        bound = len(self.hosts) - len(self.spares)
        if bound >= self._hosts_allowed(domain.tier) or (not self.spares and bound >= self.limits.hosts_max):
            self._reclaim(domain, now)
            return False
        host = next((spare for spare in self.spares if spare.ready), None) or next(iter(self.spares), None)
        if host is None:
            host = self._start_host(now)
            if host is None:
                return False
        self.spares.remove(host)
        host.domain = domain
        host.rank(domain.tier)
        host.bound_ns = now
        domain.hosts.append(host)
        del self._waiting[domain.tier][domain.name]
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
        others = [host for host in self.hosts if host.domain is not None and host.domain is not domain]
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
        for host in tuple(self.hosts):
            if host.domain is None or not host.ready or host.ending or host.calls or host.domain_queued:
                continue
            due = host.idle_since_ns + self.limits.idle_timeout_ns
            if due <= now:
                host.retire()
            else:
                self._pump_later(due)

    def _start_host(self, now: int) -> HostLink | None:
        """A new spare, or None if starting has to wait."""
        if self._shared.starting() >= self._shared.starts_max:
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
        self.hosts_started += 1
        self.hosts.add(host)
        self.spares.append(host)
        return host

    def _refuse_waiting(self) -> None:
        """Hosts do not start: answer what waits for one, until it is time to try again."""
        payload = error_payload("tool_host_start", f"no tool host came up: {self._start_failed}")
        for domain in [domain for waiting in self._waiting for domain in waiting.values()]:
            if any(host.ready for host in domain.hosts):
                continue
            units = [*domain.lanes[0], *domain.lanes[1]]
            domain.lanes[0].clear()
            domain.lanes[1].clear()
            domain.dead = 0
            for unit in units:
                if unit.batch is not None:
                    self._close_batch(unit)
            self._settle(domain)
            for call in [call for unit in units for call in unit.live()]:
                self.finish(call, ToolOutcome(False, payload, "tool_host_start", 0, False))
