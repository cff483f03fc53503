"""Steps of ``model.generate`` on their way to the model gateway and back.

A call to a model has no effect but its cost. So it is executed like a call of a keyed tool whose key never ends: when
nobody saw how an attempt ended it is made again, each attempt counted and journaled, and what an attempt may have cost
that nobody saw is charged in full.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from agentrt.engine.ports import Models
from agentrt.engine.steps import StepInFlight
from agentrt.errors import AgentrtError, InputError
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.fold import sum_costs
from agentrt.records import Cost
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolSpec

if TYPE_CHECKING:
    from agentrt.engine.machine import RunMachine
    from agentrt.models.catalog import Candidate
    from agentrt.models.service import ModelOutcome, Planned

#: Of a call that was not made because nobody wanted it any more.
NOT_CALLED: Final = ToolOutcome(
    False, b'{"code":"cancelled","message":"nobody wanted the answer any more"}', "cancelled", 0, False
)
#: How a step whose outcome nobody saw is settled.
MODEL_SPEC: Final = ToolSpec("model.generate", "keyed", 0, True, "", cls="model", key_ttl_ns=2**62)


#: What a call of a model came to, and what the gateway says of it: None if it never got there.
ModelDone = Callable[[ToolOutcome, "ModelOutcome | None"], None]


class Streamed(msgspec.Struct, frozen=True):
    """A piece of an answer that a model is making; not journaled. When ``attempt`` grows, the text begins again."""

    run_id: str
    path: str
    attempt: int
    text: str


class NoModelsError(InputError):
    """This node has no models."""

    code = "unsupported"


class FellBack(NamedTuple):
    """Another model answers than the first choice."""

    first: str
    model: str  # provider/name
    attempt: int

    def decision(self, run: str, step: str, now_ns: int) -> Decision:
        """As an event."""
        return Decision(
            at_ns=now_ns,
            control=Control.ROUTING,
            action=Action.FALL_BACK,
            scope=Scope.MODEL,
            name=self.model,
            limit="attempt",
            value=self.attempt,
            run=run,
            step=step,
            detail=f"in place of {self.first}",
        )


class ModelChoice:
    """What a step asks for, and whom: each attempt goes to the next of the models that meet its needs, and past those
    that the gate refuses."""

    __slots__ = ("_passed", "_shift", "planned")

    def __init__(self, planned: "Planned") -> None:
        self.planned: Final = planned
        self._shift = 0
        self._passed = 0  # for the attempt that is looked at

    @property
    def tier(self) -> int:
        """Of its calls, if it is below the run's."""
        return self.planned.plan.tier

    def candidate(self, attempt: int) -> "Candidate":
        """Whom the attempt (from 1) goes to."""
        candidates = self.planned.plan.candidates
        return candidates[(attempt - 1 + self._shift) % len(candidates)]

    def pass_on(self) -> bool:
        """The model is refused for now: look at the next one. False: all have been looked at."""
        self._passed += 1
        if self._passed >= len(self.planned.plan.candidates):
            self._passed = 0
            return False
        self._shift += 1
        return True

    def asks_again(self, attempt: int) -> bool:
        """Whether the attempt goes to the model of the one before."""
        return attempt > 1 and self.candidate(attempt).name == self.candidate(attempt - 1).name

    def fell_back(self, attempt: int) -> FellBack | None:
        """Whom it goes to if that is not the first choice."""
        self._passed = 0
        first, now = self.planned.plan.candidates[0], self.candidate(attempt)
        return None if now.name == first.name else FellBack(first.name, f"{now.model.provider}/{now.name}", attempt)


class ModelSteps:
    """The engine's way to the gateway. ``later`` has a call made in a later turn of the loop; ``tell``: a
    piece of an answer has come."""

    def __init__(
        self,
        models: Models | None,
        attempts_max: int,
        later: Callable[..., Any],
        tell: Callable[[Streamed], None],
    ) -> None:
        self._models = models
        self._attempts_max = attempts_max
        self._later = later
        self._tell = tell

    def plan(self, machine: "RunMachine", step: StepInFlight) -> None:
        """See RunPort.plan_model."""
        if self._models is None:
            raise NoModelsError("model.generate: this node has no models", hint="Configure [models.…]: docs/models.md")
        bound = machine.bound("context_tokens")
        planned = self._models.plan(
            step.request,
            tenant=machine.accepted.tenant,
            tier=machine.tier,
            **({} if bound is None else {"context_tokens_max": bound}),
        )
        step.plan = ModelChoice(planned)
        step.tool = planned.plan.profile
        self.reserve(step)

    def reserve(self, step: StepInFlight) -> None:
        """See RunPort.reserve_model."""
        candidate = step.plan.candidate(step.attempt)
        step.reserved = sum_costs((step.cost, Cost(0, 0, candidate.reserved_micro_usd, candidate.reserved.tokens)))

    def call(self, machine: "RunMachine", step: StepInFlight, done: ModelDone) -> None:
        """See RunPort.call_tool; the outcome goes to ``done``, with what the gateway says of it."""
        assert self._models is not None and step.key is not None
        try:
            step.call = self._models.call(
                step.plan.planned,
                step.plan.candidate(step.attempt),
                key=step.key,
                tenant=machine.accepted.tenant,
                attempt=step.attempt,
                attempts_max=self._attempts_max,
                done=partial(self._done, step, done),
                on_text=partial(self._on_text, machine.run_id, step.path, step.attempt),
            )
        except AgentrtError as error:
            payload = msgspec.json.encode(error.to_dict())
            self._later(done, ToolOutcome(False, payload, error.code, 0, False), None)

    def stop(self, step: StepInFlight) -> None:
        """See RunPort.stop_model."""
        if self._models is not None and step.call is not None:
            self._models.cancel(step.call)

    def _on_text(self, run_id: str, path: str, attempt: int, text: str) -> None:
        self._tell(Streamed(run_id, path, attempt, text))

    def _done(self, step: StepInFlight, done: ModelDone, outcome: "ModelOutcome") -> None:
        step.call = None
        step.cost = sum_costs((step.cost, Cost(0, 0, outcome.cost_micro_usd, outcome.usage.tokens)))
        done(ToolOutcome(outcome.ok, outcome.payload, outcome.code, 0, False), outcome)
