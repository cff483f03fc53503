"""What an agent author writes against: `Context` and the values that its methods give.

Every awaited method is a step: its outcome is remembered, and a run that is brought back gets it again instead of doing
it again. A step that is answered with a failure raises a `StepFailedError`.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agentrt.agents.declare import agent_declaration_of
from agentrt.agents.durations import Duration, parse_duration
from agentrt.agents.errors import BreakerOpenStepError, EnsembleFullError, LockLostError, ModelSchemaError
from agentrt.agents.spawning import Merge, Spawned, Task, checked_tasks, spawn_many
from agentrt.errors import InputError
from agentrt.flow.capacity import Capacity
from agentrt.models.declare import schema_of, tool_definition
from agentrt.models.messages import ModelAnswer
from agentrt.syscalls import BY_OP
from agentrt.tools.declare import declaration_of

if TYPE_CHECKING:
    from agentrt.agents.run import AgentRun

TOOL_CALL: Final = BY_OP["tool.call"].number
MODEL: Final = BY_OP["model.generate"].number
EVENT_WAIT: Final = BY_OP["event.wait"].number
EVENT_SEND: Final = BY_OP["event.send"].number
APPROVAL: Final = BY_OP["approval.request"].number
SPAWN: Final = BY_OP["run.spawn"].number
JOIN: Final = BY_OP["run.join"].number
ACQUIRE: Final = BY_OP["lock.acquire"].number
RELEASE: Final = BY_OP["lock.release"].number
FOREIGN: Final = BY_OP["lock.foreign"].number
CAPACITY: Final = BY_OP["capacity.get"].number
CHECKPOINT: Final = BY_OP["checkpoint"].number
EMIT: Final = BY_OP["emit"].number

#: Fewer than a run may have unanswered, which others of its steps share.
_SPAWNS_AT_ONCE: Final = 32

LEVELS: Final = ("debug", "info", "warning", "error")


class Event(msgspec.Struct, frozen=True):
    """An event that was sent to this run or topic. ``id`` is the sender's."""

    id: str
    data: Any


class Approval(msgspec.Struct, frozen=True):
    """A person's answer, true if approved. Not approved by anyone before the deadline: ``by`` is None."""

    approved: bool
    by: str | None = None
    comment: str | None = None

    def __bool__(self) -> bool:
        return self.approved


class ChildRun:
    """A run that this one has spawned."""

    def __init__(self, run: "AgentRun", run_id: str) -> None:
        self._run = run
        self.run_id = run_id

    async def result(self) -> Any:
        """Wait for the child's end. Raises ChildFailedError if it did not succeed."""
        return await self._run.ask(JOIN, {"run_id": self.run_id})

    def __repr__(self) -> str:
        return f"ChildRun({self.run_id!r})"


class Lock:
    """A lease of a named lock; ``async with`` acquires and releases it.

    ``token`` is its fencing number, higher with every holder. ``dirty``: the holder before lost it at work.
    """

    def __init__(self, run: "AgentRun", name: str, timeout_s: float | None) -> None:
        self._run = run
        self.name = name
        self._timeout_s = timeout_s
        self.token = 0
        self.dirty = False

    async def __aenter__(self) -> "Lock":
        """Raises WaitTimeoutError, DeadlockError."""
        answer = await self._run.ask(ACQUIRE, {"name": self.name, "timeout_s": self._timeout_s})
        self.token, self.dirty = answer["token"], answer["dirty"]
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raises LockLostError if it was lost, unless another exception is under way."""
        try:
            await self._run.ask(RELEASE, {"name": self.name, "token": self.token})
        except LockLostError:
            if error is None:
                raise


class ForeignLock:
    """A lock that is held elsewhere (Redis, PostgreSQL, …): ``async with`` declares it before it is taken, and releases
    it afterwards. If the run is told to end meanwhile, unwinding releases it.

    ``owner`` is a text that no other declaration of any run has: take the lock in its name, and release it only if it
    is in its name. A release may come twice, and for a lock that was never had.
    """

    def __init__(self, run: "AgentRun", name: str, release: "Callable[[ForeignLock], Any]") -> None:
        self._run = run
        self.name: Final = name
        self._release = release
        self.owner = ""
        self.held = False

    async def __aenter__(self) -> "ForeignLock":
        answer = await self._run.ask(FOREIGN, {"name": self.name, "owner": None})
        self.owner, self.held = answer["owner"], True
        self._run.handlers.append(self.release)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self.release()

    async def release(self) -> None:
        """Release it now. Again: nothing."""
        if not self.held:
            return
        made = self._release(self)
        if inspect.isawaitable(made):
            await made
        self.held = False
        if self.release in self._run.handlers:  # not while the run unwinds
            self._run.handlers.remove(self.release)
        await self._run.ask(FOREIGN, {"name": self.name, "owner": self.owner})


class Context:
    """One run's side of the runtime. Times are seconds or text such as ``"15m"`` or ``"2d"``; None waits for ever."""

    def __init__(self, run: "AgentRun", run_id: str, tenant: str, restored: Any) -> None:
        self._run = run
        self.run_id: Final = run_id
        self.tenant: Final = tenant
        #: The state given to the last `checkpoint`, or None in a run that has made none.
        self.restored: Final = restored

    @property
    def overrun(self) -> bool:
        """Whether the code that runs now has used up its time without awaiting. It may differ between a run and its
        replay: use it for nothing but deciding to `checkpoint`."""
        return self._run.notified

    async def tool(self, tool: Callable[..., Any] | str, /, **args: Any) -> Any:
        """Call a tool, by its function or its name. Raises ToolError's kinds, StepFailedError."""
        return await self._run.ask(TOOL_CALL, {"tool": _tool_name(tool), "args": args})

    async def model(
        self,
        profile: str,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        schema: Any = None,
        task: str = "",
        output_tokens_max: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | None = None,
        context: str | None = None,
        stream: bool = False,
        needs: Mapping[str, Any] | None = None,
    ) -> ModelAnswer:
        """Ask a model of a profile. ``messages``: a conversation, or the text of one message of the user. ``schema``: a
        type, which ``answer.data`` then is of, or a JSON schema. ``tools``: which it may ask for, functions or
        definitions; calling them is the agent's business. ``task``: the task class, for routes. ``stream``: observers
        are told the text as it comes. ``needs``: what the answering model must meet, see `Needs`. docs/models.md has
        all of it. Raises ModelStepError's kinds."""
        request: dict[str, Any] = {
            "profile": profile,
            "messages": [{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
        }
        given = {
            "tools": [tool_definition(tool) for tool in tools] or None,
            "tool_choice": tool_choice,
            "schema": None if schema is None else schema_of(schema),
            "task": task or None,
            "output_tokens_max": output_tokens_max,
            "temperature": temperature,
            "stop": stop,
            "context": context,
            "stream": stream or None,
            "needs": needs,
        }
        request |= {name: value for name, value in given.items() if value is not None}
        answer = msgspec.convert(await self._run.ask(MODEL, request), ModelAnswer)
        if schema is None or isinstance(schema, Mapping) or answer.data is None:
            return answer
        try:
            return msgspec.structs.replace(answer, data=msgspec.convert(answer.data, schema))
        except msgspec.ValidationError as error:  # of what the schema cannot say
            raise ModelSchemaError(
                f"the answer is not of the type: {error}", details={"text": (answer.text or "")[:2000]}
            ) from None

    async def event(self, topic: str | None = None, key: str = "", timeout: Duration | None = None) -> Event:  # noqa: ASYNC109
        """Wait for one event: sent to this run, or to a topic and key of its tenant. Raises WaitTimeoutError."""
        answer = await self._run.ask(EVENT_WAIT, {"topic": topic, "key": key, "timeout_s": _seconds(timeout)})
        return msgspec.convert(answer, Event)

    async def send(
        self,
        data: Any = None,
        *,
        run: str | ChildRun | None = None,
        topic: str | None = None,
        key: str = "",
        id: str | None = None,
    ) -> str:
        """Send an event to a run, or to a topic and key. Returns its id; what was sent under an id is sent once."""
        if (run is None) == (topic is None):
            raise InputError("an event goes either to a run or to a topic", hint="Give run= or topic=")
        run_id = run.run_id if isinstance(run, ChildRun) else run
        request = {"run_id": run_id, "topic": topic, "key": key, "data": data, "id": id}
        return str((await self._run.ask(EVENT_SEND, request))["id"])

    async def approval(self, question: str, data: Any = None, timeout: Duration | None = None) -> Approval:  # noqa: ASYNC109
        """Ask a person. The answer is true if approved; nobody having answered in time, it is not."""
        request = {"question": question, "data": data, "timeout_s": _seconds(timeout)}
        return msgspec.convert(await self._run.ask(APPROVAL, request), Approval)

    async def spawn(
        self,
        agent: Callable[..., Any] | str,
        input: Any = None,
        *,
        tier: int | str | None = None,
        detached: bool = False,
        max_result_bytes: int | None = None,
        budget: dict[str, int | float] | None = None,
        fallback_agent: Callable[..., Any] | str | None = None,
    ) -> ChildRun:
        """Start a child run. It is cancelled when this run ends before it, unless ``detached``. ``fallback_agent``: is
        started instead while too many of this agent's children have failed. Raises BreakerOpenStepError without one."""
        request = {
            "agent": _agent_name(agent),
            "input": input,
            "tier": tier,
            "detached": detached,
            "max_result_bytes": max_result_bytes,
            "budget": budget,
        }
        try:
            answer = await self._run.ask(SPAWN, request)
        except BreakerOpenStepError:
            if fallback_agent is None:
                raise
            answer = await self._run.ask(SPAWN, request | {"agent": _agent_name(fallback_agent)})
        return ChildRun(self._run, str(answer["run_id"]))

    async def spawn_many(
        self,
        tasks: Iterable[Task | tuple[Callable[..., Any] | str, Any]],
        when_full: str = "block",
        merge: Merge | None = None,
    ) -> Spawned:
        """Start children for the tasks: `Task`, or pairs of agent and input. When the queue of the ensemble is full:

        - ``block``: the others wait for a place. If all runs of the ensemble wait like that, the youngest's is refused.
        - ``defer``: the others are in ``deferred`` of the answer.
        - ``refuse``: EnsembleFullError; those that were started go on, ``details["started"]`` names them.
        - ``consolidate``: ``merge(others)``, a pure function, makes one task of the others, which waits for a place.

        Raises SpawnLimitError, StepFailedError.
        """

        async def start(tasks: list[Task], full: str) -> list[Any]:
            answers: list[Any] = []
            for first in range(0, len(tasks), _SPAWNS_AT_ONCE):
                asked = [self._spawn(task, full) for task in tasks[first : first + _SPAWNS_AT_ONCE]]
                answers += await asyncio.gather(*asked, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, EnsembleFullError):
                    raise answer
            return answers

        return await spawn_many(start, checked_tasks(tasks), when_full, merge)

    async def _spawn(self, task: Task, when_full: str) -> ChildRun:
        request = {
            "agent": _agent_name(task.agent),
            "input": task.input,
            "tier": task.tier,
            "detached": task.detached,
            "max_result_bytes": task.max_result_bytes,
            "budget": task.budget,
            "when_full": when_full,
        }
        return ChildRun(self._run, str((await self._run.ask(SPAWN, request))["run_id"]))

    async def capacity(self) -> Capacity:
        """What is left to this run: of its budgets and those above it, of depth, children and places in the queue, and
        how many children it makes sense to start (``fan_out``, ``limited_by``). None: nothing bounds it. It is a
        snapshot: others of the same budget go on."""
        return msgspec.convert(await self._run.ask(CAPACITY, {}), Capacity)

    def lock(self, name: str, timeout: Duration | None = None) -> Lock:
        """``async with ctx.lock("name") as lock:`` holds it, for a minute at most when others wait."""
        return Lock(self._run, name, _seconds(timeout))

    def foreign_lock(self, name: str, release: Callable[[ForeignLock], Any]) -> ForeignLock:
        """``async with ctx.foreign_lock("name", release=fn) as lock:`` around taking a lock that is not agentrt's and
        all that is done with it. ``fn(lock)`` (sync or async) releases what ``lock.owner`` holds, if it holds it; it is
        called at the end, and when the run is ended from outside meanwhile."""
        return ForeignLock(self._run, name, release)

    async def checkpoint(self, state: Any) -> None:
        """Begin a new segment: the program ends here and is started again from its top, with ``ctx.restored`` set to
        ``state``. Nothing after it runs."""
        await self._run.ask(CHECKPOINT, {"state": state})

    def emit(self, data: Any) -> None:
        """Tell observers; journaled, once, when the agent next waits."""
        self._run.ask_without_answer(EMIT, {"data": data})

    def log(self, message: str, level: str = "info") -> None:
        """A line for the operator; silent when the run is replayed."""
        if level not in LEVELS:
            raise InputError(f"{level!r} is no level", hint=", ".join(LEVELS))
        self._run.log(level, message)

    def on_unwind(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``handler`` (sync or async, with no arguments) if the run is ended from outside; last set, first called.
        Returns it, so that it can be used as a decorator."""
        self._run.handlers.append(handler)
        return handler


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else parse_duration(timeout)


def _tool_name(tool: Callable[..., Any] | str) -> str:
    if isinstance(tool, str):
        return tool
    declaration = declaration_of(tool)
    if declaration is None:
        raise InputError(f"{tool!r} is no tool", hint="Decorate it with @tool(kind=…), or give a tool's name")
    return declaration.name


def _agent_name(agent: Callable[..., Any] | str) -> str:
    if isinstance(agent, str):
        return agent
    declaration = agent_declaration_of(agent)
    if declaration is None:
        raise InputError(f"{agent!r} is no agent", hint="Decorate it with @agent, or give an agent's name")
    return declaration.name
