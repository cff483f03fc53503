"""The gate: what passes, who waits for what, who is next, and that nobody waits for ever."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrt.errors import ConfigError
from agentrt.flow.aimd import AimdLimits
from agentrt.flow.breaker import BreakerLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Action, Control, Scope
from agentrt.flow.gate import SUCCESS, Call, Gate, Moved, Outcome, Refused, State, Ticket, Waiting
from agentrt.flow.limits import AimdRule, BreakerRule, BulkheadRule, GateLimits, RateRule
from agentrt.flow.retry import Again, Attempts, Failure, GiveUp, RetryLimits

S = 10**9
START = 10**18


def limits(**given: Any) -> GateLimits:
    return GateLimits(**({"aimd": (), "breakers": ()} | given))


def tool(name: str = "t", tenant: str = "a", tier: int = 1, **given: Any) -> Call:
    return Call(tenant, tier, tool=name, **given)


def model(tenant: str = "a", tier: int = 1, **given: Any) -> Call:
    return Call(tenant, tier, "model", provider="p", model="m", **given)


def left(gate: Gate, call: Call) -> list[int]:
    return [room.left for room in gate.headroom(call, START)]


def granted(answer: Ticket | Waiting | Refused) -> Ticket:
    assert isinstance(answer, Ticket) and answer.state is State.GRANTED
    return answer


def waits(answer: Ticket | Waiting | Refused) -> Waiting:
    assert isinstance(answer, Waiting) and answer.ticket.state is State.WAITING
    return answer


FAILED = Outcome(Failure.TRANSPORT, draw=0.5)
BUSY = Outcome(Failure.RATE, draw=0.5)


class GateModel(RuleBasedStateMachine):
    """Limits recomputed from who holds and what was taken; nobody is kept without a cause, nobody twice."""

    LIMITS = limits(
        rates=(
            RateRule(Scope.PROVIDER, "p", RateLimit(20, 2 * S, burst=4, kept_pct=0)),
            RateRule(Scope.PROVIDER, "p", RateLimit(100, 2 * S, "tokens", burst=50, kept_pct=0)),
            RateRule(Scope.TENANT, "*", RateLimit(10, 2 * S, burst=3, kept_pct=0)),
        ),
        bulkheads=(BulkheadRule(Scope.PROVIDER, "p", 3, 0), BulkheadRule(Scope.TOOL, "t", 2, 0)),
        breakers=(BreakerRule(Scope.PROVIDER, "p", BreakerLimits(in_row=3, last=3, open_ns=S, open_max_ns=S)),),
        retry=RetryLimits(base_ns=S // 10, cap_ns=S, retry_after_max_ns=3 * S),
        waiting_max=12,
    )

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(self.LIMITS)
        self.now = START
        self.waiting: list[Ticket] = []
        self.held: list[Ticket] = []
        self.taken: dict[str, Fraction] = {}  # limit -> tokens below full
        self.passed: dict[tuple[str, int], int] = {}

    # --- the naive side ---
    def _earn(self, ns: int) -> None:
        for name in self.taken:
            per = {"requests": 20, "tokens": 100}.get(name, 10)
            self.taken[name] = max(Fraction(0), self.taken[name] - Fraction(ns * per, 2 * S))

    def _rates(self, call: Call) -> list[tuple[str, int, int]]:
        """(limit, cost, burst)"""
        rates = [(f"tenant {call.tenant}", 1, 3)]
        return [*rates, ("requests", 1, 4), ("tokens", call.tokens, 50)] if call.provider else rates

    def _granted(self, ticket: Ticket) -> None:
        call = ticket.call
        if call.provider:
            assert sum(1 for other in self.held if other.call.provider) < 3
        else:
            assert sum(1 for other in self.held if other.call.tool) < 2
        for name, cost, burst in self._rates(call):
            if not cost:
                continue
            taken = self.taken.get(name, Fraction(0))
            assert taken <= max(0, burst - cost) + Fraction(1, 1000), f"{name} was exceeded"
            self.taken[name] = taken + cost
        self.held.append(ticket)

    def _moved(self, moved: Moved) -> None:
        for ticket in moved.tickets:
            assert ticket in self.waiting
            self.waiting.remove(ticket)
            if ticket.state is State.GRANTED:
                self._granted(ticket)
            else:
                assert ticket.state is State.REFUSED and ticket.refusal is not None

    # --- what happens ---
    @rule(
        provider=st.booleans(),
        tenant=st.sampled_from("ab"),
        tier=st.integers(0, 3),
        tokens=st.integers(0, 110),
        attempt=st.integers(1, 2),
        back_off=st.sampled_from([0, 0, S]),
    )
    def request(self, provider: bool, tenant: str, tier: int, tokens: int, attempt: int, back_off: int) -> None:
        if provider:
            call = model(tenant, tier, tokens=tokens, attempt=attempt)
        else:
            call = tool("t", tenant, tier, attempt=attempt)
        answer = self.gate.request(call, self.now, self.now + back_off if back_off else 0)
        if isinstance(answer, Ticket):
            self._granted(answer)
        elif isinstance(answer, Waiting):
            assert answer.reason in ("rate", "breaker", "pool")
            assert answer.until_ns is None or answer.until_ns >= self.now
            assert answer.decision.action is Action.WAIT
            self.waiting.append(answer.ticket)
        elif answer.code == "queue_full":
            assert len(self.waiting) == 12
        elif answer.code == "rate_too_large":
            assert tokens > 100
        else:
            assert answer.code == "breaker_open" and attempt == 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=st.sampled_from([SUCCESS, SUCCESS, FAILED, BUSY, Outcome(tokens=7)]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        ticket = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if outcome.tokens is not None and ticket.call.provider:
            self.taken["tokens"] = max(Fraction(0), self.taken.get("tokens", 0) + outcome.tokens - ticket.call.tokens)
        moved = self.gate.finish(ticket, outcome, self.now)
        assert (moved.retry is None) is (outcome.failure is None)
        self._moved(moved)

    @precondition(lambda self: self.held or self.waiting)
    @rule(data=st.data(), begun=st.booleans())
    def cancel(self, data: st.DataObject, begun: bool) -> None:
        ticket = data.draw(st.sampled_from(self.held + self.waiting))
        if ticket in self.held and not begun:
            for name, cost, _ in self._rates(ticket.call):
                self.taken[name] = max(Fraction(0), self.taken.get(name, Fraction(0)) - cost)
        (self.held if ticket in self.held else self.waiting).remove(ticket)
        self._moved(self.gate.cancel(ticket, self.now, begun=begun))
        assert not self.gate.cancel(ticket, self.now).tickets

    @rule(ns=st.integers(0, S))
    def time(self, ns: int) -> None:
        end = self.now + ns
        for _ in range(1000):
            next_ns = self.gate.next_ns()
            if next_ns is None or next_ns > end:
                break
            assert next_ns >= self.now, "what is due was not done"
            self._earn(next_ns - self.now)
            self.now = next_ns
            self._moved(self.gate.due(self.now))
        else:
            raise AssertionError("time does not get on")
        self._earn(end - self.now)
        self.now = end

    @rule()
    def same_limits_again(self) -> None:
        self._moved(self.gate.configure(self.LIMITS, self.now))

    @rule(ns=st.integers(2 * S, 10**15))
    def clock_is_set_back(self, ns: int) -> None:
        self.now -= ns
        self._moved(self.gate.due(self.now))

    @invariant()
    def counted(self) -> None:
        assert self.gate.waiting == len(self.waiting)
        places = list(self.gate._places.values())
        filed = [ticket for place in places for ticket in place.line]
        backing_off = [ticket for ticket in self.waiting if ticket.place is None]
        assert sorted(t.number for t in filed + backing_off) == sorted(t.number for t in self.waiting)
        for place in places:
            if place.line:
                # Work-conserving: something keeps the next one, and somebody will look at this line again.
                tier = min(place.line.order())
                ticket = place.line.head(tier)
                kept = self.gate._keeps(ticket, self.now, place)
                assert kept is not None or tier != place.line.order()[0]
                if kept is place:
                    assert place.wake_ns <= self.gate._opens_ns(place, ticket, self.now)
                if place.kind in ("bulkhead", "breaker") and place.wake_ns > 1 << 62:
                    assert self.held

    def teardown(self) -> None:
        """Everybody who waits gets an answer in the end."""
        for _ in range(1000):
            if self.held:
                self._moved(self.gate.finish(self.held.pop(), SUCCESS, self.now))
            elif self.waiting:
                next_ns = self.gate.next_ns()
                assert next_ns is not None, "somebody waits for nothing"
                self._earn(max(0, next_ns - self.now))
                self.now = max(self.now, next_ns)
                self._moved(self.gate.due(self.now))
            else:
                break
        assert not self.waiting and self.gate.waiting == 0 and self.gate.next_ns() is None


TestGate = GateModel.TestCase
TestGate.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


_EVENT = st.tuples(
    st.sampled_from(["begin", "end", "fail", "rate", "drop", "wait"]), st.sampled_from(["t", "u"]), st.integers(0, 9)
)


@given(st.lists(_EVENT, max_size=80))
def test_the_quick_way_in_lets_the_same_calls_pass_and_comes_to_the_same(events: list[tuple[str, str, int]]) -> None:
    rules = limits(
        rates=(RateRule(Scope.TOOL, "u", RateLimit(5, S, burst=2, kept_pct=0)),),
        breakers=(BreakerRule(Scope.TOOL, "*", BreakerLimits(in_row=2, last=4, open_ns=S, open_max_ns=4 * S)),),
    )
    quick, slow = Gate(rules), Gate(rules)
    held: list[tuple[Ticket, Ticket, Call]] = []
    now, free = START, 0
    for what, name, number in events:
        now += number * S // 10
        if what == "begin":
            call = tool(name)
            ticket = quick.free("a", name, lambda _: "tool", now)
            free += ticket is not None
            one = ticket if ticket is not None else quick.request(call, now)
            other = slow.request(call, now)
            assert type(one) is type(other)
            if isinstance(one, Ticket) and isinstance(other, Ticket):
                held.append((one, other, call))
            elif isinstance(one, Waiting) and isinstance(other, Waiting):  # for the rate: nobody wants it any more
                quick.cancel(one.ticket, now)
                slow.cancel(other.ticket, now)
        elif what != "wait" and held:
            mine, theirs, call = held.pop(number % len(held))
            if what == "drop":
                if not mine.free:
                    quick.cancel(mine, now)
                slow.cancel(theirs, now)
            else:
                outcome = {"end": SUCCESS, "fail": FAILED, "rate": BUSY}[what]
                if mine.free and outcome is not SUCCESS:
                    mine.call = call
                assert quick.finish(mine, outcome, now).retry == slow.finish(theirs, outcome, now).retry
        states = [[(scope, key, breaker.state) for scope, key, breaker in gate.breakers()] for gate in (quick, slow)]
        assert states[0] == states[1]
        assert not quick.waiting and left(quick, tool("u")) == left(slow, tool("u"))
    assert free or not any(what == "begin" and name == "t" for what, name, _ in events)


def test_nothing_is_taken_unless_everything_is() -> None:
    gate = Gate(
        limits(
            rates=(RateRule(Scope.TENANT, "*", RateLimit(10, S, burst=1)),),
            bulkheads=(BulkheadRule(Scope.TOOL, "t", 1),),
        )
    )
    first = granted(gate.request(tool(tenant="a"), START))
    second = waits(gate.request(tool(tenant="b"), START))
    assert second.reason == "pool" and second.until_ns is None
    assert left(gate, tool(tenant="b")) == [0, 1], "its rate was taken although it waits"
    moved = gate.finish(first, SUCCESS, START)
    assert moved.tickets == [second.ticket]
    third = waits(gate.request(tool("other", tenant="b"), START))
    assert third.reason == "rate" and third.until_ns == START + S // 10


def test_fault_S33_holders_are_counted_not_places_in_a_line() -> None:
    gate = Gate(limits(bulkheads=(BulkheadRule(Scope.TOOL, "t", 2),)))
    held = [granted(gate.request(tool(), START)) for _ in range(2)]
    line = [waits(gate.request(tool(), START)).ticket for _ in range(10)]
    for ticket in line[:5]:
        gate.cancel(ticket, START)
    assert gate.finish(held[0], SUCCESS, START).tickets == [line[5]]
    assert not gate.cancel(line[6], START).tickets
    assert gate.finish(held[1], SUCCESS, START).tickets == [line[7]]


def test_fault_S34_waiting_holds_nothing_and_a_restart_forgets_no_limit() -> None:
    rules = limits(
        rates=(RateRule(Scope.PROVIDER, "*", RateLimit(60, 60 * S, burst=1)),), breakers=GateLimits().breakers
    )
    gate = Gate(rules)
    granted(gate.request(model(), START))
    for _ in range(5):
        gate.finish(granted(gate.request(tool("bad"), START)), FAILED, START)
    assert isinstance(gate.request(tool("bad"), START), Refused)
    again = Gate(rules)
    again.restore(gate.snapshot(), START + S // 2)
    assert waits(again.request(model(), START + S // 2)).until_ns == START + S
    assert isinstance(again.request(tool("bad"), START + S), Refused)
    assert isinstance(again.request(tool("bad"), START + 5 * S), Ticket)


def test_rows_that_make_no_sense_are_left_out() -> None:
    gate = Gate()
    gate.restore([("", ()), ("rate\0x\0y\0z", (1,)), ("breaker\0tool\0\0t", (1,)), ("aimd\0model\0\0c/p/m", (1, 2))], 0)
    assert isinstance(gate.request(model(), START), Ticket)


def test_tiers_come_in_order_and_tenants_by_weight() -> None:
    gate = Gate(limits(bulkheads=(BulkheadRule(Scope.TOOL, "t", 1),), weights={"big": 3}))
    held = granted(gate.request(tool(), START))
    line = [waits(gate.request(tool(tenant=tenant, tier=2), START)).ticket for tenant in ["big", "small"] * 40]
    urgent = waits(gate.request(tool(tenant="late", tier=0), START)).ticket
    order = []
    for _ in range(41):
        (held,) = gate.finish(held, SUCCESS, START).tickets
        order.append(held.call.tenant)
    assert order[0] == "late" and urgent.state is State.DONE
    assert order.count("big") == pytest.approx(30, abs=1)
    assert len(line) == 80


def test_a_place_is_kept_for_tier_0() -> None:
    gate = Gate(limits(bulkheads=(BulkheadRule(Scope.TOOL, "t", 5),)))
    for _ in range(4):
        granted(gate.request(tool(tier=3), START))
    waits(gate.request(tool(tier=1), START))
    granted(gate.request(tool(tier=0), START))


def test_a_newcomer_does_not_pass_one_that_waits_for_more() -> None:
    gate = Gate(limits(rates=(RateRule(Scope.PROVIDER, "*", RateLimit(1000, S, "tokens", burst=100, kept_pct=0)),)))
    granted(gate.request(model(tokens=50), START))
    large = waits(gate.request(model(tokens=100), START)).ticket
    small = waits(gate.request(model(tenant="b", tokens=1), START)).ticket
    urgent = granted(gate.request(model(tier=0, tokens=1), START))
    gate.finish(urgent, SUCCESS, START)
    assert [*gate.due(START + S // 10).tickets] == [large]
    assert [*gate.due(START + S).tickets] == [small]


def test_an_open_breaker_refuses_at_once_and_a_retry_waits_for_its_probe() -> None:
    gate = Gate(limits(breakers=(BreakerRule(Scope.TOOL, "*", BreakerLimits(in_row=2, open_ns=S)),)))
    for _ in range(2):
        moved = gate.finish(granted(gate.request(tool(), START)), FAILED, START)
    opened = [decision for decision in moved.decisions if decision.control is Control.BREAKER]
    assert [decision.action for decision in opened] == [Action.OPEN]
    refused = gate.request(tool(), START)
    assert isinstance(refused, Refused) and refused.code == "breaker_open" and refused.retry_after_ns == S
    first = waits(gate.request(tool(attempt=2), START))
    second = waits(gate.request(tool(attempt=2), START))
    assert first.reason == "breaker" and first.until_ns == START + S and gate.next_ns() == START + S
    assert gate.due(START + S).tickets == [first.ticket], "one probe, and only one"
    assert isinstance(gate.request(tool(), START + S), Refused)
    assert gate.finish(first.ticket, SUCCESS, START + S).tickets == [second.ticket]


def test_a_probe_that_is_cancelled_makes_room_for_another() -> None:
    gate = Gate(limits(breakers=(BreakerRule(Scope.TOOL, "*", BreakerLimits(in_row=1, open_ns=S)),)))
    gate.finish(granted(gate.request(tool(), START)), FAILED, START)
    probe = granted(gate.request(tool(), START + S))
    gate.cancel(probe, START + S)
    granted(gate.request(tool(), START + S))


def test_those_that_wait_behind_a_breaker_that_opens_are_refused_when_their_turn_comes() -> None:
    gate = Gate(
        limits(
            breakers=(BreakerRule(Scope.TOOL, "*", BreakerLimits(in_row=1)),),
            bulkheads=(BulkheadRule(Scope.TOOL, "t", 1),),
        )
    )
    held = granted(gate.request(tool(), START))
    line = [waits(gate.request(tool(), START)).ticket for _ in range(3)]
    moved = gate.finish(held, FAILED, START)
    assert moved.tickets == line and {ticket.state for ticket in line} == {State.REFUSED}
    assert line[0].refusal is not None and line[0].refusal.code == "breaker_open"


def test_a_429_pauses_the_model_for_everybody_and_cuts_what_it_is_given() -> None:
    gate = Gate(GateLimits(aimd=(AimdRule("*", AimdLimits(start=10, cut_pct=50)),)))
    held = [granted(gate.request(model(), START)) for _ in range(8)]
    moved = gate.finish(held[0], Outcome(Failure.RATE, retry_after_ns=2 * S), START)
    assert isinstance(moved.retry, Again) and moved.retry.at_ns >= START + 2 * S
    for ticket in held[1:]:
        gate.finish(ticket, BUSY, START)
    assert left(gate, model()) == [5], "one overload was cut more than once"
    wait = waits(gate.request(model("other"), START))
    assert wait.reason == "rate" and wait.until_ns is not None and wait.until_ns >= START + 2 * S
    assert gate.due(wait.until_ns).tickets == [wait.ticket]


def test_an_absurd_retry_after_is_capped() -> None:
    gate = Gate(limits(rates=(RateRule(Scope.PROVIDER, "*", RateLimit(100)),)))
    gate.finish(granted(gate.request(model(), START)), Outcome(Failure.RATE, retry_after_ns=10**18), START)
    wait = waits(gate.request(model(), START))
    assert wait.until_ns is not None and wait.until_ns <= START + 310 * S


def test_a_failure_names_its_owner_and_its_end() -> None:
    gate = Gate()
    given = [
        (tool("x"), Failure.CONFLICT, "kind"),
        (tool("x", attempt=5), Failure.TRANSPORT, "attempts"),
        (tool("x", handed_down=Attempts(2, 5)), Failure.TRANSPORT, "owner"),
        (tool("x", deadline_ns=START + 1), Failure.TRANSPORT, "deadline"),
    ]
    for call, failure, reason in given:
        moved = gate.finish(granted(gate.request(call, START)), Outcome(failure, draw=0.9), START)
        assert moved.retry == GiveUp(reason)
        assert moved.decisions[-1].action is Action.GIVE_UP and moved.decisions[-1].detail == reason


def test_a_back_off_holds_nothing_and_is_over_on_time() -> None:
    gate = Gate()
    wait = waits(gate.request(tool(attempt=2), START, START + S))
    assert wait.until_ns == START + S == gate.next_ns() and gate.reason(wait.ticket, START).reason == "rate"
    assert not gate.due(START + S - 1).tickets
    assert gate.due(START + S).tickets == [wait.ticket]


def test_those_that_back_off_and_are_not_wanted_any_more_take_no_memory() -> None:
    gate = Gate()
    line = [waits(gate.request(tool(attempt=2), START, START + S + number)).ticket for number in range(200)]
    for ticket in line[:-1]:
        gate.cancel(ticket, START)
    assert gate.waiting == 1 and len(gate._later) <= 65
    assert gate.due(START + 2 * S).tickets == [line[-1]]


def test_what_keeps_a_call_is_told_of_that_call() -> None:
    gate = Gate(limits(bulkheads=(BulkheadRule(Scope.TOOL, "t", 1),)))
    granted(gate.request(tool(), START))
    wait = waits(gate.request(tool(run="run_1", step="1:2"), START))
    told = gate.reason(wait.ticket, START)
    assert (told.reason, told.ticket, told.decision.run, told.decision.step) == ("pool", wait.ticket, "run_1", "1:2")


def test_tokens_are_settled_and_what_can_never_pass_is_refused() -> None:
    gate = Gate(limits(rates=(RateRule(Scope.PROVIDER, "*", RateLimit(1000, S, "tokens", burst=1000, kept_pct=0)),)))
    ticket = granted(gate.request(model(tokens=900), START))
    gate.finish(ticket, Outcome(tokens=100), START)
    assert left(gate, model()) == [900]
    refused = gate.request(model(tokens=1001), START)
    assert isinstance(refused, Refused) and refused.code == "rate_too_large" and refused.retry_after_ns is None


def test_names_of_strangers_do_not_fill_the_memory() -> None:
    gate = Gate(limits(rates=(RateRule(Scope.TENANT, "*", RateLimit(100, S)),), names_max=50))
    held = granted(gate.request(tool(tenant="mine"), START))
    for index in range(5000):
        now = START + index * S
        gate.finish(granted(gate.request(tool(f"tool{index}", tenant=f"t{index}"), now)), SUCCESS, now)
        assert len(gate._places) + len(gate._routes) <= 200
    gate.cancel(held, now)


def test_a_limit_that_is_raised_lets_those_in_who_wait() -> None:
    few = limits(bulkheads=(BulkheadRule(Scope.TOOL, "t", 1, 0),))
    gate = Gate(few)
    held = granted(gate.request(tool(), START))
    line = [waits(gate.request(tool(), START)).ticket for _ in range(5)]
    assert gate.configure(limits(bulkheads=(BulkheadRule(Scope.TOOL, "t", 3, 0),)), START).tickets == line[:2]
    assert not gate.configure(few, START).tickets
    gate.finish(held, SUCCESS, START)
    gate.finish(line[0], SUCCESS, START)
    assert gate.configure(limits(), START).tickets == line[2:]
    gate.finish(line[1], SUCCESS, START)


def test_rules_are_exact_or_for_all_and_checked() -> None:
    gate = Gate(limits(bulkheads=(BulkheadRule(Scope.TOOL, "*", 9), BulkheadRule(Scope.TOOL, "risky", 1))))
    assert left(gate, tool("risky")) == [1] and left(gate, tool("x")) == [9]
    with pytest.raises(ConfigError, match="breaker of tenants"):
        GateLimits(breakers=(BreakerRule(Scope.TENANT, "*"),))
    with pytest.raises(ConfigError, match="limit of runs"):
        GateLimits(rates=(RateRule(Scope.RUN, "*", RateLimit(1)),))
    with pytest.raises(ConfigError, match="weight"):
        GateLimits(weights={"a": 0})


def test_who_is_next_in_a_line_and_kept_by_another_limit_waits_there() -> None:
    """In the other line it would keep those behind it, and that line would want to be looked at at once, for ever."""
    gate = Gate(GateModel.LIMITS)
    for _ in range(2):
        gate.cancel(granted(gate.request(tool(tenant="a"), START)), START, begun=True)
    gate.cancel(granted(gate.request(model("a", tokens=1), START)), START, begun=True)
    first = waits(gate.request(model("b", tokens=50), START))
    second = waits(gate.request(model("a", tokens=1), START))  # its turn before b's, and it has used its own rate up
    assert first.until_ns is not None and second.until_ns is not None and first.until_ns < second.until_ns
    assert gate.next_ns() == first.until_ns > START
    assert gate.due(first.until_ns).tickets == [first.ticket]
    assert gate.due(second.until_ns).tickets == [second.ticket]


def test_who_is_next_in_the_lines_of_two_limits_ends_no_ones_turn() -> None:
    """It went from one to the other and back, for ever, and the control loop with it."""
    gate, now = Gate(GateModel.LIMITS), START
    busy: list[Ticket] = []
    for call in (
        tool(tenant="b"),
        model("c", 3, tokens=1),
        model("b", 3, attempt=2),
        tool(tenant="c", tier=0),
        model("b", 3, tokens=50),
        tool(tenant="c", tier=3, attempt=2),
        tool(tenant="c"),
        model("c", tokens=50),
        model("b"),
        tool(tenant="c"),
    ):
        answer = gate.request(call, now)
        if isinstance(answer, Ticket):
            busy.append(answer)
    now += S // 100
    busy += gate.due(now).tickets
    gate.request(model("b", tokens=10), now)
    busy += gate.finish(busy.pop(), BUSY, now).tickets
    while gate.waiting or busy:
        now = max(now, gate.next_ns() or now)
        busy += gate.due(now).tickets
        if busy:
            busy += gate.finish(busy.pop(0), BUSY, now).tickets
