"""Flow control as a whole, in virtual time: providers with limits, bursts, shapes of ensembles, outages, overload."""

from collections import Counter

import pytest

from agentrt.flow.aimd import AimdLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Scope
from agentrt.flow.gate import Call
from agentrt.flow.limits import AimdRule, BulkheadRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopGuard, LoopLimits, Sign
from perf.flow_world import START_NS, Done, Provider, S, World

WINDOW_NS = 2 * S
WEIGHTS = {"a": 1, "b": 2, "c": 3, "d": 4}


def ask(tenant: str, tier: int = 1) -> Call:
    return Call(tenant, tier, "model", provider="p", model="m")


def sixty_per_two_seconds(**given: object) -> GateLimits:
    rates = (RateRule(Scope.PROVIDER, "p", RateLimit(60, WINDOW_NS)),)
    return GateLimits(rates=rates, weights=WEIGHTS, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("retry_after", [False, True])
def test_200_agents_with_5_sub_agents_each_against_60_requests_per_2_s(retry_after: bool) -> None:
    world = World(sixty_per_two_seconds())
    provider = Provider(60, WINDOW_NS, retry_after=retry_after)
    finished: Counter[str] = Counter()
    for index in range(200):
        tenant = "abcd"[index % 4]
        joined = Counter({tenant: 5})

        def sub_agent_done(done: Done, joined: Counter[str] = joined) -> None:
            joined[done.call.tenant] -= 1
            if not joined[done.call.tenant]:
                finished[done.call.tenant] += 1

        for _ in range(5):  # all at once: 1,000 where 60 are allowed
            world.call(ask(tenant), provider, sub_agent_done)
    assert world.waiting_most > 600, "no burst"
    world.run()
    assert len(world.done) == 1000 and all(done.failure is None for done in world.done)
    assert finished == dict.fromkeys("abcd", 50), "an agent never got its answers"
    assert len(provider.log) <= 1.1 * 1000, "a retry storm"
    assert provider.most_in_a_window() <= 66
    assert world.now_ns - START_NS <= 1000 / 30 * 1.15 * S, "allowed places were left unused"
    # While all four wait, they share as they weigh.
    first_end = min(sum(1 for _, tenant, answer in provider.log if tenant == t and answer == "ok") for t in "abcd")
    assert first_end == 250
    shared = Counter(tenant for at_ns, tenant, answer in provider.log[:550] if answer == "ok")
    total = sum(shared.values())
    for tenant, weight in WEIGHTS.items():
        assert shared[tenant] == pytest.approx(total * weight / 10, rel=0.1), tenant


def test_a_provider_whose_limit_nobody_has_configured_is_not_stormed_either() -> None:
    world = World(GateLimits(aimd=(AimdRule("*", AimdLimits(start=8)),)))
    provider = Provider(60, WINDOW_NS)
    for index in range(300):
        world.call(ask("abcd"[index % 4]), provider)
    world.run()
    attempts = Counter(answer for _, _, answer in provider.log)
    assert len(world.done) == 300
    assert sum(done.failure is None for done in world.done) >= 295
    assert attempts["rate"] <= 60, "it kept on knocking"


def test_tier_0_does_not_wait_behind_a_burst() -> None:
    world = World(sixty_per_two_seconds())
    provider = Provider(60, WINDOW_NS)
    for _ in range(900):
        world.call(ask("a", tier=2), provider)
    waits: list[int] = []
    for index in range(20):

        def urgent() -> None:
            asked = world.now_ns
            world.call(ask("d", tier=0), provider, lambda done: waits.append(done.at_ns - asked))

        world.after(S + index * S, urgent)
    world.run()
    pause = S // 4  # of everybody, after the 429 that the burst at the start ran into
    assert len(waits) == 20 and max(waits) <= pause + 2 * S // 30 + provider.latency_ns * 6 // 5


def test_an_outage_is_tried_by_few_and_seen_to_end() -> None:
    world = World(GateLimits(aimd=()))
    provider = Provider(10**6, S, down=((10 * S, 40 * S),))
    for index in range(600):
        world.after(index * S // 10, lambda: world.call(ask("a"), provider))
    world.run()
    lost = [at_ns for at_ns, _, answer in provider.log if answer == "transport"]
    assert len(world.done) == 600
    assert 5 <= len(lost) <= 30, "30 s of an outage at 10 calls a second were met by more than the breaker lets through"
    assert sum(done.failure is None for done in world.done) >= 200
    refused = [done for done in world.done if done.failure == "refused"]
    assert refused and all(10 * S <= done.at_ns - START_NS <= 85 * S for done in refused)


def test_chain_each_agent_calls_the_next_and_none_holds_a_place_while_it_waits() -> None:
    """A chain of ten agents through a bulkhead of two: with places held by waiting parents it could not end."""
    world = World(sixty_per_two_seconds(bulkheads=(BulkheadRule(Scope.CLASS, "model", 2),)))
    provider = Provider(60, WINDOW_NS)
    ended: list[int] = []

    def link(depth: int) -> None:
        def then(done: Done) -> None:
            assert done.failure is None
            if depth:
                link(depth - 1)
            else:
                ended.append(done.at_ns)

        world.call(ask("a"), provider, then)

    for _ in range(20):
        link(9)
    world.run()
    assert len(ended) == 20 and len(provider.log) == 200


def test_fork_join_the_join_comes_after_every_fork() -> None:
    world = World(sixty_per_two_seconds())
    provider = Provider(60, WINDOW_NS)
    joined: list[int] = []

    def fork(left: int) -> None:
        answers: list[Done] = []

        def one(done: Done) -> None:
            answers.append(done)
            if len(answers) == 16:
                assert all(answer.failure is None for answer in answers)
                joined.append(left)
                if left:
                    fork(left - 1)

        for _ in range(16):
            world.call(ask("b"), provider, one)

    fork(9)
    world.run()
    assert joined == list(range(9, -1, -1))


def test_self_reflection_loop_is_bounded_by_the_guard_and_not_by_patience() -> None:
    """Draft, critique, draft, critique, …: the same two steps with another wording each time, and no output."""
    world = World(sixty_per_two_seconds())
    provider = Provider(60, WINDOW_NS)
    guard = LoopGuard(LoopLimits(iterations=40))
    stopped: list[tuple[Sign, int]] = []

    def turn(number: int) -> None:
        digest = number.to_bytes(4, "big")
        found = guard.step("root", "root", "writer", "model.generate", digest)
        if found is not None:
            stopped.append((found.sign, number))
            return
        world.call(ask("a"), provider, lambda done: turn(number + 1))

    turn(0)
    world.run()
    assert stopped == [(Sign.ITERATIONS, 40)] and len(provider.log) == 40


def test_overload_of_100_times_for_30_s_leaves_tier_0_and_memory_alone() -> None:
    world = World(sixty_per_two_seconds(waiting_max=500))
    provider = Provider(60, WINDOW_NS)
    for index in range(30 * 30 * 100):  # 3,000 a second
        tenant = "abcd"[index % 4]
        world.after(index * S // 3000, lambda tenant=tenant: world.call(ask(tenant, 2), provider))  # type: ignore[misc]
    waits: list[int] = []
    for index in range(30):

        def urgent() -> None:
            asked = world.now_ns
            world.call(ask("d", tier=0), provider, lambda done: waits.append(done.at_ns - asked))

        world.after(index * S, urgent)
    world.run()
    assert world.waiting_most <= 500
    refused = sum(done.failure == "refused" for done in world.done)
    assert len(world.done) == 90_030 and refused > 80_000
    assert sum(decision.limit == "waiting_max" for decision in world.decisions) == refused, "a refusal nobody saw"
    assert len(waits) == 30 and max(waits) <= S // 15 + provider.latency_ns * 6 // 5
    assert provider.most_in_a_window() <= 66
