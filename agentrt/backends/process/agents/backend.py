"""The process backend: agents that are programs, each run a process. docs/process-abi.md says what they do."""

import asyncio
import os
from collections.abc import Iterable
from typing import Any

from agentrt.backends.base import GuestEvents
from agentrt.backends.process import shared
from agentrt.backends.process.agents.command import ProcessProgram, decode_command, make_program
from agentrt.backends.process.agents.guest import ProcessGuest
from agentrt.backends.process.agents.limits import ProcessLimits
from agentrt.backends.process.agents.pool import ProcessPool
from agentrt.backends.process.settings import ProcessConfig
from agentrt.backends.slots import Slots
from agentrt.errors import ClosedError


class ProcessBackend:
    """Implements agentrt.backends.base.Backend. Everything on the control loop's thread."""

    name = "process"

    def __init__(self, limits: ProcessLimits, slots: Slots, config: ProcessConfig, tier0_share_pct: int = 80) -> None:
        """``config``: of all native processes of the node."""
        self._limits = limits
        self._slots: Slots | None = slots
        self._config = config
        self._tier0_share_pct = tier0_share_pct
        self._pool: ProcessPool | None = None

    async def open(self) -> None:
        """Nothing is started before a run is."""
        if self._slots is None:
            raise ClosedError("the process backend was closed")
        loop = asyncio.get_running_loop()
        self._launcher = shared.acquire(loop, self._config, self._tier0_share_pct)
        await self._launcher.open()
        self._pool = ProcessPool(self._limits, self._slots, self._launcher, loop)

    @property
    def _open_pool(self) -> ProcessPool:
        if self._pool is None:
            raise ClosedError("the process backend is not open")
        return self._pool

    async def prepare(self, module: bytes) -> ProcessProgram:
        """Read the files of a program; ``module`` is an encoded `Command`. Raises InputError, ModuleError,
        SandboxError (nothing would keep the program inside)."""
        self._open_pool  # noqa: B018 (raises if it is not)
        if self._limits.confined and (refusal := self._launcher.refusal) is not None:
            raise refusal
        command = decode_command(module)
        return await asyncio.to_thread(make_program, command, os.environ)

    def start(
        self,
        program: ProcessProgram,
        events: GuestEvents,
        *,
        tenant: str,
        tier: int,
        input: bytes,
        restored: bytes | None = None,
        fuel: int,
        seed: bytes,
        clock_ns: int,
        admitted: bool,
        replay: bool,
    ) -> ProcessGuest:
        """Queue a guest. Raises QueueFullError unless ``admitted``."""
        pool = self._open_pool

        def make(number: int) -> ProcessGuest:
            return ProcessGuest(
                pool,
                number,
                program,
                events,
                run_id=getattr(events, "run_id", ""),
                tenant=tenant,
                tier=tier,
                input=input,
                restored=restored,
                fuel=fuel,
                seed=seed,
                clock_ns=clock_ns,
                replay=replay,
            )

        return pool.start(make, admitted=admitted)

    def prewarm(self, counts: Iterable[tuple[ProcessProgram, int]]) -> None:
        """See Backend. What is kept ready is processes that have said so and have no run yet."""
        self._open_pool.spares.prewarm(counts)

    def statistics(self) -> dict[str, Any]:
        """Counters; see agentrt.backends.process.agents.pool.PoolStatistics."""
        statistics = self._open_pool.statistics()
        return {name: getattr(statistics, name) for name in statistics.__struct_fields__}

    async def close(self) -> None:
        """End all processes; guests that have not ended are gone and no event follows."""
        if self._pool is not None:
            await self._pool.close()
            await shared.release(self._launcher)
            self._pool = None
        self._slots = None  # they hold the core, and that its address space
