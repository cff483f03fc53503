"""`Runtime`: agentrt inside a program.

    async with Runtime(store="runs", tools=[lookup]) as runtime:
        await runtime.register("qualifier", Path("qualifier.wasm"))
        run = await runtime.submit("qualifier", {"company": "Hooli"}, tier="urgent")
        print(await run.result())

The control plane has a thread and a loop of its own. Every method may be called from any asyncio loop (the plain
names) or from any plain thread (the names that end in ``_sync``); neither blocks the control loop, and a burst of
submits costs one wake-up.
"""

import asyncio
import contextlib
import gc
import hmac
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import msgspec

from agentrt.about import version
from agentrt.backends.base import Backend, Surroundings, WorkerSlices
from agentrt.backends.process.agents.command import Command
from agentrt.cgroup import shared as cgroups
from agentrt.config import Config, load_config
from agentrt.engine import crashpoints
from agentrt.engine.accept import Asked, Via, check_fuel, check_name, check_text, encode_json
from agentrt.engine.budget import check_budget
from agentrt.engine.control import ControlThread, Done, Operation
from agentrt.engine.engine import Engine, Observer
from agentrt.engine.flowview import FlowView
from agentrt.engine.group import Group
from agentrt.engine.info import Agent, EngineLimits, EngineStatistics, RunInfo, RunResult
from agentrt.engine.listing import RunsPage, Wanted
from agentrt.engine.loopwatch import LoopWatch
from agentrt.engine.modelsteps import Streamed
from agentrt.engine.modulekeep import ModuleKeep
from agentrt.engine.ports import Models, Tools
from agentrt.engine.priority import raise_thread
from agentrt.engine.schedules import NOBODYS, Schedule
from agentrt.engine.steps import checked_event
from agentrt.errors import AgentrtError, ClosedError, ConfigError, InputError, QueueFullError
from agentrt.flow.decisions import Decision
from agentrt.flow.profilefile import ProfileFile, read_profiles
from agentrt.flow.profiles import Change, InForce, Profile, check_profile
from agentrt.flowlimits import admission_limits, classifier, gate_limits, loop_limits, urgent_rates
from agentrt.ids import RandomBlocks, parse_run_id
from agentrt.machine import read_machine
from agentrt.memorypressure import MemoryPressure
from agentrt.models.catalog import Catalog
from agentrt.models.service import ModelLimits, ModelService
from agentrt.observe.meter import Meter
from agentrt.observe.slo import targets_of
from agentrt.plugins import Plugins
from agentrt.policy import Policies, Policy
from agentrt.run import Run
from agentrt.stores.base import Row, Store
from agentrt.stores.frames import FrameData, frames_beside
from agentrt.stores.modules import KeptModule, Modules, modules_beside
from agentrt.stores.secret import store_secret
from agentrt.tiers import Tier, parse_tier
from agentrt.tools.commands import command_specs
from agentrt.tools.declare import CLASSES_DEFAULT
from agentrt.tools.router import ToolRouter
from agentrt.tools.secrets import SecretAsker, provider_from
from agentrt.tools.spec import ToolRegistry, ToolSpec
from agentrt.upgrading import check_upgrade, migration_tool

if TYPE_CHECKING:
    from agentrt.ingress.deadletters import DeadLetter
    from agentrt.ingress.letterbox import Letterbox
    from agentrt.ingress.port import Ingress
    from agentrt.ingress.service import IngressService, SourceStatistics
    from agentrt.notifiers.service import NotifierService
    from agentrt.transfer.moves import Place

_log = logging.getLogger(__name__)
_MS = 1_000_000  # ns
T = TypeVar("T")
_DEFAULT_BACKEND = "wasm"
_PYTHON_BACKEND = "python"
_PROCESS_BACKEND = "process"
_HERE = Via(wait=True)
_WATCH_INTERVAL_NS = 50 * _MS  # a long turn is seen if it is longer than the bound and this together

ModuleSource = bytes | str | os.PathLike[str] | Command


class AgentInfo(msgspec.Struct, frozen=True):
    """A registered agent. ``version`` is the content address of its module (sha256, hex)."""

    name: str
    version: str
    backend: str
    tier: int
    fuel_max: int
    on_upgrade: str = "pin"
    short: bool = False


class ScheduleInfo(msgspec.Struct, frozen=True):
    """A schedule; ``next_ns``: its next time, Unix ns. ``action``: run, or what it does with the profile that is named
    in place of an agent: apply, roll_back."""

    name: str
    tenant: str
    cron: str
    agent: str
    catch_up: str
    next_ns: int
    action: str = "run"


def profiles_of(config: Config) -> ProfileFile:
    """What the file ``flow.file`` says. Raises ConfigError."""
    path = config.flow.file
    if not path:
        return read_profiles("", "")
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"flow.file: {path} cannot be read: {error}") from error
    return read_profiles(text, path)


class RuntimeStatistics(msgspec.Struct, frozen=True):
    """A snapshot. ``backends``: what each open one says of itself; ``priority``: what is in force for which thread."""

    engine: EngineStatistics
    backends: dict[str, Any]
    tools: Any
    models: Any  # `ModelStatistics`; None: no models are configured
    store_backlog: tuple[int, int]  # batches, bytes given and not durable
    loop_long_turns: int  # turns of the control loop over node.loop_block_max_ms of CPU time
    loop_longest_turn_ns: int
    loop_heartbeat_ns: int  # CLOCK_MONOTONIC of the last sign of life
    priority: dict[str, str]
    ingresses: "dict[str, SourceStatistics]" = {}  # by source


class Runtime:
    """A node inside this process. Start it with ``async with``, ``with``, or `start`; it starts once.

    ``store``: the store's folder. None: what ``config`` says, and without ``config`` a store in memory, whose runs are
    lost with the process. ``tools``: functions decorated with `@tool`, or their specs. ``plugins``: default is the
    built-in and the installed ones. ``recover``: whether to go on with the store's runs, each as soon as its agent's
    version is registered.
    """

    def __init__(
        self,
        *,
        store: str | os.PathLike[str] | None = None,
        config: Config | None = None,
        tools: Iterable[Callable[..., Any] | ToolSpec] = (),
        plugins: Plugins | None = None,
        recover: bool = True,
    ) -> None:
        """Raises ConfigError, InputError (of a tool), PluginError."""
        if config is None:
            config = load_config() if store is not None else load_config(arguments={"store.kind": "memory"})
        if store is not None:
            changed = msgspec.structs.replace(config.store, path=os.fspath(store))
            config = msgspec.structs.replace(config, store=changed)
        self.config = config
        #: What is counted where it happens; its snapshot may be taken from any thread.
        self.meter = Meter(targets_of(config.slo))
        self._plugins = Plugins.load() if plugins is None else plugins
        self._plugins.check(config)
        self._store_factory = self._plugins.store(config.store.kind)
        self._tools_factory = self._plugins.tool_provider("python")
        known = (*tools, *command_specs(config.tools.commands))
        self._registry = ToolRegistry(known, dict.fromkeys((*CLASSES_DEFAULT, *config.tools.classes)))
        self._catalog = Catalog.of(config.models)
        kinds = {provider.kind for provider in self._catalog.providers.values()}
        self._model_factories = {kind: partial(self._plugins.model_provider(kind), config) for kind in kinds}
        self._provider_factories = {name: self._plugins.tool_provider(name) for name in config.tools.providers}
        self._notifiers = self._make_notifiers()
        self._ingresses = self._make_ingresses()
        provider_from(config.secrets)  # a wrong place is refused before anything is started
        self._recover = recover
        self._started = self._closed = False
        self._folder: str | None = None
        self._backends: dict[str, Backend] = {}
        self._opening: dict[str, asyncio.Future[Backend]] = {}
        self._holds_group = False  # a cgroup, for hosts and native processes
        self._priority: dict[str, str] = {}
        self._switch_interval_s: float | None = None
        self._gc_threshold: tuple[int, int, int] | None = None
        self._watch: LoopWatch | None = None
        # Set by _open, on the control thread:
        self._control: ControlThread
        self._engine: Engine
        self._store: Store
        self._tools: Tools
        self._models: Models | None
        self._modules: Modules
        self._module_keep: ModuleKeep

    # --- life ---------------------------------------------------------------------

    async def start(self) -> None:
        """Open the store, start the control plane. Raises StoreError kinds, ConfigError: nothing is left behind."""
        self._begin()
        try:
            await self._control.ask(self._control.operation(self._open))
        except BaseException:
            await asyncio.to_thread(self._end)
            raise

    def start_sync(self) -> None:
        """`start` for plain threads."""
        self._begin()
        try:
            self._control.ask_sync(self._control.operation(self._open))
        except BaseException:
            self._end()
            raise

    async def close(self) -> None:
        """Stop: steps in flight are recorded (at most node.close_timeout_ms), runs that have not ended go on at the
        next start. Again is harmless."""
        if self._started and not self._closed:
            if self._ingresses is not None:
                self.stop_accepting()  # also of what stands at the door, for which they would wait
                await self.close_ingresses()
            self._closed = True
            try:
                await self._control.ask(self._control.operation(self._shut))
            finally:
                await asyncio.to_thread(self._end)

    def close_sync(self) -> None:
        """`close` for plain threads."""
        if self._started and not self._closed:
            if self._ingresses is not None:
                self.stop_accepting()
                self.close_ingresses_sync()
            self._closed = True
            try:
                self._control.ask_sync(self._control.operation(self._shut))
            finally:
                self._end()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait until no run is under way; those that wait for an operator do not count. False:
        time was up."""
        done: bool = await self._control.ask(self._control.operation(lambda: self._engine.drain(timeout_s)))
        return done

    def drain_sync(self, timeout_s: float | None = None) -> bool:
        """`drain` for plain threads."""
        done: bool = self._control.ask_sync(self._control.operation(lambda: self._engine.drain(timeout_s)))
        return done

    async def park(self) -> None:
        """Accept nothing more, record the steps in flight (at most node.close_timeout_ms) and leave every run at its
        place in the journal, for the next start on this store. Until `close` runs can still be looked at; what would
        change one is refused (ClosedError)."""
        await self._control.ask(self._control.operation(self._parking))

    def park_sync(self) -> None:
        """`park` for plain threads."""
        self._control.ask_sync(self._control.operation(self._parking))

    @property
    def parked(self) -> bool:
        """Whether `park` is through."""
        return self._started and (self._closed or self._engine.parked)

    async def _parking(self) -> None:
        self._check_started()
        await self._engine.park(self.config.node.close_timeout_ms / 1e3)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> Self:
        self.start_sync()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_sync()

    # --- agents -------------------------------------------------------------------

    async def register(
        self,
        agent: str | Callable[..., Any],
        module: ModuleSource | None = None,
        *,
        tier: int | str | None = None,
        fuel: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        backend: str | None = None,
        on_upgrade: str | None = None,
        migrate: Callable[..., Any] | str | None = None,
        short: bool | None = None,
    ) -> AgentInfo:
        """Make an agent known; runs submitted from now on use this version, and the store's runs of it go on.

        ``agent``: a function decorated with `@agent`, or a name and a ``module``: its bytes, the path of a file, or the
        `Command` of a program.
        ``tier``, ``fuel`` and ``budget``: for runs that are submitted without; default: what the agent declares.
        ``on_upgrade``: what becomes of runs that older versions of it have begun: ``pin`` (default: they stay with
        theirs), ``continue`` (this one replays their journals), ``migrate`` (at their next checkpoint ``migrate``, a
        pure tool or its name, makes this one's state from (state, from_version)), ``fail``. ``short``: its runs end
        soon, so callers over HTTP may wait for them. Raises ModuleError kinds, InputError, ConfigError (no such
        backend), EngineError, StoreError (the module cannot be kept).
        """
        info: AgentInfo = await self._control.ask(
            self._registering(agent, module, tier, fuel, budget, backend, on_upgrade, migrate, short)
        )
        return info

    def register_sync(
        self,
        agent: str | Callable[..., Any],
        module: ModuleSource | None = None,
        *,
        tier: int | str | None = None,
        fuel: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        backend: str | None = None,
        on_upgrade: str | None = None,
        migrate: Callable[..., Any] | str | None = None,
        short: bool | None = None,
    ) -> AgentInfo:
        """`register` for plain threads."""
        info: AgentInfo = self._control.ask_sync(
            self._registering(agent, module, tier, fuel, budget, backend, on_upgrade, migrate, short)
        )
        return info

    def _registering(
        self,
        agent: str | Callable[..., Any],
        module: ModuleSource | None,
        tier: int | str | None,
        fuel: int | None,
        budget: Mapping[str, int | float] | None,
        backend: str | None,
        on_upgrade: str | None,
        migrate: Callable[..., Any] | str | None,
        short: bool | None,
    ) -> Operation:
        self._check_started()
        if callable(agent):
            if module is not None:
                raise InputError("a function is registered without a module")
            from agentrt.agents.declare import agent_declaration_of, agent_reference

            module, backend = agent_reference(agent).encode(), backend or _PYTHON_BACKEND
            declared = agent_declaration_of(agent)
            assert declared is not None  # or there would be no reference
            name, declared_tier, amounts = declared.name, int(declared.tier), check_budget(declared.budget)
            short = declared.short if short is None else short
            if on_upgrade in (None, declared.on_upgrade):
                on_upgrade, migrate = declared.on_upgrade, migrate or declared.migrate
        else:
            name, declared_tier, amounts = agent, int(Tier.INTERACTIVE), {}
            backend = backend or (_PROCESS_BACKEND if isinstance(module, Command) else _DEFAULT_BACKEND)
        if isinstance(module, Command):
            module = module.encode()
        if module is None:
            raise InputError(f"agent {name} has no module", hint="Pass a module, or a function decorated with @agent")
        check_name("agent", name)
        level = declared_tier if tier is None else int(parse_tier(tier))
        limit = self.config.limits.run_fuel_max
        fuel_max = limit if fuel is None else fuel
        check_fuel(fuel_max, limit)
        amounts |= check_budget(budget)
        source, opened_as = module, backend
        policy, migrates = check_upgrade(name, on_upgrade, migrate)

        async def register() -> AgentInfo:
            code = source if isinstance(source, bytes) else await asyncio.to_thread(_read_module, source)
            opened = await self._open_backend(opened_as)
            tool = None if migrates is None else migration_tool(self._registry, migrates)
            program = await opened.prepare(code)
            if getattr(opened, "self_contained", False):  # before a run can be pinned to it
                await asyncio.to_thread(self._modules.put, program.version, KeptModule(opened_as, code))
            known = Agent(name, program.version, opened, program, level, fuel_max, amounts, policy, tool, bool(short))
            self._engine.register(known)
            return _agent_info(known)

        return self._control.operation(register)

    def _bring(self, version: str, name: str, done: Done) -> None:
        """Make a kept module ready: an older version of the agent of that name."""

        async def bring() -> Agent | None:
            kept = await asyncio.to_thread(self._modules.get, version)
            if kept is None:
                return None
            opened = await self._open_backend(kept.backend)
            program = await opened.prepare(kept.module)
            return Agent(name, program.version, opened, program, int(Tier.INTERACTIVE), self.config.limits.run_fuel_max)

        self._control.operation(bring)(done)

    async def _open_backend(self, name: str) -> Backend:
        """Open a backend, the default one at the start, others at their first use."""
        if (backend := self._backends.get(name)) is not None:
            return backend
        opening = self._opening.get(name)
        if opening is None:
            opening = self._opening[name] = asyncio.ensure_future(self._make_backend(name))
            opening.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(opening)

    async def _make_backend(self, name: str) -> Backend:
        slots = None if name == _DEFAULT_BACKEND else getattr(self._backends[_DEFAULT_BACKEND], "slots", None)
        # Importing one takes tens of milliseconds, which would hold up the loop.
        backend = await asyncio.to_thread(self._plugins.backend(name), self.config, Surroundings(slots, self._secret))
        await backend.open()
        self._backends[name] = backend
        return backend

    def agents(self) -> list[AgentInfo]:
        """The registered agents by name."""
        return [_agent_info(agent) for agent in self._engine.agents()]

    def agent(self, name: str) -> AgentInfo | None:
        """The registered agent of that name."""
        found = self._engine.agent(name)
        return None if found is None else _agent_info(found)

    # --- runs -----------------------------------------------------------------------

    async def submit(
        self,
        agent: str,
        input: Any = None,
        *,
        tier: int | str | None = None,
        tenant: str = "default",
        idempotency_key: str | None = None,
        fuel: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        timeout_s: float | None = None,
        run_at: float | None = None,
        callback_url: str | None = None,
        traceparent: str | None = None,
        via: Via = _HERE,
    ) -> Run:
        """Accept a run of a registered agent; it is durable when this returns.

        ``input``: plain data. ``tier``: 0 to 3, a name or an alias (urgent, normal, batch); default: the agent's. The
        same ``idempotency_key`` of a tenant, with the same agent and input, gives the same run. ``fuel``: the most the
        run may use. ``budget``: more of that, of ``tool_calls``, ``wall_s`` and ``result_bytes``; each replaces the
        agent's own, and its children never get more than it has left. ``timeout_s``: wall time, after which the run is
        TIMED_OUT. ``run_at``: Unix time in seconds before which it does not begin. ``callback_url``: who is told when
        it has ended, by a node that serves (docs/http.md); here a row is written. ``traceparent``:
        the caller's span, as W3C's trace context has it, below which the run's trace goes on; what is none is ignored.
        ``via``: what rules and policies are
        to know of where it came from. When there is no room for another run it waits for as long as its tier may
        (flow.admission_wait_ms). Raises UnknownAgentError, InputError, IdempotencyConflictError, QueueFullError (try
        again after its ``retry_after_s``), DeniedError, StoreError kinds, ClosedError: nothing was accepted then.
        """
        if not self._started or self._closed:
            self._check_started()
        data = b"null" if input is None else encode_json("the input", input)
        control, entrance = self._control, self._engine.entrance
        future, done = control.future()
        more = (None, None) if timeout_s is None and run_at is None else _times(timeout_s, run_at)
        given = Asked(agent, data, tenant, tier, idempotency_key, fuel, budget, *more, callback_url, traceparent, via)
        (control.post_urgent if entrance.is_urgent(given) else control.post)(entrance.enter, given, done)
        try:
            return Run(self, await future)
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                control.post(entrance.stop_entering, done)
            raise
        finally:
            del future, done  # an error's traceback holds this frame, which would hold the error

    def submit_sync(
        self,
        agent: str,
        input: Any = None,
        *,
        tier: int | str | None = None,
        tenant: str = "default",
        idempotency_key: str | None = None,
        fuel: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        timeout_s: float | None = None,
        run_at: float | None = None,
        callback_url: str | None = None,
        traceparent: str | None = None,
        via: Via = _HERE,
    ) -> Run:
        """`submit` for plain threads."""
        self._check_started()
        more = _times(timeout_s, run_at)
        data = encode_json("the input", input)
        given = Asked(agent, data, tenant, tier, idempotency_key, fuel, budget, *more, callback_url, traceparent, via)
        entrance = self._engine.entrance
        urgent = entrance.is_urgent(given)
        return Run(self, self._control.ask_sync(lambda done: entrance.enter(given, done), urgent=urgent))

    @property
    def header_names(self) -> frozenset[str]:
        """Headers that the node's rules look at, in lower case: what doors that have headers put into `Via`."""
        return self._classifier.header_names

    async def submit_many(
        self,
        agent: str,
        inputs: Iterable[Any],
        *,
        tier: int | str | None = None,
        tenant: str = "default",
        idempotency_keys: Iterable[str] | None = None,
        fuel: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        timeout_s: float | None = None,
        via: Via = _HERE,
    ) -> list[Run | AgentrtError]:
        """`submit` a run per input with one hand-over to the control loop; all is settled when this returns. ``budget``
        and ``timeout_s`` hold for each run by itself.

        Each run is accepted or refused for itself: the list has, in the order of the inputs, the accepted run (durable)
        or the error that `submit` would have raised. Raises, before anything is accepted: InputError for an input that
        cannot be written as JSON and for keys that are not as many as the inputs, ClosedError. If the caller is
        cancelled meanwhile the runs are accepted all the same; the same keys find them again.
        """
        datas, keys = self._inputs(inputs, idempotency_keys)
        if not datas:
            return []
        timeout_ns, _ = _times(timeout_s, None)
        future, done = self._control.future()
        group: Group[str] = Group(len(datas), done)
        self._control.post(
            self._engine.entrance.accept_many, group, agent, datas, tenant, tier, keys, fuel, budget, timeout_ns, via
        )
        return self._runs_or_errors(await future)

    def submit_many_sync(
        self,
        agent: str,
        inputs: Iterable[Any],
        *,
        tier: int | str | None = None,
        tenant: str = "default",
        idempotency_keys: Iterable[str] | None = None,
        fuel: int | None = None,
        budget: Mapping[str, int | float] | None = None,
        timeout_s: float | None = None,
        via: Via = _HERE,
    ) -> list[Run | AgentrtError]:
        """`submit_many` for plain threads."""
        datas, keys = self._inputs(inputs, idempotency_keys)
        if not datas:
            return []

        timeout_ns, _ = _times(timeout_s, None)

        def accept(done: Done) -> None:
            self._engine.entrance.accept_many(
                Group(len(datas), done), agent, datas, tenant, tier, keys, fuel, budget, timeout_ns, via
            )

        return self._runs_or_errors(self._control.ask_sync(accept))

    def _inputs(
        self, inputs: Iterable[Any], idempotency_keys: Iterable[str] | None
    ) -> tuple[list[bytes], list[str] | None]:
        self._check_started()
        datas = [encode_json("the input", input) for input in inputs]
        keys = None if idempotency_keys is None else [*idempotency_keys]
        if keys is not None and len(keys) != len(datas):
            raise InputError(f"{len(keys)} idempotency keys for {len(datas)} inputs")
        return datas, keys

    def _runs_or_errors(self, found: list[str | AgentrtError]) -> list[Run | AgentrtError]:
        return [Run(self, run_id) if isinstance(run_id, str) else run_id for run_id in found]

    async def wait_many(self, runs: Iterable[Run]) -> list[RunResult]:
        """`Run.wait` for many with one hand-over: how each ended, in order, once all have. Raises the error of the
        first one that has one: UnknownRunError, ClosedError."""
        self._check_started()
        run_ids = [run.run_id for run in runs]
        if not run_ids:
            return []
        control, engine = self._control, self._engine
        future, done = control.future()
        group: Group[RunResult] = Group(len(run_ids), done)
        control.post(engine.queries.wait_many, group, run_ids)
        try:
            return _results(await future)
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                control.post(engine.queries.stop_waiting_many, group, run_ids)
            raise

    def wait_many_sync(self, runs: Iterable[Run], timeout_s: float | None = None) -> list[RunResult]:
        """`wait_many` for plain threads. Raises TimeoutError as well."""
        self._check_started()
        run_ids = [run.run_id for run in runs]
        if not run_ids:
            return []
        engine = self._engine

        def wait(done: Done) -> Callable[[], None]:
            group: Group[RunResult] = Group(len(run_ids), done)
            engine.queries.wait_many(group, run_ids)
            return partial(engine.queries.stop_waiting_many, group, run_ids)

        return _results(self._control.ask_sync(wait, timeout_s))

    def run(self, run_id: str) -> Run:
        """A handle on the run with this id. Raises InputError if it is none; whether the run exists shows later."""
        return Run(self, parse_run_id(run_id))

    async def describe_run(self, run_id: str) -> RunInfo:
        """The run now: its state, what it waits for, its steps under way. Raises UnknownRunError, InputError."""
        info: RunInfo = await self._control.ask(self._control.operation(lambda: self._engine.queries.describe(run_id)))
        return info

    def describe_run_sync(self, run_id: str) -> RunInfo:
        """`describe_run` for plain threads."""
        info: RunInfo = self._control.ask_sync(self._control.operation(lambda: self._engine.queries.describe(run_id)))
        return info

    async def frame_now(self, run_id: str, frame_id: str | None = None) -> FrameData:
        """The state of a run as a frame (docs/frames.md), which has its memory in it: of its guest as it waits now, or
        else the one that it left memory as. ``frame_id``: another frame that is kept of the run, to which that one is a
        delta. Raises UnknownRunError, InputError, FrameError: there is none now, or it is larger than 64 MiB."""
        data: FrameData = await self._control.ask(
            self._control.operation(lambda: self._engine.frame_looks.now(run_id, frame_id))
        )
        return data

    def refuse_unread(self, tier: int, tenant: str, idempotency_key: str | None = None) -> QueueFullError | None:
        """For a door that has not read a request yet and whose callers do not wait: the error that `submit` would raise
        if there is no room for any run of the tenant at this tier or a lower one. Not if the tenant has used the
        ``idempotency_key`` before: then its run may be the answer. Any thread."""
        if not self._started or self._closed:
            return None
        return self._engine.entrance.refuse_unread(tier, tenant, idempotency_key)

    async def decisions(self, run_id: str) -> list[Decision]:
        """What flow control has decided about the run lately, in order: which limit made it wait or refused it, which
        attempt is next, why it was ended. The latest 50, as long as the run is kept: they are durable with what the
        run commits next. [] if nothing was decided. Raises InputError, StoreError kinds."""
        parse_run_id(run_id)
        found: list[Decision] = await self._control.ask(lambda done: self._engine.queries.decisions(run_id, done))
        return found

    async def list_runs(
        self, *, state: str | None = None, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> list[RunInfo]:
        """Runs in order of acceptance, after the run id ``after``; at most ``limit``."""
        runs: list[RunInfo] = await self._control.ask(self._listing(state, tenant, after, limit))
        return runs

    async def find_runs(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        agent: str | None = None,
        text: str | None = None,
        after: str = "",
        limit: int = 100,
        newest_first: bool = False,
    ) -> RunsPage:
        """Runs that are like that, and what to go on after, None behind the last. ``text``, whatever its case, is in
        their id, agent, state or reason to wait. One call looks at 20,000 runs at most, so it may find few, or none,
        and not be the last."""
        wanted = Wanted(state, tenant, agent, None if text is None else text.lower())
        page: RunsPage = await self._control.ask(
            self._control.operation(lambda: self._engine.queries.page_of_runs(wanted, after, limit, newest_first))
        )
        return page

    def list_runs_sync(
        self, *, state: str | None = None, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> list[RunInfo]:
        """`list_runs` for plain threads."""
        runs: list[RunInfo] = self._control.ask_sync(self._listing(state, tenant, after, limit))
        return runs

    def _listing(self, state: str | None, tenant: str | None, after: str, limit: int) -> Operation:
        return self._control.operation(
            lambda: self._engine.queries.list_runs(state=state, tenant=tenant, after=after, limit=limit)
        )

    async def export_run(self, runs: Run | str | Iterable[Run | str], path: str | os.PathLike[str]) -> list[str]:
        """Move runs, and what they started, out of this node into a new file; the ids of what is in it, durable and
        fenced here (EXPORTED) when this returns. Steps in flight are recorded first. Raises UnknownRunError, InputError
        (it has ended, holds a lock, belongs to a run that stays, or the file exists), StoreError kinds: the runs go on
        here then. See docs/export-format.md."""
        moved: list[str] = await self._control.ask(self._exporting(runs, path))
        return moved

    def export_run_sync(self, runs: Run | str | Iterable[Run | str], path: str | os.PathLike[str]) -> list[str]:
        """`export_run` for plain threads."""
        moved: list[str] = self._control.ask_sync(self._exporting(runs, path))
        return moved

    def _exporting(self, runs: Run | str | Iterable[Run | str], path: str | os.PathLike[str]) -> Operation:
        self._check_started()
        many = [runs] if isinstance(runs, Run | str) else [*runs]
        run_ids = [parse_run_id(run.run_id if isinstance(run, Run) else run) for run in many]

        async def export() -> list[str]:
            from agentrt.transfer.live import export_live

            return await export_live(self._engine, self._place(), run_ids, Path(path))

        return self._control.operation(export)

    async def import_run(self, path: str | os.PathLike[str]) -> list[Run]:
        """Take over the runs of a file that `export_run` made, and go on with them. Raises ExportFileError (cut off,
        altered, of another version), RunExistsError, IdempotencyConflictError, StoreError kinds."""
        return [Run(self, run_id) for run_id in await self._control.ask(self._importing(path))]

    def import_run_sync(self, path: str | os.PathLike[str]) -> list[Run]:
        """`import_run` for plain threads."""
        return [Run(self, run_id) for run_id in self._control.ask_sync(self._importing(path))]

    def _importing(self, path: str | os.PathLike[str]) -> Operation:
        self._check_started()

        async def take() -> list[str]:
            from agentrt.transfer.live import import_live

            return await import_live(self._engine, self._place(), Path(path))

        return self._control.operation(take)

    def _place(self) -> "Place":
        from agentrt import _core
        from agentrt.transfer.moves import Place
        from agentrt.transfer.offline import committer

        commit, now_ns = committer(self._store), self._engine.now_ns
        abi, frames = _core.abi_version(), self._engine.frames.store
        return Place(self._store, self._modules, commit, asyncio.to_thread, now_ns, abi, version(), frames)

    # --- events, schedules ------------------------------------------------------------

    async def send(
        self,
        data: Any = None,
        *,
        run_id: str | None = None,
        topic: str | None = None,
        key: str = "",
        id: str | None = None,
        tenant: str = "default",
    ) -> str:
        """Send an event to a run's mailbox or to a topic (and key) of a tenant, and return its id; durable when this
        returns. One waiting run gets it, or the next one that waits. An ``id`` that was used at the same address lately
        changes nothing. Raises InputError, StoreError kinds, ClosedError."""
        sent: str = await self._control.ask(self._sending(data, run_id, topic, key, id, tenant))
        return sent

    def send_sync(
        self,
        data: Any = None,
        *,
        run_id: str | None = None,
        topic: str | None = None,
        key: str = "",
        id: str | None = None,
        tenant: str = "default",
    ) -> str:
        """`send` for plain threads."""
        sent: str = self._control.ask_sync(self._sending(data, run_id, topic, key, id, tenant))
        return sent

    def _sending(
        self, data: Any, run_id: str | None, topic: str | None, key: str, id: str | None, tenant: str
    ) -> Operation:
        self._check_started()
        check_name("tenant", tenant)
        event = checked_event(run_id, topic, key, self._small("the event", data), id)
        return lambda done: self._engine.orders.send(tenant, event, done)

    async def schedule(
        self,
        name: str,
        cron: str,
        agent: str,
        input: Any = None,
        *,
        tier: int | str | None = None,
        tenant: str = "default",
        catch_up: Literal["skip", "once"] = "once",
    ) -> None:
        """Start a run of the agent at each time of a cron expression (UTC), under a name that makes or changes the
        schedule. After a downtime: ``once`` makes up for the latest missed time, ``skip`` for none. Durable when this
        returns. Raises InputError, StoreError kinds."""
        self._check_started()
        check_name("tenant", tenant)
        check_name("schedule", name)
        check_name("agent", agent)
        check_text("a cron expression", cron, 200)
        data = self._small("the input", input)
        level = None if tier is None else int(parse_tier(tier))

        def put(done: Done) -> None:
            try:
                self._engine.schedules.put(tenant, name, cron, agent, data, level, catch_up, partial(done, None))
            except AgentrtError as error:
                done(None, error)

        await self._control.ask(put)

    async def schedule_profile(
        self,
        name: str,
        cron: str,
        profile: str = "",
        *,
        action: Literal["apply", "roll_back"] = "apply",
        catch_up: Literal["skip", "once"] = "once",
    ) -> None:
        """The same for a profile of the file `flow.file`: apply it at each time, or take it off (without a name: the
        last one). What cannot be done then is told as a decision. Raises InputError, StoreError kinds."""
        self._check_started()
        check_name("schedule", name)
        check_text("a profile", profile, 128, empty=action == "roll_back")
        check_text("a cron expression", cron, 200)
        if action not in ("apply", "roll_back"):
            raise InputError(f"a schedule of a profile does apply or roll_back, not {action!r:.40}")

        def put(done: Done) -> None:
            try:
                put = self._engine.schedules.put
                put(NOBODYS, name, cron, profile, b"null", None, catch_up, partial(done, None), action)
            except AgentrtError as error:
                done(None, error)

        await self._control.ask(put)

    async def unschedule_profile(self, name: str) -> None:
        """Remove a schedule of `schedule_profile`; what is in force stays. Raises InputError if there is none."""
        self._check_started()
        check_name("schedule", name)
        await self._control.ask(lambda done: self._engine.schedules.drop(NOBODYS, name, partial(done, None)))

    async def unschedule(self, name: str, *, tenant: str = "default") -> None:
        """Remove a schedule; its runs go on. Raises InputError if there is none of that name."""
        self._check_started()
        check_name("tenant", tenant)
        check_name("schedule", name)
        await self._control.ask(lambda done: self._engine.schedules.drop(tenant, name, partial(done, None)))

    async def schedules(self, *, tenant: str | None = None) -> list[ScheduleInfo]:
        """The schedules, of one tenant or of all."""
        found: list[Schedule] = await self._control.ask(lambda done: self._engine.schedules.list(tenant, done))
        return [
            ScheduleInfo(item.name, item.tenant, item.cron, item.agent, item.catch_up, item.next_ns, item.action)
            for item in found
        ]

    # --- profiles ---------------------------------------------------------------------

    async def apply_profile(self, profile: str | Mapping[str, Any], *, by: str = "api", reason: str = "") -> Change:
        """Put a profile over the limits in force: one of the file `flow.file`, by name, or plain data with a ``name``.
        All of it holds at once, and durably, when this returns. Raises InputError, StoreError kinds."""
        change: Change = await self._control.ask(self._applying(profile, by, reason))
        return change

    def apply_profile_sync(self, profile: str | Mapping[str, Any], *, by: str = "api", reason: str = "") -> Change:
        """`apply_profile` for plain threads."""
        change: Change = self._control.ask_sync(self._applying(profile, by, reason))
        return change

    async def roll_back_profile(self, name: str | None = None, *, by: str = "api", reason: str = "") -> Change:
        """Take a profile off again, the last one unless named. Raises InputError, StoreError kinds."""
        change: Change = await self._control.ask(self._rolling_back(name, by, reason))
        return change

    def roll_back_profile_sync(self, name: str | None = None, *, by: str = "api", reason: str = "") -> Change:
        """`roll_back_profile` for plain threads."""
        change: Change = self._control.ask_sync(self._rolling_back(name, by, reason))
        return change

    async def profile_changes(self) -> list[Change]:
        """Who applied and rolled back which profile, when and why; the newest last."""
        changes: list[Change] = await self._control.ask(lambda done: self._engine.profiles.changes(done))
        return changes

    def _applying(self, profile: str | Mapping[str, Any], by: str, reason: str) -> Operation:
        self._check_started()
        check_text("by", by, 128)
        check_text("a reason", reason, 1000, empty=True)
        checked: str | Profile
        if isinstance(profile, Mapping):
            said = {key: value for key, value in profile.items() if key != "name"}
            checked = check_profile(profile.get("name", ""), said)
        else:
            checked = profile
        return lambda done: self._engine.profiles.apply(checked, by, reason, done)

    def _rolling_back(self, name: str | None, by: str, reason: str) -> Operation:
        self._check_started()
        check_text("by", by, 128)
        check_text("a reason", reason, 1000, empty=True)
        return lambda done: self._engine.profiles.roll_back(name, by, reason, done)

    # --- tenants ----------------------------------------------------------------------

    async def disable_tenant(self, tenant: str, reason: str = "") -> None:
        """Switch a tenant off, durably: nothing new of it is accepted, and what waits does not go on until it is
        enabled. Runs that are under way go on to their next long wait. Raises InputError, StoreError kinds."""
        await self._control.ask(self._disabling(tenant, reason))

    def disable_tenant_sync(self, tenant: str, reason: str = "") -> None:
        """`disable_tenant` for plain threads."""
        self._control.ask_sync(self._disabling(tenant, reason))

    async def enable_tenant(self, tenant: str) -> None:
        """Switch a tenant on, durably; what has waited for that goes on. Raises InputError, StoreError kinds."""
        await self._control.ask(self._enabling(tenant))

    def enable_tenant_sync(self, tenant: str) -> None:
        """`enable_tenant` for plain threads."""
        self._control.ask_sync(self._enabling(tenant))

    async def disabled_tenants(self) -> dict[str, str]:
        """Those that are switched off, and why."""
        off: dict[str, str] = await self._control.ask(lambda done: done(self._engine.tenants.disabled(), None))
        return off

    def _disabling(self, tenant: str, reason: str) -> Operation:
        self._check_started()
        check_name("tenant", tenant)
        if len(reason) > 1000:
            raise InputError("a reason has at most 1000 characters")
        return lambda done: self._engine.tenants.disable(tenant, reason, partial(done, None))

    def _enabling(self, tenant: str) -> Operation:
        self._check_started()
        check_name("tenant", tenant)
        return lambda done: self._engine.tenants.enable(tenant, partial(done, None))

    def _make_policies(self) -> Policies:
        """Raises ConfigError."""
        names = [name.strip() for name in self.config.node.policies.split(",") if name.strip()]
        found: list[tuple[str, Policy]] = []
        for name in names:
            policy = self._plugins.policy(name)(self.config)
            if not isinstance(getattr(policy, "version", None), str) or not callable(getattr(policy, "decide", None)):
                raise ConfigError(f"policy {name} has no version or no decide", hint="See agentrt/policy.py")
            found.append((name, policy))
        return Policies(found)

    # --- watching -------------------------------------------------------------------

    def observe(self, observer: Observer, *, activations: bool = False) -> None:
        """Have ``observer(event, data)`` called on the control thread: ("accepted", RunInfo), ("ended", RunResult),
        ("parked", RunInfo), ("emitted", Emitted), ("streamed", Streamed: text of a model's answer as it comes). An end
        is observed before anybody gets its result. With ``activations`` also ("begun", run id) and ("left",
        Activation): when a run's guest has started, and when it is gone. It must not block; one that raises is
        disabled."""
        self._control.post(self._engine.observe, observer, activations)

    async def statistics(self) -> RuntimeStatistics:
        """Counters of all parts."""
        found: RuntimeStatistics = await self._control.ask(self._snapshot)
        return found

    def statistics_sync(self) -> RuntimeStatistics:
        """`statistics` for plain threads."""
        found: RuntimeStatistics = self._control.ask_sync(self._snapshot)
        return found

    async def slices(self, since_ns: int, most: int = 256) -> tuple[WorkerSlices, ...]:
        """For each CPU slot what it was used for since ``since_ns`` (monotonic): the longest ``most`` of its last 4,095
        slices, in order."""
        backend = self._backends["wasm"]

        def look(done: Done) -> None:
            try:
                found = backend.slices(since_ns, most)  # type: ignore[attr-defined]
            except Exception as error:
                done(None, error)
            else:
                done(found, None)

        found: tuple[WorkerSlices, ...] = await self._control.ask(look)
        return found

    def _snapshot(self, done: Done) -> None:
        try:
            assert self._watch is not None
            value = RuntimeStatistics(
                self._engine.statistics(),
                {name: backend.statistics() for name, backend in self._backends.items()},
                self._tools.statistics(),
                None if self._models is None else self._models.statistics(),
                self._store.backlog(),
                self._watch.long_turns,
                self._watch.longest_ns,
                self._watch.heartbeat_ns,
                dict(self._priority),
                self.ingress_statistics(),
            )
        except Exception as error:
            done(None, error)
        else:
            done(value, None)

    async def flow_view(self) -> FlowView:
        """What flow control has in force: profiles, the fullest accounts, breakers that are not closed."""
        found: FlowView = await self._control.ask(lambda done: done(self._engine.flow_view(), None))
        return found

    @property
    def loop_watch(self) -> LoopWatch:
        """The detector of turns of the control loop that take too long."""
        self._check_started()
        assert self._watch is not None
        return self._watch

    # --- for what runs beside the engine, as the HTTP API --------------------------------

    async def read_store(self, look: Callable[[Store], T]) -> T:
        """``look(store)`` on a reader thread. Raises what it raises, ClosedError."""
        found: T = await self._control.ask(lambda done: self._engine.look(look, done))
        return found

    def read_store_sync(self, look: Callable[[Store], T]) -> T:
        """`read_store` for plain threads."""
        found: T = self._control.ask_sync(lambda done: self._engine.look(look, done))
        return found

    async def commit_rows(self, rows: tuple[Row, ...]) -> None:
        """Make rows durable that belong to no run. Raises StoreError kinds, ClosedError."""
        await self._control.ask(lambda done: self._engine.commit_rows(rows, partial(done, None)))

    async def watch_run(self, run_id: str, notify: Callable[[], None]) -> Callable[[], None]:
        """Have ``notify()`` called on the caller's loop after the run's journal has grown, durably; several records may
        be one call. What ends it may be called from any thread."""
        loop = asyncio.get_running_loop()

        def grown(version: int) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(notify)

        remove: Callable[[], None] = await self._control.ask(
            lambda done: done(self._engine.watches.add(run_id, grown), None)
        )

        def stop() -> None:
            with contextlib.suppress(ClosedError):
                self._control.post(remove)

        return stop

    async def watch_text(self, run_id: str, notify: Callable[[Streamed], None]) -> Callable[[], None]:
        """The same for what models answer the run, as it comes: ``notify(text)``. It is not kept: who
        comes later has the step's result."""
        loop = asyncio.get_running_loop()

        def came(text: Streamed) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(notify, text)

        remove: Callable[[], None] = await self._control.ask(
            lambda done: done(self._engine.texts.add(run_id, came), None)
        )

        def stop() -> None:
            with contextlib.suppress(ClosedError):
                self._control.post(remove)

        return stop

    def accept_event(self, asked: Asked) -> "asyncio.Future[str]":
        """`submit` for ingresses: the id of the run that the event has become, now or when it came before. Raises
        ClosedError; the future of the caller's loop fails with the rest."""
        future, done = self._control.future()
        control, entrance = self._control, self._engine.entrance
        (control.post_urgent if entrance.is_urgent(asked) else control.post)(entrance.enter, asked, done)
        return future

    async def keep_letter(self, letter: "DeadLetter") -> None:
        """Keep an event that became no run. Raises QueueFullError, StoreError kinds."""
        await self.dead_letters.keep(letter)

    @cached_property
    def dead_letters(self) -> "Letterbox":
        """The events that became no runs."""
        from agentrt.ingress.letterbox import Letterbox

        return Letterbox(self, self.config.ingress.dead_letters_items_max, self.config.ingress.dead_letters_bytes_max)

    async def open_ingresses(self) -> None:
        """Let the events of ``ingress.sources`` come in, once, when their agents are registered. Buses that are not
        there are waited for."""
        await asyncio.to_thread(self.open_ingresses_sync)

    def open_ingresses_sync(self) -> None:
        """`open_ingresses` for plain threads."""
        self._check_started()
        if self._ingresses is not None:
            self._ingresses.start()

    async def close_ingresses(self) -> None:
        """Take no more events; what is under way is finished and acknowledged. `close` does it, too."""
        await asyncio.to_thread(self.close_ingresses_sync)

    def close_ingresses_sync(self) -> None:
        """`close_ingresses` for plain threads."""
        if self._ingresses is not None:
            self._ingresses.stop()

    def ingress_statistics(self) -> "dict[str, SourceStatistics]":
        """By source; a moment old."""
        return {} if self._ingresses is None else self._ingresses.statistics()

    def derive_secret(self, purpose: str) -> bytes:
        """32 bytes that only this store's nodes know, others for each purpose."""
        return hmac.digest(self._secret, purpose.encode(), "sha256")

    def stop_accepting(self) -> None:
        """Refuse new runs from now on (ClosedError); those accepted go on."""
        self._control.post(self._engine.stop_accepting)

    @property
    def accepting(self) -> bool:
        """Whether new runs are taken."""
        return self._started and not self._closed and self._engine.accepting

    # --- inside -----------------------------------------------------------------------

    def _recent(self, run_id: str) -> RunResult | None:
        """The result of a run that ended lately, without asking the control loop."""
        return None if self._closed else self._engine.queries.recent(run_id)

    def _small(self, what: str, value: Any) -> bytes:
        """What people and other systems hand in, as JSON. Raises InputError."""
        return encode_json(what, value, self.config.limits.request_bytes_max)

    def _check_started(self) -> None:
        if not self._started or self._closed:
            raise ClosedError("the runtime is closed" if self._closed else "the runtime has not been started")

    def _begin(self) -> None:
        if self._started:
            raise ClosedError("a runtime starts once", hint="Make another one")
        self._started = True
        if self.config.store.kind == "lmdb" and not self.config.store.path:
            self._folder = tempfile.mkdtemp(prefix="agentrt-")
            changed = msgspec.structs.replace(self.config.store, path=self._folder)
            self.config = msgspec.structs.replace(self.config, store=changed)
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(self.config.node.switch_interval_us / 1e6)
        if self.config.node.gc_threshold:
            self._gc_threshold = gc.get_threshold()
            gc.set_threshold(self.config.node.gc_threshold, 50, 1000)
        self._control = ControlThread()
        self._control.start()

    def _end(self) -> None:
        """Stop the control thread; blocks."""
        self._closed = True
        self.close_ingresses_sync()
        if self._notifiers is not None:
            self._notifiers.stop()
        if self._watch is not None:
            self._watch.close()
        self._control.stop()
        if self._switch_interval_s is not None:
            sys.setswitchinterval(self._switch_interval_s)
        if self._gc_threshold is not None:
            gc.set_threshold(*self._gc_threshold)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _open(self) -> None:
        """On the control loop, before anything is accepted; may block."""
        loop, node = self._control.loop, self.config.node
        policies = self._make_policies()  # first: nothing is open yet if one is missing
        self._store = self._store_factory(self.config, loop)
        try:
            self._holds_group = await asyncio.to_thread(cgroups.hold, self.config.process.cgroup)
            self._secret = await store_secret(self._store)
            # Now, because it takes long and blocks: nobody waits for the loop yet.
            await self._open_backend(_DEFAULT_BACKEND)
            self._tools = self._open_tools(loop)
            self._models = self._open_models(loop)
            limits = profiles_of(self.config)
            self._classifier = classifier(self.config, limits.rules)
            self._engine = Engine(
                loop,
                self._store,
                self._tools,
                models=self._models,
                limits=engine_limits(self.config),
                pins={"agentrt": version()} | self._catalog.pins,
                policies=policies,
                random_bytes=RandomBlocks().take,
                profile=limits.base,
                profiles=limits.profiles,
                gates=gate_limits(self.config),
                loops=loop_limits(self.config),
                meter=self.meter,
                classifier=self._classifier,
                urgent_rates=urgent_rates(self.config),
                frames=frames_beside(
                    self.config.store.kind,
                    self.config.store.path,
                    self.config.wasm.frames_bytes_max,
                    crashpoints.at_disk if crashpoints.ARMED else None,
                ),
                memory_is_short=MemoryPressure(time.monotonic_ns),
            )
            self._engine.entrance.hurried = self._control.hurried
            self._engine.on_profiles = self._share_cpu
            self._share_cpu(self._engine.flow.force)
            self._engine.tenants.load(self._store)
            self._engine.entrance.recall_urgent(self._store)
            self._modules = modules_beside(self.config.store.kind, self.config.store.path)
            self._engine.keep_versions(self._bring)
            self._module_keep = ModuleKeep(loop, self._engine, self._modules)
            await self._ask_for_tools()  # last: it may start processes
        except BaseException:
            for backend in self._backends.values():
                await backend.close()
            if self._holds_group:
                await asyncio.to_thread(cgroups.release)
            self._store.close()
            raise
        threads: Mapping[str, int] = {
            "control": self._control.thread_id,
            "store": getattr(self._store, "writer_thread_id", 0),
        }
        for name, thread_id in threads.items():
            if thread_id:
                self._priority[name] = raise_thread(thread_id, nice=node.control_nice, realtime=node.control_realtime)
        self._watch = LoopWatch(loop, cpu_max_ns=node.loop_block_max_ms * _MS, interval_ns=_WATCH_INTERVAL_NS)
        self._tools.start()
        if self._notifiers is not None:
            self._notifiers.start()
            self._engine.observe(self._notifiers.observe)
        if self._recover:
            self._engine.recover()
        else:
            self._engine.watch_progress()
        self._module_keep.open()
        self._engine.frames.open()

    def _share_cpu(self, force: InForce) -> None:
        """Processes in leaves share the CPU as the profiles in force say."""
        from agentrt.cgroup import shared

        done = self._control.loop.run_in_executor(None, shared.share(force.tier_weights()))
        done.add_done_callback(_told_if_failed)

    def _open_tools(self, loop: asyncio.AbstractEventLoop) -> Tools:
        tools = self._tools_factory(self.config, self._registry, loop)
        if not self._provider_factories:
            return tools
        others = {
            name: factory(self.config, self._registry, loop) for name, factory in self._provider_factories.items()
        }
        for provider in others.values():
            attach = getattr(provider, "attach", None)
            if attach is not None:
                attach(self._backends[_DEFAULT_BACKEND])
        return ToolRouter(self._registry, tools, others)

    async def _ask_for_tools(self) -> None:
        """Providers that must ask others which tools there are do so now."""
        if isinstance(self._tools, ToolRouter):
            try:
                await self._tools.open()
            except BaseException:
                await self._tools.close()
                raise

    def _make_notifiers(self) -> "NotifierService | None":
        """Raises ConfigError."""
        node = self.config.node
        if not node.notifiers and not node.observers:
            return None
        from agentrt.notifiers.service import NotifierService

        secrets = SecretAsker(provider_from(self.config.secrets), "agentrt-notifier-secrets")
        return NotifierService(
            {name: partial(self._plugins.notifier(name), self.config, secrets) for name in node.notifiers},
            {name: partial(self._plugins.observer(name), self.config) for name in node.observers},
        )

    def _make_ingresses(self) -> "IngressService | None":
        """Raises ConfigError."""
        if not self.config.ingress.sources:
            return None
        from agentrt.ingress.service import IngressService
        from agentrt.ingress.settings import SourceConfig

        secrets = SecretAsker(provider_from(self.config.secrets), "agentrt-ingress-secrets")
        makes: dict[str, tuple[SourceConfig, Callable[[], Ingress]]] = {}
        for name, table in self.config.ingress.sources.items():
            source = SourceConfig(**table)
            check_name("tenant", source.tenant)
            factory = self._plugins.ingress(source.kind)
            makes[name] = (source, partial(factory, self.config, name, source, secrets))
        return IngressService(makes, self)

    def _open_models(self, loop: asyncio.AbstractEventLoop) -> Models | None:
        config = self.config
        if not self._catalog.profiles:
            return None
        return ModelService(
            self._catalog,
            self._model_factories,
            loop,
            limits=ModelLimits(
                config.models.calls_max,
                config.models.calls_bytes_max,
                config.limits.request_bytes_max,
                config.limits.result_bytes_max,
            ),
            secrets=provider_from(config.secrets),
        )

    async def _shut(self) -> None:
        """On the control loop: everything stops, in the order in which it leans on the rest."""
        async with contextlib.AsyncExitStack() as stack:
            # Last in, first out: each is tried, whatever the one before it did.
            if self._holds_group:
                stack.push_async_callback(asyncio.to_thread, cgroups.release)
            stack.push_async_callback(asyncio.to_thread, self._store.close)
            for backend in self._backends.values():
                stack.push_async_callback(backend.close)
            stack.push_async_callback(self._tools.close)
            if self._models is not None:
                stack.push_async_callback(self._models.close)
            stack.push_async_callback(self._engine.close, self.config.node.close_timeout_ms / 1e3)
            self._module_keep.close()


def _told_if_failed(done: "asyncio.Future[None]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.warning("the weights of tiers could not be written: %s", error)


def _agent_info(agent: Agent) -> AgentInfo:
    return AgentInfo(
        agent.name, agent.version, agent.backend.name, agent.tier, agent.fuel_max, agent.on_upgrade, agent.short
    )


def engine_limits(config: Config) -> EngineLimits:
    """The engine's bounds from the configuration."""
    limits, store, scheduler = config.limits, config.store, config.scheduler
    return EngineLimits(
        request_bytes_max=limits.request_bytes_max,
        result_bytes_max=limits.result_bytes_max,
        journal_bytes_max=limits.journal_bytes_max,
        run_fuel_max=limits.run_fuel_max,
        attempts_max=limits.step_attempts_max,
        queue_items_max=scheduler.queue_items_max,
        queue_bytes_max=scheduler.queue_bytes_max,
        admission=admission_limits(config),
        profiles_tenant=config.flow.profiles_tenant,
        backlog_items_max=store.backlog_items_max,
        backlog_bytes_max=store.backlog_bytes_max,
        commit_delay_ns=store.commit_delay_us * 1_000,
        rehydrate_per_s=limits.rehydrate_per_s,
        rehydrate_bytes_per_s=limits.rehydrate_bytes_per_s,
        hot_ns=limits.hot_ms * _MS,
        stuck_ns=limits.stuck_ms * _MS,
        hot_runs_max=limits.hot_runs_max,
        hot_bytes_max=limits.hot_bytes_max or read_machine().memory_bytes // 4,
        frames_after_ns=config.wasm.frame_after_ms * _MS,
        replay_fuel_max=config.wasm.replay_fuel_max,
        event_ttl_ns=limits.event_ttl_s * 1_000 * _MS,
        retention_ns=limits.retention_s * 1_000 * _MS,
        lock_hold_ns=limits.lock_hold_ms * _MS,
        lock_grace_ns=limits.lock_grace_ms * _MS,
        depth_max=limits.depth_max,
        fan_out_max=limits.fan_out_max,
    )


def _times(timeout_s: float | None, run_at: float | None) -> tuple[int | None, int | None]:
    """The two in ns. Raises InputError."""
    for name, value in (("timeout_s", timeout_s), ("run_at", run_at)):
        if value is not None and not (isinstance(value, int | float) and 0 <= value < 2**33):
            raise InputError(f"{name} is a number of seconds, not {value!r}")
    return (
        None if timeout_s is None else round(timeout_s * 1e9),
        None if run_at is None else round(run_at * 1e9),
    )


def _results(found: list[RunResult | BaseException]) -> list[RunResult]:
    results: list[RunResult] = []
    for result in found:
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _read_module(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
