"""The python backend: ``async def`` agents in confined host processes. docs/python-agents.md says what authors see."""

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from agentrt.agents.protocol import Prepared
from agentrt.backends.base import GuestEvents
from agentrt.backends.python.guest import PythonGuest
from agentrt.backends.python.limits import PythonLimits
from agentrt.backends.python.pool import HostPool, PythonProgram
from agentrt.backends.python.template import Template
from agentrt.backends.slots import Slots
from agentrt.errors import ClosedError, ModuleError

#: Who may be importing at once; each is a process of its own.
_PREPARE_MAX: Final = 4


class PythonBackend:
    """Implements agentrt.backends.base.Backend. Everything on the control loop's thread."""

    name = "python"

    def __init__(self, limits: PythonLimits, slots: Slots) -> None:
        self._limits = limits
        self._slots: Slots | None = slots
        self._pool: HostPool | None = None
        self._prepared: dict[str, Prepared] = {}  # by source: the last one
        self._locks: dict[str, asyncio.Lock] = {}

    async def open(self) -> None:
        """Nothing is started before an agent is prepared."""
        self._loop = asyncio.get_running_loop()
        if self._slots is None:
            raise ClosedError("the python backend was closed")
        self._pool = HostPool(self._limits, self._slots, self._loop)
        self._preparing = asyncio.Semaphore(_PREPARE_MAX)

    @property
    def _open_pool(self) -> HostPool:
        if self._pool is None:
            raise ClosedError("the python backend is not open")
        return self._pool

    async def prepare(self, module: bytes) -> PythonProgram:
        """Import an agent in a template of its own. ``module`` is a reference, ``source:qualname`` as
        agentrt.agents.declare.agent_reference makes it; the source is a module name or the path of a file.

        Raises ModuleError and its kinds, EngineError (hosts cannot be confined); changes nothing then.
        """
        try:
            source, _, entry = module.decode().rpartition(":")
        except UnicodeDecodeError:
            source = entry = ""
        if not source or not entry or "\0" in source:
            raise ModuleError(f"{module!r:.200} is no reference to an agent", hint="module:function, or file:function")
        prepared = await self._prepare(source)
        agent = next((each for each in prepared.agents if each.entry == entry), None)
        if agent is None:
            why = prepared.broken.get(entry)
            raise ModuleError(f"agent {entry} of {source}: {why}" if why else f"{source} has no agent {entry}")
        version = hashlib.sha256(f"{prepared.digest}\0{entry}".encode()).hexdigest()
        pins = {
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "hash_seed": hashlib.sha256(str(self._limits.hash_seed).encode()).hexdigest()[:12],
        }
        return PythonProgram(version, pins, agent.name, agent.tier, agent.budget, entry, source, prepared.digest)

    async def _prepare(self, source: str) -> Prepared:
        """What the source declares; imported again only if its files have changed."""
        pool = self._open_pool
        async with self._locks.setdefault(source, asyncio.Lock()):
            known = self._prepared.get(source)
            if known is not None and await asyncio.to_thread(_unchanged, known):
                return known
            async with self._preparing:
                try:
                    template = Template(source, self._limits, self._loop)
                except OSError as error:
                    raise ModuleError(f"no process to import {source}: {error.strerror}") from None
                prepared = await template.prepare()
            pool.add_bundle(source, prepared.digest, template)
            self._prepared[source] = prepared
            return prepared

    def prewarm(self, counts: Iterable[tuple[PythonProgram, int]]) -> None:
        """See Backend. Hosts are of a bundle: of its agents, the one that wants most decides."""
        found: dict[str, int] = {}
        for program, count in counts:
            found[program.digest] = max(count, found.get(program.digest, 0))
        self._open_pool.prewarm(found)

    def start(
        self,
        program: PythonProgram,
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
    ) -> PythonGuest:
        """Queue a guest. Raises QueueFullError unless ``admitted``, QuarantinedError."""
        pool = self._open_pool

        def make(number: int) -> PythonGuest:
            return PythonGuest(
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
            )

        return pool.start(program, make, admitted=admitted)

    def release_quarantine(self, version: str) -> None:
        """Let a version that ended its host too often be started again."""
        self._open_pool.release_quarantine(version)

    def statistics(self) -> dict[str, Any]:
        """Counters; see agentrt.backends.python.pool.PoolStatistics."""
        statistics = self._open_pool.statistics()
        return {name: getattr(statistics, name) for name in statistics.__struct_fields__}

    async def close(self) -> None:
        """End all hosts; guests that have not ended are gone and no event follows."""
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
        self._slots = None  # they hold the core, and that its address space


def _unchanged(prepared: Prepared) -> bool:
    for path, mtime_ns, size in prepared.files:
        try:
            found = os.stat(path)
        except OSError:
            return False
        if (found.st_mtime_ns, found.st_size) != (mtime_ns, size):
            return False
    return True
