"""The ledger against a model that adds up what each run did, with crashes, refused writes, and runs that leave memory
and come back."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrt.errors import InputError, StoreCorruptError
from agentrt.flow.accounts import (
    AccountId,
    BaseRow,
    BelowRow,
    Entry,
    EntryRow,
    Used,
    agent_id,
    decode_base,
    decode_below,
    decode_entry,
    encode_row,
    node_id,
    tenant_id,
)
from agentrt.flow.amounts import COUNTED, INDEX, NO_LIMIT, Amounts, amounts, check_limits
from agentrt.flow.budgets import Ended, Exhausted, Ledger, Wait, decision_of
from agentrt.flow.decisions import Action, Scope
from agentrt.flow.windows import DAY_NS, HOUR_NS, Span, window_of

NOON = 20_000 * DAY_NS + 12 * HOUR_NS
TENANTS, AGENTS, KEYS = ("a", "b"), ("x", "y"), ("tool_calls", "tokens")
LIMITS = st.integers(0, 12)
ACCOUNT_LIMITS = st.dictionaries(
    st.sampled_from([key + span for key in KEYS for span in ("", "/hour", "/day", "/month")]), LIMITS, max_size=3
)
AMOUNTS = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 4), min_size=1).map(lambda values: amounts(**values))


@dataclass
class Did:
    """What a run has used, and when; what it holds."""

    used: list[tuple[int, Amounts]] = field(default_factory=list)
    held: list[Amounts] = field(default_factory=list)


@dataclass
class Run:
    run_id: str
    tenant: str
    agent: str
    budget: dict[str, int]
    parent: "Run | None"
    did: Did = field(default_factory=Did)
    durable: Did = field(default_factory=Did)  # as the store has it
    entry: Entry | None = None
    ended: bool = False

    def above(self) -> Iterator["Run"]:
        """It and those that it comes from."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.parent

    @property
    def root(self) -> str:
        return [*self.above()][-1].run_id

    def under(self, id: AccountId) -> bool:
        if id[0] == "run":
            return any(run.run_id == id[1] for run in self.above())
        return id in (node_id(), tenant_id(self.tenant), agent_id(self.tenant, self.agent))


class Model(RuleBasedStateMachine):
    """``rows`` is the store. What a run did is durable when its row is written, in a transaction of that run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOON
        self.runs: list[Run] = []
        self.limits: dict[AccountId, dict[str, int]] = {}
        self.rows: dict[tuple[str, ...], bytes] = {}
        self.overspent = False
        self.ledger = self.new_ledger()

    def new_ledger(self) -> Ledger:
        return Ledger(lambda id: self.limits.get(id, {}))

    @initialize(node=ACCOUNT_LIMITS, a=ACCOUNT_LIMITS, b=ACCOUNT_LIMITS, agent=ACCOUNT_LIMITS)
    def begin(self, node: dict[str, int], a: dict[str, int], b: dict[str, int], agent: dict[str, int]) -> None:
        self.limits = {node_id(): node, tenant_id("a"): a, tenant_id("b"): b, agent_id("a", "x"): agent}

    # --- the naive side ---

    def used(self, id: AccountId, key: str) -> int:
        name, _, span = key.partition("/")
        start = window_of(Span(span), self.now)[0] if span else 0
        did = [each for run in self.runs if run.under(id) for each in run.did.used]
        return sum(dict(values).get(INDEX[name], 0) for at, values in did if at >= start)

    def held(self, id: AccountId, key: str) -> int:
        holds = [each for run in self.runs if run.under(id) for each in run.did.held]
        return sum(dict(values).get(INDEX[key.partition("/")[0]], 0) for values in holds)

    def limits_over(self, run: Run) -> list[tuple[AccountId, str, int]]:
        ids = [node_id(), tenant_id(run.tenant), agent_id(run.tenant, run.agent)]
        found = [(id, key, limit) for id in ids for key, limit in self.limits.get(id, {}).items()]
        for above in run.above():
            found += [(("run", above.run_id), key, limit) for key, limit in above.budget.items()]
        return found

    def expected(self, run: Run, wanted: Amounts) -> str:
        answer = "held"
        for id, key, limit in self.limits_over(run):
            value = dict(wanted).get(INDEX[key.partition("/")[0]], 0)
            used = self.used(id, key)
            if value and used + value > limit:
                if id[0] == "run":
                    return "ends"
                answer = "exhausted"
            elif value and used + self.held(id, key) + value > limit and answer == "held":
                answer = "wait"
        return answer

    # --- runs ---

    def loaded(self) -> list[Run]:
        return [run for run in self.runs if run.entry is not None]

    @rule(
        tenant=st.sampled_from(TENANTS),
        agent=st.sampled_from(AGENTS),
        budget=st.dictionaries(st.sampled_from(KEYS), LIMITS, max_size=2),
        refused=st.booleans(),
        data=st.data(),
    )
    def accept(self, tenant: str, agent: str, budget: dict[str, int], refused: bool, data: st.DataObject) -> None:
        if len(self.runs) > 12:
            return
        parent = data.draw(st.sampled_from([None, *self.loaded()]), label="parent")
        run = Run(f"r{len(self.runs)}", parent.tenant if parent else tenant, agent, budget, parent)
        above = parent.entry if parent else None
        entry = self.ledger.open(run.run_id, run.tenant, agent, budget, above, run.root, self.now)
        if refused:
            self.ledger.reserve(entry, amounts(tokens=1), self.now)
            self.ledger.never_was(entry)
            return
        run.entry = entry
        self.runs.append(run)
        self.commit(run)

    def commit(self, run: Run) -> None:
        assert run.entry is not None
        self.rows["entry", run.root, run.run_id] = encode_row(self.ledger.row(run.entry))
        run.durable = deepcopy(run.did)

    @precondition(lambda self: self.loaded())
    @rule(data=st.data(), wanted=AMOUNTS, durable=st.booleans())
    def reserve(self, data: st.DataObject, wanted: Amounts, durable: bool) -> None:
        run = data.draw(st.sampled_from(self.loaded()), label="run")
        expected = self.expected(run, wanted)
        fits = all(self.ledger.left(run.entry, index, self.now) >= value for index, value in wanted)
        answer = self.ledger.reserve(run.entry, wanted, self.now)
        got = "wait"
        if answer is None:
            got = "held"
            run.did.held.append(wanted)
        elif isinstance(answer, Exhausted):
            got = "ends" if answer.ends_run else "exhausted"
            assert bool(answer.until_ns) == ("/" in answer.key)
            assert not answer.until_ns or answer.until_ns > self.now
        assert (fits, got) == (expected == "held", expected)
        if durable:
            self.commit(run)

    def holding(self) -> list[tuple[Run, Amounts]]:
        return [(run, held) for run in self.loaded() for held in run.did.held]

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), share=st.integers(0, 4), durable=st.booleans())
    def settle(self, data: st.DataObject, share: int, durable: bool) -> None:
        run, held = data.draw(st.sampled_from(self.holding()), label="step")
        used = tuple((index, min(value, share)) for index, value in held if share)
        passed = self.ledger.settle(run.entry, held, used, self.now)
        assert self.overspent or not passed  # by using no more than was held, nobody passes a limit
        run.did.held.remove(held)
        run.did.used.append((self.now, used))
        if durable:
            self.commit(run)

    @precondition(lambda self: self.loaded())
    @rule(data=st.data(), used=AMOUNTS)
    def use_more_than_was_held(self, data: st.DataObject, used: Amounts) -> None:
        run = data.draw(st.sampled_from(self.loaded()), label="run")
        passed = self.ledger.charge(run.entry, used, self.now)
        run.did.used.append((self.now, used))
        self.commit(run)
        self.overspent = True
        keys = {COUNTED[index] for index, _ in used}
        over = {
            (id, key)
            for id, key, limit in self.limits_over(run)
            if key.partition("/")[0] in keys and self.used(id, key) > limit
        }
        assert {(each.account.id, each.key) for each in passed} == over

    @precondition(lambda self: self.loaded())
    @rule(data=st.data(), refused=st.booleans())
    def end(self, data: st.DataObject, refused: bool) -> None:
        run = data.draw(st.sampled_from(self.loaded()), label="run")
        rows = self.ledger.end(run.entry, self.now)
        if refused:
            taken_back = self.ledger.take_back(run.run_id)
            assert taken_back is not None
            self.put(taken_back, run.root)
            self.ledger.reread(run.entry, decode_entry(self.rows["entry", run.root, run.run_id]))
            run.did = deepcopy(run.durable)
            return
        run.did.used += [(self.now, held) for held in run.did.held]
        run.did.held.clear()
        run.durable = deepcopy(run.did)
        del self.rows["entry", run.root, run.run_id]
        self.put(rows, run.root)
        self.ledger.ended(run.run_id)
        run.entry, run.ended = None, True

    def put(self, rows: Ended, root: str) -> None:
        self.rows |= {("base", *base.id): encode_row(base) for base in rows.bases}
        self.rows |= {("below", root, below.run_id): encode_row(below) for below in rows.below}
        for run_id in rows.gone_below:
            self.rows.pop(("below", root, run_id), None)

    @precondition(lambda self: self.loaded())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.loaded()), label="run")
        self.commit(run)
        self.ledger.leave(run.entry)
        run.entry = None

    @precondition(lambda self: any(run.entry is None and not run.ended for run in self.runs))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        away = [run for run in self.runs if run.entry is None and not run.ended]
        run = data.draw(st.sampled_from(away), label="run")
        entries = [decode_entry(row) for key, row in self.rows.items() if key[:2] == ("entry", run.root)]
        below = [decode_below(row) for key, row in self.rows.items() if key[:2] == ("below", run.root)]
        run.entry = self.ledger.attach(run.run_id, run.root, entries, below, self.now)
        assert run.entry is not None

    @rule()
    def crash(self) -> None:
        self.ledger = self.new_ledger()
        bases = [decode_base(row) for key, row in self.rows.items() if key[0] == "base"]
        entries = [decode_entry(row) for key, row in self.rows.items() if key[0] == "entry"]
        self.ledger.adopt(bases, entries, self.now)
        for run in self.runs:
            run.entry, run.did = None, deepcopy(run.durable)

    @rule(by_ns=st.sampled_from([1, HOUR_NS // 2, HOUR_NS, DAY_NS, 31 * DAY_NS, -HOUR_NS // 3]))
    def time_goes(self, by_ns: int) -> None:
        if by_ns > 0:
            self.now += by_ns
        else:  # the clock is set back: the ledger keeps the windows that it has begun
            for run in self.loaded():
                assert self.ledger.left(run.entry, 0, self.now + by_ns) == self.ledger.left(run.entry, 0, self.now)

    # --- what must hold ---

    @invariant()
    def the_sums_are_those_of_the_model(self) -> None:
        accounts = {account.id: account for account in self.ledger.accounts()}
        accounts |= {account.id: account for run in self.loaded() for account in run.entry.path}
        for id, account in accounts.items():
            limits = account.limits
            account.roll(self.now)
            for index, key in enumerate(COUNTED):
                assert account.used[index] == self.used(id, key)
                assert account.held[index] == self.held(id, key)
            for window in account.windows:
                for index, key in enumerate(COUNTED):
                    assert window.sums[index] == self.used(id, f"{key}/{window.span.value}")
            if not self.overspent:
                for key, limit in limits.items():
                    assert self.used(id, key) + self.held(id, key) <= limit

    @invariant()
    def nothing_stays_of_what_is_over(self) -> None:
        live = {run.root for run in self.runs if not run.ended}
        assert {key[1] for key in self.rows if key[0] != "base"} <= live


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# --- one by one ------------------------------------------------------------------


def ledger_with(limits: dict[AccountId, dict[str, int]]) -> Ledger:
    return Ledger(lambda id: limits.get(id, {}))


def test_a_spent_run_budget_ends_the_run_and_a_spent_tenant_waits_for_its_window() -> None:
    ledger = ledger_with({tenant_id("a"): {"tokens/hour": 10}})
    entry = ledger.open("r", "a", "x", {"tool_calls": 1}, None, "r", NOON)
    assert ledger.reserve(entry, amounts(tool_calls=1, tokens=10), NOON) is None
    waits = ledger.reserve(entry, amounts(tokens=1), NOON)
    assert isinstance(waits, Wait) and (waits.key, waits.limit, waits.value) == ("tokens/hour", 10, 10)
    assert decision_of(waits, "r", "1:2", NOON).action is Action.WAIT
    assert ledger.settle(entry, amounts(tool_calls=1, tokens=10), amounts(tool_calls=1, tokens=10), NOON) == []
    spent = ledger.reserve(entry, amounts(tokens=1), NOON)
    assert isinstance(spent, Exhausted) and spent.until_ns == NOON + HOUR_NS and not spent.ends_run
    decision = decision_of(spent, "r", "1:2", NOON)
    assert (decision.action, decision.scope, decision.who, decision.until_ns) == (
        Action.PARK,
        Scope.TENANT,
        "tenant:a",
        NOON + HOUR_NS,
    )
    both = ledger.reserve(entry, amounts(tokens=1, tool_calls=1), NOON)
    assert isinstance(both, Exhausted) and both.ends_run  # no window will help it
    assert decision_of(both, "r", None, NOON).action is Action.END
    assert ledger.reserve(entry, amounts(tokens=10), NOON + HOUR_NS) is None


def test_what_no_window_will_ever_have_is_refused() -> None:
    ledger = ledger_with({tenant_id("a"): {"tokens/hour": 10}})
    entry = ledger.open("r", "a", "x", {}, None, "r", NOON)
    refused = ledger.reserve(entry, amounts(tokens=11), NOON)
    assert isinstance(refused, Exhausted) and refused.never
    assert decision_of(refused, "r", None, NOON).action is Action.REFUSE


def test_a_budget_bounds_what_a_run_starts_and_survives_it() -> None:
    ledger = ledger_with({})
    root = ledger.open("root", "a", "x", {"tool_calls": 3}, None, "root", NOON)
    child = ledger.open("child", "a", "y", {"tool_calls": 9}, root, "root", NOON)
    grandchild = ledger.open("grand", "a", "y", {}, child, "root", NOON)
    for entry in (root, child, grandchild):
        assert ledger.reserve(entry, amounts(tool_calls=1), NOON) is None
        ledger.settle(entry, amounts(tool_calls=1), amounts(tool_calls=1), NOON)
    ledger.end(root, NOON)
    ledger.ended("root")
    refused = ledger.reserve(grandchild, amounts(tool_calls=1), NOON)
    assert isinstance(refused, Exhausted) and refused.account.id == ("run", "root")


def test_who_waits_for_an_account_hears_of_what_is_given_back() -> None:
    ledger = ledger_with({tenant_id("a"): {"tokens": 5}})
    first = ledger.open("r1", "a", "x", {}, None, "r1", NOON)
    second = ledger.open("r2", "a", "x", {}, None, "r2", NOON)
    ledger.reserve(first, amounts(tokens=5), NOON)
    waits = ledger.reserve(second, amounts(tokens=1), NOON)
    assert isinstance(waits, Wait)
    ledger.release(first, amounts(tokens=1))
    assert not ledger.freed  # nobody has said that he waits
    waits.account.wanted += 1
    ledger.release(first, amounts(tokens=1))
    assert [*ledger.freed] == [tenant_id("a")]
    assert ledger.reserve(second, amounts(tokens=1), NOON) is None


def test_giving_back_twice_is_a_bug_and_says_so() -> None:
    ledger = ledger_with({})
    entry = ledger.open("r", "a", "x", {"tokens": 5}, None, "r", NOON)
    ledger.reserve(entry, amounts(tokens=2), NOON)
    ledger.release(entry, amounts(tokens=2))
    with pytest.raises(AssertionError, match="gives back more tokens"):
        ledger.release(entry, amounts(tokens=2))


def test_limits_may_change_while_runs_are_under_way() -> None:
    limits: dict[AccountId, dict[str, int]] = {tenant_id("a"): {"tokens": 5}}
    ledger = ledger_with(limits)
    entry = ledger.open("r", "a", "x", {}, None, "r", NOON)
    away = ledger.open("away", "a", "x", {}, None, "away", NOON)
    for each in (entry, away):
        assert ledger.reserve(each, amounts(tokens=2), NOON) is None
    ledger.leave(away)
    limits[node_id()] = {"tokens": 4, "depth": 3}
    limits[tenant_id("a")] = {"tokens/day": 9}
    assert ledger.limits_changed(NOON) == [entry]
    assert entry.bounds == {"depth": 3}
    waits = ledger.reserve(entry, amounts(tokens=1), NOON)  # what the run out of memory holds counts as well
    assert isinstance(waits, Wait) and waits.account.id == node_id()
    ledger.settle(entry, amounts(tokens=2), amounts(tokens=1), NOON)
    assert ledger.reserve(entry, amounts(tokens=1), NOON) is None
    assert ledger.left(entry, INDEX["tool_calls"], NOON) == NO_LIMIT


@pytest.mark.parametrize(
    ("limits", "windows"),
    [
        ({"tokens/day": 1}, False),
        ({"tokens/week": 1}, True),
        ({"depth/day": 1}, True),
        ({"token": 1}, True),
        ({"tokens/": 1}, True),
        ({1: 1}, True),
        ({"tokens": -1}, True),
        ({"tokens": True}, True),
        ({"tokens": 1.5}, True),
        ({"tokens": float("inf")}, True),
        ({"tokens": "5"}, True),
        ({"tokens": 2**63}, True),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[Any, Any], windows: bool) -> None:
    with pytest.raises(InputError, match=r"the budget"):
        check_limits("the budget", limits, windows=windows)


def test_limits_are_read_as_people_write_them() -> None:
    assert check_limits("it", {"tokens": 1e6, "depth": 2, "wall_s": 0}) == {"tokens": 10**6, "depth": 2, "wall_s": 0}
    assert check_limits("it", {"microdollars/month": 5}, windows=True) == {"microdollars/month": 5}
    assert check_limits("it", None) == {}
    assert amounts(tokens=5, retries=0) == ((INDEX["tokens"], 5),)
    for wrong in ({"depth": 1}, {"tokens": -1}):
        with pytest.raises(InputError):
            amounts(**wrong)


def test_rows_of_fewer_keys_are_read_and_others_refused() -> None:
    used = Used.nothing()
    short = EntryRow("r", "r", "a", "x", (), {}, Used([1], [(0, [1]), (0, [1]), (0, [1])]), [2])
    assert decode_entry(encode_row(short)).held == [2, 0, 0, 0, 0, 0]
    assert decode_entry(encode_row(short)).used.windows[0] == (0, [1, 0, 0, 0, 0, 0])
    wrong = [
        EntryRow("r", "r", "a", "x", (), {}, used, [0] * 7),
        EntryRow("r", "r", "a", "x", (), {}, used, [-1]),
        BelowRow("r", "r", {}, Used([0], [])),
        BaseRow(("node",), Used([0], [(0, [-1]), (0, [0]), (0, [0])])),
    ]
    for row, decode in zip(wrong, (decode_entry, decode_entry, decode_below, decode_base), strict=True):
        with pytest.raises(StoreCorruptError):
            decode(encode_row(row))
    with pytest.raises(StoreCorruptError):
        decode_base(msgspec.msgpack.encode([["node"], 3]))


def test_a_budget_keeps_what_ended_children_have_used_through_a_restart() -> None:
    ledger = ledger_with({})
    root = ledger.open("root", "a", "x", {"tool_calls": 3}, None, "root", NOON)
    child = ledger.open("child", "a", "y", {}, root, "root", NOON)
    ledger.charge(child, amounts(tool_calls=2), NOON)
    rows = ledger.end(child, NOON)
    again = ledger_with({})
    again.adopt((), [ledger.row(root)], NOON)
    back = again.attach("root", "root", [ledger.row(root)], rows.below, NOON)
    assert back is not None and again.left(back, INDEX["tool_calls"], NOON) == 1


def test_limits_set_after_a_restart_count_what_runs_out_of_memory_hold() -> None:
    limits: dict[AccountId, dict[str, int]] = {tenant_id("b"): {"tokens": 1}}
    row = EntryRow("r", "r", "a", "x", (), {}, Used.nothing(), [0, 0, 4, 0, 0, 0])
    ledger = ledger_with(limits)
    ledger.adopt((), [row], NOON)
    limits[tenant_id("a")] = {"tokens": 5}
    ledger.limits_changed(NOON)
    other = ledger.open("o", "a", "x", {}, None, "o", NOON)
    assert isinstance(ledger.reserve(other, amounts(tokens=2), NOON), Wait)
    back = ledger.attach("r", "r", [row], (), NOON)
    assert back is not None
    ledger.settle(back, amounts(tokens=4), amounts(tokens=4), NOON)
    assert ledger.reserve(other, amounts(tokens=1), NOON) is None
    assert isinstance(ledger.reserve(other, amounts(tokens=1), NOON), Wait)


def test_a_clock_that_is_set_back_opens_no_window_again() -> None:
    ledger = ledger_with({tenant_id("a"): {"tokens/hour": 5}})
    entry = ledger.open("r", "a", "x", {}, None, "r", NOON)
    ledger.charge(entry, amounts(tokens=5), NOON)
    later = ledger.open("s", "a", "x", {}, None, "s", NOON - HOUR_NS)
    spent = ledger.reserve(later, amounts(tokens=1), NOON - HOUR_NS)
    assert isinstance(spent, Exhausted) and spent.until_ns == NOON + HOUR_NS
    ledger.charge(later, amounts(tokens=2), NOON - HOUR_NS)
    assert later.used.windows[0] == (NOON, [0, 0, 2, 0, 0, 0])


def test_accepting_a_run_twice_leaves_the_first_as_it_was() -> None:
    ledger = ledger_with({})
    root = ledger.open("root", "a", "x", {"tool_calls": 5}, None, "root", NOON)
    child = ledger.open("child", "a", "y", {"tool_calls": 2}, root, "root", NOON)
    ledger.charge(child, amounts(tool_calls=1), NOON)
    rows = [ledger.row(root), ledger.row(child)]
    ledger.leave(child)  # it waits in the store, and its parent spawns it again after a crash
    again = ledger.open("child", "a", "y", {"tool_calls": 2}, root, "root", NOON)
    ledger.never_was(again, exists=True)
    assert ledger.end(root, NOON).gone_below == ()  # the child still lives, and so do the budgets above it
    back = ledger.attach("child", "root", rows, (), NOON)
    assert back is not None and ledger.left(back, INDEX["tool_calls"], NOON) == 1
