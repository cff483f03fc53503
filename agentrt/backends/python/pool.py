"""All Python hosts of a node: who lives where, who is too long at work, and what happens to the others.

    place -> a host of the run's domain with room, or a spare, or a new one, or wait (by tier, then arrival)
    watch -> an activation over its quantum: notice; when another run of the host has work: stop the host, which is the
             hog's own from now on, and bring the others back elsewhere
    gone  -> the run that was executing is charged with it, the others are brought back elsewhere; it is, too, if others
             ended the host (SIGKILL, the end of its template), `PythonLimits.kills_max` times

Nothing here is a task: all are callbacks of the loop, and only its thread may call.
"""

import asyncio
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from agentrt.agents.protocol import Drop, ToHost
from agentrt.backends.python.guest import FUEL_SPENT, PythonGuest
from agentrt.backends.python.host import Domain, HostLink
from agentrt.backends.python.limits import PythonLimits
from agentrt.backends.python.rank import HostRanks
from agentrt.backends.python.template import ForkedHost, Template
from agentrt.backends.python.watch import Watch
from agentrt.backends.slots import Slots
from agentrt.errors import AgentrtError, ClosedError, ModuleError, QueueFullError

_RECEIVE_BYTES: Final = 256 * 1024
#: Starts of hosts, or of a template, that fail in a row before the runs that wait for them do: with the pauses between
#: them about 8 s, so that neither a kill nor a machine short of memory ends runs.
_START_ATTEMPTS_MAX: Final = 8
_BACKOFF_S: Final = 0.1
_BACKOFF_S_MAX: Final = 2.0
_SWEEP_S: Final = 5.0
#: A spare that was taken is replaced a little later: whoever took it needs the CPUs now.
_SPARE_REST_S: Final = 0.05
_CLOSE_GRACE_S: Final = 2.0


class QuarantinedError(ModuleError):
    """This version of the agent has ended its host too many times in a row; it is not started any more."""

    code = "agent_quarantined"


class _ChangedError(ModuleError):
    """A bundle's code is not there any more."""


class PythonProgram(msgspec.Struct, frozen=True, eq=False):
    """An agent, ready to start. ``version``: sha256 over its bundle and entry, hex."""

    version: str
    pins: dict[str, str]
    name: str
    tier: int
    budget: dict[str, int | float]
    entry: str
    source: str
    digest: str  # of the bundle
    unwinds: bool = True


class PoolStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the pool's counters."""

    hosts: int
    spares: int
    guests: int
    waiting: int  # guests with work and without a host
    hosts_started: int
    hosts_died: int  # not ended by the pool
    overruns: int
    exiles: int  # hosts that became one run's own
    moves: int  # runs brought back in another host
    evictions: int  # runs that lost their host and are brought back from their journals
    quarantined: int


class Bundle:
    """A bundle's template and spare hosts."""

    __slots__ = (
        "digest",
        "failures",
        "loading",
        "prewarm",
        "rest_until",
        "retry_at",
        "source",
        "spares",
        "starting",
        "template",
        "used",
    )

    def __init__(self, source: str, digest: str, template: Template) -> None:
        self.source = source
        self.digest = digest
        self.template = template
        self.spares: list[HostLink] = []
        self.starting = 0  # forked or asked for, not ready, without a domain
        self.failures = 0  # of starts in a row
        self.retry_at = 0.0  # nothing is started before that, on the loop's clock
        self.loading = False
        self.used = False
        self.prewarm = 0  # hosts that are kept ready, whether or not it is in use
        self.rest_until = 0.0  # no new spare before that, on the loop's clock


class HostPool:
    """See the module. Made, used and closed on the loop's thread."""

    def __init__(self, limits: PythonLimits, slots: Slots, loop: asyncio.AbstractEventLoop) -> None:
        self.limits: Final = limits
        self.slots: Final = slots
        self.ranks: Final = HostRanks(limits.nice)
        self.loop: Final = loop
        self.receive_buffer: Final = memoryview(bytearray(_RECEIVE_BYTES))
        self._bundles: dict[str, Bundle] = {}
        self._hosts: set[HostLink] = set()
        self._domains: dict[Domain, list[HostLink]] = {}
        self._waiting: Final[tuple[deque[PythonGuest], ...]] = (deque(), deque(), deque(), deque())
        self._guests: dict[int, PythonGuest] = {}
        self._numbers = 0
        self._deaths: Counter[str] = Counter()  # of hosts in a row, by version
        self._watch = Watch(self)
        self._pump_due = False
        self._sweep: asyncio.TimerHandle | None = None
        self._loads: set[asyncio.Task[None]] = set()
        self._emptied: asyncio.Future[None] | None = None
        self.closed = False
        self._hosts_started = self._hosts_died = self._overruns = self._exiles = self._moves = self._evictions = 0

    # --- for the backend ---------------------------------------------------------------

    def add_bundle(self, source: str, digest: str, template: Template) -> None:
        """A template is ready. One that is known already is not needed."""
        known = self._bundles.get(digest)
        if known is None:
            self._bundles[digest] = Bundle(source, digest, template)
        elif known.template is not template:
            if known.template.alive:
                template.close()
            else:
                known.template = template
        self._pump_soon()

    def start(self, program: PythonProgram, make: Callable[[int], PythonGuest], *, admitted: bool) -> PythonGuest:
        """A new guest, made with its number. Raises QuarantinedError, QueueFullError, ClosedError."""
        if self.closed:
            raise ClosedError("the python backend is closed")
        if self.is_quarantined(program.version):
            raise QuarantinedError(
                f"agent {program.name} has ended its host {self.limits.deaths_max} times in a row",
                hint="Register another version of it, or release this one",
            )
        if len(self._guests) >= self.limits.guests_max and not admitted:
            raise QueueFullError(f"{len(self._guests)} Python agents are running or waiting", limit="guests_max")
        self._numbers += 1
        guest = make(self._numbers)
        self._guests[guest.number] = guest
        self.place(guest)
        return guest

    def is_quarantined(self, version: str) -> bool:
        return self._deaths[version] >= self.limits.deaths_max

    def release_quarantine(self, version: str) -> None:
        """Let the version be started again."""
        del self._deaths[version]

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            hosts=len(self._hosts),
            spares=sum(len(bundle.spares) for bundle in self._bundles.values()),
            guests=len(self._guests),
            waiting=sum(len(waiting) for waiting in self._waiting),
            hosts_started=self._hosts_started,
            hosts_died=self._hosts_died,
            overruns=self._overruns,
            exiles=self._exiles,
            moves=self._moves,
            evictions=self._evictions,
            quarantined=sum(self.is_quarantined(version) for version in self._deaths),
        )

    async def close(self) -> None:
        """End all hosts and templates. No event follows."""
        if self.closed:
            return
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for task in tuple(self._loads):
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        if self._hosts:
            self._emptied = self.loop.create_future()
            for host in tuple(self._hosts):
                host.kill()
            try:
                async with asyncio.timeout(_CLOSE_GRACE_S):
                    await self._emptied
            except TimeoutError:
                pass
        for bundle in self._bundles.values():
            bundle.template.close()
        until = self.loop.time() + _CLOSE_GRACE_S
        while any(bundle.template.alive for bundle in self._bundles.values()) and self.loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def tell(self, event: Callable[..., None], *args: Any) -> None:
        """Call the engine; what it raises is reported and harms nobody else."""
        if self.closed:
            return
        try:
            event(*args)
        except Exception as error:
            self.loop.call_exception_handler({"message": "a guest's event handler raised", "exception": error})

    def ask(self, event: Callable[..., bool], *args: Any) -> bool:
        """`tell`, and what the engine says; false if it raises."""
        said = False

        def asked() -> None:
            nonlocal said
            said = event(*args)

        self.tell(asked)
        return said

    # --- from guests ------------------------------------------------------------------------

    def send(self, guest: PythonGuest, message: ToHost) -> None:
        """To the guest's host, unless that is someone else's own by now."""
        host = guest.host
        assert host is not None
        if host.own is not None and host.own is not guest:
            self._exile(host)  # this one has work: it is placed with the others
        elif not host.ending:
            host.send(guest, message)

    def kill(self, guest: PythonGuest) -> None:
        """End it; `on_exit` follows, not from inside this call."""
        host = guest.host
        stuck = host is not None and host.own is guest
        self.drop(guest)
        if stuck and host is not None and host.inflight:
            host.kill()
        self.loop.call_soon(self.tell, guest.events.on_exit, guest.close("killed", 0, None, "killed"))

    def on_unwinding(self, guest: PythonGuest) -> None:
        """It is to unwind; if its activation does not end, it never will by itself."""
        host = guest.host
        if host is not None and host.own is guest and guest.never_unwinds:
            self._rescue(host, guest)

    def drop(self, guest: PythonGuest) -> None:
        """Its host may forget it."""
        host = guest.host
        if host is not None:
            host.remove(guest)
            if not host.ending:
                host.send(guest, Drop(guest.number))
            self._after_removal(host, guest)

    def on_ended(self, guest: PythonGuest) -> None:
        """Its host has forgotten it already."""
        host = guest.host
        if host is not None:
            host.remove(guest)
            self._after_removal(host, guest)
        if not guest.died:
            self._deaths.pop(guest.program.version, None)

    def _after_removal(self, host: HostLink, guest: PythonGuest) -> None:
        if host.own is guest:
            host.own = None
            if host.exiled:
                host.exiled = False
                for number in host.left_behind:
                    host.send(guest, Drop(number))
                host.left_behind.clear()
                if not host.ending and host.domain is not None:
                    host.work_at(host.domain[2])
        self._pump_soon()

    def forget(self, guest: PythonGuest) -> None:
        """It is over."""
        self._guests.pop(guest.number, None)
        if guest.waits_for_host:
            guest.waits_for_host = False
            self._waiting[guest.tier].remove(guest)

    # --- placing --------------------------------------------------------------------------------

    def place(self, guest: PythonGuest) -> None:
        """Give it a host, now or when there is one."""
        if guest.host is not None or guest.waits_for_host or guest.ended or self.closed:
            return
        if not guest.can_move:
            self._evictions += 1
            self.loop.call_soon(guest.end, "evicted", 0, None, "its host is gone, and so are the answers it was given")
            return
        if not self._try_place(guest):
            guest.waits_for_host = True
            self._waiting[guest.tier].append(guest)
            self._pump_soon()

    def _try_place(self, guest: PythonGuest) -> bool:
        bundle = self._bundles[guest.program.digest]
        bundle.used = True
        domain = (guest.tenant, bundle.digest, guest.tier)
        hosts = self._domains.get(domain, [])
        usable = [host for host in hosts if host.own is None and not host.ending]
        best = min(usable, key=lambda host: len(host.guests), default=None)
        limits = self.limits
        if (best is None or len(best.guests) >= limits.runs_per_host_good) and (
            len(usable) < limits.hosts_per_domain_max
        ):
            spare = next((host for host in bundle.spares if not host.ending), None)
            if spare is not None:
                bundle.spares.remove(spare)
                spare.domain = domain
                spare.work_at(guest.tier)
                self._domains.setdefault(domain, []).append(spare)
                self._adopt(spare, guest)
                bundle.rest_until = self.loop.time() + _SPARE_REST_S
                self.loop.call_later(_SPARE_REST_S + 0.001, self._pump_soon)
                return True
        if best is None or len(best.guests) >= limits.runs_per_host_max:
            return False
        self._adopt(best, guest)
        return True

    def _adopt(self, host: HostLink, guest: PythonGuest) -> None:
        if guest.started:
            guest.moves += 1
            self._moves += 1
        host.adopt(guest)

    def _pump_soon(self) -> None:
        if not self._pump_due and not self.closed:
            self._pump_due = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Hand out hosts, most urgent first, and start what is missing."""
        self._pump_due = False
        if self.closed:
            return
        missing: dict[str, int] = {}  # bundle -> hosts that its waiting runs could use
        urgent: dict[str, int] = {}
        for tier, waiting in enumerate(self._waiting):
            domains: set[Domain] = set()
            for guest in list(waiting):
                if self._try_place(guest):
                    guest.waits_for_host = False
                    waiting.remove(guest)
                    continue
                digest = guest.program.digest
                domain = (guest.tenant, digest, tier)
                if domain not in domains:
                    domains.add(domain)
                    missing[digest] = missing.get(digest, 0) + 1
                    urgent.setdefault(digest, tier)
        for digest in sorted(missing, key=lambda digest: urgent[digest]):
            self._start_hosts(self._bundles[digest], missing[digest], needed=True)
        for bundle in self._bundles.values():
            spares = max(bundle.prewarm, self.limits.spares if bundle.used else 0)
            if spares and bundle.rest_until <= self.loop.time():
                self._start_hosts(bundle, spares - len(bundle.spares), needed=False)
        if self._sweep is None:
            self._sweep = self.loop.call_later(_SWEEP_S, self._retire_idle)

    def prewarm(self, counts: Mapping[str, int]) -> None:
        """Keep so many hosts of a bundle (by digest) ready from now on, as far as `hosts_max` allows; others none but
        for the ordinary spares. Those that are too many go when their place is needed."""
        for digest, bundle in self._bundles.items():
            bundle.prewarm = counts.get(digest, 0)
        self._pump_soon()

    def _start_hosts(self, bundle: Bundle, count: int, *, needed: bool) -> None:
        limits = self.limits
        if bundle.retry_at > self.loop.time():
            return
        for _ in range(count - bundle.starting):
            starting = sum(each.starting for each in self._bundles.values())
            if starting >= limits.starts_max or bundle.loading:
                return
            if len(self._hosts) + starting >= limits.hosts_max - (not needed):
                if needed:
                    self._reclaim()
                return
            if not bundle.template.alive:
                self._reload(bundle)
                return
            bundle.starting += 1
            try:
                bundle.template.fork(lambda forked: self._on_forked(bundle, forked))
            except OSError as error:
                self._on_forked(bundle, f"{error.strerror}")
                return

    def _on_forked(self, bundle: Bundle, forked: ForkedHost | str) -> None:
        if isinstance(forked, str):
            bundle.starting -= 1
            self._on_host_failed(bundle, forked)
            return
        self._hosts_started += 1
        host = HostLink(self, bundle, bundle.template, forked)
        self._hosts.add(host)
        if self.closed:
            host.kill()

    def on_ready(self, host: HostLink) -> None:
        """A new host takes runs."""
        bundle = host.bundle
        bundle.starting -= 1
        bundle.failures = 0
        bundle.spares.append(host)
        self._pump_soon()

    def _on_host_failed(self, bundle: Bundle, why: str) -> None:
        if bundle.template.alive:
            self._on_start_failed(bundle, why)
        else:  # it went with its template, of which there will be another
            self._pump_soon()

    def _on_start_failed(self, bundle: Bundle, why: str) -> None:
        """A host, or the template, did not come up: try again in a while, and not for ever."""
        bundle.failures += 1
        if bundle.failures < _START_ATTEMPTS_MAX:
            pause_s = min(_BACKOFF_S_MAX, _BACKOFF_S * 2 ** (bundle.failures - 1))
            bundle.retry_at = self.loop.time() + pause_s
            self.loop.call_later(pause_s + 0.001, self._pump_soon)
            return
        bundle.failures = 0
        self._fail_waiting(bundle, f"no Python host came up: {why}")

    def _fail_waiting(self, bundle: Bundle, why: str) -> None:
        for waiting in self._waiting:
            for guest in [each for each in waiting if each.program.digest == bundle.digest]:
                guest.end("engine", 0, None, why)

    def _reload(self, bundle: Bundle) -> None:
        """Its template ended: start another, which must find the same code."""
        bundle.loading = True

        async def load() -> None:
            try:
                template = Template(bundle.source, self.limits, self.loop)
                prepared = await template.prepare()
                if prepared.digest != bundle.digest:
                    template.close()
                    raise _ChangedError(f"{bundle.source} has changed, and its earlier version is gone")
                bundle.template = template
            except _ChangedError as error:
                self._fail_waiting(bundle, str(error))
            except (AgentrtError, OSError) as error:
                self._on_start_failed(bundle, str(error))
            finally:
                bundle.loading = False
            self._pump_soon()

        task = self.loop.create_task(load())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def _reclaim(self) -> None:
        """Free a place: a spare of others, else the host that is idle for longest; its runs only wait."""
        for bundle in self._bundles.values():
            if bundle.spares:
                bundle.spares.pop().kill()
                return
        idle = [host for host in self._hosts if host.domain is not None and not host.busy and not host.ending]
        if idle:
            host = min(idle, key=lambda host: (len(host.guests) > 0, host.idle_since_ns))
            for guest in list(host.guests.values()):
                host.remove(guest)
            host.kill()

    def on_idle(self) -> None:
        """A host has nothing to do: its runs, if it has any, only wait."""
        if any(self._waiting):
            self._pump_soon()

    def _retire_idle(self) -> None:
        self._sweep = self.loop.call_later(_SWEEP_S, self._retire_idle)
        due = time.monotonic_ns() - self.limits.idle_timeout_ns
        for host in tuple(self._hosts):
            if host.domain is not None and not host.guests and not host.busy and 0 < host.idle_since_ns <= due:
                host.kill()

    # --- hogs -----------------------------------------------------------------------------------

    def watch(self, host: HostLink) -> None:
        """It has a slot and work to do."""
        self._watch.add(host)

    def on_overrun(self, host: HostLink, number: int) -> None:
        """The activation of this run has used its quantum."""
        self._overruns += 1
        guest = host.guests.get(number)
        if guest is None or guest.ended:  # it is not wanted any more, and does not end
            self._end_with_host(host, None, "", "")
            return
        host.own = guest
        guest.demotions += 1
        host.notice()
        if guest.never_unwinds:
            self._rescue(host, guest)
        elif any(each.has_work for each in host.guests.values() if each is not guest):
            self._exile(host)

    def on_overrun_over(self, host: HostLink) -> None:
        """The activation that had overrun has ended after all."""
        if not host.exiled:
            host.own = None

    def _exile(self, host: HostLink) -> None:
        """Others have work: the host is its hog's own from now on, and waits for a slot at a lower tier."""
        if host.exiled:
            others = [each for each in host.guests.values() if each is not host.own]
        else:
            self._exiles += 1
            host.exiled = True
            host.work_at(min(3, host.slot_tier + 1))
            others = [each for each in host.guests.values() if each is not host.own]
            host.stop()
        self._move(host, others)

    def _move(self, host: HostLink, guests: list[PythonGuest]) -> None:
        """Off the host; those with work are brought back elsewhere at once, the others when they have some."""
        for guest in guests:
            host.remove(guest)
            host.left_behind.append(guest.number)
        for guest in guests:
            if guest.has_work:
                self.place(guest)
        self._pump_soon()

    def on_fuel_spent(self, host: HostLink, guest: PythonGuest) -> None:
        """An activation that has not ended has used the run's last fuel."""
        self._end_with_host(host, guest, "fuel", FUEL_SPENT)

    def _end_with_host(self, host: HostLink, guest: PythonGuest | None, reason: str, message: str) -> None:
        """Nothing but the end of its host ends this guest."""
        if guest is not None:
            host.remove(guest)
            self._after_removal(host, guest)
        host.kill()
        self._move(host, list(host.guests.values()))
        if guest is None:
            return
        if guest.unwinds_without(reason, message):
            self.place(guest)
        else:
            guest.end(reason, 0, None, message)

    def _rescue(self, host: HostLink, guest: PythonGuest) -> None:
        """It is to unwind, and its activation does not end: bring it back without that."""
        host.own = None
        host.kill()
        self._move(host, [each for each in host.guests.values() if each is not guest])
        host.remove(guest)
        if not guest.started:
            guest.end("unwound", 0, None, "it was stopped in its first activation")
            return
        guest.skip_to_unwinding()
        self.place(guest)

    # --- ends ----------------------------------------------------------------------------------

    def on_gone(self, host: HostLink, charged: int) -> None:
        """The process has ended."""
        self._hosts.discard(host)
        bundle = host.bundle
        if host.domain is not None:
            hosts = self._domains[host.domain]
            hosts.remove(host)
            if not hosts:
                del self._domains[host.domain]
        elif host in bundle.spares:
            bundle.spares.remove(host)
        elif not host.ready:
            bundle.starting -= 1
        if self.closed:
            if not self._hosts and self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)
            return
        guests = list(host.guests.values())
        if host.by_us:
            host.template.when_gone(host.pid, lambda status: None)
            self._move(host, guests)
            return
        self._hosts_died += 1
        if not host.ready:
            self._on_host_failed(bundle, "it ended before it was ready")
        blamed = host.guests.get(charged)
        self._move(host, [guest for guest in guests if guest is not blamed])
        if blamed is not None:
            host.remove(blamed)
        host.template.when_gone(host.pid, lambda status: self._blame(host, blamed, status))

    def _blame(self, host: HostLink, guest: PythonGuest | None, status: int | None) -> None:
        if guest is None or guest.ended or self.closed:
            return
        if not host.condemned and status in (None, -signal.SIGKILL):
            guest.kills += 1
            if guest.kills <= self.limits.kills_max:
                self.place(guest)
                return
        self._deaths[guest.program.version] += 1
        if guest.host is not None:  # something came for it meanwhile
            self.drop(guest)
        message = f"the agent ended its host process ({_status(status)})"
        guest.died = True
        if guest.unwinds_without("host_died", message):
            self.place(guest)
        else:
            guest.end("host_died", 0, None, message)


def _status(status: int | None) -> str:
    if status is None:
        return "how is not known"
    return f"status {status}" if status >= 0 else f"signal {-status}"
