"""Steps of ``model.generate`` on their way to the model gateway and back.

A call to a model has no effect but its cost. So it is executed like a call of a keyed tool whose key never ends: when
nobody saw how an attempt ended it is made again, each attempt counted and journaled, and what an attempt may have cost
that nobody saw is charged in full.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agentrt.engine.ports import Models
from agentrt.engine.steps import StepInFlight
from agentrt.errors import AgentrtError, InputError
from agentrt.fold import sum_costs
from agentrt.records import Cost
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolSpec

if TYPE_CHECKING:
    from agentrt.engine.machine import RunMachine
    from agentrt.models.service import ModelOutcome

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


class ModelSteps:
    """The engine's way to the gateway. ``later`` has a call made in a later turn of the loop; ``tell`` is None while
    there are no observers."""

    def __init__(
        self,
        models: Models | None,
        attempts_max: int,
        later: Callable[..., Any],
        tell: Callable[[], Callable[[str, Any], None] | None],
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
        step.plan = planned
        step.tool = planned.plan.profile
        self.reserve(step)

    def reserve(self, step: StepInFlight) -> None:
        """See RunPort.reserve_model."""
        candidate = step.plan.candidate(step.attempt)
        step.reserved = sum_costs((step.cost, Cost(0, 0, candidate.reserved_micro_usd, candidate.reserved.tokens)))

    def call(self, machine: "RunMachine", step: StepInFlight, done: ModelDone) -> None:
        """See RunPort.call_tool; the outcome goes to ``done``, with what the gateway says of it."""
        assert self._models is not None and step.key is not None
        tell = self._tell()
        try:
            step.call = self._models.call(
                step.plan,
                key=step.key,
                tenant=machine.accepted.tenant,
                attempt=step.attempt,
                attempts_max=self._attempts_max,
                done=partial(self._done, step, done),
                on_text=None if tell is None else partial(self._on_text, tell, machine.run_id, step.path, step.attempt),
            )
        except AgentrtError as error:
            payload = msgspec.json.encode(error.to_dict())
            self._later(done, ToolOutcome(False, payload, error.code, 0, False), None)

    def stop(self, step: StepInFlight) -> None:
        """See RunPort.stop_model."""
        if self._models is not None and step.call is not None:
            self._models.cancel(step.call)

    def _on_text(self, tell: Callable[[str, Any], None], run_id: str, path: str, attempt: int, text: str) -> None:
        tell("streamed", Streamed(run_id, path, attempt, text))

    def _done(self, step: StepInFlight, done: ModelDone, outcome: "ModelOutcome") -> None:
        step.call = None
        step.cost = sum_costs((step.cost, Cost(0, 0, outcome.cost_micro_usd, outcome.usage.tokens)))
        done(ToolOutcome(outcome.ok, outcome.payload, outcome.code, 0, False), outcome)
