"""What the engine asks of its surroundings, and what a machine asks of the engine."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from agentrt.errors import AgentrtError, StoreError
from agentrt.fold import Step
from agentrt.records import Cost
from agentrt.stores.base import Batch, Row, Store
from agentrt.tools.outcome import Done
from agentrt.tools.spec import ToolSpec

if TYPE_CHECKING:
    from agentrt.engine.machine import RunMachine
    from agentrt.engine.steps import StepInFlight
    from agentrt.models.catalog import Candidate
    from agentrt.models.service import ModelOutcome, Planned


class Registry(Protocol):
    def get(self, name: str) -> ToolSpec:
        """Raises UnknownToolError."""


class Tools(Protocol):
    """The part of `agentrt.tools.pool.ToolPool` that the engine uses."""

    @property
    def registry(self) -> Registry: ...

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
        """Call a tool, or its reconcile function; ``done`` is called once, later, on the loop. Raises QueueFullError,
        InputError, ClosedError."""

    def cancel(self, call: Any) -> None:
        """Nobody wants this call, which `call` returned; its outcome still comes."""

    def start(self) -> None:
        """Called once, on the loop, before the first call."""

    def statistics(self) -> Any: ...

    def stop(self) -> None:
        """The node stops: begin no call any more. Those that have not begun end as evicted, and what runs is told
        (SIGUSR1)."""

    def evict(self) -> None:
        """After `stop`: end what still runs; outcomes that say so follow."""

    async def close(self) -> None:
        """No outcome is delivered from now on."""

    # A provider whose tools compete for the CPU may have ``urgent(wanted)`` as well: see `ToolPool.urgent`. One that
    # keeps processes ready may have ``prewarm(counts)``, called on the loop: see `ToolPool.prewarm`. One whose
    # calls are wasm guests may have ``attach(backend)``, called once before `start`: see `agentrt.backends.wasm`. One
    # that has to ask somebody which tools there are may have ``async open()``, awaited once on the loop before `start`:
    # the node accepts nothing and no run goes on before. What it raises keeps the runtime from starting.


class Models(Protocol):
    """The part of `agentrt.models.service.ModelService` that the engine uses."""

    def plan(self, payload: bytes, *, tenant: str, tier: int, context_tokens_max: int = ...) -> "Planned":
        """What a request of ``model.generate`` asks for, and which models may answer. Raises InputError kinds."""

    def call(
        self,
        planned: "Planned",
        candidate: "Candidate",
        *,
        key: str,
        tenant: str,
        attempt: int,
        attempts_max: int,
        done: "Callable[[ModelOutcome], None]",
        on_text: Callable[[str], None] | None = None,
    ) -> object:
        """Make one attempt; ``done`` is called once, later, on the loop. Raises QueueFullError, ClosedError."""

    def cancel(self, call: object) -> None:
        """Nobody wants the outcome any more; it still comes."""

    def statistics(self) -> Any: ...

    async def close(self) -> None:
        """No outcome is delivered from now on."""


class Hold(msgspec.Struct, frozen=True):
    """A step may not begin now. Whoever says so calls `RunMachine.unhold` when it may, and at ``until_ns`` (Unix ns) at
    the latest the run looks again by itself. ``reason``: one of `states.WAIT_REASONS`."""

    reason: str
    detail: str
    until_ns: int


class Refusal(msgspec.Struct, frozen=True):
    """A step may not begin. ``ends``: nor may the run go on, which ends as LOOP_DETECTED if that is what the error
    says, else as BUDGET_EXHAUSTED."""

    error: AgentrtError
    ends: bool = False


MachineT = TypeVar("MachineT", contravariant=True)


class RunPort(Protocol[MachineT]):
    """What a `RunMachine` may ask for.

    Nothing here calls back into the machine before it has returned."""

    attempts_max: int
    #: Whether `admit` may say anything but yes.
    admits: bool
    journal_bytes_max: int
    result_bytes_max: int
    now_ns: Callable[[], int]  # wall clock, Unix ns

    def tool(self, name: str) -> ToolSpec:
        """Raises UnknownToolError."""

    def admit(self, machine: MachineT, step: "StepInFlight") -> Hold | Refusal | None:
        """May the step begin, as far as amounts and rates go? None: yes, and what it may use is reserved."""

    def may_repeat(self, machine: MachineT, step: "StepInFlight") -> AgentrtError | None:
        """May the step of a run with an account be attempted once more? None: yes, and it is counted."""

    def unheld(self, machine: MachineT, step: "StepInFlight") -> None:
        """The step was held by `admit` and is not wanted any more."""

    def settled(self, machine: MachineT, step: "StepInFlight") -> None:
        """The step of a run with an account has an outcome and ``cost``; it goes with the records that are pending."""

    def count_step(self, op: str, ok: bool, attempt: int, took_ns: int | None, cost: Cost) -> None:
        """A step has an outcome; ``took_ns``: since it was prepared, None for one that never is."""

    def settled_recorded(self, machine: MachineT, step: "Step") -> None:
        """The same of a step that only the journal knows."""

    def released(self, machine: MachineT, step: "StepInFlight") -> None:
        """The same of a step that certainly had no effect and will not be done."""

    def account_rows(self, machine: MachineT) -> tuple[Row, ...]:
        """The run's account as it is now, to be stored with the records that are pending."""

    def end_account(self, machine: MachineT) -> tuple[Row, ...]:
        """The run ends now: rows that go with its RunEnded."""

    def capacity(self, machine: MachineT) -> bytes:
        """What is left to the run, as JSON."""

    def commit(self, machine: MachineT, batch: Batch, done: Callable[[StoreError | None], None]) -> None: ...

    def call_tool(self, machine: MachineT, step: "StepInFlight") -> None:
        """Execute the step; its outcome arrives at `RunMachine.on_outcome`."""

    def plan_model(self, machine: MachineT, step: "StepInFlight") -> None:
        """Set the step's ``plan``, ``tool`` (the profile) and ``reserved``. Raises InputError kinds."""

    def reserve_model(self, step: "StepInFlight") -> None:
        """Set ``reserved`` for the step's attempt and what those before it may have cost."""

    def stop_call(self, machine: MachineT, step: "StepInFlight") -> None:
        """Nobody wants this call of a tool any more, which was given to `call_tool`; its outcome follows. One that has
        begun may go on to its end: see `agentrt.tools.pool.ToolPool.cancel`."""

    def stop_model(self, machine: MachineT, step: "StepInFlight") -> None:
        """Nobody wants the answer of this step, which was given to `call_tool`; its outcome follows soon."""

    def reconcile(self, machine: MachineT, step: "StepInFlight") -> None:
        """Ask the step's tool what became of it; the answer arrives at `RunMachine.on_reconciled`."""

    def begin(self, machine: MachineT, step: "StepInFlight") -> None:
        """A step that is no tool call is durable (again, after a restart): act, or see to it that what it waits for
        finds it. Its outcome arrives at `RunMachine.answer`."""

    def wait_over(self, machine: MachineT, path: str) -> None:
        """The step waited for a lock or a child, and does not any more."""

    def on_foreign(self, machine: MachineT) -> None:
        """It holds another number of locks elsewhere (``machine.foreign``)."""

    def end_children(self, machine: MachineT, children: tuple[str, ...]) -> None:
        """Cancel these runs; `RunMachine.child_gone` follows for each that has ended or never was."""

    def start_again(self, machine: MachineT) -> None:
        """A new segment begins: start a guest from the machine's ``restored``."""

    def on_idle(self, machine: MachineT) -> None:
        """The guest is suspended and waits may be all it has: `RunMachine.park` when it has been so for long."""

    def mind_clock(self, machine: MachineT, after_ns: int) -> None:
        """Call `RunMachine.clock_due` after that time, if the run is in memory then."""

    def on_safe_point(self, machine: MachineT) -> None:
        """The guest has stopped where it was asked to; it is told to go on from there."""

    def woken(self, machine: MachineT) -> None:
        """What a run that `rests` waited for is there."""

    def on_emitted(self, machine: MachineT, path: str, data: bytes) -> None:
        """What the run told its observers is durable."""

    def join_later(self, machine: MachineT) -> None:
        """The machine has records that wait for company: call its `flush` within the commit delay."""

    def log(self, machine: MachineT, payload: bytes) -> None: ...

    def on_accepted(self, machine: MachineT) -> None:
        """RunAccepted is durable."""

    def on_cancelled(self, machine: MachineT) -> None:
        """CancelRequested is durable."""

    def on_ended(self, machine: MachineT) -> None:
        """RunEnded is durable, or was never needed again: the machine is done."""

    def on_parked(self, machine: MachineT) -> None:
        """The guest is gone and nothing of the run is under way: it waits, durably (``machine.wait``), or it was woken
        or told to end meanwhile, or the node stops."""

    def on_discarded(self, machine: MachineT, error: AgentrtError) -> None:
        """An append was refused; the guest and all tools are gone, the store has the truth."""


class Runs(Protocol):
    """What the services that wake waiting runs need of the engine."""

    now_ns: Callable[[], int]  # wall clock, Unix ns

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """``done(function(store), None)`` or ``done(None, error)``, later; the function runs on a reader thread. Nobody
        is answered once the node stops."""

    def look(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """`read` for callers from outside, who are answered in any case."""

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None:
        """Make rows durable that belong to no run."""

    def drop(self, rows: tuple[Row, ...]) -> None:
        """Remove rows that nobody needs; tried again until it is done or the node ends."""

    def later(self, again: Callable[[], None]) -> None:
        """Call it in a while: the store could not be read, or refused. Not called once the node ends."""

    def with_run(
        self,
        run_id: str,
        action: "Callable[[RunMachine], None]",
        missing: Callable[[BaseException | None], None],
    ) -> None:
        """Have ``action(machine)`` called, with the run read from the store if need be; ``missing(None)`` if it has
        ended or never was, ``missing(error)`` if it cannot be read."""
