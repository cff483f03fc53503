"""The demo's judge must see what it is there to see."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.demo.figures import percentile, sum_counters
from agentrt.demo.ledger import Book, Entry, Report
from agentrt.demo.load import Order, Planner
from agentrt.demo.verdict import Verdict, judge


def order(id: str, places: int, **changes: Any) -> Order:
    made = Order(id, "steps", 1, "acme", {}, places, run_id=f"run_{id}", state="SUCCEEDED")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def good() -> tuple[list[Order], Report]:
    orders = [order("a", 3), order("b", 1), order("c", 0)]
    return orders, Report({"a": {1: 1, 2: 1, 3: 1}, "b": {1: 1}}, dropped=4)


def test_a_clean_demo_passes() -> None:
    orders, report = good()
    verdict = judge(orders, report, runs_in_store=3)
    assert verdict == Verdict(accepted=3, finished=3, failed=0, lost=0, duplicates=0, dropped=4, findings=[])
    assert verdict.passed


def _lose_effect(orders: list[Order], report: Report) -> int:
    del report.entries["a"][2]
    return 3


def _double_effect(orders: list[Order], report: Report) -> int:
    report.entries["a"][2] = 2
    return 3


def _unordered_effect(orders: list[Order], report: Report) -> int:
    report.entries["nobody"] = {1: 1}
    return 3


def _effect_too_many(orders: list[Order], report: Report) -> int:
    report.entries["b"][2] = 1
    return 3


def _no_end(orders: list[Order], report: Report) -> int:
    orders[0].state = ""
    return 3


def _never_accepted(orders: list[Order], report: Report) -> int:
    orders[1].run_id = ""
    return 2


def _failed_run(orders: list[Order], report: Report) -> int:
    orders[2].state = "FAILED"
    return 3


def _run_too_many(orders: list[Order], report: Report) -> int:
    return 4


def _run_too_few(orders: list[Order], report: Report) -> int:
    return 2


@pytest.mark.parametrize(
    ("spoil", "lost", "duplicates", "failed"),
    [
        (_lose_effect, 1, 0, 0),
        (_double_effect, 0, 1, 0),
        (_unordered_effect, 0, 1, 0),
        (_effect_too_many, 0, 1, 0),
        (_no_end, 1, 0, 0),
        (_never_accepted, 1, 0, 0),
        (_failed_run, 0, 0, 1),
        (_run_too_many, 0, 1, 0),
        (_run_too_few, 1, 0, 0),
    ],
)
def test_every_kind_of_loss_and_doubling_is_found(spoil: Any, lost: int, duplicates: int, failed: int) -> None:
    orders, report = good()
    verdict = judge(orders, report, runs_in_store=spoil(orders, report))
    assert (verdict.lost, verdict.duplicates, verdict.failed) == (lost, duplicates, failed)
    assert verdict.findings
    assert not verdict.passed


def test_an_empty_demo_does_not_pass() -> None:
    assert not judge([], Report({}, 0), 0).passed


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3))))
def test_the_ledger_enters_each_key_once_and_counts_the_rest(calls: list[tuple[str, int]]) -> None:
    book = Book()
    new = [book.enter(Entry(key, f"order-{key}", place)).new for key, place in calls]
    keys = {key for key, _ in calls}
    report = book.report()
    assert sum(new) == len(keys)
    assert report.dropped == len(calls) - len(keys)
    assert {order: sum(places.values()) for order, places in report.entries.items()} == {f"order-{k}": 1 for k in keys}


@given(st.lists(st.integers(-1000, 1000), min_size=1), st.integers(1, 100))
def test_percentile_is_the_smallest_value_that_covers(values: list[int], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) * 100 >= len(values) * percent
    smaller = [v for v in values if v < found]
    assert len(smaller) * 100 < len(values) * percent


def test_counters_of_several_lives_add_up() -> None:
    assert sum_counters([{"a": 2, "b": [1, 2]}, {"a": 3, "b": [0, 4]}, {}], "a") == 5
    assert sum_counters([{"a": 2, "b": [1, 2]}, {"b": [0, 4]}], "b") == 7


def test_orders_have_ids_of_their_own() -> None:
    planner = Planner(random.Random(1), hog_rounds=5, texts=10)
    orders = [make() for make in (planner.lead, planner.steps, planner.index, planner.hog) for _ in range(20)]
    assert len({o.id for o in orders}) == len(orders)
    assert all(o.input["order"] == o.id for o in orders)
    assert {o.tier for o in orders} == {0, 1, 2, 3}
