"""The watch over activations: whose CPU time or wall time is up, whose fuel is spent, and who does not work at all.

It looks at the hosts that have a slot and work to do, four times a quantum, and only while there are any. A host's page
says which activation it is in; the clocks are read when one is seen first, so that nothing on the hosts' own path
reads a clock of CPU time. Wall time counts only while the host neither works nor waits for a CPU: a full machine makes
no hog of anyone.
"""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrt.backends.python.host import HostLink
    from agentrt.backends.python.pool import HostPool


class Watch:
    """Calls `HostPool.on_overrun` once for an activation, `HostPool.on_fuel_spent`, or ends a host that hangs."""

    def __init__(self, pool: "HostPool") -> None:
        self._pool = pool
        self._limits = pool.limits
        self._tick_s = max(0.001, pool.limits.quantum_ns / 4e9)
        self._hosts: set[HostLink] = set()
        self._ticking = False

    def add(self, host: "HostLink") -> None:
        """It has a slot and work to do; it is looked at until one of the two is over."""
        self._hosts.add(host)
        if not self._ticking:
            self._ticking = True
            self._pool.loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        now = time.monotonic_ns()
        for host in tuple(self._hosts):
            if not host.granted or not host.inflight or host.ending:
                self._hosts.discard(host)
                continue
            try:
                self._look(host, now)
            except OSError:  # it is gone, and its pidfd will say so
                self._hosts.discard(host)
        self._ticking = bool(self._hosts) and not self._pool.closed
        if self._ticking:
            self._pool.loop.call_later(self._tick_s, self._tick)

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
        if guest is not None and guest.fuel_used + used * limits.fuel_per_us // 1000 >= guest.fuel:
            guest.fuel_used += used * limits.fuel_per_us // 1000
            self._pool.on_fuel_spent(host, guest)
            return
        if number and cpu - host.progress_cpu_ns > (now - host.progress_wall_ns) // 100:
            host.progress_cpu_ns, host.progress_wall_ns = cpu, now
        elif now - host.progress_wall_ns >= limits.hang_ns:
            if number and host.is_runnable():
                host.progress_wall_ns = now
            else:  # it waits for what does not come, or is between two activations and never begins the next
                host.condemn()
