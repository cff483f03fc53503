"""Admission and its door, the fair line, and the classifier."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrt.errors import ConfigError
from agentrt.flow.admission import RETRY_NS, Admission, AdmissionLimits, Applicant, Bound, News, Refusal, Waits, Why
from agentrt.flow.classifier import Classifier, Ingress, Rule
from agentrt.flow.decisions import Action
from agentrt.flow.fair import AGING_PICKS, Fair

S = 10**9
TENANTS = ("a", "b", "c")


class FairModel(RuleBasedStateMachine):
    """Nothing is lost, tiers are strict but for aging, tenants come first come first served within themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.fair: Fair[int] = Fair(aging_picks=5)
        self.there: dict[int, tuple[int, str]] = {}
        self.number = 0
        self.passed = [0, 0, 0, 0]

    @rule(tier=st.integers(0, 3), tenant=st.sampled_from(TENANTS), weight=st.integers(1, 5))
    def put(self, tier: int, tenant: str, weight: int) -> None:
        self.number += 1
        self.fair.put(tier, tenant, weight, self.number, self.number)
        self.there[self.number] = (tier, tenant)

    @precondition(lambda self: self.there)
    @rule(cost=st.integers(1, 9))
    def take(self, cost: int) -> None:
        tier = self.fair.order()[0]
        best = min(tier for tier, _ in self.there.values())
        if tier != best:
            assert self.passed[tier] >= 5
        head = self.fair.head(tier)
        assert self.fair.take(tier, cost) == head
        assert self.there[head][0] == tier
        assert not [n for n, at in self.there.items() if at == self.there[head] and n < head]
        del self.there[head]
        self.passed[tier] = 0
        for lower in range(tier + 1, 4):
            if any(at == lower for at, _ in self.there.values()):
                self.passed[lower] += 1

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def remove_and_put_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        tier, tenant = self.there[number]
        assert self.fair.remove(tier, tenant, number) == number
        if data.draw(st.booleans()):
            self.fair.put(tier, tenant, 1, number, number)  # to its old place
        else:
            del self.there[number]
        if not any(at == tier for at, _ in self.there.values()):
            self.passed[tier] = 0

    @invariant()
    def counts(self) -> None:
        assert len(self.fair) == self.fair.count == len(self.there)
        assert sorted(self.fair) == sorted(self.there)
        assert self.fair.first_tier() == min((tier for tier, _ in self.there.values()), default=4)


TestFair = FairModel.TestCase


@settings(max_examples=20)  # each is thousands of picks
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10), min_size=2), st.integers(0, 10**6))
def test_tenants_share_by_weight_whatever_they_ask_for(weights: dict[str, int], seed: int) -> None:
    fair: Fair[tuple[str, int]] = Fair()
    number, got, random_ = 0, dict.fromkeys(weights, 0), random.Random(seed)
    for tenant, weight in weights.items():
        for _ in range(3000):
            number += 1
            fair.put(1, tenant, weight, number, (tenant, random_.randint(1, 5)))
    while sum(got.values()) < 6000:
        tenant, cost = fair.head(1)
        fair.take(1, cost)
        got[tenant] += cost
    total, units = sum(weights.values()), sum(got.values())
    for tenant, weight in weights.items():
        assert got[tenant] == pytest.approx(units * weight / total, rel=0.1, abs=10)


def test_a_tenant_that_was_away_has_saved_nothing() -> None:
    fair: Fair[str] = Fair()
    for number in range(100):
        fair.put(1, "busy", 1, number, "busy")
    for _ in range(50):
        fair.take(1, 1)
    for number in range(100, 200):
        fair.put(1, "back", 1, number, "back")
    assert [fair.take(1, 1) for _ in range(20)].count("busy") >= 9


def test_no_tier_starves() -> None:
    fair: Fair[int] = Fair()
    fair.put(3, "slow", 1, 0, -1)
    for number in range(1, 1000):
        fair.put(0, "fast", 1, number, number)
    taken = [fair.take(fair.order()[0], 1) for _ in range(AGING_PICKS + 1)]
    assert taken[-1] == -1


# --- admission ---------------------------------------------------------------------------

LIMITS = AdmissionLimits(
    node=Bound(8, 1000),
    tiers=(Bound(), Bound(), Bound(), Bound(2, 0)),
    classes={"tool": Bound(3, 0)},
    tenant=Bound(5, 600),
    tenants={"c": Bound(1, 0)},
    tier_pct=(100, 80, 60, 50),
    door=Bound(4, 400),
)


class AdmissionModel(RuleBasedStateMachine):
    """Sums over lists of who is in and who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = LIMITS
        self.admission = Admission(LIMITS)
        self.now = 0
        self.inside: list[Applicant] = []
        self.door: list[Waits] = []
        self.ref = 0

    def _fits(self, who: Applicant) -> bool:
        pct = LIMITS.tier_pct[who.tier]
        checks: list[tuple[list[Applicant], float, float]] = [
            (self.inside, -(-self.limits.node.items * pct // 100), -(-1000 * pct // 100)),
            ([x for x in self.inside if x.tier == who.tier], 2 if who.tier == 3 else 10**9, 10**9),
            ([x for x in self.inside if x.cls == who.cls], 3 if who.cls == "tool" else 10**9, 10**9),
            (
                [x for x in self.inside if x.tenant == who.tenant],
                1 if who.tenant == "c" else self.limits.tenant.items,
                10**9 if who.tenant == "c" else 600,
            ),
        ]
        return all(
            len(members) < items and sum(x.size_bytes for x in members) + who.size_bytes <= size
            for members, items, size in checks
        )

    @rule(
        tier=st.integers(0, 3),
        tenant=st.sampled_from(TENANTS),
        cls=st.sampled_from(["agent", "tool"]),
        size=st.integers(0, 700),
        wait=st.booleans(),
    )
    def enter(self, tier: int, tenant: str, cls: str, size: int, wait: bool) -> None:
        self.ref += 1
        who = Applicant(tier, tenant, cls, size, self.ref)
        fits = self._fits(who)
        answer = self.admission.enter(who, self.now, wait=wait)
        if answer is None:
            assert fits
            self.inside.append(who)
        elif isinstance(answer, Waits):
            assert wait
            self.door.append(answer)
        else:
            assert isinstance(answer, Refusal)
            if fits:  # only a large one at the door may keep it out
                assert any(w.limit == "node.bytes" and w.applicant.tier <= tier for w in self.door)
            if answer.why is Why.TOO_LARGE:
                assert size > min(600 if tenant != "c" else 10**9, -(-1000 * LIMITS.tier_pct[tier] // 100))
                assert answer.retry_after_ns == 0
            else:
                assert RETRY_NS[0] <= answer.retry_after_ns <= RETRY_NS[1]
            assert answer.limit and answer.decision.action is Action.REFUSE

    def _news(self, news: News) -> None:
        for who in news.admitted:
            self.inside.append(who)
        gone = {who.ref for who in news.admitted} | {who.ref for who, _ in news.refused}
        self.door = [waits for waits in self.door if waits.applicant.ref not in gone]
        assert all(waits.over is False for waits in self.door)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        who = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self._news(self.admission.leave(who, self.now))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def rest_and_come_back(self, data: st.DataObject) -> None:
        """A run that only waits gives its place up for a while, and gets it back whatever the bounds say."""
        who = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self._news(self.admission.withdraw(who, self.now))
        self.admission.adopt(who)
        self.inside.append(who)

    @rule(tenant=st.integers(1, 5), node=st.integers(4, 10))
    def configure(self, tenant: int, node: int) -> None:
        changed = {"tenant": Bound(tenant, 600), "node": Bound(node, 1000)}
        self.limits = msgspec.structs.replace(LIMITS, **changed)
        self._news(self.admission.configure(self.limits, self.now))

    @precondition(lambda self: self.door)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        waits = self.door.pop(data.draw(st.integers(0, len(self.door) - 1)))
        self._news(self.admission.give_up(waits, self.now))

    @rule(tier=st.integers(0, 3), size=st.integers(0, 300))
    def shed(self, tier: int, size: int) -> None:
        before = list(self.door)
        news = self.admission.shed(Applicant(tier, "a", size_bytes=size), self.now)
        for who, refusal in news.refused:
            assert who.tier > tier and refusal.why is Why.SHED and refusal.decision.action is Action.SHED
        assert len(news.refused) <= len(before)
        self._news(news)

    @rule(ns=st.integers(0, 2000 * S))
    def time(self, ns: int) -> None:
        self.now += ns
        news = self.admission.due(self.now)
        for who, refusal in news.refused:
            assert refusal.why is Why.TOO_LATE
            assert next(w for w in self.door if w.applicant is who).until_ns <= self.now
        self._news(news)
        assert all(waits.until_ns > self.now for waits in self.door)

    @invariant()
    def sums(self) -> None:
        assert self.admission.items == len(self.inside)
        assert self.admission.bytes == sum(who.size_bytes for who in self.inside)
        assert self.admission.waiting == len(self.door) <= 4
        assert sum(waits.applicant.size_bytes for waits in self.door) <= 400
        assert self.admission.next_ns() == min((waits.until_ns for waits in self.door), default=None)
        assert len(self.admission._classes) <= 2 and len(self.admission._tenants) <= 3
        # Nobody stands at the door who could be in, but for those whom a large one, of their tier or above, holds up.
        large = [waits.applicant.tier for waits in self.door if not self._fits(waits.applicant)]
        for waits in self.door:
            if self._fits(waits.applicant):
                assert waits.limit == "node.bytes" and min(large, default=9) <= waits.applicant.tier


TestAdmission = AdmissionModel.TestCase


def test_a_retry_time_comes_from_the_measured_drain_rate() -> None:
    admission = Admission(AdmissionLimits(node=Bound(200, 10**6), tier_pct=(100, 100, 100, 100)))
    who = Applicant(1, "a")
    now = 0
    for _ in range(200):
        admission.enter(who, now)
    refused = admission.enter(who, now)
    assert isinstance(refused, Refusal) and refused.retry_after_ns == 10 * S  # nothing has ended yet
    refused = admission.enter(who, now + 40 * S)
    assert isinstance(refused, Refusal) and refused.retry_after_ns == 40 * S  # and still has not
    assert admission.retry_after_ns(99, 40 * S) == RETRY_NS[1]
    for _ in range(2000):  # ten a second
        now += S // 10
        admission.leave(who, now)
        admission.enter(who, now)
    assert admission.retry_after_ns(99, now) == pytest.approx(10 * S, rel=0.1)
    assert admission.retry_after_ns(99, now + 100 * S) == RETRY_NS[1]  # and then nothing ended any more


def test_overload_leaves_tier_0_alone_and_memory_flat() -> None:
    """100 times what the node takes, for 30 virtual seconds: every refusal is an answer, the door stays short."""
    limits = AdmissionLimits(node=Bound(100, 10**6), door=Bound(50, 10**6))
    admission = Admission(limits)
    urgent = Applicant(0, "u", size_bytes=100)
    random_ = random.Random(1)
    inside: list[Applicant] = []
    offered = answered = 0
    waiting: set[int] = set()
    for turn in range(30_000):
        now = turn * 1_000_000
        for index in range(10):  # 10,000 a second, of which 100 can be served
            offered += 1
            who = Applicant(random_.randint(1, 3), random_.choice(TENANTS), size_bytes=100, ref=(turn, index))
            answer = admission.enter(who, now, wait=random_.random() < 0.5)
            if answer is None:
                inside.append(who)
                answered += 1
            elif isinstance(answer, Refusal):
                answered += 1
            else:
                waiting.add(id(answer))
        if turn % 10 == 0 and inside:
            inside.sort(key=lambda who: str(who.ref))
            news = admission.leave(inside.pop(0), now)
            inside += news.admitted
            answered += len(news.admitted)
        news = admission.due(now)
        answered += len(news.refused) + len(news.admitted)
        inside += news.admitted
        if turn % 100 == 0:
            assert admission.enter(urgent, now) is None, "tier 0 was kept out"
            news = admission.leave(urgent, now)
            inside += news.admitted
            answered += len(news.admitted)
        assert admission.items <= 100 and admission.waiting <= 50 and len(admission._tenants) <= 4
    assert offered == answered + admission.waiting


class Counting(Admission):
    """Counts looks at bounds."""

    looks = 0

    def _full(self, applicant: Applicant) -> Any:
        self.looks += 1
        return super()._full(applicant)


def test_a_tenant_at_its_own_bound_costs_the_others_nothing() -> None:
    limits = AdmissionLimits(tenants={"full": Bound(1, 0)}, door=Bound(1000, 10**6))
    admission = Counting(limits)
    first, other = Applicant(2, "full"), Applicant(2, "other")
    assert admission.enter(first, 0) is None
    for _ in range(1000):
        assert isinstance(admission.enter(first, 0, wait=True), Waits)
    admission.looks = 0
    for _ in range(1000):
        assert admission.enter(other, 0) is None
        assert admission.leave(other, 0) == News()
    assert admission.looks == 1000  # each for itself
    assert len(admission.leave(first, 0).admitted) == 1 and admission.looks <= 1003


def test_a_long_line_goes_over_to_another_bound_in_steps() -> None:
    limits = AdmissionLimits(node=Bound(2, 100), tenants={"a": Bound(1, 0)}, tier_pct=(100, 100, 100, 100))
    admission = Counting(limits)
    one, other = Applicant(1, "a"), Applicant(1, "b")
    assert admission.enter(one, 0) is None and admission.enter(other, 0) is None
    for _ in range(500):
        assert isinstance(admission.enter(one, 0, wait=True), Waits)
    admission.adopt(other)  # and a recovered one: now the node keeps everybody out
    most = inside = 0
    admitted = admission.leave(one, 0).admitted
    while admission.next_ns() == 0:
        before = admission.looks
        admitted += admission.due(0).admitted
        most = max(most, admission.looks - before)
    assert not admitted and most < 400
    admitted = admission.leave(other, 0).admitted
    while (next_ns := admission.next_ns()) is not None:  # nobody is forgotten on the way
        before = admission.looks
        if next_ns:
            inside += len(admitted)
            admitted = [who for old in admitted for who in admission.leave(old, 0).admitted]
        admitted += admission.due(0).admitted
        assert admission.looks - before < 1000 and len(admitted) <= 1
    assert admission.waiting == 0 and inside + len(admitted) == 500


def test_what_is_over_is_forgotten() -> None:
    admission = Admission(AdmissionLimits(node=Bound(1, 100)))
    for number in range(5000):
        assert admission.enter(Applicant(1, f"t{number}"), 0) is None
        admission.leave(Applicant(1, f"t{number}"), 0)
    assert len(admission._tenants) <= 1024
    who = Applicant(3, "a")
    assert admission.enter(who, 0) is None
    stays = admission.enter(who, 0, wait=True)
    for _ in range(5000):
        waits = admission.enter(who, 0, wait=True)
        assert isinstance(waits, Waits) and admission.give_up(waits, 0) == News()
    assert isinstance(stays, Waits) and len(admission._ends) < 200


# --- classifier ---------------------------------------------------------------------------

RULES = (
    Rule(door="bus", type="order.*", fields={"order.kind": "rush"}, set_agent="rush", set_tier="urgent",
         set_key="{source}/{field:order.id}"),
    Rule(door="http", headers={"X-Batch": "*"}, set_tier=2),
    Rule(type="spam", refuse="nobody wants it"),
)  # fmt: skip


def ingress(**given: Any) -> Ingress:
    return Ingress(**({"door": "bus", "tenant": "t"} | given))


def test_the_first_rule_that_holds_decides() -> None:
    classifier = Classifier(RULES)
    found = classifier.classify(
        ingress(source="orders", type="order.new", payload={"order": {"kind": "rush", "id": 7}}, agent="other")
    )
    assert (found.agent, found.tier, found.key, found.rule) == ("rush", 0, "orders/7", 0)
    assert classifier.classify(ingress(door="http", headers={"x-batch": ""}, agent="a", tier=1)).tier == 2
    assert classifier.classify(ingress(type="spam")).refused == "nobody wants it"
    other = classifier.classify(ingress(agent="a", tier=3, idempotency_key="k"))
    assert (other.agent, other.tier, other.key, other.rule, other.decision) == ("a", 3, "k", None, None)


def test_a_key_can_be_made_of_a_header() -> None:
    classifier = Classifier([Rule(set_key="mail {header:X-Message}", set_agent="a")])
    assert classifier.classify(ingress(door="http", headers={"x-message": "17"})).key == "mail 17"
    assert "key" in classifier.classify(ingress(door="http", headers={"x-other": "17"})).refused


def test_no_rule_lifts_a_tenant_above_its_tier() -> None:
    classifier = Classifier(RULES, {"t": 2}, 1)
    rush = {"order": {"kind": "rush", "id": 7}}
    found = classifier.classify(ingress(source="o", type="order.x", payload=rush))
    assert found.tier == 2 and found.decision is not None and found.decision.limit == "max_tier"
    assert classifier.classify(ingress(tenant="other", agent="a", tier=0)).tier == 1
    assert classifier.classify(ingress(agent="a")).tier is None


def test_a_key_with_a_missing_part_refuses_rather_than_make_two_requests_one() -> None:
    classifier = Classifier(RULES)
    for payload in ({"order": {"kind": "rush"}}, {"order": {"kind": "rush", "id": ["x"]}}):
        assert "key" in classifier.classify(ingress(source="o", type="order.x", payload=payload)).refused


@given(
    st.lists(st.sampled_from(["a", "b", "?", "*", "\n", "."]), max_size=12).map("".join),
    st.text("ab.\n", max_size=12),
)
def test_globs_match_what_a_slow_matcher_says(pattern: str, text: str) -> None:
    def slow(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(slow(pattern[1:], text[index:]) for index in range(len(text) + 1))
        return bool(text) and pattern[0] in ("?", text[0]) and slow(pattern[1:], text[1:])

    if not pattern:
        return
    classifier = Classifier([Rule(source=pattern, set_agent="hit")])
    assert (classifier.classify(ingress(source=text)).agent == "hit") is slow(pattern, text)


def test_no_pattern_explodes() -> None:
    classifier = Classifier([Rule(source="*a" * 100 + "b", set_agent="hit")])
    assert not classifier.classify(ingress(source="a" * 1000)).agent  # one that explodes takes longer than there is


def test_rules_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match="makes no key"):
        Classifier([Rule(set_key="constant")])
    with pytest.raises(ConfigError, match="makes no key"):
        Classifier([Rule(set_key="{header:x}{nonsense}")])
    with pytest.raises(ConfigError, match="too long"):
        Classifier([Rule(source="x" * 2000)])
    with pytest.raises(ConfigError, match="rules"):
        Classifier([Rule()] * 2000)


def test_who_asks_alike_at_once_is_refused_alike_until_something_moves() -> None:
    admission = Admission(AdmissionLimits(node=Bound(2, 1 << 20)))
    one, other = Applicant(1, "a", size_bytes=5), Applicant(1, "b", size_bytes=7)
    assert admission.enter(one, 0) is None and admission.enter(other, 0) is None
    first = admission.enter(one, 1_000)
    assert isinstance(first, Refusal)
    assert admission.enter(msgspec.structs.replace(one, size_bytes=9), 900_000) is first
    later = admission.enter(one, 2_000_000)
    assert isinstance(later, Refusal) and later is not first and later.decision.at_ns == 2_000_000
    huge = admission.enter(Applicant(1, "a", size_bytes=1 << 21), 2_000_000)
    assert isinstance(huge, Refusal) and huge.why is Why.TOO_LARGE
    admission.leave(other, 2_000_001)
    assert admission.enter(one, 2_000_002) is None
    again = admission.enter(one, 2_000_003)
    assert isinstance(again, Refusal) and again is not later
