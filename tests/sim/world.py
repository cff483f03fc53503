"""One seed: a disk and a ledger, nodes that live and die on them, users, and the calm at the end in which all must end.

The first part of a history is rough: faults as the seed draws them, nodes that crash at a commit or between any two
events, users who submit, cancel, approve, send and decide at random. Then it is calm: nothing goes wrong any more, the
users give whatever is waited for, and every run has to end.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Final
from zlib import crc32

import msgspec

from agentrt.engine.engine import Engine
from agentrt.engine.info import Agent, EngineLimits, RunResult
from agentrt.engine.steps import EventSend, send_address
from agentrt.errors import (
    AgentrtError,
    ClosedError,
    IdempotencyConflictError,
    InputError,
    QueueFullError,
    StepSettledError,
    StoreError,
    TenantDisabledError,
    UnknownAgentError,
    UnknownRunError,
)
from agentrt.states import StepState
from agentrt.stores.memory import MemoryDisk
from tests.sim.guests import Deaths, Evictions, SimBackend, SimProgram
from tests.sim.laws import Laws, Violation, check
from tests.sim.lending import LendingLaws
from tests.sim.loop import MICROSECOND, MILLISECOND, SECOND, FineTimer, LifeLoop, Scheduler
from tests.sim.programs import TOPICS, Features, Program, agent_of, make_program
from tests.sim.store import InjectedError, SimStore, StoreFaults, reader
from tests.sim.tools import Ledger, SimTools, ToolFaults

# Programs that keep what they hold elsewhere are part of the game.
logging.getLogger("agentrt.engine").addHandler(logging.NullHandler())

_EPOCH_NS: Final = 1_700_000_000 * SECOND
_EVENTS_MAX: Final = 400_000  # of one seed; a usual one has some thousands
_TURN_EVENTS: Final = 200  # more than one thing in a lane takes
_STUCK_NS: Final = 300 * SECOND  # without a record in the calm
_CALM_PERIOD_NS: Final = 2 * SECOND
TENANTS: Final = ("red", "blue")
_FOREVER_NS: Final = 10**18
_PLENTY_BYTES: Final = 1 << 26


class Report(msgspec.Struct):
    """What a seed was."""

    seed: int
    hash: str
    runs: int
    records: int
    events: int
    lives: int
    states: dict[str, int]
    virtual_s: float
    failure: str | None = None
    law: str | None = None


class Submit:
    """A user who wants a run."""

    def __init__(self, number: int, agent: str, how: dict[str, Any]) -> None:
        self.number, self.agent, self.how = number, agent, how
        self.input: Any = {"user": number}
        self.run_id: str | None = None
        self.asked_in: int | None = None  # the life that was asked
        self.over = False  # has its id, or an answer that says no
        self.result: RunResult | None = None
        self.waits_in: int | None = None


class Logs:
    """Stands for the engine's log relay."""

    dropped = 0

    def put(self, run_id: str, payload: bytes) -> None: ...

    def close(self) -> None: ...


class Life:
    """One life of the node."""

    def __init__(self, number: int, loop: LifeLoop, store: SimStore, engine: Engine, backend: SimBackend) -> None:
        self.number, self.loop, self.store, self.engine, self.backend = number, loop, store, engine, backend
        self.closing = False


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.scheduler = Scheduler(chance)
        self.disk = MemoryDisk()
        self.ledger = Ledger()
        self._evictions, self._deaths = Evictions(seed), Deaths(seed)
        self._work = random.Random(f"work {seed}")
        self._amounts = random.Random(f"amounts {seed}")  # of its own, so that a seed's other draws stay
        self.laws = Laws(self.disk, self.ledger, self.wall_ns, self.note)
        self._trace = trace
        self._hash = blake2b(digest_size=8)
        self._skew_ns = 0
        self.records = 0
        self.life: Life | None = None
        self.lives = 0
        self._died_ns = 0
        self.calm = False
        self.restarted_calm = False
        self.finished = False
        self.meets: dict[tuple[str, str], int] = {}  # waits with an event at their address, for how many turns
        self.violation: Violation | None = None

        features = Features(chance)
        agents = chance.randint(1, 5)
        size = chance.choice((2, 4, 7, 12))
        self.programs: list[Program] = [make_program(chance, features, agents - 1 - n, size) for n in range(agents)]
        for number, program in enumerate(self.programs):
            if "unwind" in repr(program) or "foreign" in repr(program):
                self.laws.unwinds.add(f"a{number}")
        self.limits = EngineLimits(
            attempts_max=chance.choice((2, 3, 5)),
            commit_delay_ns=chance.choice((0, 200_000, 200_000)),
            rehydrate_per_s=chance.choice((50, 5000)),
            register_grace_ns=chance.choice((100 * MILLISECOND, 5 * SECOND)),
            hot_ns=chance.choice((0, 20 * MILLISECOND, SECOND, _FOREVER_NS)),
            hot_runs_max=chance.choice((1, 10_000)),
            stuck_ns=chance.choice((10 * SECOND, 60 * SECOND)),
            lock_hold_ns=chance.choice((SECOND, 60 * SECOND)),
            retention_ns=chance.choice((_FOREVER_NS, _FOREVER_NS, 30 * SECOND)),
            event_ttl_ns=chance.choice((24 * 3600 * SECOND, 24 * 3600 * SECOND, 20 * SECOND)),
            queue_items_max=chance.choice((100_000, 100_000, 4)),
            journal_bytes_max=chance.choice((_PLENTY_BYTES, _PLENTY_BYTES, _PLENTY_BYTES, 600)),
        )
        self.laws.attempts_max = self.limits.attempts_max
        self.laws.event_ttl_ns = self.limits.event_ttl_ns
        self.laws.retention_ns = self.limits.retention_ns
        if self.limits.journal_bytes_max < _PLENTY_BYTES:
            self.laws.may_fail.add("run_failed")

        self.store_faults, self.tool_faults = StoreFaults(), ToolFaults()
        self._draw_faults(chance)
        self.horizon_ns = chance.choice((SECOND, 5 * SECOND, 30 * SECOND))
        self.upgrades = chance.choice((0.0, 0.0, 0.3))  # share of agents that each new life has in another version
        self.versions: list[list[str]] = [["pin"] for _ in self.programs]  # by agent: on_upgrade of each version
        self.schedules: set[tuple[str, str]] = set()  # acknowledged, and not dropped
        self.schedule_waits = 0
        self.crashes = chance.choice((0, 0, 1, 1, 2, 4))
        self.crashes_soon = chance.random() < 0.7
        self.submits = [self._draw_submit(chance, number) for number in range(chance.randint(1, 5))]
        self._plan_users(chance)
        self.laws.lock_hold_ns, self.laws.lock_grace_ns = self.limits.lock_hold_ns, self.limits.lock_grace_ns
        self.laws.ran_ns = self._ran_ns
        faults = self.store_faults
        slow_ns = faults.sync_ns + faults.tell_ns + self.reads_ns + self.guest_latency_ns
        faulty = faults.stale or faults.full or faults.reads
        self.lending = LendingLaws(self.laws, (10 * SECOND if faulty else 200 * MILLISECOND) + 20 * slow_ns)

    # --- drawing ---

    def _draw_faults(self, chance: random.Random) -> None:
        store, tools = self.store_faults, self.tool_faults
        store.stale = chance.choice((0.0, 0.0, 0.02, 0.1))
        store.full = chance.choice((0.0, 0.0, 0.0, 0.05))
        store.reads = chance.choice((0.0, 0.0, 0.0, 0.03))
        store.sync_ns = chance.choice((100_000, 400_000, 5 * MILLISECOND, 50 * MILLISECOND))
        store.tell_ns = chance.choice((20_000, MILLISECOND))
        tools.dies = chance.choice((0.0, 0.0, 0.1, 0.4))
        tools.late = chance.choice((0.0, 0.0, 0.2))
        tools.times_out = chance.choice((0.0, 0.1))
        tools.full = chance.choice((0.0, 0.0, 0.05))
        tools.cannot_tell = chance.choice((0.0, 0.2))
        tools.latency_ns = chance.choice((200_000, 3 * MILLISECOND, 100 * MILLISECOND))
        self.guest_latency_ns = chance.choice((0, 50 * MICROSECOND, 2 * MILLISECOND))
        self.chops = chance.choice((0.0, 0.3))
        self.hogs = chance.random() < 0.3  # guests that compute for long
        self.reads_ns = chance.choice((50 * MICROSECOND, MILLISECOND, 30 * MILLISECOND))

    def _draw_submit(self, chance: random.Random, number: int) -> Submit:
        how: dict[str, Any] = {"tenant": chance.choice(TENANTS), "tier": chance.choice((None, 0, 1, 2, 3))}
        if chance.random() < 0.5:
            how["idempotency_key"] = f"key-{chance.randint(0, 3) if chance.random() < 0.3 else 100 + number}"
        if chance.random() < 0.15:
            how["timeout_ns"] = int(chance.choice((0.01, 1.0, 20.0)) * chance.random() * SECOND) + 1
        if chance.random() < 0.1:
            how["budget"] = {"tool_calls": chance.randint(0, 6)}
            if self._amounts.random() < 0.5:
                how["budget"]["wall_s"] = self._amounts.choice((0.05, 2, 30.0)) * (1 + self._amounts.random())
        if self._work.random() < 0.1:
            how["budget"] = how.get("budget", {}) | {
                "active_s": self._work.choice((0.01, 0.3, 5)) * self._work.random()
            }
        if chance.random() < 0.1:
            how["start_ns"] = chance.randint(-SECOND, 3 * SECOND)  # from now; see `_submit`
        top = 0 if chance.random() < 0.7 else chance.randrange(len(self.programs))
        return Submit(number, f"a{top}", how)

    def _plan_users(self, chance: random.Random) -> None:
        at = self.scheduler.at
        for submit in self.submits:
            at(int(chance.random() ** 3 * self.horizon_ns), self._submit, submit)
            if "idempotency_key" in submit.how and chance.random() < 0.3:  # it asks twice
                twin = Submit(submit.number, submit.agent, submit.how)
                self.submits = [*self.submits, twin]
                at(int(chance.random() * self.horizon_ns), self._submit, twin)
        acts = (
            self._cancel_some,
            self._approve_some,
            self._send_some,
            self._decide_some,
            self._jump,
            self.close_life,
            self._upgrade_some,
            self._schedule_some,
            self._switch_tenant,
        )
        weights = (1, 3, 4, 3, 0.3, 0.4, 0.5 if self.upgrades else 0, 0.3, 0.3)
        for act in chance.choices(acts, weights, k=chance.choice((0, 5, 15))):
            at(int(chance.random() * self.horizon_ns), act)
        for _ in range(self.crashes if not self.crashes_soon else 0):
            at(int(chance.random() * self.horizon_ns), self._crash_now)
        at(0, self.start_life)
        at(self.horizon_ns, self._begin_calm)

    # --- time and trace ---

    def wall_ns(self) -> int:
        return _EPOCH_NS + self.scheduler.now + self._skew_ns

    def monotonic_ns(self) -> int:
        return SECOND + self.scheduler.now

    def note(self, *what: Any) -> None:
        line = f"{self.scheduler.now} {self.scheduler.events} " + " ".join(map(str, what))
        self._hash.update(line.encode())
        if what[0] == "commit":
            self.records += len(what) - 3
        if self._trace is not None:
            self._trace(line)

    # --- the node ---

    def start_life(self) -> None:
        if self.life is not None:
            return
        chance = self.chance
        self.lives += 1
        if self._died_ns:
            self.laws.down.append((self._died_ns, self.wall_ns()))
        loop = LifeLoop(self.scheduler, chance, self._met)
        loop.reads_max_ns = self.reads_ns
        crash_at = None
        if self.crashes_soon and self.crashes and not self.calm:
            self.crashes -= 1
            crash_at = (int(chance.random() ** 2 * 60), chance.random() < 0.5)
        store = SimStore(self.disk, loop, chance, self.store_faults, self.laws, crash_at, self._crash_now)
        tools = SimTools(loop, self.ledger, chance, self.tool_faults, self.laws)
        faults = (self._evictions, self._deaths)
        backend = SimBackend(loop, chance, self.laws, self.guest_latency_ns, self.chops, *faults, self.hogs)
        self.lending.begin_life()
        self.laws.in_flight.clear()
        asyncio._set_running_loop(loop)
        engine = Engine(
            loop,
            store,
            tools,
            limits=self.limits,
            now_ns=self.wall_ns,
            random_bytes=chance.randbytes,
            monotonic_ns=self.monotonic_ns,
            fine_timer=FineTimer,  # type: ignore[arg-type]
        )
        engine.tenants.load(reader(self.disk))
        engine._logs = Logs()  # type: ignore[assignment]
        self.life = life = Life(self.lives, loop, store, engine, backend)
        self.note("life", self.lives)
        engine.observe(self._observe)
        engine.keep_versions(partial(self._bring, life))
        for number in range(len(self.programs)):
            if self.lives > 1 and self.upgrades and chance.random() < self.upgrades:
                self._new_version(number)
        for number in range(len(self.programs)):
            if self.calm or chance.random() > 0.05 or not self.lives:
                self._register(life, number)
            else:
                self.scheduler.at(
                    self.scheduler.now + int(chance.random() * 10 * SECOND), self._register, life, number, life=loop
                )
        engine.recover()
        for submit in self.submits:
            if submit.run_id is not None:
                self._wait(submit)
            elif not submit.over and submit.asked_in is not None:  # its answer was lost with the node
                self.scheduler.at(self.scheduler.now + int(chance.random() * SECOND), self._submit, submit)
        self.scheduler.after_event = self._after_event

    def _register(self, life: Life, number: int, every: bool = False) -> None:
        """The agent in its last version, or in every one that there was."""
        last = len(self.versions[number]) - 1
        for version in range(0 if every else last, last + 1):
            life.engine.register(self._agent(life, number, version))

    def _agent(self, life: Life, number: int, version: int) -> Agent:
        name, policy = f"a{number}", self.versions[number][version]
        code = agent_of(self.programs[number], number)
        program = SimProgram(f"v{number}.{version}", code, name in self.laws.unwinds)
        if version == len(self.versions[number]) - 1:
            self.laws.versions[name] = program.version
        migrate = "moved" if policy == "migrate" else None
        return Agent(name, program.version, life.backend, program, 1, 10**12, {}, policy, migrate)  # type: ignore[arg-type]

    def _new_version(self, number: int) -> None:
        policy = self.chance.choice(("pin", "continue", "continue", "migrate", "migrate", "fail"))
        self.versions[number].append(policy)
        if policy == "fail":
            self.laws.may_fail.add("upgraded")
        self.note("upgrade", number, policy)

    def _upgrade_some(self) -> None:
        life = self.life
        if life is not None and not life.closing:
            number = self.chance.randrange(len(self.programs))
            self._new_version(number)
            self._register(life, number)

    def _bring(self, life: Life, version: str, name: str, done: Callable[[Any, Any], None]) -> None:
        number, _, old = version[1:].partition(".")
        agent = self._agent(life, int(number), int(old)) if self.calm or self.chance.random() < 0.7 else None
        error = InjectedError("injected: no module now") if not self.calm and self.chance.random() < 0.1 else None
        at = self.scheduler.now + int(self.chance.random() * 50 * MILLISECOND)
        self.scheduler.at(at, done, None if error else agent, error, life=life.loop)

    def _schedule_some(self) -> None:
        engine = self._node()
        if engine is None:
            return
        key = (self.chance.choice(TENANTS), self.chance.choice(("nightly", "hourly")))

        def done(error: BaseException | None) -> None:
            if error is None:
                self.schedules.add(key)
            elif not isinstance(error, (StoreError, ClosedError)):
                raise Violation("a schedule is answered as documented", repr(error))

        catch_up: Any = self.chance.choice(("once", "skip"))
        self.note("schedule", *key, catch_up)
        engine.schedules.put(*key, "* * * * *", "a0", b"null", None, catch_up, done)

    def _switch_tenant(self) -> None:
        engine = self._node()
        if engine is None:
            return
        tenant = self.chance.choice(TENANTS)
        off = engine.tenants.why_off(tenant) is None

        def done(error: BaseException | None) -> None:
            if error is None:
                (self.laws.tenants_off.add if off else self.laws.tenants_off.discard)(tenant)
            elif not isinstance(error, (StoreError, ClosedError)):
                raise Violation("a switch is answered as documented", repr(error))

        self.note("tenant", tenant, off)
        self.laws.tenants_off.discard(tenant)  # not for sure any more
        if off:
            engine.tenants.disable(tenant, "as drawn", done)
        else:
            engine.tenants.enable(tenant, done)

    def _enable_tenants(self, engine: Engine) -> None:
        self.laws.tenants_off.clear()
        for tenant in engine.tenants.disabled():
            engine.tenants.enable(tenant, lambda error: check(error is None, "a tenant can be enabled", repr(error)))

    def _unschedule(self, engine: Engine) -> None:
        """In the calm: half of the worlds wait until each schedule has run once, then it is dropped."""
        known = {(schedule.tenant, schedule.name): schedule.id for schedule in self.laws.schedules.values()}
        for key in self.schedules:
            check(key in known, "what is acknowledged is durable", f"schedule {key}")
        for key, schedule_id in known.items():
            self.schedule_waits += 1
            check(self.schedule_waits < 400, "a schedule runs at its times", f"{schedule_id}")
            if self.seed % 2 and not self.laws.scheduled.get(schedule_id):
                continue

            def dropped(error: BaseException | None, key: tuple[str, str] = key) -> None:
                check(error is None or isinstance(error, InputError), "a schedule can be dropped", f"{key}: {error!r}")
                self.schedules.discard(key)  # one that was on its way was acknowledged, and dropped after that

            self.schedules.discard(key)
            engine.schedules.drop(*key, dropped)

    def _after_event(self) -> None:
        life = self.life
        if life is None or life.closing:
            return
        engine = life.engine
        self.lending.after_event(self.scheduler.now, life.backend.guests, engine)
        idle = engine._idle_guests._tier
        for machine in engine._runs.values():
            if machine.may_be_parked and machine not in idle:
                raise Violation("what only waits leaves memory", f"nobody will park {machine.run_id}")
        intake = engine._intake
        resting = sum(machine.rests for machine in engine._runs.values())
        if intake.admission.items != len(engine._runs) - resting + len(engine._places.out) + intake.promised:
            raise Violation(
                "admission counts what is under way",
                f"{intake.admission.items} items, {len(engine._runs)} in memory, of which {resting} only wait for"
                f" children, {len(engine._places.out)} outside, {intake.promised} promised",
            )

    def _ran_ns(self, run_id: str) -> int:
        return 0 if self.life is None else self.life.backend.ran_ns.get(run_id, 0)

    def _met(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, StoreError) and "injected" in str(error):
            return
        if "never retrieved" in context.get("message", "") and (self.life is None or self.life.closing):
            return
        raise Violation("no exception reaches the loop", f"{context.get('message')}: {error!r}")

    def _observe(self, event: str, data: Any) -> None:
        if event == "emitted":
            self.laws.emitted(data.run_id, data.path, data.data)
        elif event == "stuck":
            raise Violation("no run is stuck", f"{data}")

    def _crash_now(self) -> None:
        """The process is gone, and with it all that was under way in it."""
        life = self.life
        if life is None or self.calm:
            return
        self.note("crash", life.number)
        self._end_life()
        pause = self.chance.choice((MILLISECOND, MILLISECOND, SECOND, 150 * SECOND))
        self.scheduler.at(self.scheduler.now + int(pause * (0.1 + self.chance.random())), self.start_life)

    def _end_life(self) -> None:
        assert self.life is not None
        self.life.loop.dead = True
        self.life.store.close()
        self.life = None
        self._died_ns = self.wall_ns()
        self.laws.guests.clear()
        asyncio._set_running_loop(None)

    def close_life(self) -> None:
        """The node stops in good order and starts again."""
        life = self.life
        if life is None or life.closing:
            return
        life.closing = True
        self.note("close", life.number)
        task = life.loop.create_task(life.engine.close(self.chance.choice((0.0, 0.01, 5.0))))
        task.add_done_callback(partial(self._closed, life))

    def _closed(self, life: Life, task: "asyncio.Task[None]") -> None:
        if life.loop.dead:
            return
        error = task.exception()
        if error is not None:
            raise Violation("closing raises nothing", repr(error))
        self.note("closed", life.number)
        # What was given to the store is committed by its close.
        if life.store.backlog()[0]:
            self.scheduler.at(self.scheduler.now + MILLISECOND, self._closed, life, task, life=life.loop)
            return
        self._end_life()
        self.scheduler.at(self.scheduler.now + int(self.chance.random() * SECOND), self.start_life)

    # --- users ---

    def _node(self) -> Engine | None:
        return None if self.life is None or self.life.closing else self.life.engine

    def _submit(self, submit: Submit) -> None:
        engine = self._node()
        if submit.over:
            return
        if engine is None:
            self.scheduler.at(self.scheduler.now + 50 * MILLISECOND, self._submit, submit)
            return
        number = self.lives
        submit.asked_in = number
        how = dict(submit.how)
        if "start_ns" in how:
            how["start_ns"] += self.wall_ns()

        def done(run_id: str | None, error: BaseException | None) -> None:
            self._submitted(submit, run_id, error)

        engine.accept(submit.agent, msgspec.json.encode(submit.input), done, **how)

    def _submitted(self, submit: Submit, run_id: str | None, error: BaseException | None) -> None:
        self.note("submitted", submit.number, run_id, "" if error is None else type(error).__name__)
        if error is None and run_id is not None:
            self.laws.accepted_ack(run_id)
            if submit.over:  # it had asked twice, without a key
                return
            submit.over, submit.run_id = True, run_id
            self._wait(submit)
            return
        if isinstance(error, IdempotencyConflictError):
            submit.over = True  # its key is another user's
        elif isinstance(error, (StoreError, QueueFullError, ClosedError, UnknownAgentError, TenantDisabledError)):
            self.scheduler.at(self.scheduler.now + 500 * MILLISECOND, self._submit, submit)
        else:
            raise Violation("a submit is answered as documented", repr(error))

    def _wait(self, submit: Submit) -> None:
        life = self.life
        if life is None or submit.result is not None or submit.run_id is None or submit.waits_in == life.number:
            return
        submit.waits_in = life.number

        def done(result: RunResult | None, error: BaseException | None) -> None:
            if result is not None:
                submit.result = result
                self.laws.result_told(result)
                return
            if isinstance(error, UnknownRunError) and submit.run_id in self.laws.erased:
                submit.over, submit.run_id = True, None
                return
            if isinstance(error, ClosedError) and life.closing:
                return
            if isinstance(error, StoreError):
                submit.waits_in = None  # asks again
                self.scheduler.at(self.scheduler.now + SECOND, self._wait, submit)
                return
            raise Violation("a run's result is told", f"{submit.run_id}: {error!r}")

        life.engine.queries.wait_ended(submit.run_id, done)

    def _unended(self) -> list[str]:
        return self.laws.unended()

    def _cancel_some(self) -> None:
        engine, runs = self._node(), self._unended()
        if engine is None or not runs:
            return
        self.cancel(engine, self.chance.choice(runs))

    def cancel(self, engine: Engine, run_id: str) -> None:
        def done(error: BaseException | None) -> None:
            if error is None:
                self.laws.cancel_ack(run_id)
            elif not isinstance(error, (StoreError, ClosedError, UnknownRunError)):
                raise Violation("a cancel is answered as documented", repr(error))

        self.note("cancel", run_id)
        engine.orders.cancel(run_id, done)

    def _waiting_steps(self, op: str) -> list[tuple[str, Any]]:
        return [
            (run_id, step)
            for run_id in self._unended()
            for step in self.laws.folds[run_id].open.values()
            if step.op == op and step.state is StepState.PREPARED
        ]

    def _approve_some(self) -> None:
        engine, steps = self._node(), self._waiting_steps("approval.request")
        if engine is not None and steps:
            run_id, step = self.chance.choice(steps)
            for _ in range(self.chance.choice((1, 1, 2))):
                self.approve(engine, run_id, step.path if self.chance.random() < 0.7 else None)

    def approve(self, engine: Engine, run_id: str, path: str | None) -> None:
        answer = msgspec.json.encode(
            {"approved": self.chance.random() < 0.8, "by": f"u{self.chance.randrange(1000)}", "comment": None}
        )

        def done(path: str | None, error: BaseException | None) -> None:
            if error is None and path is not None:
                self.laws.approved_ack(run_id, path, answer)
            elif not isinstance(error, (StepSettledError, InputError, StoreError, ClosedError)):
                raise Violation("an approval is answered as documented", repr(error))

        self.note("approve", run_id, path)
        engine.orders.approve(run_id, path, answer, done)

    def _send_some(self) -> None:
        engine = self._node()
        if engine is None:
            return
        event_id = f"user-{self.chance.randrange(6)}" if self.chance.random() < 0.4 else None
        to: dict[str, Any] = {"topic": self.chance.choice(TOPICS), "key": self.chance.choice(("", "k"))}
        runs = self._unended()
        if runs and self.chance.random() < 0.3:
            to = {"run_id": self.chance.choice(runs)}
        self.send(engine, self.chance.choice(TENANTS), to, event_id)

    def send(self, engine: Engine, tenant: str, to: dict[str, Any], event_id: str | None) -> None:
        data = msgspec.Raw(b"%d" % self.chance.randrange(10**6))
        event = EventSend(**to, data=data, id=event_id)

        def done(sent: str | None, error: BaseException | None) -> None:
            if error is None and sent is not None:
                self.laws.sent_ack(send_address(tenant, event), sent)
            elif not isinstance(error, (StoreError, ClosedError)):
                raise Violation("a send is answered as documented", repr(error))

        self.note("send", tenant, to, event_id)
        engine.orders.send(tenant, event, done)

    def _decide_some(self) -> None:
        engine = self._node()
        if engine is not None and engine._places.parked:
            self.decide(engine, self.chance.choice(sorted(engine._places.parked)))

    def decide(self, engine: Engine, run_id: str) -> None:
        """An operator looks at a parked run."""

        def done(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, AgentrtError):
                raise Violation("a decision is answered as documented", repr(error))

        laws, fold = self.laws, self.laws.folds[run_id]
        steps = [step for step in fold.open.values() if step.op == "tool.call" and step.key is not None]
        what = self.chance.random()
        if not steps or what < 0.2:
            self.note("resume", run_id)
            laws.more_attempts[run_id] = laws.more_attempts.get(run_id, 0) + 1
            engine.orders.resume(run_id, done)
            return
        step = self.chance.choice(steps)
        known = self.ledger.args.get(step.key or "")
        if what < 0.5:
            self.note("again", run_id, step.path)
            laws.more_attempts[run_id] = laws.more_attempts.get(run_id, 0) + 1
            engine.orders.decide(run_id, step.path, done, ok=None)
        else:
            self.note("decide", run_id, step.path)
            laws.decided.add((run_id, step.path))
            payload = b"%d" % crc32(known or b"")
            engine.orders.decide(run_id, step.path, done, ok=known is not None, payload=payload)

    def _jump(self) -> None:
        """Somebody sets the clock, forward or back."""
        self._skew_ns += int(self.chance.choice((-1, 1, 1)) * self.chance.random() ** 2 * 20 * SECOND)
        self.laws.clock_set_back = True
        self.note("clock", self._skew_ns)

    # --- the calm ---

    def _begin_calm(self) -> None:
        self.note("calm")
        self.calm = True
        faults = self.store_faults
        faults.stale = faults.full = faults.reads = 0.0
        tools = self.tool_faults
        tools.dies = tools.late = tools.times_out = tools.full = tools.cannot_tell = 0.0
        self.laws.last_ns = self.wall_ns()
        if self.life is not None:
            self.life.store.crash_at = None
            for number in range(len(self.programs)):
                self._register(self.life, number, every=True)
        self._calm_turn()

    def _calm_turn(self) -> None:
        """Whatever is waited for comes."""
        self.scheduler.at(self.scheduler.now + _CALM_PERIOD_NS, self._calm_turn)
        life = self.life
        if life is None or life.closing:
            return
        if not self.finished and not self.restarted_calm and self.chance.random() < 0.2:
            # What a node has forgotten, the next one finds.
            self.restarted_calm = True
            self.close_life()
            return
        engine = life.engine
        self._enable_tenants(engine)
        self._unschedule(engine)
        for run_id in sorted(engine._places.parked):
            self.decide(engine, run_id)
        for run_id, step in self._waiting_steps("approval.request"):
            self.approve(engine, run_id, step.path)
        meets: dict[tuple[str, str], int] = {}
        for run_id, step in self._waiting_steps("event.wait"):
            request = msgspec.json.decode(step.request or b"")
            tenant = self.laws.folds[run_id].run().tenant
            to = {"run_id": run_id} if request["topic"] is None else {"topic": request["topic"], "key": request["key"]}
            if not self.laws.has_event(send_address(tenant, EventSend(**to))):
                self.send(engine, tenant, to, None)
            elif run_id not in engine._places.parked:
                meets[run_id, step.path] = turns = self.meets.get((run_id, step.path), 0) + 1
                check(turns < 4, "an event meets who waits for it", f"{run_id}/{step.path}: {to}")
        self.meets = meets

    def _over(self) -> bool:
        if not self.calm or self.laws.open or self.life is None or self.life.closing:
            return False
        if any(not submit.over for submit in self.submits) or self.laws.schedules:
            return False
        engine = self.life.engine
        return not (engine._runs or engine._places.loading or engine._plan.ready or self.life.store.backlog()[0])

    def _lanes(self) -> list[bytes]:
        assert self.life is not None
        engine = self.life.engine
        return [key for part in (engine._locks, engine._mailbox, engine.schedules) for key in part._lanes._lanes]

    def _stuck(self) -> bool:
        return self.calm and self.wall_ns() - self.laws.last_ns > _STUCK_NS

    def _explain(self) -> str:
        life = self.life
        lines = []
        for run_id in self._unended():
            fold = self.laws.folds[run_id]
            steps = [f"{step.path} {step.op} {step.state}" for step in fold.open.values()]
            machine = None if life is None else life.engine._runs.get(run_id)
            where = (
                "nowhere in memory" if machine is None else f"{machine.phase.name}, guest {machine.guest is not None}"
            )
            lines.append(f"{run_id} {fold.run().agent} {fold.state} wait={fold.wait} steps={steps} {where}")
        return "; ".join(lines) or f"submits {[submit.number for submit in self.submits if not submit.over]}"

    def run(self) -> None:
        """Raises Violation."""
        scheduler = self.scheduler
        scheduler.run(lambda: self._over() or self._stuck(), _EVENTS_MAX)
        if not self._over():
            raise Violation("every run ends or waits for something named", self._explain())
        self.finished = True
        # A little more, for what the ends still have to clean up.
        until = scheduler.now + 3 * SECOND
        scheduler.run(lambda: scheduler.now > until and self._over(), _EVENTS_MAX)
        # The turn of a schedule may have begun meanwhile.
        scheduler.run(lambda: not self._lanes(), scheduler.events + _TURN_EVENTS)
        self._check_end()

    def _check_end(self) -> None:
        self.laws.at_the_end()
        assert self.life is not None
        engine = self.life.engine
        kept = {
            engine._places: ("runs", "loading", "parked", "out"),
            engine._loader: ("_later", "_backing_off", "_reloads"),
            engine.orders: ("_cancels",),
            engine: ("_doomed",),
        }
        left = {name: value for part, names in kept.items() for name in names if (value := getattr(part, name))}
        check(not left, "nothing is left in memory", f"{left}")
        check(not len(engine._waiters), "nobody waits for what has ended", f"{engine._waiters._waiters}")
        locks = engine._locks
        check(not locks._waiting and not locks._graces, "nothing is left in memory", "waiters of locks")
        check(not len(locks._lending) and not locks._lending._in, "nothing is left in memory", "lent tiers")
        check(not self._lanes(), "nothing is left in memory", f"lanes {self._lanes()}")
        check(not len(engine._idle_guests), "nothing is left in memory", "idle guests")
        intake = engine._intake
        check(not intake._children and not intake._callers, "nothing is left in memory", "somebody at the door")
        check(not engine.flow._kept, "nothing is left in memory", "places of spawns")
        size = intake.admission.bytes - sum(place.size_bytes for place in intake._promised.values())
        check(size == 0, "admission counts what is under way", f"{size} bytes")
        for submit in self.submits:
            told = submit.run_id is None or submit.result is not None
            check(told, "a run's result is told", f"{submit.run_id}")
            if submit.run_id is not None and submit.result is not None:
                check(submit.result.run_id == submit.run_id, "a run's result is told", f"{submit.run_id}")

    def report(self, failure: Violation | None) -> Report:
        scheduler = self.scheduler
        self._hash.update(f"{scheduler.now} {scheduler.events}".encode())
        states: dict[str, int] = {}
        for fold in self.laws.folds.values():
            state = str(fold.state)
            states[state] = states.get(state, 0) + 1
        return Report(
            self.seed,
            self._hash.hexdigest(),
            len(self.laws.folds),
            self.records,
            scheduler.events,
            self.lives,
            states,
            scheduler.now / SECOND,
            None if failure is None else str(failure),
            None if failure is None else failure.law,
        )


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> Report:
    """One history. A broken law, or an exception in a callback, is the report's ``failure``."""
    world = World(seed, trace)
    failure: Violation | None = None
    try:
        world.run()
    except Violation as violation:
        failure = violation
    except Exception as error:
        failure = Violation("no exception reaches the loop", f"{error!r} {_place(error)}")
    finally:
        asyncio._set_running_loop(None)
        if world.life is not None:
            world.life.loop.dead = True
    return world.report(failure)


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    places = []
    while trace is not None:
        places.append(f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-6:]))
