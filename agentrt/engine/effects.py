"""What a step does: whether it may, its call or what it tells others once it is durable, and how it is stopped.

The outcome comes to `RunMachine.on_outcome` or `RunMachine.answer`, not from inside a machine's own call. Loop thread
only.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec

from agentrt.engine.access import StoreAccess
from agentrt.engine.admission import Intake
from agentrt.engine.downtime import Downtime
from agentrt.engine.entrance import Entrance
from agentrt.engine.family import Family
from agentrt.engine.flow import Flow
from agentrt.engine.gates import Gates
from agentrt.engine.locks import Locks
from agentrt.engine.machine import RunMachine
from agentrt.engine.mailbox import Mailbox
from agentrt.engine.modelsteps import NOT_CALLED, ModelSteps
from agentrt.engine.ports import Hold, Refusal, Tools
from agentrt.engine.steps import EventSend, StepInFlight, decode, registration, send_address
from agentrt.engine.timers import Timers
from agentrt.errors import AgentrtError
from agentrt.flow.timeouts import Layer
from agentrt.tools.outcome import ToolOutcome

_AFTER_NS: Final = 10_000_000  # a tool is stopped so long after its run's deadline, which is to be met first


class EffectRuns(Protocol):
    """What it needs of the engine."""

    now_ns: Callable[[], int]
    attempts_max: int

    @property
    def closing(self) -> bool: ...

    def find_joins(self, machine: RunMachine) -> None:
        """Its children are lent what it is lent."""


class Effects:
    """Of the steps of one node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: EffectRuns,
        access: StoreAccess,
        tools: Tools,
        models: ModelSteps,
        entrance: Entrance,
        intake: Intake,
        flow: Flow,
        gates: Gates | None,
        family: Family,
        mailbox: Mailbox,
        locks: Locks,
        timers: Timers,
        downtime: Downtime,
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._now_ns = runs.now_ns
        self._access = access
        self._tools = tools
        self._tools_call = tools.call
        self._tool = tools.registry.get
        self._models = models
        self._entrance = entrance
        self._intake = intake
        self._flow = flow
        self._gates = gates
        self._family = family
        self._mailbox = mailbox
        self._locks = locks
        self._timers = timers
        self._downtime = downtime
        self.tool_calls = 0
        #: See RunPort.
        self.admit: Callable[[RunMachine, StepInFlight], Hold | Refusal | None] = self._admit_amounts
        if gates is not None:
            self.admit = partial(self._admit_step, gates)

    def _admit_step(self, gates: Gates, machine: RunMachine, step: StepInFlight) -> Hold | Refusal | None:
        """Rates first: what waits for them reserves nothing."""
        verdict = gates.admit(machine, step)
        if step.op == "event.send":
            return verdict
        # A further attempt keeps what was reserved for the first; one of a model may need more.
        if verdict is None and (step.attempt == 1 or step.plan is not None):
            verdict = self._admit_amounts(machine, step)
            if verdict is not None:
                gates.unheld(machine.run_id, step.path, child=not step.tool)
        return verdict

    def _admit_amounts(self, machine: RunMachine, step: StepInFlight) -> Hold | Refusal | None:
        if step.op == "event.send":
            return None
        if step.plan is not None:
            self._models.reserve(step)  # the gate may have passed on to another model
        verdict = self._flow.admit(machine, step)
        if verdict is None and step.op == "run.spawn":
            verdict = self._entrance.admit_child(machine, step)
        return verdict

    def unheld(self, machine: RunMachine, step: StepInFlight) -> None:
        if self._gates is not None:
            self._gates.unheld(machine.run_id, step.path, child=not step.tool)
        self._flow.unheld(machine, step)
        if step.op == "run.spawn":
            self._intake.drop_child(f"{machine.run_id}/{step.path}")

    def call_tool(self, machine: RunMachine, step: StepInFlight) -> None:
        self.tool_calls += step.plan is None
        call = self._call if step.plan is None else self._models.call
        if self._gates is None or step.unwinding:
            call(machine, step, partial(self._told, machine, step))
        else:
            self._gates.dispatch(machine, step, call)

    def _call(
        self, machine: RunMachine, step: StepInFlight, done: Callable[..., None], *, reconcile: bool = False
    ) -> None:
        """``reconcile``: ask the tool what became of the step, in the tool's own time."""
        timeouts, clock = machine.timeouts, machine.clock
        timeout_ns = None
        bounded = timeouts.deadline_ns or clock is not None
        if bounded and not (step.unwinding or reconcile):  # who unwinds has a time of its own
            now_ns = self._now_ns()
            spent_ns = 0 if clock is None else clock.spent_ns(now_ns)
            left_ns, layer = timeouts.left(spent_ns, now_ns, self._tool(step.tool).timeout_ns)
            timeout_ns = None if layer is Layer.TOOL else max(0, left_ns) + _AFTER_NS
        try:
            call = self._tools_call(
                step.tool,
                step.args,
                key=step.key,
                tenant=machine.accepted.tenant,
                tier=machine.tier,
                attempt=step.attempt,
                done=done,
                timeout_ns=timeout_ns,
                reconcile=reconcile,
            )
        except AgentrtError as error:
            payload = msgspec.json.encode(error.to_dict())
            self._loop.call_soon(done, ToolOutcome(False, payload, error.code, 0, False))
        else:
            if not reconcile:  # a question is not stopped
                step.call = call

    def _told(self, machine: RunMachine, step: StepInFlight, outcome: ToolOutcome, model: object = None) -> None:
        self._flow.learn(machine, step, outcome.cost_ns)
        machine.on_outcome(step, outcome)

    def stop_call(self, machine: RunMachine, step: StepInFlight) -> None:
        if step.call is not None:
            self._tools.cancel(step.call)
        elif self._gates is not None and self._gates.withdraw(machine.run_id, step.path):
            self._loop.call_soon(machine.on_outcome, step, NOT_CALLED)

    def stop_model(self, machine: RunMachine, step: StepInFlight) -> None:
        if step.call is not None:
            self._models.stop(step)
        elif self._gates is not None and self._gates.withdraw(machine.run_id, step.path):
            self._loop.call_soon(machine.on_outcome, step, NOT_CALLED)

    def reconcile(self, machine: RunMachine, step: StepInFlight) -> None:
        self._ask_tool(machine, step, 1)

    def _ask_tool(self, machine: RunMachine, step: StepInFlight, time: int) -> None:
        self._call(machine, step, partial(self._tool_said, machine, step, time), reconcile=True)

    def _tool_said(self, machine: RunMachine, step: StepInFlight, time: int, outcome: ToolOutcome) -> None:
        """Whoever killed the host of the call may have killed the one that was asked about it, too. That is no answer,
        and a question has no effect."""
        asks = machine.open.get(step.handle) is step and not self._runs.closing
        if outcome.host_died and asks and time < self._runs.attempts_max:
            self._ask_tool(machine, step, time + 1)
        else:
            machine.on_reconciled(step, outcome)

    def begin(self, machine: RunMachine, step: StepInFlight) -> None:
        # Not at once: a machine is not called back before its own call has returned.
        self._loop.call_soon(self._begin, machine, step)

    def _begin(self, machine: RunMachine, step: StepInFlight) -> None:
        if self._runs.closing or machine.open.get(step.handle) is not step:
            return
        op = step.op
        if op == "run.spawn":
            self._family.spawn(machine, step)
        elif op == "run.join":
            self._family.join(machine, step)
            if self._locks.lent(machine.run_id) is not None and machine.open.get(step.handle) is step:
                self._runs.find_joins(machine)
        elif op == "event.send":
            self._send(machine, step)
        elif op == "lock.release":
            self._locks.release(machine, step)
        else:
            if op == "lock.acquire":
                self._locks.acquire(machine, step)
            found = registration(machine.run_id, machine.accepted.tenant, op, step.path, step.request, step.prepared_ns)
            if found.due_ns:
                due_ns = found.due_ns
                if op == "approval.request":
                    due_ns = self._downtime.moved(step.prepared_ns, due_ns)
                self._timers.arm(due_ns, machine.run_id, step.path, moved=due_ns != found.due_ns)
            if op == "event.wait":
                self._mailbox.match(found.address)

    def _send(self, machine: RunMachine, step: StepInFlight) -> None:
        request = decode(step.op, step.request)
        assert isinstance(request, EventSend)
        path = step.path
        event_id = request.id or f"{machine.run_id}/{path}"
        answer = msgspec.json.encode({"id": event_id})

        def done(fresh: bool, error: BaseException | None) -> None:
            if not fresh and error is None:
                machine.answer(path, True, answer)  # an event of this id was sent before
            elif error is not None:  # nothing was sent: the id says so if it was
                self._access.later(partial(self._begin, machine, step))

        address = send_address(machine.accepted.tenant, request)
        self._mailbox.publish(
            address,
            event_id,
            bytes(request.data),
            lambda rows, told: machine.answer(path, True, answer, rows, told),
            done,
        )
