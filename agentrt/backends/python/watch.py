"""The watch over activations: whose CPU time or wall time is up, whose fuel is spent, and who does not work at all.

It looks at the hosts that have a slot and work to do, four times a quantum, and only while there are any. A host's page
says which activation it is in; the clocks are read when one is seen first, so that nothing on the hosts' own path
reads a clock of CPU time. Wall time counts only while the host neither works nor waits for a CPU, and only while this
loop is not late: a full machine, or one that stood still, makes no hog of anyone.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrt.backends.python.host import HostLink
    from agentrt.backends.python.pool import HostPool


class Watch:
    """Calls `HostPool.on_overrun` once for an activation, `HostPool.on_fuel_spent`, or ends a host that hangs."""

    def __init__(self, pool: "HostPool", now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._pool = pool
        self._limits = pool.limits
        self._tick_ns = max(1_000_000, pool.limits.quantum_ns // 4)
        self._hosts: set[HostLink] = set()
        self._ticking = False
        self._due_ns = 0  # when the next look is

    def add(self, host: "HostLink") -> None:
        """It has a slot and work to do; it is looked at until one of the two is over."""
        self._hosts.add(host)
        if not self._ticking:
            self._ticking = True
            self._tick_later(self._now_ns())

    def _tick(self) -> None:
        now = self._now_ns()
        late_ns = now - self._due_ns
        for host in tuple(self._hosts):
            if late_ns > self._limits.quantum_wall_ns // 2:
                host.wall_base_ns += late_ns
                host.progress_wall_ns += late_ns
            if not host.granted or not host.inflight or host.ending:
                self._hosts.discard(host)
                continue
            try:
                self._look(host, now)
            except OSError:  # it is gone, and its pidfd will say so
                self._hosts.discard(host)
        self._ticking = bool(self._hosts) and not self._pool.closed
        if self._ticking:
            self._tick_later(now)

    def _tick_later(self, now: int) -> None:
        self._due_ns = now + self._tick_ns
        self._pool.loop.call_later(self._tick_ns / 1e9, self._tick)

    def _look(self, host: "HostLink", now: int) -> None:
        activation, number, cpu = host.activations, host.running, host.cpu_ns()
        if activation != host.activation:
            host.activation = activation
            host.cpu_base_ns = host.progress_cpu_ns = cpu
            host.wall_base_ns = host.progress_wall_ns = now
            host.noticed = False
            return
        limits = self._limits
        used = cpu - host.cpu_base_ns
        if now - host.wall_base_ns >= limits.quantum_wall_ns and used < limits.quantum_ns and host.is_runnable():
            host.wall_base_ns = now
        over = used >= limits.quantum_ns or now - host.wall_base_ns >= limits.quantum_wall_ns
        if number and over and not host.noticed:
            host.noticed = True
            self._pool.on_overrun(host, number)
            if host.ending:
                return
        guest = host.guests.get(number)
        fuel = used * limits.fuel_per_us // 1000
        if guest is not None and not guest.unwinding and guest.fuel_used + fuel >= guest.fuel:
            guest.fuel_used += fuel
            self._pool.on_fuel_spent(host, guest)
            return
        if number and cpu - host.progress_cpu_ns > (now - host.progress_wall_ns) // 100:
            host.progress_cpu_ns, host.progress_wall_ns = cpu, now
        elif now - host.progress_wall_ns >= limits.hang_ns:
            if host.is_runnable() and (number or cpu - host.progress_cpu_ns < limits.hang_ns // 100):
                host.progress_wall_ns = now
            else:  # it waits for what does not come, or works between two activations and never begins the next
                host.condemn()
