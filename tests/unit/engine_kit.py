"""A node in one process for the engine's unit tests: guests that are Python generators, tools that the test answers,
the model store, and crashes at any commit.

A guest is a function ``agent(ctx, input)`` that yields ``ctx.wait(handles)`` and returns its output. It keeps the
backend contract to the letter: replay included, handles in program order, answers chosen by the lowest seq.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import msgspec

from agentrt.backends.base import Exit, GuestEvents, Request, Status
from agentrt.engine.engine import Engine
from agentrt.engine.info import Agent, EngineLimits, RunResult
from agentrt.engine.rows import FOLLOWING, rows_of
from agentrt.engine.steps import EventSend
from agentrt.errors import StaleWriteError, StoreError
from agentrt.flow.profiles import Profile
from agentrt.fold import RunFold, fold, head_of
from agentrt.policy import Policies
from agentrt.records import Record
from agentrt.stores.base import Batch, Done, Store
from agentrt.stores.memory import MemoryDisk, MemoryStore
from agentrt.tools.outcome import EVICTED_RUNNING, ToolOutcome
from agentrt.tools.spec import ToolRegistry, ToolSpec

AgentFn = Callable[["Ctx", Any], Generator[tuple[int, ...], int, Any]]
TOOL_CALL, LOG = 1, 13


class Ctx:
    """What a generator guest can do."""

    def __init__(self, guest: "FakeGuest") -> None:
        self._guest = guest

    def submit(self, op: int, payload: bytes) -> int:
        return self._guest.submit(op, payload)

    def tool(self, name: str, **args: Any) -> int:
        return self.submit(TOOL_CALL, msgspec.json.encode({"tool": name, "args": args}))

    def op(self, number: int, **request: Any) -> int:
        return self.submit(number, msgspec.json.encode(request))

    def abandon(self, *handles: int) -> None:
        guest = self._guest
        taken, guest.requests = guest.requests, []
        guest.backend.post(guest, partial(guest.events.on_syscalls, taken, None))
        guest.backend.post(guest, partial(guest.events.on_abandoned, handles))

    def on_unwind(self, handler: AgentFn) -> None:
        self._guest.handlers.append(handler)

    @property
    def restored(self) -> Any:
        return None if self._guest.restored is None else msgspec.json.decode(self._guest.restored)

    def log(self, message: str) -> None:
        self._guest.requests.append(Request(0, LOG, msgspec.json.encode({"message": message})))

    def wait(self, *handles: int) -> tuple[int, ...]:
        return handles

    def read(self, handle: int) -> Any:
        status, payload = self._guest.answers[handle][1:3]
        value = msgspec.json.decode(payload)
        return value if status == Status.OK else {"error": value}

    def close(self, handle: int) -> None:
        self._guest.answers.pop(handle, None)
        self._guest.closed.add(handle)

    @property
    def clock_ns(self) -> int:
        return self._guest.clock_ns


class FakeGuest:
    def __init__(
        self,
        backend: "FakeBackend",
        agent: AgentFn,
        events: GuestEvents,
        input: bytes,
        restored: bytes | None,
        clock_ns: int,
        replay: bool,
    ) -> None:
        self.backend, self.events = backend, events
        self.restored = restored
        self.handlers: list[AgentFn] = []
        self.lent: int | None = None
        self.busy = 0  # how often it says that it cannot be lent a tier now
        self.ran_ns = 0
        self._unwinding = self._told = False
        self.requests: list[Request] = []
        self.answers: dict[int, tuple[int, int, bytes, int]] = {}
        self.closed: set[int] = set()
        self.clock_ns = clock_ns
        self.live = not replay
        self._look = False
        self._next = 1
        self._waiting: tuple[int, ...] | None = None
        self._reported = False
        self._ended = False
        self._scheduled = False
        self.delivered: list[int] = []
        self._code = agent(Ctx(self), msgspec.json.decode(input))
        self._value: int | None = None
        self._wake()

    def submit(self, op: int, payload: bytes) -> int:
        handle, self._next = self._next, self._next + 1
        self.requests.append(Request(handle, op, payload))
        if self.backend.chop and self.backend.random.random() < 0.5:
            # Part of the requests is seen before the guest waits.
            taken, self.requests = self.requests, []
            self.backend.post(self, partial(self.events.on_syscalls, taken, None))
        return handle

    # --- Guest ---
    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None:
        if self._ended:
            return
        assert 0 < handle < self._next
        self._look = True
        if handle not in self.answers and handle not in self.closed:
            self.answers[handle] = (seq, status, payload, clock_ns)
        self._wake()

    def go_live(self) -> None:
        assert not self.live
        self.live = True
        self._wake()

    def kill(self) -> None:
        self.end("killed", 0, None)

    def lend(self, tier: int | None) -> bool:
        self.busy -= self.busy > 0
        if self.busy:
            return False
        self.lent = tier
        return True

    def unwind(self, reason: str, skipped: int = 0) -> None:
        self._next += skipped
        self.backend.post(self, partial(self._unwind, reason))

    def _unwind(self, reason: str) -> None:
        if self._ended:
            return
        self._told = True
        self._turn()  # what was answered before; what it asks for then nobody hears
        self._told = False
        if self._ended:
            return
        self._unwinding, self.requests = True, []
        self.backend.post(self, self.events.on_unwinding)

        def code(ctx: Ctx, _: Any) -> Generator[tuple[int, ...], int, Any]:
            while self.handlers:
                yield from self.handlers.pop()(ctx, reason)

        self._code, self._waiting, self._value = code(Ctx(self), None), None, None
        self._wake()

    # --- running ---
    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.backend.post(self, self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._ended:
            return
        try:
            while True:
                if self._waiting is not None:
                    if not (self.live or self._look):
                        break
                    ready = [(self.answers[h][0], i) for i, h in enumerate(self._waiting) if h in self.answers]
                    if not ready:
                        break
                    index = min(ready)[1]
                    handle = self._waiting[index]
                    self.delivered.append(handle)
                    self.clock_ns = max(self.clock_ns, self.answers[handle][3])
                    self._waiting, self._value = None, handle
                self._waiting = next(self._code) if self._value is None else self._code.send(self._value)
                self._look, self._reported = False, False
        except StopIteration as stop:
            output = stop.value if isinstance(stop.value, bytes) else msgspec.json.encode(stop.value)
            self.report(None)
            self.end("unwound" if self._unwinding else "returned", 0, output)
            return
        except Exception as error:
            self.report(None)
            self.end("trap", 1, None, repr(error))
            return
        waiting = None if self._reported else self._waiting
        self._reported = True
        self.report(waiting)

    def report(self, waiting: tuple[int, ...] | None) -> None:
        if self._told:
            self.requests = []
        elif self.requests or waiting is not None:
            taken, self.requests = self.requests, []
            self.backend.post(self, partial(self.events.on_syscalls, taken, waiting))

    def end(self, reason: str, code: int, output: bytes | None, message: str = "") -> None:
        if not self._ended:
            self._ended = True
            exit = Exit(reason, code, output, message, 1000, 10, 1, 2, 0, 0)
            self.backend.post(self, partial(self.events.on_exit, exit))


class FakeProgram(msgspec.Struct, frozen=True):
    version: str
    pins: dict[str, str]
    agent: AgentFn
    unwinds: bool = False


class FakeBackend:
    """Events in order per guest, interleaved at random between guests (``random``) or as they come."""

    name = "fake"

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int | None = None) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self.chop = seed is not None
        self.dead = False
        self.guests: list[FakeGuest] = []
        self.starts = 0
        self.given: list[dict[str, Any]] = []  # what guests were started with
        self._posts: dict[int, deque[Callable[[], Any]]] = {}
        self._due = False

    async def open(self) -> None: ...

    async def close(self) -> None:
        for guest in self.guests:
            guest.kill()

    async def prepare(self, module: bytes) -> FakeProgram:
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        return {}

    def post(self, guest: FakeGuest, event: Callable[[], Any]) -> None:
        self._posts.setdefault(id(guest), deque()).append(event)
        if not self._due:
            self._due = True
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._due = False
        if self.dead:
            return
        queues, self._posts = self._posts, {}
        order = list(queues.values())
        if self.chop:
            self.random.shuffle(order)
        for queue in order:
            for event in queue:
                event()

    def start(self, program: FakeProgram, events: GuestEvents, **given: Any) -> FakeGuest:
        self.starts += 1
        self.given.append(given)
        guest = FakeGuest(
            self, program.agent, events, given["input"], given["restored"], given["clock_ns"], given["replay"]
        )
        self.guests.append(guest)
        return guest


class World:
    """What tools have done, outside any node: effects by idempotency key, and how often each was asked for."""

    def __init__(self) -> None:
        self.effects: dict[str, Any] = {}
        self.asked: dict[str, int] = {}
        self.attempts: list[tuple[str, int]] = []
        self.script: dict[str, list[ToolOutcome]] = {}  # what a tool's next calls come to, without any effect


class FakeTools:
    """``add`` and ``boom`` are pure, ``put`` is keyed, ``sure`` too and can be asked. ``hold`` keeps calls until the
    test answers them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, world: World, seed: int | None = None) -> None:
        self.registry = ToolRegistry()
        for name, kind in (("add", "pure"), ("boom", "pure"), ("put", "keyed"), ("fail", "keyed"), ("flaky", "pure")):
            self.registry.add(ToolSpec(name, kind, 10**9, True, f"x:{name}"))
        self.registry.add(ToolSpec("moved", "pure", 10**9, True, "x:moved"))  # a migrate function
        self.registry.add(ToolSpec("once", "at_most_once", 10**9, True, "x:once"))
        self.registry.add(ToolSpec("ask", "reconcilable", 10**9, True, "x:ask", reconcile=True))
        self.registry.add(ToolSpec("thrice", "keyed", 10**9, True, "x:thrice", attempts_max=3))
        self.registry.add(ToolSpec("never", "keyed", 10**9, True, "x:never", attempts_max=1))
        self.registry.add(ToolSpec("sure", "keyed", 10**9, True, "x:sure", reconcile=True, attempts_max=2))
        self.registry.add(ToolSpec("brief", "keyed", 10**9, True, "x:brief", key_ttl_ns=10**9))
        self.loop, self.world = loop, world
        self.random = random.Random(seed)
        self.shuffle = seed is not None
        self.hold = False
        self.held: list[tuple[str, Any, str | None, int, Callable[[ToolOutcome], None]]] = []
        self.dead = self.stopping = False
        self.calls = 0
        self.cancelled: list[str] = []  # keys
        self.timeouts: list[int | None] = []  # that calls were given instead of the tools' own
        self.reconciled: list[str] = []
        self.found: str | None = None  # what a reconcile function says, else the truth
        self.deaf = 0  # hosts that die when they are asked so
        self.die_share = 0.0  # of calls whose host dies, with or without the effect

    def call(
        self,
        name: str,
        args: bytes,
        *,
        key: str | None,
        tenant: str,
        tier: int,
        attempt: int,
        done: Callable[[ToolOutcome], None],
        timeout_ns: int | None = None,
        reconcile: bool = False,
    ) -> str | None:
        self.calls += 1
        self.timeouts.append(timeout_ns)
        if reconcile:
            self.reconciled.append(key or "")
            if self.deaf:
                self.deaf -= 1
                self.loop.call_soon(done, DIED)
                return None
            found = self.found or ("yes" if key in self.world.effects else "no")
            result = {"put": self.world.effects.get(key or "")}
            payload = msgspec.json.encode({"found": found, "result": result})
            self.loop.call_soon(done, ToolOutcome(True, payload, None, 5, False))
            return None
        call = (name, msgspec.json.decode(args), key, attempt, done)
        if key is not None:
            self.world.attempts.append((key, attempt))
        self.held.append(call)
        if not self.hold:
            self.loop.call_soon(self.answer_one)
        return key

    def start(self) -> None: ...

    def cancel(self, call: Any) -> None:
        """A call that has begun goes on; what the test answers is its outcome."""
        self.cancelled.append(call)

    def statistics(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def stop(self) -> None:
        self.stopping = True

    def evict(self) -> None:
        """All that is held is ended, whatever it has done."""
        held, self.held = self.held, []
        for *_, done in held:
            self.loop.call_soon(done, EVICTED_RUNNING)

    async def close(self) -> None:
        self.dead = True

    def answer_one(self) -> None:
        if self.dead or not self.held:
            return
        index = self.random.randrange(len(self.held)) if self.shuffle else 0
        name, args, key, _, done = self.held.pop(index)
        if self.random.random() < self.die_share:
            if self.random.random() < 0.5:
                self.execute(name, args, key)
            done(DIED)
            return
        done(self.execute(name, args, key))

    def execute(self, name: str, args: Any, key: str | None) -> ToolOutcome:
        if script := self.world.script.get(name):
            return script.pop(0)
        if key is not None:
            self.world.asked[key] = self.world.asked.get(key, 0) + 1
            self.world.effects.setdefault(key, args)
        if name == "add":
            return ToolOutcome(True, msgspec.json.encode(args["a"] + args["b"]), None, 5, False)
        if name == "flaky":
            return ToolOutcome(True, msgspec.json.encode(self.random.random()), None, 5, False)
        if name == "moved" and args["state"].get("ok", True):
            state = args["state"] | {"from": args["from_version"]}
            return ToolOutcome(True, msgspec.json.encode(state), None, 5, False)
        if name in ("boom", "fail", "moved"):
            return ToolOutcome(False, b'{"code":"tool_failed","message":"boom"}', "tool_failed", 5, False)
        return ToolOutcome(True, msgspec.json.encode({"put": args}), None, 5, False)


SLOW = ToolOutcome(False, b'{"code":"tool_timeout","message":"slow"}', "tool_timeout", 5, False, unknown=True)
DIED = ToolOutcome(False, b'{"code":"tool_host_died","message":"gone"}', "tool_host_died", 0, True)


class CrashingStore:
    """A store session that dies at its n-th commit: before it takes effect, or after it without saying so. n from 0."""

    def __init__(self, store: MemoryStore, at: int | None = None, *, applied: bool = False) -> None:
        self._store, self.at, self.applied = store, at, applied
        self.generation = store.generation
        self.commits = 0
        self.crashed = asyncio.Event()
        self.refuse: Callable[[Batch], StoreError | None] | None = None
        self._loop = asyncio.get_running_loop()
        self._refused: set[str] = set()
        self.random = random.Random(0)
        self.refuse_share = 0.0
        self.slow = False  # keep what the store has to say
        self._said: list[tuple[Done, StoreError | None]] = []

    def speak(self) -> None:
        """Be quick again, and say what was kept."""
        self.slow = False
        said, self._said = self._said, []
        for done, error in said:
            done(error)

    def commit(self, batch: Batch, done: Done) -> None:
        if self.crashed.is_set():
            return
        run_id = batch.run_id or ""
        if self.refuse is not None and (run_id in self._refused or (error := self.refuse(batch)) is not None):
            self._refused.add(run_id)
            self._loop.call_soon(done, error if run_id not in self._refused else StoreError("refused"))
            return
        if batch.after_version and self.random.random() < self.refuse_share:
            self._loop.call_soon(done, StaleWriteError("not yours"))  # what follows it is refused by its version
            return
        number, self.commits = self.commits, self.commits + 1
        if number == self.at:
            self.crashed.set()
            if self.applied:
                self._store.commit(batch, lambda error: None)
            return
        self._store.commit(batch, self._guard(done))

    def _guard(self, done: Done) -> Done:
        def guarded(error: StoreError | None) -> None:
            if self.slow:
                self._said.append((done, error))
            elif not self.crashed.is_set():
                done(error)

        return guarded

    def accept_again(self) -> None:
        self.refuse = None
        self._refused.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Node:
    """One life of a node on a disk and a world that outlive it."""

    def __init__(
        self,
        disk: MemoryDisk,
        world: World,
        *,
        crash_at: int | None = None,
        applied: bool = False,
        seed: int | None = None,
        limits: EngineLimits | None = None,
        now_ns: Callable[[], int] | None = None,
        models: Any = None,
        policies: Policies | None = None,
        profile: Profile | None = None,
        profiles: dict[str, Profile] | None = None,
        **how: Any,
    ) -> None:
        """``how``: what else an `Engine` takes."""
        self.loop = asyncio.get_running_loop()
        self.disk = disk
        self.store = CrashingStore(MemoryStore(self.loop, disk), crash_at, applied=applied)
        self.tools = FakeTools(self.loop, world, seed)
        self.backend = FakeBackend(self.loop, seed)
        given = random.Random(seed)
        extra: dict[str, Any] = how if now_ns is None else how | {"now_ns": now_ns}
        self.engine = Engine(
            self.loop,
            self.store,  # type: ignore[arg-type]
            self.tools,
            limits=limits,
            models=models,
            policies=policies,
            random_bytes=given.randbytes,
            profile=profile,
            profiles=profiles,
            **extra,
        )

    def register(
        self,
        name: str,
        agent: AgentFn,
        *,
        version: str | None = None,
        pins: Any = None,
        unwinds: bool = False,
        **upgrade: Any,
    ) -> None:
        self.engine.register(self.agent(name, agent, version, pins, unwinds, **upgrade))

    def agent(
        self,
        name: str,
        agent: AgentFn,
        version: str | None = None,
        pins: Any = None,
        unwinds: bool = False,
        **upgrade: Any,
    ) -> Agent:
        program = FakeProgram(version or f"v-{name}", pins or {}, agent, unwinds)
        return Agent(name, program.version, self.backend, program, 1, 10**12, **upgrade)  # type: ignore[arg-type]

    async def submit(self, agent: str, input: Any = None, **how: Any) -> str:
        future: asyncio.Future[str] = self.loop.create_future()
        self.engine.accept(agent, msgspec.json.encode(input), partial(settle, future), **how)
        return await future

    def result(self, run_id: str) -> "asyncio.Future[RunResult]":
        future: asyncio.Future[RunResult] = self.loop.create_future()
        self.engine.queries.wait_ended(run_id, partial(settle, future))
        return future

    async def cancel(self, run_id: str) -> None:
        future: asyncio.Future[None] = self.loop.create_future()

        def done(error: BaseException | None) -> None:
            settle(future, None, error)

        self.engine.orders.cancel(run_id, done)
        await future

    async def decide(self, run_id: str, path: str, ok: bool | None, result: Any = None) -> None:
        future: asyncio.Future[None] = self.loop.create_future()
        payload = msgspec.json.encode(result)
        self.engine.orders.decide(run_id, path, lambda error: settle(future, None, error), ok=ok, payload=payload)
        await future

    async def resume(self, run_id: str) -> None:
        future: asyncio.Future[None] = self.loop.create_future()
        self.engine.orders.resume(run_id, lambda error: settle(future, None, error))
        await future

    async def approve(self, run_id: str, path: str | None = None, answer: Any = None) -> str:
        future: asyncio.Future[str] = self.loop.create_future()
        payload = msgspec.json.encode(answer or {"approved": True, "by": "ann", "comment": None})
        self.engine.orders.approve(run_id, path, payload, partial(settle, future))
        return await future

    async def send(self, tenant: str = "default", **event: Any) -> str:
        future: asyncio.Future[str] = self.loop.create_future()
        event["data"] = msgspec.Raw(msgspec.json.encode(event.get("data")))
        self.engine.orders.send(tenant, EventSend(**event), partial(settle, future))
        return await future

    async def until(self, condition: Callable[[], bool], turns: int = 20_000) -> None:
        """Let the loop turn until the condition holds."""
        for _ in range(turns):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to that")

    def crash(self) -> None:
        """The process is gone: nothing of it acts any more."""
        self.store.crashed.set()
        self.backend.dead = self.tools.dead = True
        self.engine._closing = self.engine._closed = True
        self.engine._flusher.close()  # its descriptor goes with the process

    async def close(self) -> None:
        await self.engine.close(0.2)

    # --- what the disk says ---
    def records(self, run_id: str) -> list[Record]:
        return MemoryReader(self.disk).read_records(run_id)

    def fold(self, run_id: str) -> RunFold:
        return fold(self.records(run_id))

    def check_disk(self) -> None:
        """Every head is the fold of its records; READY, TIMERS and WAITS hold what follows from journals, and no
        others."""
        reader = MemoryReader(self.disk)
        rows: dict[tuple[str, bytes], bytes | None] = {}
        for head in reader.scan_heads():
            state = fold(reader.read_records(head.run_id))
            assert head_of(state, head.run_id) == head
            rows |= {(row.table, row.key): row.value for row in rows_of(head.run_id, state)}
        there = {(table, key): value for table in FOLLOWING for key, value in reader.scan_rows(table, limit=100_000)}
        assert there == rows


class MemoryReader(MemoryStore):
    """Looks at a disk without a session of its own."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._closed = False


def settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def run(main: Any) -> Any:
    """Run a test's coroutine; an exception that the loop's callbacks met fails it."""

    async def guarded() -> Any:
        met: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: met.append(context))
        value = await asyncio.wait_for(main, 60)
        assert not met, met
        return value

    return asyncio.run(guarded())


assert issubclass(MemoryStore, object) and Store
