"""What policies answer, and how they are asked. docs/durable-runs.md says when.

A policy is a plugin: an object with a ``version`` (text; runs are pinned to it) and ``decide(kind, facts)``, which is
pure and takes less than a millisecond. One that raises, overruns, or answers something else has answered deny.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

#: CPU time of one decision; past it the answer is deny.
OVERRUN_NS: Final = 1_000_000
#: Wall time of the same: a policy that waits for something blocks the node. Generous, for the thread may be preempted.
OVERRUN_WALL_NS: Final = 20_000_000
_REASON_CHARS_MAX: Final = 500


class Allow(msgspec.Struct, frozen=True):
    """It may go on."""


class Deny(msgspec.Struct, frozen=True):
    """It may not, for good: a run is refused, or ends as FAILED with ``denied``."""

    reason: str


class Defer(msgspec.Struct, frozen=True):
    """Not now: a run is refused until later (`DeferredError`), or waits for an operator."""

    reason: str


Decision = Allow | Deny | Defer
ALLOW: Final = Allow()


class Policy(Protocol):
    """What is asked, by ``kind``, and the facts of each:

    - ``run.accept``: a run is about to be accepted. Facts: tenant, agent, version, tier, parent (None, or run and
      step), and how it came: door, source, type.
    - ``run.resume``: a run is brought back, or its approval was answered. Facts: run, tenant, agent, version, tier,
      pins.

    Allow whatever else is asked: later releases may ask more.
    """

    #: Runs are pinned to it: another one for other rules.
    version: str

    def decide(self, kind: str, facts: Mapping[str, Any]) -> Decision:
        """A function of its arguments and of the policy's settings."""


_log: Final = logging.getLogger(__name__)


class Policies:
    """The policies of a node, in the order of the configuration. ``cpu_ns`` and ``wall_ns``: clocks of this thread."""

    def __init__(
        self,
        policies: Sequence[tuple[str, Policy]] = (),
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        wall_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._policies: Final = tuple(policies)
        self._cpu_ns, self._wall_ns = cpu_ns, wall_ns
        self.denied = 0

    def __bool__(self) -> bool:
        return bool(self._policies)

    @property
    def pins(self) -> dict[str, str]:
        """What runs are pinned to."""
        if not self._policies:
            return {}
        return {"policy": ", ".join(f"{name} {policy.version}" for name, policy in self._policies)}

    def decide(self, kind: str, facts: Mapping[str, Any]) -> Decision:
        """The first denial, else the first deferral, else allow."""
        found: Decision = ALLOW
        for name, policy in self._policies:
            answer = self._ask(name, policy, kind, facts)
            if isinstance(answer, Deny):
                self.denied += 1
                return answer
            if isinstance(answer, Defer) and isinstance(found, Allow):
                found = answer
        return found

    def _ask(self, name: str, policy: Policy, kind: str, facts: Mapping[str, Any]) -> Decision:
        cpu, wall = self._cpu_ns(), self._wall_ns()
        try:
            answer = policy.decide(kind, facts)
        except Exception as error:
            _log.warning("policy %s raised %r on %s: denied", name, error, kind)
            return Deny(f"policy {name} failed")
        if self._cpu_ns() - cpu > OVERRUN_NS or self._wall_ns() - wall > OVERRUN_WALL_NS:
            _log.warning("policy %s took too long for %s: denied", name, kind)
            return Deny(f"policy {name} took too long")
        if isinstance(answer, Allow):
            return answer
        if isinstance(answer, Deny | Defer) and isinstance(answer.reason, str):
            return type(answer)(f"policy {name}: {answer.reason}"[:_REASON_CHARS_MAX])
        _log.warning("policy %s answered %r to %s: denied", name, answer, kind)
        return Deny(f"policy {name} gave no answer")
