"""All native commands of a node's tools: a pool per class, and the launcher under them."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentrt.backends.process import shared
from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.settings import ProcessConfig
from agentrt.errors import InputError
from agentrt.tools.commandpool import CommandCall, CommandPool
from agentrt.tools.outcome import ClassStatistics, ToolLimits, ToolOutcome
from agentrt.tools.spec import ToolSpec


class CommandSet:
    """On the loop's thread. ``limits_of``: bounds of a class. ``tier0_share_pct``: of time for which urgent work may
    keep commands from running."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: ProcessConfig,
        limits_of: Callable[[str], ToolLimits],
        tier0_share_pct: int,
    ) -> None:
        self._loop = loop
        self._config = config
        self._limits_of = limits_of
        self._tier0_share_pct = tier0_share_pct
        self._launcher: Launcher | None = None
        self._pools: Final[dict[str, CommandPool]] = {}
        self._stopping = False

    def prepare(self) -> Launcher:
        """Find out what can be confined, so that the first call need not wait for it."""
        if self._launcher is None:
            self._launcher = shared.acquire(self._loop, self._config, self._tier0_share_pct)
        return self._launcher

    def call(
        self,
        number: int,
        spec: ToolSpec,
        args: bytes,
        *,
        key: str | None,
        attempt: int,
        timeout_ns: int | None,
        tenant: str,
        domain: str,
        tier: int,
        done: Callable[[ToolOutcome], None],
    ) -> CommandCall:
        """Accept a call; `begin` goes on with it. ``number`` only grows. Raises InputError, QueueFullError."""
        pool = self._pools.get(spec.cls)
        if pool is None:
            pool = self._pools[spec.cls] = CommandPool(self.prepare(), self._limits_of(spec.cls))
            if self._stopping:
                pool.stop()
        if len(args) > pool.limits.request_bytes_max:
            raise InputError(
                f"arguments of {len(args)} bytes for tool {spec.name}, more than {pool.limits.request_bytes_max}",
                limit="limits.request_bytes_max",
            )
        limit_ns = spec.timeout_ns if timeout_ns is None else min(timeout_ns, spec.timeout_ns)
        call = CommandCall(
            number, spec, args, key=key, attempt=attempt, timeout_ns=limit_ns, tenant=tenant, domain=domain, tier=tier,
            done=done,
        )  # fmt: skip
        pool.accept(call)
        return call

    def begin(self, call: CommandCall, secrets: dict[str, str] | None = None) -> None:
        """Have it done when there is a place. ``secrets``: values that its arguments refer to."""
        self._pools[call.spec.cls].put(call, secrets)

    def refuse(self, call: CommandCall, code: str, message: str) -> None:
        """Answer one that has not begun, and will not."""
        self._pools[call.spec.cls].refuse(call, code, message)

    def cancel(self, call: CommandCall) -> None:
        """Nobody wants it any more."""
        self._pools[call.spec.cls].cancel(call)

    def urgent(self, wanted: Callable[[], bool]) -> None:
        """A run of tier 0 begins: commands of lower tiers make room, for as long as ``wanted()``."""
        if self._launcher is not None:
            self._launcher.urgent(wanted)

    def statistics(self, cls: str) -> ClassStatistics:
        pool = self._pools.get(cls)
        return ClassStatistics() if pool is None else pool.statistics()

    def processes(self) -> Mapping[str, Any]:
        """What the launcher says, of agents' processes as well; empty before there was one."""
        return shared.statistics(self._loop)

    def stop(self) -> None:
        """Begin nothing more; what runs is told that the node stops."""
        self._stopping = True
        for pool in self._pools.values():
            pool.stop()

    def evict(self) -> None:
        """End what runs; the outcomes follow."""
        for pool in self._pools.values():
            pool.evict()

    async def close(self) -> None:
        """Kill all of them. No outcome follows."""
        for pool in self._pools.values():
            pool.close()
        if self._launcher is not None:
            launcher, self._launcher = self._launcher, None
            await shared.release(launcher)
