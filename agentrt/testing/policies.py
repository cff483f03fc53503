"""The contract suite of policies: every sentence of agentrt/policy.py as a test.

class TestAcmePolicy(PolicyContract):
    @pytest.fixture
    def policy(self):
        return AcmePolicy(...)
"""

import copy
import time
from typing import Any, Final

import pytest

from agentrt.policy import OVERRUN_NS, Allow, Defer, Deny, Policies, Policy

ACCEPT: Final[dict[str, Any]] = {
    "tenant": "acme",
    "agent": "qualifier",
    "version": "0" * 64,
    "tier": 2,
    "parent": None,
}
RESUME: Final[dict[str, Any]] = {
    "run": "run_01HF7YAT00000000000000000A",
    "tenant": "acme",
    "agent": "qualifier",
    "version": "0" * 64,
    "tier": 2,
    "pins": {"agentrt": "0.1.0"},
}


class PolicyContract:
    """Subclass it, give it the ``policy`` fixture, and pytest runs it all. ``facts``: more of them, if the policy looks
    at what these do not have."""

    facts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("run.accept", ACCEPT),
        ("run.accept", ACCEPT | {"tier": 0, "parent": "run_01HF7YAT00000000000000000A/1:1"}),
        ("run.resume", RESUME),
    )

    @pytest.fixture
    def policy(self) -> Policy:
        raise NotImplementedError("the subclass says how its policy is made")

    def test_its_version_is_text_that_stays(self, policy: Policy) -> None:
        assert isinstance(policy.version, str) and policy.version
        before = policy.version
        policy.decide(*self.facts[0])
        assert policy.version == before

    def test_it_answers_what_there_is_to_answer(self, policy: Policy) -> None:
        for kind, facts in self.facts:
            answer = policy.decide(kind, facts)
            assert isinstance(answer, Allow | Deny | Defer)
            if not isinstance(answer, Allow):
                assert isinstance(answer.reason, str) and answer.reason

    def test_it_is_pure(self, policy: Policy) -> None:
        """Same facts, same answer, whatever was asked meanwhile; and the facts stay as they were."""
        first = []
        for kind, facts in self.facts:
            given = copy.deepcopy(facts)
            first.append(policy.decide(kind, given))
            assert given == facts
        assert [policy.decide(kind, facts) for kind, facts in reversed(self.facts)] == first[::-1]

    def test_it_lets_pass_what_it_does_not_know(self, policy: Policy) -> None:
        """Later releases ask about more, and tell more: a policy that raises has answered deny."""
        assert isinstance(policy.decide("run.of_a_later_release", {"tenant": "acme"}), Allow | Deny | Defer)
        for kind, facts in self.facts:
            assert policy.decide(kind, facts | {"of_a_later_release": 1}) == policy.decide(kind, facts)

    def test_it_is_fast(self, policy: Policy) -> None:
        """The median of many, for a machine may stall."""
        took: list[int] = []
        for _ in range(31):
            for kind, facts in self.facts:
                before = time.thread_time_ns()
                policy.decide(kind, facts)
                took.append(time.thread_time_ns() - before)
        assert sorted(took)[len(took) // 2] < OVERRUN_NS

    def test_the_node_takes_its_answers(self, policy: Policy) -> None:
        """As the node asks: what was no answer would be a denial that says so."""
        asked = Policies([("yours", policy)], cpu_ns=lambda: 0, wall_ns=lambda: 0)
        for kind, facts in self.facts:
            answer = asked.decide(kind, facts)
            assert type(answer) is type(policy.decide(kind, facts))
