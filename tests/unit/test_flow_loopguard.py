"""The loop guard: what it finds, what it leaves alone, and what it forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from agentrt.errors import ConfigError
from agentrt.flow.decisions import Action
from agentrt.flow.loopguard import PERIOD_MAX, RUNS_MAX, Found, LoopGuard, LoopLimits, Sign


def naive_turns(events: list[tuple[str, bytes]], period: int) -> int:
    """How often the last ``period`` events have come in a row."""
    turn, turns = events[-period:], 0
    while len(turn) == period and events[len(events) - (turns + 1) * period : len(events) - turns * period] == turn:
        turns += 1
    return turns


class LoopModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.guard = LoopGuard(LoopLimits(iterations=30, spend_micro_usd=100, repeats=3, rallies=2))
        self.steps: dict[str, list[tuple[str, bytes]]] = {}
        self.talk: list[tuple[str, bytes]] = []
        self.iterations = self.spend = 0

    @rule(run=st.sampled_from(["r", "c1", "c2"]), digest=st.sampled_from([b"x", b"y", b"z"]))
    def step(self, run: str, digest: bytes) -> None:
        found = self.guard.step("r", run, "agent", "tool.call t", digest)
        self.iterations += 1
        if self.iterations > 30:
            assert found == Found(Sign.ITERATIONS, self.iterations, 30)
            return
        if self.spend > 100:
            assert found == Found(Sign.SPEND, self.spend, 100)
            return
        events = self.steps.setdefault(run, [])
        events.append(("agent", digest))
        expected = [p for p in range(1, PERIOD_MAX + 1) if naive_turns(events, p) >= 3]
        assert (found is not None) is bool(expected)
        if found is not None:
            assert found.sign is Sign.REPETITION and len(found.cycle) == expected[0]
            assert found.count == naive_turns(events, expected[0])

    @rule(agent=st.sampled_from(["a", "b"]), digest=st.sampled_from([b"1", b"2"]))
    def talk_to(self, agent: str, digest: bytes) -> None:
        found = self.guard.hand_over("r", "r", agent, "event.send", digest)
        self.talk.append((agent, digest))
        expected = [
            p
            for p in range(1, PERIOD_MAX + 1)
            if naive_turns(self.talk, p) >= 2 and len({agent for agent, _ in self.talk[-p:]}) > 1
        ]
        assert (found is not None) is bool(expected)

    @rule(cost=st.integers(0, 40))
    def spent(self, cost: int) -> None:
        self.spend += cost
        assert (self.guard.spent("r", cost) is not None) is (self.spend > 100)

    @rule()
    def output(self) -> None:
        self.guard.output("r")
        self.iterations = self.spend = 0

    @rule(run=st.sampled_from(["c1", "c2"]))
    def child_ends(self, run: str) -> None:
        self.guard.run_ended("r", run)
        self.steps.pop(run, None)

    @rule()
    def restart(self) -> None:
        old, limits = self.guard, self.guard.limits
        self.guard = LoopGuard(limits)
        self.guard.restore("r", *old.snapshot("r"))
        for run, events in self.steps.items():
            self.guard.remember("r", run, "agent", [("tool.call t", digest) for _, digest in events])
        self.talk = []


TestLoop = LoopModel.TestCase


@given(st.lists(st.tuples(st.sampled_from([b"x", b"y", b"z"]), st.integers(1, 2 * PERIOD_MAX)), max_size=8))
def test_a_step_that_is_repeated_for_long_leaves_no_trace_in_what_is_counted_after_it(
    steps: list[tuple[bytes, int]],
) -> None:
    guard = LoopGuard(LoopLimits(repeats=3))
    events: list[tuple[str, bytes]] = []
    for digest in (digest for digest, times in steps for _ in range(times)):
        events.append(("agent", digest))
        turns = [naive_turns(events, period) for period in range(1, PERIOD_MAX + 1)]
        period = next((period for period, times in enumerate(turns, 1) if times >= 3), None)
        found = guard.step("r", "r", "agent", "tool.call t", digest)
        told = None if found is None else (len(found.cycle), found.count)
        assert told == (None if period is None else (period, turns[period - 1]))


def test_fault_B78_a_child_that_repeats_one_call_is_stopped_with_the_evidence() -> None:
    guard = LoopGuard()
    found = None
    calls = 0
    while found is None:
        calls += 1
        found = guard.step("root", "child", "searcher", "tool.call search", b"\x01")
    assert calls == 50
    assert found.sign is Sign.REPETITION and found.cycle == (("searcher", "tool.call search", "01"),)
    decision = found.decision("root", "child", "1:50", 7)
    assert decision.action is Action.END and decision.run == "child" and "search" in decision.detail


def test_fault_B79_a_session_that_is_renewed_again_and_again_resets_nothing() -> None:
    guard = LoopGuard(LoopLimits(iterations=100))
    found = None
    for session in range(1000):
        found = guard.step("root", f"child{session}", "worker", "tool.call t", session.to_bytes(4, "big"))
        guard.run_ended("root", f"child{session}")
        if found is not None:
            break
    assert found is not None and found.sign is Sign.ITERATIONS and session == 100


def test_two_agents_that_hand_the_same_work_to_and_fro_down_a_chain_of_children() -> None:
    guard = LoopGuard()
    run, found, depth = "root", None, 0
    while found is None:
        agent, other = ("writer", "critic") if depth % 2 == 0 else ("critic", "writer")
        child = f"child{depth}"
        # Others of the ensemble talk meanwhile: the chain of ancestors shows it all the same.
        guard.hand_over("root", "other", "noise", "event.send", depth.to_bytes(4, "big"))
        found = guard.hand_over("root", run, agent, f"run.spawn {other}", other.encode(), child)
        run, depth = child, depth + 1
    assert depth == 16  # eight rallies of two
    assert found.sign is Sign.PING_PONG and {agent for agent, _, _ in found.cycle} == {"writer", "critic"}


def test_a_fan_out_of_equal_children_is_no_loop() -> None:
    guard = LoopGuard()
    for index in range(500):
        digest = index.to_bytes(4, "big")
        assert guard.step("root", "root", "mapper", "run.spawn worker", digest) is None
        assert guard.hand_over("root", "root", "mapper", "run.spawn worker", digest, f"c{index}") is None
        assert guard.step("root", f"c{index}", "worker", "tool.call config", b"same") is None


def test_steps_that_make_progress_are_no_loop() -> None:
    guard = LoopGuard(LoopLimits(iterations=50))
    for index in range(500):
        assert guard.step("root", "root", "agent", "tool.call next", index.to_bytes(4, "big")) is None
        if index % 40 == 0:
            guard.output("root")


def test_signs_can_be_switched_off_one_by_one() -> None:
    guard = LoopGuard(LoopLimits(iterations=0, spend_micro_usd=0, repeats=0, rallies=0))
    for _ in range(20_000):
        assert guard.step("r", "r", "a", "tool.call t", b"x") is None
        assert guard.hand_over("r", "r", "a", "event.send", b"x") is None
    assert guard.spent("r", 10**12) is None


@given(st.integers(2, 50), st.integers(1, PERIOD_MAX))
def test_every_short_cycle_is_found_after_its_turns(repeats: int, period: int) -> None:
    guard = LoopGuard(LoopLimits(repeats=repeats))
    for index in range(repeats * period):
        found = guard.step("r", "r", "a", "t", bytes([index % period]))
        assert (found is not None) is (index == repeats * period - 1)


def test_memory_is_bounded_and_goes_with_the_ensemble() -> None:
    guard = LoopGuard()
    for index in range(3 * RUNS_MAX):
        guard.step("root", f"c{index}", "a", "t", b"x")
        guard.hand_over("root", "root", "a", "run.spawn", index.to_bytes(4, "big"), f"c{index}")
    ensemble = guard._ensembles["root"]
    assert len(ensemble.steps) <= RUNS_MAX and len(ensemble.chains) <= RUNS_MAX
    guard.run_ended("root", "root")
    assert not len(guard)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ConfigError):
        LoopLimits(repeats=1)
    with pytest.raises(ConfigError):
        LoopLimits(iterations=-1)
