"""Tools, as the engine calls them: each class has its pool of hosts (hostpool.py) and of native processes
(commandset.py); here is what they share.

call -> its secrets, from the provider, in a thread -> the pool of its class -> a host, or a process -> `done`
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from agentrt.backends.process.settings import ProcessConfig
from agentrt.errors import ClosedError, ConfigError, InputError, QueueFullError
from agentrt.tools.binding import error_payload
from agentrt.tools.commandpool import CommandCall
from agentrt.tools.commandset import CommandSet
from agentrt.tools.declare import CLASS_DEFAULT
from agentrt.tools.hostpool import HostPool, Shared
from agentrt.tools.orphans import Orphans
from agentrt.tools.outcome import EVICTED_WAITING, ClassStatistics, Done, ToolLimits, ToolOutcome, ToolStatistics
from agentrt.tools.pending import PendingCall
from agentrt.tools.secretrefs import VALUE_CHARS_MIN, names_in
from agentrt.tools.secrets import SecretError, SecretProvider
from agentrt.tools.spec import ToolRegistry, ToolSpec
from agentrt.tools.starter import HostStarter

_CLOSE_GRACE_S: Final = 1.0
_ORPHANS_S: Final = 0.005  # between two looks at them
_RECEIVE_BYTES: Final = 256 * 1024


class ToolPool:
    """All tool hosts of a node. Make it, use it and close it on the loop's thread, which must outlive the hosts.

    ``limits``: of the default class, and of those that ``classes`` does not name. ``trust_domain`` says whose code may
    share a process: tenants with the same answer; by default each tenant is its own. ``secrets``: where the values
    behind ``secret://name`` come from. ``process``: how native commands are run. ``tier0_share_pct``: of time for which
    urgent work may keep them from running.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        loop: asyncio.AbstractEventLoop,
        limits: ToolLimits | None = None,
        *,
        classes: Mapping[str, ToolLimits] | None = None,
        trust_domain: Callable[[str], str] | None = None,
        secrets: SecretProvider | None = None,
        process: ProcessConfig | None = None,
        tier0_share_pct: int = 80,
        folder: Path | None = None,
    ) -> None:
        """``folder``: of the store whose runs call, if that outlives this node. Raises ConfigError if limits are given
        for a class that the registry does not know."""
        self.registry: Final = registry
        self.loop: Final = loop
        self.limits: Final = ToolLimits() if limits is None else limits
        self._classes: Final = dict(classes or {})
        for cls in self._classes:
            if cls not in registry.classes:
                raise ConfigError(f"there is no class {cls!r} of tools", hint=f"Classes: {', '.join(registry.classes)}")
        self._trust_domain = trust_domain
        self._secrets = secrets
        self._secret_thread: ThreadPoolExecutor | None = None
        starter = HostStarter(
            registry,
            loop,
            mode=self.limits.template,
            nice=min(limits.host_nice for limits in (self.limits, *self._classes.values())),
            start_timeout_ns=self.limits.start_timeout_ns,
            hidden_prefix="" if secrets is None else secrets.environment_prefix,
            on_change=self._on_starter_changed,
        )
        self._shared = Shared(
            registry, loop, starter, self.limits.starts_max, self._finish, memoryview(bytearray(_RECEIVE_BYTES))
        )
        self._pools: Final = self._shared.pools
        self._commands: Final = CommandSet(
            loop,
            ProcessConfig() if process is None else process,
            lambda cls: self._classes.get(cls, self.limits),
            tier0_share_pct,
        )
        self._closed = self._stopping = self._started = False
        self._wanted: dict[str, int] = {}  # hosts to be kept ready, by class
        self._emptied: asyncio.Future[None] | None = None
        self._next_id = 0
        self._folder = folder
        self._orphans: Orphans | None = None
        #: What became of these is asked once no orphan can have an effect any more.
        self._asking: list[tuple[PendingCall, str]] = []

    # --- for the engine --------------------------------------------------------

    def start(self) -> None:
        """Start the spare hosts, so that the first call need not wait for one."""
        if self._folder is not None:
            self._orphans = Orphans(self._folder)
            self._shared.starter.held_fd = self._orphans.fd
        self._shared.starter.prepare()
        hosted = {spec.cls for spec in self.registry if spec.command is None}
        for cls in {CLASS_DEFAULT, *hosted} & {*self.registry.classes}:
            self._pool(cls).pump_soon()
        self._started = True
        self.prewarm(self._wanted)
        if any(spec.command is not None for spec in self.registry):
            self._commands.prepare()

    def prewarm(self, counts: Mapping[str, int]) -> None:
        """Keep so many hosts of each class ready from now on, of classes that are not named the ordinary spares."""
        self._wanted = dict(counts)
        if not self._started:
            return
        for cls in self.registry.classes:
            if cls in counts or cls in self._pools:
                self._pool(cls).prewarm(counts.get(cls, 0))

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
        reconcile: bool = False,
    ) -> Any:
        """Call a tool; what is returned is good for `cancel` only. ``args`` is a JSON object as text, ``key`` the
        step's idempotency key (None for pure tools). ``reconcile``: ask the tool's reconcile function what became of
        the call with this key instead.

        ``timeout_ns`` shortens the tool's own time-out; it begins when a host gets the call. ``done`` is called once,
        on the loop, never from inside this call, and not at all after `close`. Raises UnknownToolError, InputError
        (args above the limit, nothing to reconcile with), QueueFullError, ClosedError; nothing was accepted then.
        """
        if self._closed:
            raise ClosedError("the tools are closed")
        number, spec = self.registry.find(name)
        if spec.command is not None:
            return self._call_command(spec, args, key, tenant, tier, attempt, done, timeout_ns, reconcile)
        pool = self._pools.get(spec.cls) or self._pool(spec.cls)
        limits = pool.limits
        size = len(args)
        if size > limits.request_bytes_max:
            raise InputError(
                f"arguments of {size} bytes for tool {name}, more than {limits.request_bytes_max}",
                limit="limits.request_bytes_max",
            )
        if reconcile and not spec.reconcile:
            raise InputError(f"tool {name} has no reconcile function", hint="Declare it with reconcile=")
        if pool.items >= limits.queue_items_max or pool.bytes + size > limits.queue_bytes_max:
            raise QueueFullError(f"{pool.items} tool calls with {pool.bytes} bytes are waiting or running")
        limit_ns = spec.timeout_ns if timeout_ns is None else min(timeout_ns, spec.timeout_ns)
        domain = pool.domain(tenant if self._trust_domain is None else self._trust_domain(tenant), tier)
        self._next_id += 1
        call = PendingCall(self._next_id, number, spec, args, key, attempt, limit_ns, done, domain, reconcile)
        pool.items += 1
        pool.bytes += size
        pool.calls += 1
        if self._stopping:
            self.loop.call_soon(self._finish, call, EVICTED_WAITING)
        elif reconcile and self._orphans is not None and self._orphans.left():
            if not self._asking:
                self.loop.call_later(_ORPHANS_S, self._ask)
            self._asking.append((call, tenant))
        else:
            self._put(call, tenant)
        return call

    def _put(self, call: PendingCall, tenant: str) -> None:
        spec = call.spec
        if spec.secrets and (names := names_in(call.args)):
            refuse = partial(self._fail, call, "tool_secret")
            self._with_secrets(spec, tenant, names, lambda: call.ended, refuse, partial(self._go_on, call))
        else:
            call.domain.pool.put(call)

    def _ask(self) -> None:
        """Put the questions, if the hosts of the node before are gone now."""
        if self._closed:
            return
        if not self._stopping and self._orphans is not None and self._orphans.left():
            self.loop.call_later(_ORPHANS_S, self._ask)
            return
        asking, self._asking = self._asking, []
        for call, tenant in asking:
            if call.ended:
                continue
            if self._stopping:
                self._finish(call, EVICTED_WAITING)
                continue
            domain = call.domain
            call.domain = domain.pool.domain(domain.name, domain.tier)  # it may have been forgotten meanwhile
            self._put(call, tenant)

    def _call_command(
        self,
        spec: ToolSpec,
        args: bytes,
        key: str | None,
        tenant: str,
        tier: int,
        attempt: int,
        done: Done,
        timeout_ns: int | None,
        reconcile: bool,
    ) -> CommandCall:
        """As `call`, which says what it raises."""
        if reconcile:
            raise InputError(f"tool {spec.name} is a command, which cannot be asked what became of a call")
        domain = tenant if self._trust_domain is None else self._trust_domain(tenant)
        self._next_id += 1
        call = self._commands.call(
            self._next_id, spec, args, key=key, attempt=attempt, timeout_ns=timeout_ns, tenant=tenant, domain=domain,
            tier=tier, done=partial(self._tell, done),
        )  # fmt: skip
        begin = partial(self._commands.begin, call)
        if spec.secrets and (names := names_in(args)):
            refuse = partial(self._commands.refuse, call, "tool_secret")
            self._with_secrets(spec, tenant, names, lambda: call.ended, refuse, begin)
        else:
            begin()
        return call

    def cancel(self, call: object) -> None:
        """Nobody wants this call any more. One that no host has yet ends as cancelled. A running async tool gets
        asyncio's cancellation; a sync one is ended if it is pure, else left to finish, as is what runs in a batch. What
        comes of it is its outcome; a pure call that is still running after the grace is answered without. A call that
        has ended is left alone."""
        if isinstance(call, CommandCall):
            self._commands.cancel(call)
            return
        if not isinstance(call, PendingCall) or call.ended or call.cancelled:
            return
        call.cancelled = True
        if call.host is None:
            self.loop.call_soon(self._cancel_waiting, call)
        else:
            self._cancel_running(call)

    def statistics(self) -> ToolStatistics:
        classes = {
            cls: _sum(
                (
                    pool.statistics() if (pool := self._pools.get(cls)) is not None else ClassStatistics(),
                    self._commands.statistics(cls),
                )
            )
            for cls in self.registry.classes
        }
        total = _sum(classes.values())
        return ToolStatistics(
            hosts=total.hosts,
            spares=sum(len(pool.spares) for pool in self._pools.values()),
            running=total.running,
            queued=total.queued,
            queued_bytes=total.queued_bytes,
            calls=total.calls,
            failures=total.failures,
            timeouts=total.timeouts,
            hosts_started=total.hosts_started,
            hosts_died=total.hosts_died,
            start_mode=self._shared.starter.mode,
            classes=classes,
            processes=self._commands.processes(),
        )

    def urgent(self, wanted: Callable[[], bool]) -> None:
        """A run of tier 0 begins: commands of lower tiers make room, for as long as ``wanted()``."""
        self._commands.urgent(wanted)

    def stop(self) -> None:
        """The node stops. Calls that no host has end as evicted, and so does what is called from now on; what runs gets
        SIGUSR1, and may still answer."""
        self._stopping = True
        self._ask()
        for pool in self._pools.values():
            pool.stop()
        self._commands.stop()

    def evict(self) -> None:
        """After `stop`: end the hosts that have calls; their outcomes follow."""
        for pool in self._pools.values():
            pool.evict()
        self._commands.evict()

    async def close(self) -> None:
        """End all hosts: by closing their sockets, after a second by force. No outcome is delivered from now on."""
        if self._closed:
            return
        self._closed = True
        if self._secret_thread is not None:
            self._secret_thread.shutdown(wait=False, cancel_futures=True)
        await self._commands.close()
        for pool in self._pools.values():
            pool.close()
        if any(pool.hosts for pool in self._pools.values()):
            self._emptied = self.loop.create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._emptied), _CLOSE_GRACE_S)
            for pool in self._pools.values():
                pool.kill()
            with contextlib.suppress(TimeoutError):  # one in an uninterruptible sleep is left to its PR_SET_PDEATHSIG
                await asyncio.wait_for(asyncio.shield(self._emptied), _CLOSE_GRACE_S)
            for pool in self._pools.values():
                pool.abandon()
        self._shared.starter.close()
        if self._orphans is not None:
            self._orphans.close()

    # --- within ----------------------------------------------------------------

    def _pool(self, cls: str) -> HostPool:
        pool = self._pools.get(cls)
        if pool is None:
            pool = self._pools[cls] = HostPool(self._shared, self._classes.get(cls, self.limits), self._on_emptied)
        return pool

    def _on_emptied(self) -> None:
        if any(pool.hosts for pool in self._pools.values()):
            return
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _on_starter_changed(self) -> None:
        if not self._closed:
            self._shared.pump()

    def _finish(self, call: PendingCall, outcome: ToolOutcome) -> None:
        """Give a call its outcome and its room back; only the first one counts."""
        if call.ended:
            return
        call.ended = True
        pool = call.domain.pool
        pool.items -= 1
        pool.bytes -= len(call.args)
        call.secrets = None
        if not outcome.ok:
            pool.failures += 1
            if outcome.code == "tool_timeout":
                pool.timeouts += 1
        self._tell(call.done, outcome)

    def _tell(self, done: Done, outcome: ToolOutcome) -> None:
        if self._closed:
            return
        try:
            done(outcome)
        except Exception as error:
            self.loop.call_exception_handler({"message": "a tool's done callback raised", "exception": error})

    def _fail(self, call: PendingCall, code: str, message: str, unknown: bool = False) -> None:
        self._finish(call, ToolOutcome(False, error_payload(code, message), code, 0, False, unknown))

    def _cancel_waiting(self, call: PendingCall) -> None:
        if call.ended:
            return
        if call.host is not None:  # it was sent in the same turn of the loop
            self._cancel_running(call)
            return
        self._fail(call, "cancelled", "the call was cancelled")
        if call.queued:
            call.domain.pool.on_dead(call)

    def _cancel_running(self, call: PendingCall) -> None:
        assert call.host is not None
        call.host.cancel(call)
        if call.spec.kind == "pure":
            grace_s = call.domain.pool.limits.cancel_grace_ns / 1e9
            self.loop.call_later(grace_s, self._fail, call, "cancelled", "the call was cancelled", True)

    # --- secrets ---------------------------------------------------------------

    def _go_on(self, call: PendingCall, values: dict[str, str]) -> None:
        """Its secrets are known."""
        call.secrets = values
        if self._stopping:
            self._finish(call, EVICTED_WAITING)
            return
        domain = call.domain
        call.domain = domain.pool.domain(domain.name, domain.tier)  # it may have been forgotten meanwhile
        call.domain.pool.put(call)

    def _with_secrets(
        self,
        spec: ToolSpec,
        tenant: str,
        names: set[str],
        ended: Callable[[], bool],
        refuse: Callable[[str], None],
        go_on: Callable[[dict[str, str]], None],
    ) -> None:
        """Have the values for a call's references looked up; then one of the two is called, later, unless it has
        ``ended``."""
        undeclared = sorted(names.difference(spec.secrets))
        if undeclared:
            self.loop.call_soon(refuse, f"tool {spec.name} does not declare the secret {undeclared[0][:200]!r}")
            return
        if self._secrets is None:
            wanted = ", ".join(sorted(names))
            self.loop.call_soon(refuse, f"no provider of secrets was given, and tool {spec.name} needs {wanted}")
            return
        if self._secret_thread is None:
            self._secret_thread = ThreadPoolExecutor(1, "agentrt-secrets")
        timer = self.loop.call_later(self.limits.secret_timeout_ns / 1e9, refuse, "the provider of secrets is too slow")

        def found(values: dict[str, str] | str) -> None:
            timer.cancel()
            if ended() or self._closed:
                return
            if isinstance(values, str):
                refuse(values)
            else:
                go_on(values)

        def look() -> None:
            if ended():
                return
            values = _look_up(self._secrets, tenant, names)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self.loop.call_soon_threadsafe(found, values)

        self._secret_thread.submit(look)


def _sum(parts: Iterable[ClassStatistics]) -> ClassStatistics:
    return ClassStatistics(*map(sum, zip(*parts, strict=True)))


def _look_up(provider: SecretProvider | None, tenant: str, names: set[str]) -> dict[str, str] | str:
    """The values, or what is wrong, in words that hold none."""
    assert provider is not None
    values: dict[str, str] = {}
    for name in sorted(names):
        try:
            value = provider.get(tenant, name)
        except SecretError as error:
            return error.message
        except Exception as error:
            return f"the provider of secrets failed for {name}: {type(error).__name__}"
        if not isinstance(value, str) or len(value) < VALUE_CHARS_MIN:
            return f"secret {name} has fewer than {VALUE_CHARS_MIN} characters: it could not be kept out of results"
        values[name] = value
    return values
