"""The tool provider: each call is a guest of its own on the node's CPU slots, in the tier of its run and in the
share of its tenant. Everything on the control loop; the work is the workers'."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from agentrt.backends import wasi
from agentrt.backends.base import Exit, Request
from agentrt.backends.wasm import WasmBackend, WasmProgram
from agentrt.config import Config
from agentrt.errors import AgentrtError, ClosedError, ConfigError, InputError, QueueFullError
from agentrt.tools.outcome import Done, ToolOutcome
from agentrt.tools.spec import ToolRegistry, ToolSpec
from agentrt_sandbox import request as requests
from agentrt_sandbox.images import ImageMaker, available
from agentrt_sandbox.interpreters import INTERPRETERS, installed, load, start_of
from agentrt_sandbox.lines import Lines
from agentrt_sandbox.result import encode, failure, result_of
from agentrt_sandbox.settings import SandboxSettings

PROVIDER: Final = "sandbox"
#: Language -> tool.
TOOLS: Final = {"python": "python.exec", "js": "js.exec"}
_MS: Final = 1_000_000  # ns
#: Repeating a call is harmless for ever: it has no effect.
_KEY_TTL_NS: Final = 10**18
#: What time it is in the sandbox: 2000-01-01, as Unix ns.
_FIXED_CLOCK_NS: Final = 946_684_800 * 10**9
#: What wasmtime says of a module that begins with more memory than it may have.
_TOO_LITTLE: Final = "exceeds memory limits"
_RESERVED: Final = tuple(of.harness for of in INTERPRETERS.values())

_log = logging.getLogger(__name__)


class _Call:
    """One call, from `SandboxTools.call` to its outcome. It is also what its guest's events go to."""

    __slots__ = (
        "asked",
        "began_ns",
        "done",
        "guest",
        "name",
        "size",
        "tenant",
        "tier",
        "timer",
        "tools",
        "wall_ns",
        "why",
    )

    def __init__(
        self, tools: "SandboxTools", name: str, asked: requests.Request, size: int, tenant: str, tier: int,
        wall_ns: int, done: Done,
    ) -> None:  # fmt: skip
        self.tools, self.name, self.asked, self.size = tools, name, asked, size
        self.tenant, self.tier, self.wall_ns, self.done = tenant, tier, wall_ns, done
        self.guest: Any = None  # None: it waits, or has ended
        self.timer: asyncio.TimerHandle | None = None
        self.began_ns = 0
        self.why: str | None = None  # killed for that

    def kill(self, why: str) -> None:
        """The first reason counts."""
        if self.guest is not None and self.why is None:
            self.why = why
            self.guest.kill()

    # agentrt.backends.base.GuestEvents

    def on_syscalls(self, requests: Sequence[Request], waiting: tuple[int, ...] | None) -> None:
        if requests or waiting:
            self.kill("syscall")

    def on_abandoned(self, handles: tuple[int, ...]) -> None: ...

    def on_unwinding(self) -> None: ...

    def may_snapshot(self) -> bool:
        return False

    def on_safe_point(self) -> None: ...

    def on_cut_short(self, reason: str, message: str, answers: int) -> bool:
        return False

    def on_exit(self, exit: Exit) -> None:
        self.tools.ended(self, exit)


class SandboxStatistics(NamedTuple):
    """``ready``: the interpreters that calls may use now; ``booted``: those of them that begin booted."""

    running: int
    waiting: int
    waiting_bytes: int
    calls: int
    failures: int  # calls that gave no result; code that fails is a result
    ready: tuple[str, ...]
    booted: tuple[str, ...]


class SandboxTools:
    """See `agentrt.engine.ports.Tools`. Without `attach` it has a core of its own."""

    def __init__(self, config: Config, registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ConfigError."""
        self.registry: Final = registry
        self._config, self._loop = config, loop
        settings = self._settings = config.plugin("sandbox", SandboxSettings)
        here = installed()
        self._runtimes = {
            "python": tuple(name for name in here if INTERPRETERS[name].language == "python"),
            "js": tuple(name for name in here if INTERPRETERS[name].language == "js"),
        }
        if settings.python not in self._runtimes["python"]:
            raise ConfigError(
                f"plugins.sandbox.python is {settings.python}, which is not installed",
                hint=f"pip install {INTERPRETERS[settings.python].distribution}",
            )
        # the one that is used without being asked for comes first
        self._runtimes["python"] = tuple(sorted(self._runtimes["python"], key=lambda name: name != settings.python))
        if settings.memory_bytes_max > config.wasm.memory_bytes_max:
            raise ConfigError("plugins.sandbox.memory_bytes_max is more than wasm.memory_bytes_max")
        for language, name in TOOLS.items():
            if self._runtimes[language]:
                registry.add(
                    ToolSpec(
                        name,
                        "keyed",
                        settings.timeout_ms * _MS,
                        True,
                        f"{PROVIDER}:{language}",
                        settings.cls,
                        _KEY_TTL_NS,
                        provider=PROVIDER,
                    )
                )
        self._languages = {name: language for language, name in TOOLS.items()}
        self._lines: Lines[_Call] = Lines(settings.calls_max, settings.waiting_max, settings.waiting_bytes_max)
        self._running: set[_Call] = set()
        self._programs: dict[str, WasmProgram] = {}
        self._usual: dict[str, WasmProgram] = {}  # with the usual memory and no files
        self._booted: set[str] = set()  # of these, those that begin booted
        self._images = ImageMaker(config)
        self._broken: dict[str, str] = {}  # name -> why
        self._waiting_for: dict[str, list[_Call]] = {}  # its interpreter
        self._backend: WasmBackend | None = None
        self._own = False
        self._preparing: asyncio.Task[None] | None = None
        self._stopped = self._closed = False
        self._calls = self._failures = 0

    def attach(self, backend: WasmBackend) -> None:
        """The node's backend, whose slots calls use from now on."""
        self._backend = backend

    # --- agentrt.engine.ports.Tools -------------------------------------------------

    def start(self) -> None:
        self._preparing = self._loop.create_task(self._prepare())

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
    ) -> object:
        if self._closed:
            raise ClosedError("the sandbox is closed")
        spec = self.registry.get(name)
        if self._stopped:
            self._later(done, _EVICTED)
            return None
        if not self._lines.may_begin(tier):
            self._check_room(len(args))
        runtimes = self._runtimes[self._languages[name]]
        try:
            asked = requests.parse(args, runtimes, self._settings, reserved=_RESERVED)
        except InputError as error:
            self._failures += 1
            self._later(done, _failed("tool_args", error.message, hint=error.hint))
            return None
        there = asked.runtime in self._programs or asked.runtime in self._broken
        if not there:
            self._check_room(len(args))
        wall_ns = spec.timeout_ns if timeout_ns is None else min(timeout_ns, spec.timeout_ns)
        call = _Call(self, name, asked, len(args), tenant, tier, wall_ns, done)
        self._calls += 1
        if there:
            self._lines.add(call, tier=tier, tenant=tenant, size=call.size)
            self._begin_some()
        else:  # beside the lines: others need not wait for it, too
            self._lines.park(call.size)
            self._waiting_for.setdefault(asked.runtime, []).append(call)
        return call

    def _check_room(self, size: int) -> None:
        """Raises QueueFullError unless one more may wait."""
        if self._lines.full(size):
            raise QueueFullError(f"{self._lines.items} calls of the sandbox wait already", limit="plugins.sandbox")

    def cancel(self, call: Any) -> None:
        if isinstance(call, _Call) and not self._closed:
            if self._lines.remove(call, tier=call.tier, tenant=call.tenant):
                self._later(call.done, _CANCELLED)
            elif not self._unprepared(call, _CANCELLED):
                call.kill("cancelled")

    def statistics(self) -> SandboxStatistics:
        lines = self._lines
        return SandboxStatistics(
            len(self._running),
            lines.items,
            lines.bytes,
            self._calls,
            self._failures,
            tuple(self._programs),
            tuple(sorted(self._booted)),
        )

    def stop(self) -> None:
        self._stopped = True
        for call in self._lines.drain():
            self._later(call.done, _EVICTED)
        for waiting in [*self._waiting_for.values()]:
            for call in [*waiting]:
                self._unprepared(call, _EVICTED)

    def evict(self) -> None:
        for call in tuple(self._running):
            call.kill("evicted")

    async def close(self) -> None:
        self._stopped = self._closed = True
        self._lines.drain()
        self._waiting_for.clear()
        for call in tuple(self._running):
            _stop_timer(call)
            call.kill("closed")
        self._images.close()
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        if self._own and self._backend is not None:
            await self._backend.close()

    # --- interpreters ---------------------------------------------------------------

    async def _prepare(self) -> None:
        """Compile what there is, the small ones first."""
        if self._backend is None:
            backend = WasmBackend(self._config)
            await backend.open()
            self._backend, self._own = backend, True
        images = self._settings.images
        if images and not await asyncio.to_thread(available):
            _log.warning("interpreters boot for each call, for want of images: pip install 'agentrt[capture]'")
            images = False
        names = sorted(installed(), key=lambda name: (name == "cpython", name))
        for name in names:
            try:
                module = await self._begun(name, images)
                self._is_ready(name, await self._backend.prepare(module))
            except AgentrtError as error:
                self._is_broken(name, error)

    async def _begun(self, name: str, images: bool) -> bytes:
        """The module that its calls begin with: the image if there can be one. It is settled before the first call, so
        that the same call takes the same fuel, the first as the last."""
        if images and INTERPRETERS[name].image:
            try:
                module = await self._images.image_of(name, self._settings.digests)
            except AgentrtError as error:
                _log.warning("%s boots for each call: %s", name, error)
            else:
                self._booted.add(name)
                return module
        return await asyncio.to_thread(load, name, self._settings.digests)

    def _is_ready(self, name: str, program: WasmProgram) -> None:
        assert self._backend is not None
        self._programs[name] = program
        self._usual[name] = self._backend.started_with(program, self._start_of(name, self._settings.memory_bytes))
        self._let_in(name)

    def _let_in(self, name: str) -> None:
        """What waited for an interpreter goes into the lines: it is ready, or never will be."""
        for call in self._waiting_for.pop(name, ()):
            self._lines.unpark(call.size)
            self._lines.add(call, tier=call.tier, tenant=call.tenant, size=call.size)
        self._begin_some()

    def _start_of(self, name: str, memory_bytes: int) -> wasi.Packed:
        return start_of(name, memory_bytes, preload=name in self._booted)

    def _is_broken(self, name: str, error: AgentrtError) -> None:
        _log.error("%s cannot be used: %s", name, error)
        self._broken[name] = error.message
        self._let_in(name)

    def _unprepared(self, call: _Call, outcome: ToolOutcome) -> bool:
        """End a call whose interpreter is not there yet; false if it is."""
        waiting = self._waiting_for.get(call.asked.runtime, [])
        if call not in waiting:
            return False
        waiting.remove(call)
        self._lines.unpark(call.size)
        self._failures += 1
        self._later(call.done, outcome)
        return True

    # --- calls ----------------------------------------------------------------------

    def _begin_some(self) -> None:
        while (call := self._lines.take()) is not None:
            self._running.add(call)
            self._run(call)

    def _run(self, call: _Call) -> None:
        asked, limits = call.asked, call.asked.limits
        if asked.runtime in self._broken:
            self._finish(call, _failed("tool_import", f"{asked.runtime}: {self._broken[asked.runtime]}"))
            return
        assert self._backend is not None
        try:
            call.guest = self._backend.start(
                self._program(asked),
                call,
                tenant=call.tenant,
                tier=call.tier,
                input=asked.input,
                fuel=limits.fuel,
                seed=asked.seed,
                clock_ns=time.time_ns() if self._settings.clock == "real" else _FIXED_CLOCK_NS,
                admitted=False,
                replay=False,
                memory_bytes_max=limits.memory_bytes,
            )
        except InputError as error:  # of a file's path
            self._finish(call, _failed("tool_args", error.message))
        except AgentrtError as error:
            self._finish(call, _failed("tool_unavailable", error.message))
        else:
            call.began_ns = time.monotonic_ns()
            self._look_again(call, min(limits.time_ms * _MS, call.wall_ns))

    def _program(self, asked: requests.Request) -> WasmProgram:
        """Raises InputError kinds: the files cannot be."""
        usual = self._usual[asked.runtime]
        if not asked.files and asked.limits.memory_bytes == self._settings.memory_bytes:
            return usual
        assert self._backend is not None
        start = self._start_of(asked.runtime, asked.limits.memory_bytes)
        packed = wasi.Packed(start.args, start.env, start.files | dict(asked.files), start.entry)
        return self._backend.started_with(usual, packed)

    def _look_again(self, call: _Call, after_ns: int) -> None:
        call.timer = self._loop.call_later(max(after_ns / 1e9, 0.001), self._look, call)

    def _look(self, call: _Call) -> None:
        """Time is what it has worked, and, far later, what has passed."""
        ran_ns, passed_ns = call.guest.ran_ns, time.monotonic_ns() - call.began_ns
        left_ns, wall_ns = call.asked.limits.time_ms * _MS - ran_ns, call.wall_ns - passed_ns
        if left_ns <= 0:
            call.kill("time")
        elif wall_ns <= 0:
            call.kill("timeout")
        else:
            self._look_again(call, min(left_ns, wall_ns))

    def ended(self, call: _Call, exit: Exit) -> None:
        """Its guest is gone."""
        call.guest = None
        if self._closed:
            return
        # one that ended before it was killed has a result, unless it did what it must not
        why = call.why if exit.reason == "killed" or call.why == "syscall" else None
        if exit.reason == "engine" and _TOO_LITTLE in exit.message:
            why = "memory"
        if why in _OUTCOMES:
            outcome = _OUTCOMES[why]
        elif exit.reason in ("engine", "killed") and why not in ("time", "syscall", "memory"):
            outcome = _failed("tool_unavailable", f"the core could not run it: {exit.message[:200]}")
        else:
            result = result_of(exit, call.asked.limits, why)
            outcome = ToolOutcome(True, encode(result, self._config.limits.result_bytes_max), None, 0, False)
        self._finish(call, outcome._replace(cost_ns=exit.slot_ns, fuel=exit.fuel))

    def _finish(self, call: _Call, outcome: ToolOutcome) -> None:
        """Its place is free, and its outcome told, which is never inside `call`."""
        _stop_timer(call)
        self._running.discard(call)
        self._lines.free()
        self._failures += not outcome.ok
        self._later(call.done, outcome)
        self._loop.call_soon(self._begin_some)

    def _later(self, done: Callable[[ToolOutcome], None], outcome: ToolOutcome) -> None:
        self._loop.call_soon(self._tell, done, outcome)

    def _tell(self, done: Callable[[ToolOutcome], None], outcome: ToolOutcome) -> None:
        if not self._closed:
            done(outcome)


def _stop_timer(call: _Call) -> None:
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None


def _failed(code: str, message: str, **details: Any) -> ToolOutcome:
    found = {name: value for name, value in details.items() if value}
    return ToolOutcome(False, failure(code, message, **found), code, 0, False)


_EVICTED: Final = _failed("tool_evicted", "the node stopped")._replace(evicted=True)
_CANCELLED: Final = _failed("cancelled", "nobody wants it any more")
#: Of calls that were killed and have no result; none has had an effect.
_OUTCOMES: Final = {
    "cancelled": _CANCELLED,
    "evicted": _EVICTED,
    "timeout": _failed("tool_timeout", "it did not come to an end in time"),
}
